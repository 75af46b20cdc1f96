"""A parser of the header of GGUF files (versions 2 and 3, little-endian), over a memory map.

The file is not trusted: every count, length, dimension and offset is checked against the remaining bytes before memory
is allocated. The `gguf` package only decodes the blocks of quantized tensors.
"""

import dataclasses
import functools
import math
import mmap
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.checkpoints.base import StoredTensor
from jaxspec.errors import CheckpointError

_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {kind: struct.Struct("<" + code) for kind, code in _FORMATS.items()}
_STRING, _ARRAY = 8, 9
MAX_STRINGS, MAX_TEXT, MAX_ENTRIES = 1 << 20, 1 << 25, 1 << 16
"""Maximum number of strings of a header, of bytes of all its strings, and of metadata entries or tensors.

Published files have up to 0.8 million strings of 9 MB (a vocabulary of 262,144 tokens and its merges) and a few
thousand tensors. In memory, a string is several times as large as in the file; an array of numbers is not copied.
"""
_SMALLEST_ENTRY, _SMALLEST_TENSOR = 8 + 1 + 4 + 1, 8 + 1 + 4 + 8 + 4 + 8


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One entry of the tensor table: type, NumPy shape (rows first), and its bytes [start, stop)."""

    kind: int
    shape: tuple[int, ...]
    start: int
    stop: int


class _Cursor:
    """Reads the header sequentially, never past the end."""

    def __init__(self, data, where: str):
        self.data, self.where, self.at = data, where, 0
        self.strings, self.text = 0, 0

    def fail(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {problem} (at byte {self.at})")

    def skip(self, size: int, what: str) -> int:
        """Skips `size` bytes and returns the offset of the first."""
        remaining = len(self.data) - self.at
        if size > remaining:
            raise self.fail(f"{what} takes {size} bytes, but {remaining} are left: truncated or malformed")
        self.at += size
        return self.at - size

    def scalar(self, kind: int, what: str):
        reader = _SCALARS[kind]
        return reader.unpack_from(self.data, self.skip(reader.size, what))[0]

    def count(self, smallest: int, what: str, limit: int | None = None) -> int:
        """Reads a number of items of at least `smallest` bytes each, which must fit in the rest of the file."""
        count, remaining = self.scalar(10, what), len(self.data) - self.at
        if count > remaining // smallest:
            raise self.fail(f"{what} is {count}, but {remaining} bytes are left: truncated or malformed")
        if limit is not None and count > limit:
            raise self.fail(f"{what} is {count}, expected at most {limit}")
        return count

    def string(self, what: str) -> str:
        size = self.count(1, f"the length of {what}")
        start = self.skip(size, what)
        self.strings, self.text = self.strings + 1, self.text + size
        if self.strings > MAX_STRINGS or self.text > MAX_TEXT:
            raise self.fail(
                f"{what} is string number {self.strings}, and the strings have {self.text} bytes together; expected at "
                f"most {MAX_STRINGS} strings of {MAX_TEXT} bytes together"
            )
        try:
            return self.data[start : start + size].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None

    def name(self, what: str, known_names: Mapping[str, object]) -> str:
        name = self.string(what)
        if not name or len(name) > 65535 or name in known_names:
            raise self.fail(f"{what} {name[:80]!r} is empty, too long or duplicated")
        return name

    def value(self, key: str):
        kind = self.scalar(4, f"the type of {key}")
        if kind == _ARRAY:
            return self.array(key)
        if kind == _STRING:
            return self.string(key)
        if kind not in _SCALARS:
            raise self.fail(f"{key} has type {kind}, expected 0 .. 12")
        return self.scalar(kind, key)

    def array(self, key: str) -> list[str] | memoryview:
        kind = self.scalar(4, f"the item type of {key}")
        if kind not in _SCALARS and kind != _STRING:
            raise self.fail(f"{key} is an array of type {kind}, expected an array of numbers or of strings")
        size = 8 if kind == _STRING else _SCALARS[kind].size
        count = self.count(size, f"the number of items of {key}")
        if kind == _STRING:
            if self.strings + count > MAX_STRINGS:
                raise self.fail(f"{key} has {count} strings, expected at most {MAX_STRINGS} in all")
            return self.string_array(key, count)
        start = self.skip(count * size, key)
        code: Any = _FORMATS[kind]
        return memoryview(self.data)[start : start + count * size].cast(code)

    def string_array(self, key: str, count: int) -> list[str]:
        """Reads strings in the same way as `string`, but without a call for each string, because a header has up to a
        million."""
        data, begin, at, end = self.data, self.at, self.at, len(self.data)
        limit, unpack = begin + MAX_TEXT - self.text, _SCALARS[10].unpack_from
        strings: list[str] = []
        for _ in range(count):
            start, limit = at + 8, limit + 8
            stop = start + unpack(data, at)[0] if start <= end else end + 1
            try:
                if stop > min(end, limit):
                    raise ValueError
                strings.append(data[start:stop].decode("utf-8"))
            except ValueError:
                break
            at = stop
        self.at, self.strings = at, self.strings + len(strings)
        self.text += at - begin - 8 * len(strings)
        if len(strings) < count:
            self.string(key)  # raises
        return strings

    def tensor(self, name: str) -> tuple[int, tuple[int, ...], int]:
        """Reads one entry of the tensor table: type, NumPy shape and offset."""
        dimensions = self.scalar(4, f"the number of dimensions of {name}")
        if not 1 <= dimensions <= 4:
            raise self.fail(f"tensor {name} has {dimensions} dimensions, expected 1 .. 4")
        shape = tuple(self.scalar(10, f"the shape of {name}") for _ in range(dimensions))[::-1]
        if 0 in shape or math.prod(shape) >= 1 << 63:
            raise self.fail(f"tensor {name} has shape {list(shape)}: empty or too large")
        return self.scalar(4, f"the type of {name}"), shape, self.scalar(10, f"the offset of {name}")


def parse_tables(data, where: str) -> tuple[dict[str, Any], dict[str, tuple[int, tuple[int, ...], int]], int]:
    """Parses the metadata and the tensor table, without the checks of the tensors' bytes in `parse_header`.

    Returns:
        The metadata; type, shape and offset of each tensor by name; and the size of the header in bytes.
    """
    cursor = _Cursor(data, where)
    start = cursor.skip(4, "the magic number")
    if (magic := bytes(data[start : start + 4])) != b"GGUF":
        raise CheckpointError(f"{where}: begins with {magic!r}, expected b'GGUF': not a GGUF file")
    version = cursor.scalar(4, "the version")
    if version in (2 << 24, 3 << 24):
        raise CheckpointError(f"{where}: a big-endian GGUF file; only little-endian files are supported")
    if version not in (2, 3):
        raise CheckpointError(f"{where}: GGUF version {version}, expected 2 or 3; convert the model again")
    num_tensors = cursor.count(_SMALLEST_TENSOR, "the number of tensors", MAX_ENTRIES)
    num_entries = cursor.count(_SMALLEST_ENTRY, "the number of metadata entries", MAX_ENTRIES)
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.name("a metadata key", metadata)
        metadata[key] = cursor.value(key)
    entries: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for _ in range(num_tensors):
        name = cursor.name("a tensor name", entries)
        entries[name] = cursor.tensor(name)
    return metadata, entries, cursor.at


def parse_header(data, where: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Parses the header of a GGUF file.

    Args:
        data: the whole file, as bytes or a memory map.
        where: the name of the file, for messages.

    Returns:
        The metadata (arrays of strings as lists, arrays of numbers as views of the file) and the tensors by name.

    Raises:
        CheckpointError: an entry is malformed, truncated, overlapping, duplicated, or of an unsupported type.
    """
    metadata, entries, size = parse_tables(data, where)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise CheckpointError(f"{where}: general.alignment is {alignment!r}, expected a power of two")
    base = -(-size // alignment) * alignment
    tensors = {name: _locate(where, name, entry, base, alignment) for name, entry in entries.items()}
    end, before = base, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start < end:
            raise CheckpointError(f"{where}: tensors {before} and {name} overlap")
        if tensor.stop > len(data):
            raise CheckpointError(
                f"{where}: tensor {name} ends at byte {tensor.stop}, but the file ends at {len(data)}: truncated"
            )
        end, before = tensor.stop, name
    return metadata, tensors


def _locate(where: str, name: str, entry: tuple, base: int, alignment: int) -> Tensor:
    kind, shape, offset = entry
    type_name, block, size = _layout(kind)
    if not block:
        raise CheckpointError(f"{where}: tensor {name} has type {type_name}, which is not supported")
    if shape[-1] % block:
        raise CheckpointError(
            f"{where}: tensor {name} has rows of {shape[-1]}, expected a multiple of {block} for {type_name}"
        )
    if offset % alignment:
        raise CheckpointError(f"{where}: tensor {name} has offset {offset}, not a multiple of {alignment}")
    return Tensor(kind, shape, base + offset, base + offset + math.prod(shape) // block * size)


@functools.cache
def _layout(kind: int) -> tuple[str, int, int]:
    """Returns the name of a tensor type, and the weights and bytes of one block; 0 weights if it cannot be decoded."""
    import gguf

    try:
        known = gguf.GGMLQuantizationType(kind)
        block, size = gguf.GGML_QUANT_SIZES[known]
        gguf.quants.dequantize(np.zeros((1, size), np.uint8), known)
    except (ValueError, KeyError, NotImplementedError):
        return str(kind), 0, 0
    return known.name, block, size


def raw_rows(data, tensor: Tensor) -> np.ndarray:
    """Returns the bytes of one tensor, `[*shape[:-1], bytes of a row]`."""
    raw = np.frombuffer(data, np.uint8, tensor.stop - tensor.start, tensor.start)
    return raw.reshape(*tensor.shape[:-1], -1)


def type_name(tensor: Tensor) -> str:
    """Returns the name of a tensor's type, such as "Q4_K"."""
    return _layout(tensor.kind)[0]


def decode(data, tensor: Tensor) -> np.ndarray:
    """Decodes one tensor to float32."""
    import gguf

    raw = raw_rows(data, tensor)
    with np.errstate(all="ignore"):  # overflow is reported by `check_finite`, with the tensor's name
        array = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(tensor.kind))
    return np.asarray(array, np.float32).reshape(tensor.shape)


def map_file(where: str) -> mmap.mmap:
    """Maps the whole file into memory.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        with open(where, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"{where}: cannot be read: {error}") from None


def describe_tensor(kind: int, shape: tuple[int, ...]) -> StoredTensor:
    """Describes a stored tensor of this type and shape."""
    import gguf

    try:
        known = gguf.GGMLQuantizationType(kind)
        block, size = gguf.GGML_QUANT_SIZES[known]
    except (ValueError, KeyError):  # newer than the package, or invalid
        return StoredTensor(f"type {kind}", shape, 0)
    return StoredTensor(known.name, shape, math.prod(shape) // block * size)
