"""Tests the checkpoints of a run: whole or refused, whatever happened to their files, and never lost."""

import errno
import json
import os
import pathlib
import resource
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from helpers.damage import damaged
from helpers.narrow import not_none
from jaxspec.checkpoints import orbax
from jaxspec.errors import TrainingError
from jaxspec.train.checkpoints import SUMS_FILE, Checkpoints, DamagedCheckpoint, TrainCheckpoint
from jaxspec.train.files import fingerprint
from jaxspec.train.log import SPEED_FILE, UNDONE_FILE, Log
from jaxspec.train.losses import LossSums
from jaxspec.train.step import Trainable, TrainState


def state(step: int) -> TrainState:
    """One that could be of a run, with numbers of its own at every step."""
    heads = {"weight": jnp.arange(12, dtype=jnp.float32).reshape(3, 4) + step, "bias": jnp.full(3, step, jnp.bfloat16)}
    window = LossSums(*(jnp.full(2, float(step)) for _ in LossSums._fields[:-1]), blocks=None)
    return TrainState(
        Trainable(heads), (jnp.ones(3),), jnp.int32(step), jnp.ones(2), window, jnp.int32(0), jnp.int32(0)
    )


def checkpoint(step: int, best=None) -> TrainCheckpoint:
    return TrainCheckpoint(state(step), {"next_index": step, "of": [1, 2]}, best)


def saved(folder: pathlib.Path, *steps: int) -> Checkpoints:
    store = Checkpoints(folder)
    for step in steps:
        store.save(checkpoint(step, (3, 1.4000000000000001)))
    return store


def assert_is(found: TrainCheckpoint | None, step: int) -> None:
    assert found is not None
    assert fingerprint(found.state) == fingerprint(state(step))
    assert (found.order, found.best) == ({"next_index": step, "of": [1, 2]}, (3, 1.4000000000000001))


