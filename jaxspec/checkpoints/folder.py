"""The files of a checkpoint's directory: JSON, and tensors in one safetensors file or the shards of an index.

Nothing here executes anything. Every file must lie in the directory itself, or in the blobs of the Hub cache the
directory belongs to.
"""

import dataclasses
import functools
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jaxspec.checkpoints.base import StoredTensor, refuse_difference
from jaxspec.errors import CheckpointError
from jaxspec.storage import reading

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True)
class HeldTensor:
    """One tensor of a file, unread.

    Attributes:
        where: the file, for messages.
        stored: its type and shape.
        read: gives it in the file's own dtype.
    """

    where: str
    stored: StoredTensor
    read: Callable[[], np.ndarray]


def open_tensors(directory: pathlib.Path) -> dict[str, HeldTensor]:
    """The tensors of `model.safetensors`, or of the shards of its index, by name.

    Raises:
        CheckpointError: a file is missing or malformed, or index and shards differ.
    """
    if inside(directory, WHOLE) is not None:
        return open_shard(directory, WHOLE)
    index, tensors = _index(directory), {}
    for name in sorted(set(index.values())):
        shard = open_shard(directory, name)
        refuse_difference(str(directory / name), {key for key, holder in index.items() if holder == name}, shard)
        tensors |= shard
    return tensors


def open_shard(directory: pathlib.Path, name: str) -> dict[str, HeldTensor]:
    """The tensors of one safetensors file, by name."""
    from safetensors import SafetensorError, safe_open

    file, where = inside(directory, name), str(directory / name)
    if file is None:
        raise CheckpointError(f"{where}: the index names this shard, and there is no such file")
    try:
        shard: Any = safe_open(file, framework="np")
        parts = {key: shard.get_slice(key) for key in shard.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{where}: not a safetensors file that can be read: {error}") from None
    return {
        key: HeldTensor(where, _stored(part), functools.partial(shard.get_tensor, key)) for key, part in parts.items()
    }


def check_types(tensors: Mapping[str, HeldTensor], types: Iterable[str] = FLOATS) -> None:
    """Raises CheckpointError, naming it, when a tensor is of another type."""
    for name, held in tensors.items():
        if held.stored.type not in types:
            raise CheckpointError(f"{held.where}: tensor {name} has type {held.stored.type}, expected one of {types}")


def _stored(part: Any) -> StoredTensor:
    """Of a slice of safetensors; its type names the bits of a number: BF16, F8_E4M3, I64."""
    dtype, shape = part.get_dtype(), tuple(part.get_shape())
    bits = re.search(r"\d+", dtype)
    return StoredTensor(dtype, shape, math.prod(shape) * int(bits[0] if bits else 8) // 8)


def _index(directory: pathlib.Path) -> dict[str, str]:
    """Tensor -> name of its shard, from the index; every shard name is checked to be a plain file name."""
    index = read_json(directory, INDEX)
    if index is None:
        pickles = sorted(file.name for file in directory.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
        why = f"expected {WHOLE}, or {INDEX} and its shards"
        if pickles:
            why = f"{', '.join(pickles[:3])} may hold code and are never opened; convert them to safetensors"
        raise CheckpointError(f"{directory}: has no safetensors weights: {why}")
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(f"{directory / INDEX}: weight_map is missing or empty, expected shards")
    for shard in shards.values():
        plain = isinstance(shard, str) and shard.endswith(".safetensors") and not set(shard) & set("/\\:\0")
        if not plain:
            raise CheckpointError(
                f"{directory / INDEX}: shard {shard!r}, expected the plain name of a .safetensors file"
            )
    return shards


def inside(directory: pathlib.Path, name: str) -> pathlib.Path | None:
    """Path of a file of the directory, or None; a link may only lead to the blobs of the same Hub cache."""
    file, home = directory / name, directory.resolve()
    if not os.path.exists(file):
        return None
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if (real := file.resolve()).parent not in (home, blobs) or not real.is_file():
        raise CheckpointError(f"{file}: leads to {real}, expected a file in {home}")
    return file


def read_text(directory: pathlib.Path, name: str) -> str | None:
    """A file's text; None where there is none."""
    if (file := inside(directory, name)) is None:
        return None
    return reading.read_text(file)


def read_json(directory: pathlib.Path, name: str, limit: int = reading.MAX_BYTES) -> dict | None:
    """The object of a JSON file; None where there is none."""
    file = inside(directory, name)
    return None if file is None else reading.read_json(file, limit=limit)
