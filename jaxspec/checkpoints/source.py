"""Resolves a preset, a path or a Hub repository, and opens the checkpoint in any supported format."""

import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Sequence

from jaxspec.checkpoints import gguf, gguf_parts, hf, hub, presets, saved
from jaxspec.checkpoints.base import Checkpoint, Headers
from jaxspec.errors import CheckpointError, InvalidConfig, UnknownName
from jaxspec.storage.reading import check_path


def open_source(
    source: str | os.PathLike,
    revision: str | None = None,
    report: Callable[[str], object] | None = None,
    context: int | None = None,
) -> Checkpoint:
    """Opens the checkpoint of a preset, a path, or a repository of the Hugging Face Hub, `organization/name`.

    Args:
        source: the preset, path or repository, or a GGUF file in a repository, `organization/name/file.gguf` (any part
            of a split file). A preset takes precedence over a path with the same name; write `./name` for the path.
        revision: branch, tag or commit of a Hub repository; equivalent to `organization/name@revision`.
        report: called with one line of text per step of a download.
        context: length of the longest text to decode, in tokens; None for the model's own context length. Models with
            LongRoPE (Phi-3) have two sets of rotary frequencies. By default, they use the set of their original
            context, which is then the limit. With a larger `context`, all texts use the long set, even short texts.

    Raises:
        InvalidConfig: the context exceeds the model's, or the source or revision is not a valid name.
        UnknownName: the source is neither a preset nor a path nor a repository.
        FetchError: the download failed.
        CheckpointError: the checkpoint is malformed or not supported.
    """
    path = find_source(source, revision, report)
    name = os.fspath(source)
    checkpoint = open_checkpoint(path, context)
    return checkpoint if path == name else dataclasses.replace(checkpoint, source=name, path=path)


def find_source(
    source: str | os.PathLike,
    revision: str | None = None,
    report: Callable[[str], object] | None = None,
    more: Sequence[str] = (),
) -> str:
    """Returns the path of a preset, path or repository, after downloading it if necessary.

    The arguments and errors are those of `open_source`. In addition, `more` lists patterns of further files to download
    from a repository.
    """
    if revision is not None and not (isinstance(revision, str) and revision.isprintable() and revision.strip()):
        raise InvalidConfig(f"revision must be the name of a branch, tag or commit, got {revision!r:.80}")
    checked_path = check_path(source, "the model's name or path")
    name = os.fspath(source)
    if name in presets.PRESETS:
        return str(presets.fetch_preset(name, report=report))
    if os.path.exists(checked_path):
        return name
    if name.startswith((".", "~", "/")):
        raise CheckpointError(f"{name}: no such file or directory")
    if named := re.fullmatch(r"([\w.-]+/[\w.-]+)/([\w./-]+\.gguf)(?:@([\w./-]+))?", name, re.ASCII):
        return str(hub.fetch_gguf(named[1], named[2], revision or named[3]))
    if name.endswith(".gguf"):
        raise CheckpointError(f"{name}: no such file or directory")
    if named := re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", name, re.ASCII):
        return str(hub.fetch_repository(named[1], revision or named[2], more=more))
    raise UnknownName("model (a preset, a path or a Hub repository)", name, presets.PRESETS)


def open_checkpoint(path: str | os.PathLike, context: int | None = None) -> Checkpoint:
    """Opens a GGUF file, a Hugging Face directory, or a directory that `jaxspec.save` wrote.

    Args:
        path: the file or directory; any part of a split GGUF file, or a directory with one GGUF model.
        context: length of the longest text to decode; see `open_source`.

    Raises:
        CheckpointError: the checkpoint does not exist or is malformed, or its format or model is not supported.
    """
    if context is not None and (type(context) is not int or context < 1):
        raise InvalidConfig(f"context must be a whole number of tokens from 1, got {context!r}")
    place = check_path(path, "the checkpoint's path", CheckpointError)
    if os.path.isfile(place / saved.MANIFEST):
        return _with_context(saved.open_saved(place), context)
    if os.path.isdir(place):
        if not (place / "config.json").exists() and (file := gguf_parts.find_model(place)) is not None:
            return _with_context(gguf.open_gguf(file, context), context)
        return _with_context(hf.open_hf(place, context), context)
    if place.suffix.lower() == ".gguf" and os.path.isfile(place):
        return _with_context(gguf.open_gguf(place, context), context)
    if not os.path.exists(place):
        raise CheckpointError(f"{place}: no such file or directory")
    raise CheckpointError(
        f"{place}: not a supported checkpoint; pass a .gguf file, or a directory with config.json and "
        "safetensors weights (for a .safetensors file, pass its directory)"
    )


def read_headers(path: str | os.PathLike) -> Headers:
    """Reads the headers of a GGUF file or a Hugging Face directory; its model need not be supported.

    Raises:
        CheckpointError: the header of the file cannot be read.
    """
    place = check_path(path, "the checkpoint's path", CheckpointError)
    if not place.is_dir():
        return gguf.read_gguf_headers(place)
    file = None if (place / "config.json").exists() else gguf_parts.find_model(place)
    return hf.read_hf_headers(place) if file is None else gguf.read_gguf_headers(file)


def weight_files(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the existing weight files of a checkpoint: the safetensors files of a directory, or the parts of a GGUF
    file."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    file = gguf_parts.find_model(path) if not files else files[0]
    if file is None or file.suffix.lower() != ".gguf":
        return files
    return [part for name in gguf_parts.part_names(file.name) if (part := file.with_name(name)).is_file()]


def _with_context(checkpoint: Checkpoint, context: int | None) -> Checkpoint:
    longest = checkpoint.config.max_position
    if context is None:
        return checkpoint
    if context > longest:
        raise InvalidConfig(f"{checkpoint.source}: context is {context}, but the model supports at most {longest}")
    config = dataclasses.replace(checkpoint.config, max_position=context)
    return dataclasses.replace(checkpoint, config=config)
