"""Finds draft heads and their layout by file names and headers. Nothing here imports JAX."""

import os
import pathlib

from jaxspec.checkpoints import folder
from jaxspec.checkpoints.presets import PRESETS
from jaxspec.errors import CheckpointError
from jaxspec.heads.layouts import FILES, LAYOUTS, PICKLES, TORCH, recognise

OURS, MANIFEST, TENSORS = "jaxspec", "heads.json", "heads.safetensors"
"""The name and the two files of jaxspec's own layout."""
PICKLE = "pickle"
"""The result of `find_layout` for a file of torch, which it does not open."""
SHIPPED = pathlib.Path(__file__).parent / "shipped"
"""The heads that come with this package: a directory for each preset, in it one for each drafter."""


def shipped_heads(preset: str, drafter: str) -> pathlib.Path | None:
    """Returns the directory of a preset's heads for a drafter; None if none come with this package."""
    place = SHIPPED / preset / drafter
    return place if preset in PRESETS and (place / MANIFEST).exists() else None


def every_shipped() -> list[str]:
    """Returns the names PRESET/DRAFTER of all heads that come with this package."""
    return sorted(path.parent.relative_to(SHIPPED).as_posix() for path in SHIPPED.glob(f"*/*/{MANIFEST}"))


def find_layout(path: pathlib.Path) -> str | None:
    """Returns the name of the layout of the heads in a directory or a file.

    The name is `OURS` for jaxspec's own layout, and `PICKLE` for a file of torch, which is not opened. It is None if
    there are no heads, or if the file cannot be read.
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
    """Returns the names of files with heads that are fetched from a repository of the Hub, besides those of a model."""
    names = (*FILES, TORCH)
    return (MANIFEST, TENSORS, *(name for name in names if allow_pickle or pathlib.Path(name).suffix not in PICKLES))
