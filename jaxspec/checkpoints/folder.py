"""Reads the files of a checkpoint directory: JSON, text, and safetensors in one file or in shards.

The content of a file is never executed. Every file must be in the directory itself, or in the blobs of the Hub cache
that the directory belongs to.
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

from jaxspec.checkpoints.base import StoredTensor, check_names
from jaxspec.errors import CheckpointError
from jaxspec.storage import reading

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
SHARD_PATTERN = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,6})-of-(?P<count>\d{5,6})\.safetensors", re.DOTALL | re.ASCII)
"""The name of a shard."""
MAX_SHARDS = 4096
FLOAT_TYPES = ("F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor of a file that is read on demand.

    Attributes:
        where: the file, for messages.
        stored: type, shape and size of the tensor.
        read: reads the tensor in the dtype of the file.
    """

    where: str
    stored: StoredTensor
    read: Callable[[], np.ndarray]


def open_tensors(directory: pathlib.Path) -> dict[str, LazyTensor]:
    """Opens the tensors of `model.safetensors`, of the shards of its index, or of all shards if there is no index; by
    name.

    Raises:
        CheckpointError: a file is missing or malformed, or the index contradicts the shards.
    """
    if inside(directory, WEIGHTS_FILE) is not None:
        return open_shard(directory, WEIGHTS_FILE)
    if not os.path.lexists(directory / INDEX_FILE) and (shards := _shards(directory)):
        return _open_all(directory, shards)
    index, tensors = _index(directory), {}
    for name in sorted(set(index.values())):
        shard = open_shard(directory, name)
        check_names(str(directory / name), {key for key, holder in index.items() if holder == name}, shard)
        tensors |= shard
    return tensors


def _shards(directory: pathlib.Path) -> list[str]:
    """Returns the names of the safetensors files of a directory without an index: one file, or all shards of a set.

    Raises:
        CheckpointError: a shard is missing, or there are several files that do not form a set.
    """
    names = sorted(file.name for file in directory.glob("*.safetensors"))
    if len(names) < 2 and not (names and SHARD_PATTERN.fullmatch(names[0])):
        return names
    sets = {(match["stem"], int(match["count"])) for name in names if (match := SHARD_PATTERN.fullmatch(name))}
    if len(sets) != 1:
        raise CheckpointError(
            f"{directory}: has the safetensors files {', '.join(names[:4])}, but no {INDEX_FILE} that says which of "
            f"them belong together; expected {WEIGHTS_FILE}, or shards such as model-00001-of-00002.safetensors"
        )
    [(stem, count)] = sets
    if not 0 < count <= MAX_SHARDS:
        raise CheckpointError(f"{directory}: {names[0]} is one of {count} shards, expected 1 to {MAX_SHARDS}")
    digits = len(next(match["count"] for name in names if (match := SHARD_PATTERN.fullmatch(name))))
    shard_names = [f"{stem}-{i:0{digits}d}-of-{count:0{digits}d}.safetensors" for i in range(1, count + 1)]
    if missing := [name for name in shard_names if not os.path.exists(directory / name)]:
        raise CheckpointError(f"{directory / missing[0]}: is missing; {names[0]} is one of {count} shards")
    return shard_names


def _open_all(directory: pathlib.Path, names: Iterable[str]) -> dict[str, LazyTensor]:
    """Opens the tensors of all these files, by name.

    Raises:
        CheckpointError: two files contain the same tensor, or the tensors have the names of another format.
    """
    tensors: dict[str, LazyTensor] = {}
    for name in names:
        shard = open_shard(directory, name)
        if duplicates := sorted(shard.keys() & tensors.keys()):
            raise CheckpointError(
                f"{directory / name}: tensor {duplicates[0]} is also in {tensors[duplicates[0]].where}; "
                "remove one of the files"
            )
        tensors |= shard
    if "tok_embeddings.weight" in tensors:
        raise CheckpointError(
            f"{tensors['tok_embeddings.weight'].where}: has the tensor names of Mistral's and Meta's own code "
            f"(tok_embeddings.weight); use the files in the Hugging Face format ({WEIGHTS_FILE}) of the same model"
        )
    return tensors


def open_shard(directory: pathlib.Path, name: str) -> dict[str, LazyTensor]:
    """Opens the tensors of one safetensors file, by name.

    Raises:
        CheckpointError: the file is missing or malformed.
    """
    from safetensors import SafetensorError, safe_open

    file, where = inside(directory, name), str(directory / name)
    if file is None:
        raise CheckpointError(f"{where}: the index names this shard, but the file does not exist")
    try:
        shard: Any = safe_open(file, framework="np")
        parts = {key: shard.get_slice(key) for key in shard.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{where}: not a valid safetensors file: {error}") from None
    return {
        key: LazyTensor(where, _stored(part), functools.partial(shard.get_tensor, key)) for key, part in parts.items()
    }


def check_types(tensors: Mapping[str, LazyTensor], types: Iterable[str] = FLOAT_TYPES) -> None:
    """Raises CheckpointError if a tensor is of another type; the message names it."""
    for name, tensor in tensors.items():
        if tensor.stored.type not in types:
            raise CheckpointError(
                f"{tensor.where}: tensor {name} has type {tensor.stored.type}, expected one of {types}"
            )


def _stored(part: Any) -> StoredTensor:
    """Describes a slice of safetensors."""
    dtype, shape = part.get_dtype(), tuple(part.get_shape())  # the type's name has its bits: BF16, F8_E4M3, I64
    bits = re.search(r"\d+", dtype)
    return StoredTensor(dtype, shape, math.prod(shape) * int(bits[0] if bits else 8) // 8)


def _index(directory: pathlib.Path) -> dict[str, str]:
    """Reads the index, which names the shard of each tensor. Names of shards must be plain file names."""
    index = read_optional_json(directory, INDEX_FILE)
    if index is None:
        pickles = sorted(file.name for file in directory.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
        why = f"expected {WEIGHTS_FILE}, or {INDEX_FILE} and its shards"
        if pickles:
            why = f"{', '.join(pickles[:3])} can contain code and are never opened; convert them to safetensors"
        raise CheckpointError(f"{directory}: has no safetensors weights: {why}")
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(f"{directory / INDEX_FILE}: weight_map is missing or empty, expected shards")
    for shard in shards.values():
        plain = isinstance(shard, str) and shard.endswith(".safetensors") and not set(shard) & set("/\\:\0")
        if not plain:
            raise CheckpointError(
                f"{directory / INDEX_FILE}: shard {shard!r}, expected the plain name of a .safetensors file"
            )
    return shards


def inside(directory: pathlib.Path, name: str) -> pathlib.Path | None:
    """Returns the path of a file in a directory, or None if the file does not exist.

    Raises:
        CheckpointError: the file is a link that leads neither into the directory nor to the blobs of its Hub cache.
    """
    file, home = directory / name, directory.resolve()
    if not os.path.exists(file):
        return None
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    homes = (home, blobs, home / pathlib.PurePosixPath(name).parent)
    if (real := file.resolve()).parent not in homes or not real.is_file():
        raise CheckpointError(f"{file}: leads to {real}, expected a file in {home}")
    return file


def read_optional_text(directory: pathlib.Path, name: str) -> str | None:
    """Reads a file's text; returns None if there is no such file."""
    if (file := inside(directory, name)) is None:
        return None
    return reading.read_text_file(file)


def read_optional_json(directory: pathlib.Path, name: str, limit: int = reading.MAX_BYTES) -> dict | None:
    """Reads the object of a JSON file; returns None if there is no such file."""
    file = inside(directory, name)
    return None if file is None else reading.read_json_file(file, limit=limit)
