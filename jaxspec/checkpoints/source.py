"""Finds what a user names, a preset, a path or a repository of the Hub, and opens it, whatever its format."""

import dataclasses
import os
import re
from collections.abc import Callable, Sequence

from jaxspec.checkpoints import gguf, hf, hub, presets, saved
from jaxspec.checkpoints.base import Checkpoint, Headers
from jaxspec.errors import CheckpointError, InvalidConfig, UnknownName
from jaxspec.storage.reading import check_path


def open_source(
    source: str | os.PathLike,
    revision: str | None = None,
    report: Callable[[str], object] | None = None,
    context: int | None = None,
) -> Checkpoint:
    """Opens what a user names: a preset, a path, or a repository of the Hugging Face Hub, `organization/name`.

    Args:
        source: the name; a preset comes before a path of the same name (write `./name` for the path).
        revision: branch, tag or commit of a Hub repository; `organization/name@revision` says the same.
        report: called with one line of text per step of a download.
        context: the longest text that will be decoded, in tokens; None for what the model was made for. Models
            with LongRoPE (Phi-3) rotate otherwise beyond their original context: without a context theirs is the
            original one, with more all texts use the long rotation, short ones too.

    Raises:
        InvalidConfig: a context that the model does not have, or a name that cannot be one.
        UnknownName: it is none of the three.
        FetchError: the download failed.
        CheckpointError: what was found is not a checkpoint that can be read.
    """
    place = find_source(source, revision, report)
    name = os.fspath(source)
    checkpoint = open_checkpoint(place, context)
    return checkpoint if place == name else dataclasses.replace(checkpoint, source=name)


def find_source(
    source: str | os.PathLike,
    revision: str | None = None,
    report: Callable[[str], object] | None = None,
    more: Sequence[str] = (),
) -> str:
    """The path of what a user names, fetched first where it is not here; arguments and errors as `open_source`'s.

    `more`: files to fetch from a repository besides those of a model.
    """
    if revision is not None and not (isinstance(revision, str) and revision.isprintable() and revision.strip()):
        raise InvalidConfig(f"revision must be the name of a branch, tag or commit, got {revision!r:.80}")
    path = check_path(source, "the model's name or path")
    name = os.fspath(source)
    if name in presets.PRESETS:
        return str(presets.fetch(name, report=report))
    if os.path.exists(path):
        return name
    if name.endswith(".gguf") or name.startswith((".", "~", "/")):
        raise CheckpointError(f"{name}: no such file or directory")
    if named := re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", name, re.ASCII):
        return str(hub.fetch_repository(named[1], revision or named[2], more=more))
    raise UnknownName("model (a preset, a path or a Hub repository)", name, presets.PRESETS)


def open_checkpoint(path: str | os.PathLike, context: int | None = None) -> Checkpoint:
    """Opens a GGUF file, a Hugging Face directory or what `jaxspec.save` wrote; `context` as in `open_source`.

    Raises:
        CheckpointError: it does not exist, is neither, is malformed, or is of a model that is not read.
    """
    if context is not None and (type(context) is not int or context < 1):
        raise InvalidConfig(f"context must be a whole number of tokens from 1, got {context!r}")
    place = check_path(path, "the checkpoint's path", CheckpointError)
    if os.path.isfile(place / saved.MANIFEST):
        return _within(saved.open_saved(place), context)
    if os.path.isdir(place):
        return _within(hf.open_hf(place, context), context)
    if place.suffix.lower() == ".gguf" and os.path.isfile(place):
        return _within(gguf.open_gguf(place, context), context)
    if not os.path.exists(place):
        raise CheckpointError(f"{place}: no such file or directory")
    raise CheckpointError(
        f"{place}: not a checkpoint that is read; give a .gguf file, or a directory with config.json and "
        "safetensors weights (for a .safetensors file, give its directory)"
    )


def read_headers(path: str | os.PathLike) -> Headers:
    """What can be seen of a GGUF file or a Hugging Face directory, of whatever model it is.

    Raises:
        CheckpointError: not even the header of the file can be read.
    """
    place = check_path(path, "the checkpoint's path", CheckpointError)
    return hf.read_headers(place) if place.is_dir() else gguf.read_headers(place)


def _within(checkpoint: Checkpoint, context: int | None) -> Checkpoint:
    longest = checkpoint.config.max_position
    if context is None:
        return checkpoint
    if context > longest:
        raise InvalidConfig(f"{checkpoint.source}: context {context} is more than the model's {longest}")
    config = dataclasses.replace(checkpoint.config, max_position=context)
    return dataclasses.replace(checkpoint, config=config)
