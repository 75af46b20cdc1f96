"""Tests the readers of paths and JSON: each returns what the file holds, or raises one line that names the file."""

import json
import os
import pathlib

import jax
import numpy as np
import pytest

import jaxspec
from helpers import toys
from helpers.bounds import bounded
from jaxspec.bench import tasks
from jaxspec.checkpoints.source import open_checkpoint
from jaxspec.core.topology import chain
from jaxspec.errors import CheckpointError, InvalidConfig, JaxspecError, TaskError, TuningError
from jaxspec.generation.drafting import Drafting
from jaxspec.heads.export import export_heads
from jaxspec.heads.files import load_heads, save_heads
from jaxspec.heads.headers import open_heads
from jaxspec.heads.medusa_config import HeadsConfig
from jaxspec.heads.network import DraftHeads, init_params
from jaxspec.schedules.adaptive import Adaptive
from jaxspec.storage.reading import MAX_DIGITS, MAX_JSON_DEPTH, check_path, parse_object, read_bytes, read_json_file

pytestmark = pytest.mark.quick

# --- JSON -------------------------------------------------------------------------------------------------------


def nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1, "b": [2.5, "c", null, true]}', {"a": 1, "b": [2.5, "c", None, True]}),
        ("\ufeff{}", {}),  # the byte order mark of Windows' editors
        ('{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        ('{"a": "\\\\ud800"}', {"a": "\\ud800"}),  # an escaped backslash
        ('{"a": 1000000000000000019884624838656}', {"a": 1000000000000000019884624838656}),  # of published files
        ('{"a": -' + "9" * (MAX_DIGITS - 1) + "}", {"a": 1 - 10 ** (MAX_DIGITS - 1)}),
        ('{"a": 1, "a": 1}', {"a": 1}),  # twice, and the same
        (nested(MAX_JSON_DEPTH - 1), None),
    ],
)
def test_json_is_what_json_says(text, expected):
    assert parse_object(text.encode(), "f") == (json.loads(text) if expected is None else expected)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "not JSON: it is empty"),
        (b" \n", "not JSON: it is empty"),
        (b"{", "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b"\xff\xfe{\0}\0", "not UTF-8: invalid start byte at byte 0"),
        ('{"é": 1}'.encode("latin-1"), "not UTF-8"),
        (b'{"a": "x\0"}', "not JSON"),
        (b"[1]", "contains a list, expected an object"),
        (b"5", "contains a int, expected an object"),
        (b'{"a": ' + b"9" * 4000 + b"}", "a whole number of 4000 digits, expected at most 40"),
        (b'{"a": -' + b"9" * 5000 + b"}", "a whole number of 5001 digits"),
        (b'{"a": 1e999}', "the number 1e999 is too large"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": [-Infinity]}', "-Infinity is not"),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', "the key 'b' has two different values"),
        (b'{"a": "\\ud800"}', "lone surrogate"),
        (b'{"\\uDFFFa": 1}', "lone surrogate"),
        (nested(MAX_JSON_DEPTH + 1).encode(), "nested deeper than 64 levels"),
        (b"[" * 100_000, "nested deeper than 64 levels"),
        (b'{"a":' * 100_000, "nested deeper than 64 levels"),
    ],
)
def test_what_is_not_one_json_object_is_refused(raw, said):
    with bounded(), pytest.raises(TuningError, match=f"^the/file: .*{said}") as caught:
        parse_object(raw, "the/file", TuningError)
    assert len(str(caught.value)) < 300


# --- paths ------------------------------------------------------------------------------------------------------


class BytesPath:
    def __fspath__(self):
        return b"bytes"


NO_PATHS = [5, None, True, 2.5, b"model", BytesPath(), [], {}, np.zeros(3), object, "", " ", pathlib.Path("a\0b"),
            "a\0b", "\ud800", "x" * 5000, "x/" * 5000, "~" + "x" * 5000, "~nosuchuser/model"]  # fmt: skip
