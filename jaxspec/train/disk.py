"""Files that are there whole or not at all, and what identifies arrays."""

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxspec.errors import TrainingError


def write_whole(path: pathlib.Path, write: Callable[[Any], Any]) -> None:
    """Writes a file beside its place and moves it there once it is on the disk.

    Raises:
        TrainingError: it cannot be written; what stood there before still does.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise TrainingError(f"{path}: cannot be written: {error.strerror or error}") from None


def write_json(path: pathlib.Path, value: Any) -> None:
    """A JSON file, as `write_whole`."""
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))


def sync_folder(folder: pathlib.Path) -> None:
    """A renamed file is not on the disk before its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fingerprint(tree: Any) -> str:
    """sha256 over names, shapes, dtypes and bytes of all arrays of a pytree."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}\n".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
    return digest.hexdigest()


def digest_of(value: Any) -> str:
    """sha256 of what JSON can say."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
