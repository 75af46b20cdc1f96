"""Tests that `jaxspec train` may be ended at any point: by a full disk, or by Ctrl-C.

The points at which the command writes, or measures a tree, are counted. Some of them, spread over all, are then made to
fail, each in a run of its own.
What is on disk stays intact, and the same command comes to the bits of a run that was not ended.
"""

import errno
import functools
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytest

import jaxspec
from helpers import trainees
from helpers.tiers import with_slow
from jaxspec.checkpoints import orbax
from jaxspec.cli import main
from jaxspec.heads.find import HEADS_MANIFEST
from jaxspec.kernels.library import kernels_available
from jaxspec.train import evaluate, monitor
from jaxspec.train.checkpoints import Checkpoints
from jaxspec.train.files import fingerprint
from jaxspec.train.log import LOG_FILE

SETTINGS = trainees.TINY | trainees.SIZES | {"steps": 4, "save_every": 2, "eval_every": 2, "log_every": 1, "warmup": 1}
MEASURE = evaluate.measure_trees
FEWEST = 50
"""The least number of points at which a run writes. The number itself depends on the version of Orbax."""
FULL_AT, INTERRUPTED_AT = range(0, 100, 2), range(1, 100, 2)
"""Where the disk is full, and where Ctrl-C is pressed, in percent of all points."""


def nth(percent: int, count: int) -> int:
    """The number of the point, from 1 to `count`, at a percentage below 100."""
    return 1 + percent * count // 100


