"""Reads the tensors of a `torch.save` file without PyTorch: a zip of raw storages and a pickle that describes them.

The pickle is never unpickled. An interpreter of two dozen opcodes and a few names parses it; the interpreter never
calls or imports anything, and rejects a file with other opcodes or names.
"""

import dataclasses
import functools
import math
import pathlib
import pickletools
import re
import struct
import zipfile
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.checkpoints.base import StoredTensor
from jaxspec.checkpoints.folder import LazyTensor
from jaxspec.errors import CheckpointError

_STORAGES = {
    "FloatStorage": ("F32", np.dtype(np.float32)),
    "HalfStorage": ("F16", np.dtype(np.float16)),
    "BFloat16Storage": ("BF16", np.dtype(ml_dtypes.bfloat16)),
    "LongStorage": ("I64", np.dtype(np.int64)),
    "BoolStorage": ("BOOL", np.dtype(np.bool_)),
}
_REBUILD, _ORDERED = ("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict")
_KNOWN_NAMES = {_REBUILD, _ORDERED, *(("torch", name) for name in _STORAGES)}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_CONSTANT_OPCODES = {"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"}
_MAX_PICKLE, _MAX_SHARED = 1 << 20, 16


@dataclasses.dataclass(frozen=True)
class _Name:
    module: str
    name: str


@dataclasses.dataclass(frozen=True)
class _Storage:
    kind: str
    key: str
    size: int


@dataclasses.dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Malformed(Exception):
    """The file is malformed or not supported; it becomes a CheckpointError that names the file."""


def open_torch(path: pathlib.Path) -> dict[str, LazyTensor]:
    """Opens the tensors of a state dict, by name; they are read lazily.

    Raises:
        CheckpointError: the file is not a zip that torch.save wrote, contains values other than tensors of float32,
            float16 and bfloat16, or a tensor exceeds its storage.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != b"PK\x03\x04":
                raise _Malformed(
                    "not the zip format that torch.save writes since PyTorch 1.6; load it with PyTorch and save it "
                    "again, or convert it to safetensors"
                )
        with zipfile.ZipFile(path) as archive:
            root, entries = _entries(archive, path.stat().st_size)
            if "byteorder" in entries and archive.read(entries["byteorder"])[:16] != b"little":
                raise _Malformed("its numbers are not little-endian")
            if "data.pkl" not in entries or entries["data.pkl"].file_size > _MAX_PICKLE:
                raise _Malformed(f"expected a data.pkl of at most {_MAX_PICKLE} bytes")
            tensors = _tensors(_run(archive.read(entries["data.pkl"])))
        total = sum(_check(name, tensor, entries) for name, tensor in tensors.items())
        if total > _MAX_SHARED * path.stat().st_size:
            raise _Malformed(f"its tensors take {total} bytes, but the file has {path.stat().st_size}")
    except _Malformed as error:
        raise CheckpointError(f"{path}: {error}") from None
    # The standard library's errors for malformed zips and pickles.
    except (zipfile.BadZipFile, OSError, ValueError, LookupError, RuntimeError, EOFError, struct.error) as error:
        raise CheckpointError(f"{path}: not a valid torch.save file: {error!s:.200}") from None
    return {name: _lazy(path, f"{root}/data/{tensor.storage.key}", tensor) for name, tensor in tensors.items()}


def _entries(archive: zipfile.ZipFile, size: int) -> tuple[str, dict[str, zipfile.ZipInfo]]:
    """Returns the archive's root directory, and its entries by their path below it."""
    entries: dict[str, zipfile.ZipInfo] = {}
    root = None
    for info in archive.infolist():
        parts = info.filename.split("/")
        root = root or parts[0]
        if parts[0] != root or len(parts) < 2 or {"", ".", ".."} & set(parts) or re.search(r"[\\\0:]", info.filename):
            raise _Malformed(f"entry {info.filename!r:.80} is outside the root directory of the archive")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
            raise _Malformed(f"entry {info.filename!r:.80} is compressed, which torch.save does not do")
        if info.header_offset + info.file_size > size:
            raise _Malformed(f"entry {info.filename!r:.80} claims more bytes than the file has")
        name = "/".join(parts[1:])
        if name in entries:
            raise _Malformed(f"entry {info.filename!r:.80} is duplicated")
        entries[name] = info
    return root or "", entries


