"""Tests that the header of a GGUF file takes memory in proportion to the file, whatever it counts."""

import contextlib
import struct
import tracemalloc

import numpy as np
import pytest

from helpers.bounds import bounded
from helpers.checkpoints import VOCABULARY, random_params, tiny_config, write_gguf
from jaxspec.checkpoints import gguf_header
from jaxspec.checkpoints.gguf_header import MAX_ENTRIES, MAX_STRINGS, MAX_TEXT, parse_header
from jaxspec.checkpoints.source import open_checkpoint, read_headers
from jaxspec.errors import CheckpointError

pytestmark = pytest.mark.quick
CONFIG = tiny_config()
FORMATS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}
COUNTS = [0, 1, 7, 1000, 1 << 16]


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(*entries: bytes, tensors: int = 0, count: int | None = None) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, len(entries) if count is None else count) + b"".join(entries)


def array(key: bytes, kind: int, count: int, items: bytes) -> bytes:
    return text(key) + struct.pack("<IIQ", 9, kind, count) + items


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", FORMATS)
def test_arrays_of_numbers_are_views_of_the_file(kind, count):
    """55 arrays: of every type and of up to 65,536 items, at an address that no item is aligned to."""
    dtype = np.dtype(FORMATS[kind])
    items = np.random.default_rng(kind).integers(0, 2 if kind == 7 else 100, count).astype(dtype)
    raw = header(array(b"odd", kind, count, items.tobytes()))
    tracemalloc.start()
    try:
        metadata, _ = parse_header(raw, "made.gguf")
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert np.array_equal(np.array(metadata["odd"].tolist(), dtype), items)


def test_an_array_of_two_to_the_24(tmp_path):
    """A file of 64 MB, under a key of the tokenizer and under any other."""
    many = np.zeros(1 << 24, np.int32).tobytes()
    path = tmp_path / "model.gguf"
    for key in (b"tokenizer.ggml.token_type", b"tokenizer.ggml.scores", b"any.key"):
        raw = write_gguf(path, CONFIG, random_params(CONFIG), metadata=VOCABULARY).read_bytes()
        count = struct.unpack_from("<Q", raw, 16)[0]
        name = b"tokenizer.ggml.token_type"
        raw = raw.replace(text(name), text(b"x" * len(name))) if key == name else raw
        path.write_bytes(raw[:16] + struct.pack("<Q", count + 1) + array(key, 5, 1 << 24, many) + raw[24:])
        with bounded(), contextlib.suppress(CheckpointError):
            open_checkpoint(path)
        with bounded(), contextlib.suppress(CheckpointError):
            read_headers(path)


HOSTILE = {
    "strings": header(array(b"a", 8, MAX_STRINGS + 1, bytes(8) * (MAX_STRINGS + 1))),
    "strings of arrays": header(*(array(b"%d" % i, 8, 1 << 18, bytes(8) * (1 << 18)) for i in range(5))),
    "one string": header(text(b"a") + struct.pack("<I", 8) + text(b"x" * (MAX_TEXT + 1))),
    "wide letters": header(text(b"a") + struct.pack("<I", 8) + text("\U0001f600".encode() + b"x" * (MAX_TEXT - 8))),
    "entries": header(*(text(b"%d" % i) + struct.pack("<IB", 7, 1) for i in range(MAX_ENTRIES + 1))),
    "tensors": header(tensors=MAX_ENTRIES + 1) + bytes(33 * (MAX_ENTRIES + 1)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_take_little(name):
    with bounded(), contextlib.suppress(CheckpointError):
        parse_header(HOSTILE[name], "made.gguf")
    if name != "wide letters":
        with pytest.raises(CheckpointError, match="expected at most"):
            parse_header(HOSTILE[name], "made.gguf")


@pytest.mark.parametrize("length", range(1, 6))
@pytest.mark.parametrize("beyond", [0, 1, 40])
def test_the_text_of_an_array_is_limited_as_it_is_read(monkeypatch, length, beyond):
    """Of short strings, whose lengths take more bytes than their text, the first beyond the limit is refused."""
    count = 60
    raw = header(array(b"a", 8, count, text(b"x" * length) * count))
    monkeypatch.setattr(gguf_header, "MAX_TEXT", 1 + (count - beyond) * length)  # the key has one byte
    if not beyond:
        assert parse_header(raw, "made.gguf")[0]["a"] == ["x" * length] * count
        return
    number, size = 2 + count - beyond, 1 + (1 + count - beyond) * length
    with pytest.raises(CheckpointError, match=f"a is string number {number}, and the strings have {size} bytes"):
        parse_header(raw, "made.gguf")
