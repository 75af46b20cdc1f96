"""Tests split GGUF files: all parts are read, and parts that are missing or do not belong together are named."""

import json
import pathlib
import shutil
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest

from helpers.checkpoints import VOCABULARY, assert_same_params, random_params, tiny_config, write_gguf
from jaxspec.checkpoints import gguf_parts
from jaxspec.checkpoints.load import read_params
from jaxspec.checkpoints.source import open_checkpoint, open_source, read_headers
from jaxspec.cli import main
from jaxspec.errors import CheckpointError, FetchError

pytestmark = pytest.mark.quick
CONFIG = tiny_config()
PARAMS = random_params(CONFIG)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict:
    place = write_gguf(tmp_path_factory.mktemp("whole") / "model.gguf", CONFIG, PARAMS)
    return read_params(open_checkpoint(place))


def write_parts(folder: pathlib.Path, monkeypatch, size: int, metadata: Any = None, **options) -> list[pathlib.Path]:
    """Writes the parts with the package `gguf`, each with `size` tensors."""
    folder.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter
    with monkeypatch.context() as patch:
        make = lambda path, kind: writer(path, kind, split_max_tensors=size, **options)  # noqa: E731
        patch.setattr(gguf, "GGUFWriter", make)
        write_gguf(folder / "model.gguf", CONFIG, PARAMS, metadata=metadata)
    return sorted(folder.iterdir())


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 7, 9, 11, 13, 19])
def test_any_part_or_the_folder_is_the_model(size, first, whole, tmp_path, monkeypatch):
    """76 files: splits into 2 to 21 parts, the first of which may hold metadata alone."""
    parts = write_parts(tmp_path / "model", monkeypatch, size, small_first_shard=first)
    assert len(parts) == -(-20 // size) + first
    for place in {parts[0], parts[1], parts[len(parts) // 2], parts[-1], parts[0].parent}:
        assert_same_params(read_params(open_checkpoint(place)), whole)
        assert len(read_headers(place).stored) == 20


def damage(parts: list[pathlib.Path], name: str) -> str:
    """Damages the parts; returns words of the error."""
    first, second, third, *_ = parts
    if name == "missing":
        second.unlink()
        return r"is part 1 of 4, and part 2 is missing: .*model-00002-of-00004.gguf; copy all parts"
    if name == "more missing":
        second.unlink()
        third.unlink()
        return "part 2 and 1 more is missing"
    if name == "twice":
        shutil.copyfile(third, second)
        return "model-00002-of-00004.gguf: is not part 2 of 4"
    if name == "cut":
        second.write_bytes(second.read_bytes()[:-40])
        return "model-00002-of-00004.gguf: tensor .* truncated"
    if name == "empty":
        second.write_bytes(b"")
        return "model-00002-of-00004.gguf: cannot be read"
    if name == "whole model":
        write_gguf(second, CONFIG, PARAMS)
        return "model-00002-of-00004.gguf: is not part 2 of 4"
    if name == "renamed":
        first.rename(first.with_name("model.gguf"))
        return "model.gguf: is part 1 of 4 of a split GGUF file, whose name must end with -00001-of-00004.gguf"
    assert name == "joined"
    first.with_name("model.gguf").write_bytes(b"".join(part.read_bytes() for part in parts))
    return "model.gguf: is part 1 of 4 .* merge the parts with llama-gguf-split"


@pytest.mark.parametrize(
    "name", ["missing", "more missing", "twice", "cut", "empty", "whole model", "renamed", "joined"]
)
def test_parts_that_are_not_together(name, tmp_path, monkeypatch):
    parts = write_parts(tmp_path / "model", monkeypatch, 6)
    words = damage(parts, name)
    joined = parts[0].with_name("model.gguf")
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(joined if joined.exists() else parts[0])


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"split.count": 0}, None),
        ({"split.count": 1, "split.no": 0, "split.tensors.count": 20}, None),
        ({"split.count": 2, "split.no": 2}, "split.no is 2, expected 0 to 1"),
        ({"split.count": 2, "split.no": "x"}, "split.no is 'x', expected 0 to 1"),
        ({"split.count": "4"}, "split.count is '4', expected 1 to 4096"),
        ({"split.count": [4]}, "split.count is .*, expected 1 to 4096"),
        ({"split.count": 2**31}, "split.count is 2147483648, expected 1 to 4096"),
        ({"split.count": 2, "split.no": 0}, "part 1 of 2 .* whose name must end with -00001-of-00002.gguf"),
    ],
)
def test_one_file(metadata, words, whole, tmp_path):
    place = write_gguf(tmp_path / "model-00001-of-00001.gguf", CONFIG, PARAMS, metadata=metadata)
    if words is None:
        assert_same_params(read_params(open_checkpoint(place)), whole)
        return
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(place)


def test_parts_of_other_models_do_not_belong_together(tmp_path, monkeypatch):
    parts = write_parts(tmp_path / "model", monkeypatch, 6)
    others = write_parts(tmp_path / "other", monkeypatch, 5, small_first_shard=False)
    shutil.copyfile(others[1], parts[1])  # 5 tensors, one of which the first part has, too
    with pytest.raises(CheckpointError, match=r"tensor .* is also in .*00001-of-00004.gguf"):
        open_checkpoint(parts[0])


def test_a_folder_with_one_model_is_that_model(whole, tmp_path):
    write_gguf(tmp_path / "model.gguf", CONFIG, PARAMS)
    (tmp_path / "mmproj-model.gguf").write_bytes(b"GGUF")
    assert_same_params(read_params(open_checkpoint(tmp_path)), whole)
    write_gguf(tmp_path / "other.gguf", CONFIG, PARAMS)
    with pytest.raises(
        CheckpointError, match=r"contains 2 GGUF models; to open one of them, pass its path, such as .*model.gguf"
    ):
        open_checkpoint(tmp_path)


def test_inspect_shows_all_parts(tmp_path, monkeypatch, capsys):
    parts = write_parts(tmp_path / "model", monkeypatch, 6, VOCABULARY)
    for place in (parts[2], parts[0].parent):
        assert main(["inspect", str(place), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["files"], shown["stored"]["F32"]["tensors"]) == (4, 20)
        assert shown["file_size_bytes"] == sum(part.stat().st_size for part in parts)
    parts[1].unlink()
    assert main(["inspect", str(parts[0])]) == 1
    assert "part 2 is missing" in capsys.readouterr().err


def test_files_of_the_hub(whole, tmp_path, monkeypatch):
    parts = write_parts(tmp_path / "Q4", monkeypatch, 6)
    asked = []

    def download(repo, *, revision, allow_patterns):
        asked.append((repo, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    names = [f"Q4/{part.name}" for part in parts]
    found = open_source(f"some/model-GGUF/{names[1]}@v1")
    assert_same_params(read_params(found), whole)
    assert asked == [("some/model-GGUF", "v1", names)]
    with pytest.raises(FetchError, match=r"some/model: other.gguf is not in the cache"):
        open_source("some/model/other.gguf")


@pytest.mark.parametrize("name", ["model.gguf", "m-00001-of-00001.gguf", "m-00003-of-00002x.gguf", "m-1-of-2.gguf"])
def test_names_of_whole_files(name):
    assert gguf_parts.part_names(name) == [name]
    assert np.shape(gguf_parts.part_names("m-00002-of-00003.gguf")) == (3,)