def _run(data: bytes) -> Any:
    """Evaluates a pickle of dicts, tuples, lists, strings, numbers, names, storages and tensors."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def pop_mark() -> list[Any]:
        at = marks.pop()
        items = stack[at:]
        del stack[at:]
        return items

    for opcode, arg, _ in pickletools.genops(data):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                marks.append(len(stack))
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case name if name in _CONSTANT_OPCODES:
                stack.append(arg)
            case "BINPUT" | "LONG_BINPUT":
                memo[arg] = stack[-1]  # pyright: ignore[reportArgumentType]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[arg])  # pyright: ignore[reportArgumentType]
            case "TUPLE":
                stack.append(tuple(pop_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                marks.append(len(stack) - int(name[-1]))
                stack.append(tuple(pop_mark()))
            case "GLOBAL":
                stack.append(_name(*str(arg).rsplit(" ", 1)))
            case "STACK_GLOBAL":
                name = stack.pop()
                stack.append(_name(stack.pop(), name))
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "REDUCE":
                arguments = stack.pop()
                stack.append(_reduce(stack.pop(), arguments))
            case "SETITEM":
                marks.append(len(stack) - 2)
                _fill(pop_mark(), stack[-1])
            case "SETITEMS":
                _fill(pop_mark(), stack[-1])
            case "BUILD":  # the metadata that a state dict has as an attribute
                stack.pop()
                if type(stack[-1]) is not dict:
                    raise _Malformed("its pickle sets the state of something other than a dict")
            case other:
                raise _Malformed(f"its pickle uses {other} {arg!r:.80}, expected only tensors")
    raise _Malformed("its pickle has no end")


def _name(module: Any, name: Any) -> _Name:
    if type(module) is not str or type(name) is not str or (module, name) not in _KNOWN_NAMES:
        shown = f"{module}.{name}" if type(module) is str and type(name) is str else "a name that is not a string"
        raise _Malformed(f"its pickle uses {shown!r:.80}, expected only tensors of float32, float16 or bfloat16")
    return _Name(module, name)


def _storage(arguments: Any) -> _Storage:
    if type(arguments) is not tuple or len(arguments) != 5:
        raise _Malformed("a storage is not a tuple of five entries")
    tag, kind, key, _, size = arguments
    if not (type(tag) is str and tag == "storage" and isinstance(kind, _Name) and kind.name in _STORAGES):
        raise _Malformed("a storage has an unknown type")
    if not (type(key) is str and re.fullmatch(r"\d{1,9}", key, re.ASCII) and type(size) is int and size >= 0):
        raise _Malformed("a storage has an invalid key or size")
    return _Storage(kind.name, key, size)


def _reduce(function: Any, arguments: Any) -> Any:
    known = (function.module, function.name) if isinstance(function, _Name) else None
    if known == _ORDERED and type(arguments) is tuple and not arguments:
        return {}
    if known != _REBUILD or type(arguments) is not tuple or len(arguments) not in (6, 7):
        raise _Malformed("its pickle calls something that does not make a tensor")
    storage, offset, shape, strides = arguments[:4]
    if not isinstance(storage, _Storage) or type(shape) is not tuple or type(strides) is not tuple:
        raise _Malformed("a tensor has an invalid storage, shape or strides")
    numbers = (offset, *shape, *strides)
    if not len(shape) == len(strides) <= 8 or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        raise _Malformed("offset, shape and strides of a tensor must be whole numbers from 0")
    return _Tensor(storage, offset, shape, strides)


def _fill(items: list[Any], target: Any) -> None:
    if type(target) is not dict or len(items) % 2:
        raise _Malformed("its pickle sets items of something other than a dict")
    for key, value in zip(items[::2], items[1::2]):
        if type(key) is not str or key in target:
            raise _Malformed(f"key {key!r:.80} is duplicated" if type(key) is str else "a key is not a string")
        target[key] = value


def _tensors(content: Any) -> dict[str, _Tensor]:
    if type(content) is not dict:
        raise _Malformed("its content is not a dict of tensors")
    for name, tensor in content.items():
        if not isinstance(tensor, _Tensor):
            raise _Malformed(f"{name!r:.80} is not a tensor")
    return content


def _check(name: str, tensor: _Tensor, entries: dict[str, zipfile.ZipInfo]) -> int:
    """Checks that a tensor fits in its storage and the storage in the file; returns the tensor's bytes."""
    _, dtype = _STORAGES[tensor.storage.kind]
    entry, size = entries.get(f"data/{tensor.storage.key}"), tensor.storage.size
    if entry is None or entry.file_size != size * dtype.itemsize:
        got = "no" if entry is None else entry.file_size
        raise _Malformed(f"tensor {name!r:.80}: its storage has {got} bytes, expected {size * dtype.itemsize}")
    count = math.prod(tensor.shape)
    last = tensor.offset + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides))
    if count and (count > size or last >= size):
        raise _Malformed(
            f"tensor {name!r:.80} of shape {list(tensor.shape)}, strides {list(tensor.strides)} and offset "
            f"{tensor.offset} exceeds its storage of {size} numbers"
        )
    return count * dtype.itemsize


def _lazy(path: pathlib.Path, entry: str, tensor: _Tensor) -> LazyTensor:
    kind, dtype = _STORAGES[tensor.storage.kind]
    stored = StoredTensor(kind, tensor.shape, math.prod(tensor.shape) * dtype.itemsize)
    return LazyTensor(str(path), stored, functools.partial(_read, path, entry, tensor, dtype))


def _read(path: pathlib.Path, entry: str, tensor: _Tensor, dtype: np.dtype) -> np.ndarray:
    try:
        with zipfile.ZipFile(path) as archive:
            numbers = np.frombuffer(archive.read(entry), dtype)
    except (zipfile.BadZipFile, OSError, LookupError, ValueError, RuntimeError, EOFError, struct.error) as error:
        raise CheckpointError(f"{path}: {entry} cannot be read: {error!s:.200}") from None
    if numbers.size != tensor.storage.size:
        raise CheckpointError(f"{path}: {entry} has {numbers.size} numbers, expected {tensor.storage.size}")
    if not math.prod(tensor.shape):
        return np.zeros(tensor.shape, dtype)
    strides = [stride * dtype.itemsize for stride in tensor.strides]
    return np.ascontiguousarray(np.lib.stride_tricks.as_strided(numbers[tensor.offset :], tensor.shape, strides))