class Points:
    """Counts the points at which files are written or a text is decoded, and calls a function before each."""

    def __init__(self, patch: pytest.MonkeyPatch, before: Callable[[int], Any], root: pathlib.Path, decoding: bool):
        self.count, self._before, self._root = 0, before, root
        for owner, name in ((os, "replace"), (os, "rename"), (os, "mkdir"), (os, "fsync"), (tempfile, "mkdtemp")):
            self._wrap(patch, owner, name, lambda *_, **__: True)
        self._wrap(patch, orbax, "write_tree", lambda *_: True)
        self._wrap(patch, pathlib.Path, "open", lambda path, mode="r", *_, **__: mode[0] in "wa" and self.inside(path))
        self._wrap(patch, pathlib.Path, "rename", lambda path, *_: self.inside(path))
        if decoding:
            self._wrap(patch, evaluate, "generate", lambda *_, **__: True)

    def inside(self, path: Any) -> bool:
        return pathlib.Path(path).absolute().is_relative_to(self._root)

    def _wrap(self, patch: pytest.MonkeyPatch, owner: Any, name: str, counts: Callable[..., bool]) -> None:
        original = getattr(owner, name)

        def wrapped(*args, **options):
            if counts(*args, **options):
                self.count += 1
                self._before(self.count)
            return original(*args, **options)

        patch.setattr(owner, name, wrapped)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A target, prompts, and answers and features of a run: what every run below begins with."""
    root = tmp_path_factory.mktemp("begun")
    jaxspec.save(trainees.target(), root / "target")
    trainees.write_prompts(root / "prompts.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        measure_little(patch)
        assert main(command(root, root / "whole")) == 0
        shutil.copytree(root / "whole" / "answers", root / "counted" / "answers")
        writes, points = (Points(patch, lambda _: None, root / "counted", decoding) for decoding in (False, True))
        assert main(command(root, root / "counted")) == 0
    assert FEWEST <= writes.count < points.count
    return root, prints(root / "whole"), (writes.count, points.count)


def measure_little(patch: pytest.MonkeyPatch) -> None:
    """Measures two trees on a few tokens."""
    patch.setattr(evaluate, "TREE_SIZES", (1, 3))
    patch.setattr(evaluate, "measure_trees", functools.partial(MEASURE, max_new_tokens=8, repeats=1))
    patch.setattr(monitor, "plot_log", lambda records, path: path.write_bytes(b"a plot"))


def command(root: pathlib.Path, out: pathlib.Path) -> list[str]:
    words = ["train", "medusa", "--target", str(root / "target"), "--prompts", str(root / "prompts.jsonl")]
    words += ["--out", str(out), "--fit-prompts", "1"]
    for name, value in SETTINGS.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def prints(folder: pathlib.Path) -> dict[str, str]:
    """The bits that a run ends with."""
    found = Checkpoints(folder / "checkpoints").fingerprints() | {LOG_FILE: (folder / LOG_FILE).read_text()}
    return found | {"heads": fingerprint(jaxspec.load_heads(folder / "heads").params)}


def assert_intact(folder: pathlib.Path) -> None:
    """Every checkpoint is whole, and heads can be loaded if there are any."""
    store = Checkpoints(folder / "checkpoints")
    assert len(store.fingerprints()) == len(store.steps())
    if (folder / "heads").exists():
        jaxspec.load_heads(folder / "heads")


def assert_goes_on(root: pathlib.Path, folder: pathlib.Path, whole: dict[str, str]) -> None:
    assert_intact(folder)
    assert main(command(root, folder)) == 0
    assert prints(folder) == whole
    assert json.loads((folder / "heads" / HEADS_MANIFEST).read_text())["tree"]
    assert len(json.loads((folder / "heads" / "evaluation.json").read_text())["trees"]) == 2
    assert not [path for path in folder.rglob("*") if ".part" in path.name or path.name.endswith(".old")]


@pytest.fixture
def folder(begun, tmp_path, monkeypatch):
    """The folder of another run, with the answers of the first."""
    measure_little(monkeypatch)
    shutil.copytree(begun[0] / "whole" / "answers", tmp_path / "run" / "answers")
    return tmp_path / "run"


@pytest.mark.parametrize("percent", with_slow(FULL_AT, set(FULL_AT) - set(FULL_AT[19::26])))
def test_a_disk_that_is_full_from_a_point_on(begun, folder, monkeypatch, capsys, percent):
    """The one line of the error names a file of the run, also where the plot and the cleaning up fail behind it."""
    failed, point = [], nth(percent, begun[2][0])

    def full(number: int) -> None:
        if number >= point:
            failed.append(number)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        Points(patch, full, folder, decoding=False)
        status = main(command(begun[0], folder))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("jaxspec: error")]
    (line,) = lines
    assert failed
    assert status == 1
    assert str(folder) in line
    assert "no space is left" in line or os.strerror(errno.ENOSPC) in line
    assert "OSError" not in line
    assert_goes_on(begun[0], folder, begun[1])


@pytest.fixture
def keyboard():
    """Ctrl-C as a terminal has it: a process that a shell started in the background ignores it."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("keyboard")