def names(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_relative_folder_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = saved(pathlib.Path("run/checkpoints"), 3, 6)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert_is(store.load_newest(state(0))[0], 6)
    assert (tmp_path / "run" / "checkpoints" / "step-00000006").is_dir()
    done = subprocess.run(
        ["sha256sum", "--quiet", "-c", SUMS_FILE], cwd=tmp_path / "run/checkpoints/step-00000006", check=False
    )
    assert done.returncode == 0


def assert_every_mutant_is_refused(folder: pathlib.Path, mutants: int) -> None:
    """None of them gives other values, or an error that is not ours."""
    store = saved(folder, 3, 6)
    place = folder / "step-00000006"
    for what in damaged(place, mutants, seed=0):
        # Every file is covered: none may pass.
        with pytest.raises(DamagedCheckpoint, match=f"^{place}: is damaged: ") as error:
            store.load(6, state(0))
        assert str(error.value).isprintable(), what
        with pytest.raises(DamagedCheckpoint):
            store.fingerprints()
    assert_is(store.load(6, state(0)), 6)


def test_mutants_are_refused(tmp_path):
    assert_every_mutant_is_refused(tmp_path, 60)


@pytest.mark.slow
def test_300_mutants_are_refused(tmp_path):
    assert_every_mutant_is_refused(tmp_path, 300)


@pytest.mark.parametrize("name", ["about.json", SUMS_FILE])
def test_every_bit_of_what_is_no_array_is_covered(tmp_path, name):
    """Order of the data, best step and the checksums themselves."""
    store = saved(tmp_path, 3)
    path = tmp_path / "step-00000003" / name
    whole = path.read_bytes()
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << (at % 8)
        path.write_bytes(flipped)
        with pytest.raises(DamagedCheckpoint):
            store.about(3)
    path.write_bytes(whole)
    assert store.about(3)["best"] == [3, 1.4000000000000001]


def test_the_checkpoint_before_a_damaged_one_is_used_and_that_one_is_kept(tmp_path):
    store = saved(tmp_path, 3, 6)
    (tmp_path / "step-00000006" / "state" / "_METADATA").unlink()
    found, said = store.load_newest(state(0))
    assert_is(found, 3)
    assert said == [
        f"{tmp_path}/step-00000006: is damaged: state/_METADATA is missing; it is kept as damaged-step-00000006"
    ]
    store.save(checkpoint(6))
    (tmp_path / "step-00000006" / "about.json").write_text("{}")
    found, said = store.load_newest(state(0))
    assert_is(found, 3)
    assert said[0].endswith("about.json are not those that were written; it is kept as damaged-step-00000006-1")
    assert names(tmp_path) == ["damaged-step-00000006", "damaged-step-00000006-1", "step-00000003"]
    for step in (9, 12):
        store.save(checkpoint(step))
    assert names(tmp_path)[:2] == ["damaged-step-00000006", "damaged-step-00000006-1"]


def test_where_all_are_damaged_nothing_is_changed(tmp_path):
    store = saved(tmp_path, 3, 6)
    for name in ("step-00000003", "step-00000006"):
        (tmp_path / name / SUMS_FILE).unlink()
    with pytest.raises(TrainingError, match=r"step-00000006: is damaged: it has no file SHA256SUMS, and no checkpoint"):
        store.load_newest(state(0))
    assert store.steps() == [3, 6]


def test_what_cannot_be_read_though_it_is_whole_is_not_called_damaged(tmp_path, monkeypatch):
    """No file may be opened, or Orbax fails: the reason, and everything stays where it is."""
    store = saved(tmp_path, 3, 6)
    assert_is(store.load_newest(state(0))[0], 6)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(TrainingError, match=f"cannot be read: {os.strerror(errno.EMFILE)}") as error:
            store.load(6, state(0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not isinstance(error.value, DamagedCheckpoint)

    def fails(*_):
        raise orbax.OrbaxError("no such luck")

    monkeypatch.setattr(orbax, "read_tree", fails)
    with pytest.raises(TrainingError, match=r"step-00000006: cannot be read: no such luck; nothing was changed"):
        store.load_newest(state(0))
    assert names(tmp_path) == ["step-00000003", "step-00000006"]


def test_a_checkpoint_besides_the_regular_ones_gives_way_to_the_next(tmp_path):
    """However often a run is interrupted, it ends with the checkpoints of one that was not."""
    store = saved(tmp_path, 3, 6, 9)
    store.save(checkpoint(10), extra=True)
    assert_is(store.load(3, state(0)), 3)  # the best
    assert store.steps() == [3, 6, 9, 10]
    assert int(not_none(store.load_newest(state(0))[0]).state.step) == 10
    store.save(checkpoint(11), extra=True)
    store.save(checkpoint(12, (3, 1.0)))
    assert names(tmp_path) == ["step-00000003", "step-00000009", "step-00000012"]


def test_lines_of_later_steps_are_moved_and_damaged_ones_refused(tmp_path):
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (3, 6, 9)]
    (tmp_path / "log.jsonl").write_text("".join(lines) + '{"step": 12, "lo')
    assert [one["step"] for one in Log(tmp_path, 6).records] == [3, 6]
    assert (tmp_path / "log.jsonl").read_text() == "".join(lines[:2])
    assert (tmp_path / UNDONE_FILE).read_text() == lines[2]
    for bad, why in (
        ("{\n", "Expecting"),
        ("[1]\n", "its step is missing"),
        ('{"step": "3"}\n', "its step is missing"),
    ):
        whole = lines[0] + bad + lines[1]
        (tmp_path / "log.jsonl").write_text(whole)
        with pytest.raises(TrainingError, match=f"log.jsonl, line 2: is damaged \\({why}.*; remove the file to resume"):
            Log(tmp_path, 6)
        assert (tmp_path / "log.jsonl").read_text() == whole
    assert (tmp_path / SPEED_FILE).read_text() == ""


PROGRAM = """
import logging, pathlib, resource, sys
import numpy as np
from jaxspec.checkpoints import orbax

folder, tree = pathlib.Path(sys.argv[1]), {f"{i}": np.random.default_rng(i).random((64, 64)) for i in range(24)}

def why(do, *args):
    try:
        do(*args)
    except orbax.OrbaxError as error:
        print(error)

why(orbax.write_tree, pathlib.Path("relative"), tree)
orbax.write_tree(folder / "whole", tree)
(folder / "whole" / "manifest.ocdbt").unlink()
for _ in range(5):
    why(orbax.read_tree, folder / "whole", tree)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
why(orbax.write_tree, folder / "full", tree)
print(logging.root.handlers, logging.getLogger("absl").disabled, logging.getLogger("asyncio").disabled)
"""


def test_orbax_says_nothing_itself(tmp_path):
    """Arrays that are not there, and a disk that is full, in a process whose logging nobody has set up."""
    words = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == 7
    assert all("NOT_FOUND" in line for line in lines[:5])
    assert lines[5:] == [os.strerror(errno.EFBIG), "[] False False"]
    assert jax.tree.leaves(orbax.read_shapes(tmp_path / "relative"))
