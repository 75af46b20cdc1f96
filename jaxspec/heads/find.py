"""Finds draft heads and their layout by file names and headers. Nothing here imports JAX."""

import os
import pathlib

from jaxspec.checkpoints import folder
from jaxspec.errors import CheckpointError
from jaxspec.heads.layouts import FILES, LAYOUTS, PICKLES, recognise

OURS, MANIFEST, TENSORS = "jaxspec", "heads.json", "heads.safetensors"
"""Our own layout: its name and its two files."""
PICKLE = "pickle"
"""What `find_layout` returns for a file of torch, which it does not open."""


def find_layout(path: pathlib.Path) -> str | None:
    """Returns the name of the layout of the heads in a directory or a file.

    `OURS` is our own, `PICKLE` that of a file of torch, which is not opened. None: there are no heads, or nothing can
    be read.
    """
    if path.is_dir():
        if os.path.exists(path / MANIFEST):
            return OURS
        name = next((name for name in FILES if os.path.exists(path / name)), None)
        path = path if name is None else path / name
    if path.suffix in PICKLES:
        return PICKLE
    try:
        if path.is_dir():
            layout = recognise(folder.open_tensors(path))
        else:
            layout = recognise(folder.open_shard(path.parent, path.name)) if path.suffix == ".safetensors" else None
    except CheckpointError:
        named = (name for name, layout in LAYOUTS.items() if path.name in layout.files)
        return next(named, None) if path.name in FILES else None
    return None if layout is None else layout.name


def hub_files(allow_pickle: bool = False) -> tuple[str, ...]:
    """Lists the files with heads that are fetched from a repository of the Hub, besides those of a model."""
    return (MANIFEST, TENSORS, *(name for name in FILES if allow_pickle or pathlib.Path(name).suffix not in PICKLES))
