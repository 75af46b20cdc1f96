"""JSON files of a training run, and checksums of arrays."""

import hashlib
import json
import pathlib
from typing import Any

import jax
import numpy as np

from jaxspec.core.mesh import to_host
from jaxspec.storage.writing import write_whole


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a JSON file completely or not at all, see `jaxspec.storage.writing.write_whole`."""
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))


def fingerprint(tree: Any) -> str:
    """Returns the sha256 of the names, shapes, dtypes and bytes of all arrays of a pytree.

    The devices that hold the arrays do not change it. If processes share the arrays, all of them must call it.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = to_host(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}\n".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
    return digest.hexdigest()


def digest_of(value: Any) -> str:
    """Returns the sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
