"""Writes a model in the Hugging Face format: the directory that it was trained from, with new weights."""

import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

import numpy as np

from jaxspec.checkpoints import base, folder
from jaxspec.checkpoints.hf import TEMPLATES_FOLDER
from jaxspec.checkpoints.hf_config import read_config
from jaxspec.checkpoints.hf_families import Family
from jaxspec.checkpoints.hf_wrappers import text_settings
from jaxspec.checkpoints.saved import MANIFEST
from jaxspec.checkpoints.source import find_source
from jaxspec.errors import CheckpointError, InvalidConfig, shown
from jaxspec.models.columns import file_order
from jaxspec.models.config import ModelConfig
from jaxspec.models.model import Model
from jaxspec.models.packed import has_blocks, is_quantized, unpack_params
from jaxspec.models.transformer import TransformerLM
from jaxspec.storage.reading import check_path
from jaxspec.storage.writing import reason

CONFIG_FILE = "config.json"
COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""The files that are copied if they exist."""


def is_hf(source: str | os.PathLike) -> bool:
    """Returns whether a source of `load` is in the Hugging Face format; downloads the source if necessary."""
    destination = pathlib.Path(find_source(source))
    return (destination / CONFIG_FILE).is_file() and not (destination / MANIFEST).is_file()


def export_model(model: Model, directory: str | os.PathLike, like: str | os.PathLike) -> pathlib.Path:
    """Writes a model in the Hugging Face format, which `load` and other systems read. `save` writes jaxspec's own
    format.

    Args:
        model: a `Model` whose network is a `TransformerLM`, on one or several devices, such as a trained draft model.
        directory: a path that does not exist yet.
        like: the directory or repository, in the Hugging Face format, of the model that it was trained from. Its
            config.json is written with the model's `pard_token` and dtype, and its tokenizer's files are copied.

    Returns:
        The absolute path of the directory.

    Raises:
        InvalidConfig: the network is not a `TransformerLM`, its weights are quantized, or the model in `like` has
            different sizes.
        CheckpointError: the directory exists, or cannot be written, or `like` cannot be read.
    """
    if not isinstance(model, Model) or not isinstance(model.lm, TransformerLM):
        raise InvalidConfig(f"model must be a Model of a TransformerLM, got {shown(model)}")
    if has_blocks(model.params) or is_quantized(model.params):
        raise InvalidConfig(f"{model.name} has quantized weights, which cannot be exported; load it in another dtype")
    destination = check_path(directory, "the directory to export to").absolute()
    if destination.exists():
        raise CheckpointError(f"{destination}: already exists; choose a new directory")
    source = pathlib.Path(find_source(like))
    settings = folder.read_optional_json(source, CONFIG_FILE) if source.is_dir() else None
    if settings is None or not is_hf(like):
        raise CheckpointError(f"{os.fspath(like)}: has no {CONFIG_FILE}, expected a model in the Hugging Face format")
    settings = dict(text_settings(settings))
    config, family = read_config(str(source / CONFIG_FILE), settings)
    if family.interleaved_experts:
        raise InvalidConfig(f"{model.name} is a model of {settings['model_type']}, which cannot be exported; use save")
    if config.param_shapes() != model.lm.config.param_shapes():
        raise InvalidConfig(
            f"{model.name} and {os.fspath(like)} have different sizes; pass the model that it was trained from"
        )
    params: Any = unpack_params(file_order(model.lm, model.params))
    name = "dtype" if "dtype" in settings else "torch_dtype"  # the newer name, and the older one
    added_settings: dict[str, Any] = {name: str(params["embed"].dtype)}
    if (token := model.settings.get("pard_token")) is not None:
        added_settings |= {"pard_token": token, "spd_type": "pard"}  # AMD's code also writes the second entry
    _write(destination, source, _tensors(config, family, params), settings | added_settings)
    return destination


def _tensors(config: ModelConfig, family: Family, params: Any) -> dict[str, np.ndarray]:
    """Returns the file's tensors: the inverse of `jaxspec.checkpoints.base.canonical_tensors`."""
    tensors, names = {}, family.all_names(config)
    for name, shape in config.param_shapes().items():
        *layer, leaf = name.split(".")
        array = np.asarray((params["layers"][int(layer[1])] if layer else params)[leaf])
        for file, piece in base.split_parts(base.file_parts(config, names, name, shape), array).items():
            rows, offset = family.rows(file, config), family.offset(file)
            piece = piece if rows is None else piece[np.argsort(rows)]
            tensors[file] = np.ascontiguousarray(piece - np.float32(offset) if offset else piece)
    return tensors


def _write(destination: pathlib.Path, source: pathlib.Path, tensors: dict[str, np.ndarray], settings: dict) -> None:
    """Writes the directory under a temporary name, and renames it."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        part = pathlib.Path(tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}-"))
        try:
            templates = (f"{TEMPLATES_FOLDER}/{file.name}" for file in (source / TEMPLATES_FOLDER).glob("*.jinja"))
            for name in (*COPIED_FILES, *templates):
                if (file := folder.inside(source, name)) is not None:
                    (part / name).parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, part / name)
            save_file(tensors, part / folder.WEIGHTS_FILE, metadata={"format": "pt"})
            (part / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n")
            os.replace(part, destination)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{destination}: cannot be written: {reason(error, destination.parent)}") from None
    except SafetensorError as error:
        raise CheckpointError(f"{destination}: cannot be written: {error}") from None