@pytest.mark.parametrize("percent", with_slow(INTERRUPTED_AT, set(INTERRUPTED_AT) - set(INTERRUPTED_AT[19::26])))
def test_ctrl_c_at_a_point(begun, folder, monkeypatch, capsys, percent):
    """Status 130, and the last lines say how to go on; heads are there as soon as trees are measured."""
    pressed, decoded, point = [], [], nth(percent, begun[2][1])

    def press(number: int) -> None:
        if number == point:
            pressed.append(number)
            os.kill(os.getpid(), signal.SIGINT)

    measure = evaluate.measure_trees
    with monkeypatch.context() as patch:
        Points(patch, press, folder, decoding=True)
        patch.setattr(evaluate, "measure_trees", lambda *a, **o: decoded.append(folder / "heads") or measure(*a, **o))
        status = main(command(begun[0], folder))
    error = capsys.readouterr().err
    assert pressed
    assert status == 130
    assert error.endswith("\njaxspec: interrupted\n")
    said = error.splitlines()[-3]
    assert "the same command resumes it" in said or "the same command continues with the measurement" in said
    if decoded:
        held = f"training is complete: {folder / 'heads'} holds the result"
        assert said == f"{held}; the same command continues with the measurement"
        assert jaxspec.load_heads(folder / "heads").config.num_heads == SETTINGS["heads"]
    assert_goes_on(begun[0], folder, begun[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trees_are_measured_with_the_models_that_are_served(begun, folder, monkeypatch, dtype):
    """Target and heads as `jaxspec generate` loads them, with the CPU kernels where this machine has them."""
    decoded, generate = [], evaluate.generate
    shutil.rmtree(folder)
    shutil.copytree(begun[0] / "whole", folder)
    monkeypatch.setattr(evaluate, "generate", lambda *a, **o: decoded.append((a[0], o)) or generate(*a, **o))
    assert main([*command(begun[0], folder), "--fit-dtype", dtype]) == 0
    served = jaxspec.load(begun[0] / "target", dtype=dtype)
    assert len(decoded) >= 6
    for model, options in decoded:
        assert model.lm == served.lm
        assert model.lm.execution.kernels == kernels_available()
        assert fingerprint(model.params) == fingerprint(served.params)
        heads = options.get("heads")
        assert heads is None or heads.params["blocks"][0][0]["kernel"].dtype == dtype


def test_a_tree_that_was_fitted_stays_until_another_one_is(begun, folder, monkeypatch, capsys):
    """The same command measures again; interrupted, it leaves heads, tree and card as they were."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    shutil.rmtree(folder)
    shutil.copytree(begun[0] / "whole", folder)
    before = {path.name: path.read_bytes() for path in (folder / "heads").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "generate", interrupted)
        assert main(command(begun[0], folder)) == 130
    assert "training is complete" in capsys.readouterr().err
    assert before == {path.name: path.read_bytes() for path in (folder / "heads").iterdir()}
    assert main([*command(begun[0], folder), "--fit-prompts", "0"]) == 0
    assert json.loads((folder / "heads" / HEADS_MANIFEST).read_text())["tree"] is None
    assert json.loads((folder / "heads" / "evaluation.json").read_text())["trees"] == []


@pytest.mark.usefixtures("keyboard")
def test_a_process_that_measures_ends_at_once_with_the_status_of_ctrl_c(begun, tmp_path):
    """While XLA decodes in its own threads, where the shutdown of the interpreter would wait or crash."""
    root, out = begun[0], tmp_path / "run"
    shutil.copytree(root / "whole", out)
    with subprocess.Popen(
        [sys.executable, "-m", "jaxspec", *command(root, out)], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("measuring trees"):
                break
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait() == 130, rest
    assert "the same command continues with the measurement\n\njaxspec: interrupted\n" in rest
    assert_intact(out)


def test_what_fails_in_the_display_does_not_hide_the_error(tmp_path, monkeypatch, capsys):
    """A damaged log, a plot that fails in a way of its own, and TensorBoard: each is a line."""
    failures = itertools.cycle((OSError(errno.ENOSPC, "No space left"), ValueError("not\na plot"), MemoryError()))

    class Writer:
        def add_scalar(self, *_):
            raise next(failures)

        close = add_scalar

    def fail(*_):
        raise next(failures)

    record = {"loss": 1.0, "top1": [0.5], "top5": [0.5], "accepted": [0.5], "accepted_length": 1.5, "tokens_per_s": 1.0}
    (tmp_path / LOG_FILE).write_text('{"step": 1}\n')

    def end(number: int) -> None:
        with monitor.Monitor(tmp_path) as shown:
            monkeypatch.setattr(monitor, "plot_log", fail)
            monkeypatch.setattr(shown, "_tensorboard", Writer() if number % 2 else None)
            shown.watch.step(1, 1, record)
            raise RuntimeError("the cause")

    for number in range(6):
        with pytest.raises(RuntimeError, match="the cause"):
            end(number)
        lines = capsys.readouterr().err.splitlines()
        assert lines[-1].startswith(f"{tmp_path / monitor.PLOT_FILE} is incomplete: ")
    (tmp_path / LOG_FILE).write_text("{\n")
    with pytest.raises(RuntimeError, match="the cause"):
        end(0)
    assert "is damaged" in capsys.readouterr().err