REFUSED = "must be a str|is empty|contains a|cannot be used|no home directory"
READERS = {
    "load": jaxspec.load,
    "open_checkpoint": open_checkpoint,
    "load_heads": load_heads,
    "Drafting.load": jaxspec.Drafting.load,
    "tasks.load": tasks.load_task,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("given", NO_PATHS, ids=[f"{given!r:.20}" for given in NO_PATHS])
def test_what_is_no_path_is_refused_in_a_line(name, given):
    with (
        bounded(),
        pytest.raises(
            JaxspecError, match=r"must be a str|is empty|contains a|cannot be used|no home directory"
        ) as caught,
    ):
        READERS[name](given)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("given", NO_PATHS, ids=[f"{given!r:.20}" for given in NO_PATHS])
def test_nor_is_anything_written_there(given):
    lm = toys.transformer(num_layers=1)
    model = jaxspec.Model(lm, lm.init_params(jax.random.key(0)))
    config = HeadsConfig(8, 9)
    heads = DraftHeads(config, init_params(config))
    writers = (
        lambda path: jaxspec.save(model, path),
        lambda path: save_heads(heads, path),
        lambda path: export_heads(heads, path, "legacy"),
        Drafting("none", tree=chain(0), schedule=Adaptive()).save,
    )
    for write in writers:
        with pytest.raises(InvalidConfig, match=REFUSED) as caught:
            write(given)
        assert str(caught.value).isprintable()


def test_a_path_may_be_an_object_or_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_path("~/a") == check_path(tmp_path / "a") == tmp_path / "a"
    assert check_path("./~nosuchuser") == pathlib.Path("./~nosuchuser")
    (tmp_path / "t.jsonl").write_text('{"prompt": "x"}')
    assert tasks.load_task(tmp_path / "t.jsonl").questions == tasks.load_task("~/t.jsonl").questions


def odd_file(place: pathlib.Path, kind: str) -> pathlib.Path:
    """A path that is there, and no file with content."""
    if kind == "directory":
        place.mkdir()
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    elif kind == "loop":
        place.symlink_to(place)
    else:
        place.touch()
    return place


@pytest.mark.parametrize("kind", ["directory", "pipe", "device", "loop", "empty"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, kind):
    """A pipe that is opened blocks for ever, and a device has no end."""
    cases = [
        (jaxspec.Drafting.load, "t.json", TuningError),
        (tasks.load_task, "t.jsonl", TaskError),
        (jaxspec.load, "m.gguf", CheckpointError),
        (load_heads, "medusa_lm_head.safetensors", CheckpointError),
        (lambda path: load_heads(path, allow_pickle=True), "medusa_lm_head.pt", CheckpointError),
        (lambda path: read_json_file(check_path(path)), "f.json", CheckpointError),
    ]
    for read, name, error in cases:
        place = odd_file(tmp_path / name, kind)
        with bounded(), pytest.raises((error, InvalidConfig), match=str(tmp_path)):
            read(place)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "heads.json", "jaxspec.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["directory", "pipe", "device", "loop", "empty"])
def test_so_are_those_in_a_directory(tmp_path, name, kind):
    odd_file(tmp_path / name, kind)
    for read in (open_checkpoint, open_heads):
        with bounded(), pytest.raises(CheckpointError, match=str(tmp_path)):
            read(tmp_path)


def test_a_file_is_read_up_to_a_limit(tmp_path):
    with (tmp_path / "f").open("wb") as file:
        file.truncate(1 << 40)  # a hole, which takes no room on the disk
    with bounded(), pytest.raises(CheckpointError, match="1099511627776 bytes, expected at most"):
        read_bytes(tmp_path / "f")


@pytest.mark.parametrize("given", [5, b"main", "", " ", "a\nb", "\ud800", ["main"]])
def test_a_revision_is_a_name(given):
    with pytest.raises(InvalidConfig, match="revision must be the name of a branch, tag or commit"):
        jaxspec.load("organization/name", revision=given)


# --- messages ---------------------------------------------------------------------------------------------------


def test_a_message_is_one_line_that_can_be_printed(tmp_path):
    error = CheckpointError("a\nb\r\n  c\x1b[31m\ud800\x00 é 漢" + "y" * 10_000)
    assert str(error).startswith("a b c\\x1b[31m\\ud800\\x00 é 漢yyy")
    assert str(error).isprintable()
    assert len(str(error)) < 2000
    with pytest.raises(CheckpointError, match="two lines: is a directory") as caught:
        read_bytes(odd_file(tmp_path / "two\nlines", "directory"))
    assert str(caught.value).isprintable()
