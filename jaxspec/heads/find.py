"""Finds draft heads and their layout by file names and headers. Nothing here imports JAX."""

import contextlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

from jaxspec.checkpoints import folder, gguf, gguf_parts
from jaxspec.checkpoints.base import DRAFTING_TENSOR
from jaxspec.checkpoints.presets import PRESETS
from jaxspec.checkpoints.source import find_source
from jaxspec.errors import CheckpointError, UnknownName
from jaxspec.heads.eagle_layouts import MTP_LAYOUT
from jaxspec.heads.kinds import PICKLE_SUFFIXES
from jaxspec.heads.layouts import HEAD_FILES, LAYOUTS, TORCH_FILE, recognise_layout

OWN_LAYOUT, HEADS_MANIFEST, HEADS_TENSORS = "jaxspec", "heads.json", "heads.safetensors"
"""The name and the two files of jaxspec's own layout."""
PICKLE_LAYOUT = "pickle"
"""The result of `find_layout` for a pickle file that `torch.save` wrote. Such a file is not opened."""
SHIPPED_FOLDER = pathlib.Path(__file__).parent / "shipped"
"""The heads that come with this package, in directories PRESET/DRAFTER."""


def find_shipped_heads(preset: str, drafter: str) -> pathlib.Path | None:
    """Returns the directory of a preset's heads for a drafter; None if this package has no such heads."""
    path = SHIPPED_FOLDER / preset / drafter
    return path if preset in PRESETS and (path / HEADS_MANIFEST).exists() else None


def list_shipped_heads() -> list[str]:
    """Returns the names PRESET/DRAFTER of all heads that come with this package."""
    return sorted(
        path.parent.relative_to(SHIPPED_FOLDER).as_posix() for path in SHIPPED_FOLDER.glob(f"*/*/{HEADS_MANIFEST}")
    )


def find_named_heads(source: Any) -> pathlib.Path | None:
    """Returns the directory of heads that come with this package, by their name PRESET/DRAFTER; None for other names.

    Raises:
        CheckpointError: the name begins with a preset, and no such heads come with this package.
    """
    preset, slash, drafter = source.partition("/") if isinstance(source, str) else ("", "", "")
    if not slash or preset not in PRESETS or os.path.exists(source):
        return None
    if (path := find_shipped_heads(preset, drafter)) is None:
        raise _not_shipped(source)
    return path


def find_heads(
    source: str | os.PathLike, *, allow_pickle: bool = False, report: Callable[[str], object] | None = None
) -> str | os.PathLike:
    """Returns the path of heads, after downloading them if necessary. Every command finds heads with this function.

    Args:
        source: the name of heads that come with this package, PRESET/DRAFTER, or of a preset for its Medusa heads; a
            path, or a Hub repository.
        allow_pickle: whether pickle files that `torch.save` wrote are also downloaded.
        report: called with one line of text per step of a download.

    Raises:
        UnknownName: there are no such heads; the message lists the heads that come with this package.
        CheckpointError: no such heads of a preset come with this package, or the path does not exist.
        FetchError: the download failed.
    """
    if (path := find_named_heads(source)) is not None:
        return path
    if isinstance(source, str) and source in PRESETS:
        if (path := find_shipped_heads(source, "medusa")) is None:
            raise _not_shipped(source)
        return path
    try:
        return find_source(source, report=report, more=list_hub_files(allow_pickle))
    except UnknownName:
        raise UnknownName("heads (a name, a path or a Hub repository)", source, list_shipped_heads()) from None


def _not_shipped(name: str) -> CheckpointError:
    """Makes the error for heads of a preset that do not come with this package."""
    return CheckpointError(
        f"jaxspec does not come with heads {name}, only with {', '.join(list_shipped_heads())}; train heads with "
        "'jaxspec train', or give the path of other heads"
    )


def find_gguf(path: pathlib.Path) -> pathlib.Path | None:
    """Returns the GGUF file that a path names, or that a directory without other files of models holds."""
    if path.is_dir():
        held = any(os.path.exists(path / name) for name in (folder.WEIGHTS_FILE, folder.INDEX_FILE, *HEAD_FILES))
        return None if held or os.path.exists(path / TORCH_FILE) else gguf_parts.find_model(path)
    return path if path.suffix.lower() == ".gguf" else None


def find_layout(path: pathlib.Path) -> str | None:
    """Returns the name of the layout of the heads in a directory or a file.

    The name is `OWN_LAYOUT` for jaxspec's own layout, and `PICKLE_LAYOUT` for a pickle file that `torch.save` wrote.
    Such a file is not opened. The name is None if there are no heads, or if the file cannot be read.
    """
    if path.is_dir():
        if os.path.exists(path / HEADS_MANIFEST):
            return OWN_LAYOUT
        name = next((name for name in HEAD_FILES if os.path.exists(path / name)), None)
        path = path if name is None else path / name
    if path.suffix in PICKLE_SUFFIXES:
        return PICKLE_LAYOUT
    if (file := find_gguf(path)) is not None:
        with contextlib.suppress(CheckpointError):
            if any(DRAFTING_TENSOR.fullmatch(name) for name in gguf.read_gguf_headers(file).stored):
                return MTP_LAYOUT
        return None
    try:
        if path.is_dir():
            layout = recognise_layout(folder.open_tensors(path))
        else:
            layout = (
                recognise_layout(folder.open_shard(path.parent, path.name)) if path.suffix == ".safetensors" else None
            )
    except CheckpointError:
        named = (name for name, layout in LAYOUTS.items() if path.name in layout.files)
        return next(named, None) if path.name in HEAD_FILES else None
    return None if layout is None else layout.name


def list_hub_files(allow_pickle: bool = False) -> tuple[str, ...]:
    """Returns the names of files with heads that are fetched from a Hub repository, besides the files of a model."""
    names = (*HEAD_FILES, TORCH_FILE)
    return (
        HEADS_MANIFEST,
        HEADS_TENSORS,
        *(name for name in names if allow_pickle or pathlib.Path(name).suffix not in PICKLE_SUFFIXES),
    )
