"""Saved models: parameters as an Orbax checkpoint, everything else as JSON.

The directory of a saved model contains `jaxspec.json` (config, stop ids, chat template), `params/` (an Orbax checkpoint
of the parameter tree, in the precision of the parameters) and, if the model has a tokenizer, `tokenizer.json` and
`tokenizer_config.json`. It is written under a temporary name and renamed. `jaxspec.json` contains the sha256 of every
file in `params/`, which is checked before Orbax reads the file.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.checkpoints.base import (
    Checkpoint,
    StoredTensor,
    TokenizerSource,
    check_names,
    check_shape,
    parse_config,
)
from jaxspec.errors import CheckpointError, InvalidConfig, shown
from jaxspec.models.config import ModelConfig
from jaxspec.storage.reading import check_path, read_json_file

if TYPE_CHECKING:
    from jaxspec.models.model import Model

MANIFEST, PARAMS = "jaxspec.json", "params"
SAVED_VERSION = 1
_MAX_SMALL_BYTES = 1 << 20  # files up to this size, in bytes, are checked before any weight is read


def save(model: "Model", directory: str | os.PathLike) -> pathlib.Path:
    """Saves a model to a directory, from which `load` reads it.

    Args:
        model: a `Model` whose network is a `TransformerLM`, on one or several devices.
        directory: a path that does not exist yet.

    Returns:
        The absolute path of the directory.

    Raises:
        InvalidConfig: the network is not a `TransformerLM`, or its weights are quantized.
        CheckpointError: the directory exists, or cannot be written.
    """
    from jaxspec.checkpoints import orbax
    from jaxspec.models.columns import file_order
    from jaxspec.models.model import Model
    from jaxspec.models.packed import has_blocks, is_quantized, unpack_params
    from jaxspec.models.transformer import TransformerLM

    if not isinstance(model, Model):
        raise InvalidConfig(f"model must be a Model, as from jaxspec.load; got {shown(model)}")
    if not isinstance(model.lm, TransformerLM):
        raise InvalidConfig(
            f"only a TransformerLM can be saved, got {type(model.lm).__name__}; save its parameters with Orbax"
        )
    if has_blocks(model.params):
        raise InvalidConfig(f"{model.name} was loaded with dtype 'file' and cannot be saved; keep its GGUF file")
    if is_quantized(model.params):
        raise InvalidConfig(
            "int8 weights cannot be saved, because they are quantized when a model is loaded; save the original model"
        )
    destination = check_path(directory, "the directory to save to").absolute()
    if destination.exists():
        raise CheckpointError(f"{destination}: already exists; choose a new directory")
    try:
        json.dumps(settings := dict(model.settings))
    except (TypeError, ValueError) as error:
        raise InvalidConfig(f"settings of {model.name} cannot be saved, because they are not JSON: {error}") from None
    tokenizer, template = model.tokenizer, model.chat_template
    manifest = {
        "format": "jaxspec",
        "version": SAVED_VERSION,
        "config": dataclasses.asdict(model.lm.config),
        "stop_ids": list(model.stop_ids),
        "has_all_stop_ids": True,
        "chat_template": None if template is None else template.source,
        "named_templates": {} if template is None else template.named,
        "special_tokens": {} if template is None else template.special_tokens,
        "settings": settings,
    }
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        part = pathlib.Path(tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}-"))
        try:
            if tokenizer is not None:
                tokenizer.save(part)
            orbax.write_tree(part / PARAMS, _as_tree(unpack_params(file_order(model.lm, model.params))))
            manifest["sha256"] = {name: _sha256(file) for name, file in _files(part / PARAMS).items()}
            (part / MANIFEST).write_text(json.dumps(manifest, indent=1))
            os.replace(part, destination)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except (OSError, orbax.OrbaxError) as error:
        raise CheckpointError(
            f"{destination}: cannot be written: {getattr(error, 'strerror', None) or error}"
        ) from None
    return destination


def open_saved(directory: pathlib.Path) -> Checkpoint:
    """Opens a directory that `save` wrote.

    Raises:
        CheckpointError: a file is missing, malformed, or damaged.
    """
    where = str(directory / MANIFEST)
    try:
        manifest = read_json_file(directory / MANIFEST)
        if manifest.get("format") != "jaxspec" or manifest.get("version") != SAVED_VERSION:
            raise CheckpointError(f"{where}: expected format jaxspec, version {SAVED_VERSION}")
        config = parse_config(where, manifest["config"])
        stop_ids, template = tuple(manifest["stop_ids"]), manifest["chat_template"]
        special, named = dict(manifest["special_tokens"]), dict(manifest.get("named_templates", {}))
        settings = _settings(manifest)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{where}: not a valid manifest: {type(error).__name__}: {error}") from None
    tokenizer = directory / "tokenizer.json"
    readers, stored = _tensors(directory / PARAMS, config, manifest.get("sha256", {}))
    return Checkpoint(
        config=config,
        source=str(directory),
        tensors=readers,
        stop_ids=stop_ids,
        has_all_stop_ids=manifest.get("has_all_stop_ids") is True,
        tokenizer=TokenizerSource(json_path=str(tokenizer)) if tokenizer.is_file() else None,
        chat_template=template,
        named_templates=named,
        special_tokens=special,
        architecture="jaxspec",
        stored=stored,
        settings=settings,
    )


def _settings(manifest: dict[str, Any]) -> dict[str, Any]:
    """Returns `Model.settings`; older manifests have only settings of PARD models, in separate entries."""
    if "settings" in manifest:
        return dict(manifest["settings"])
    settings = {"pard_token": manifest.get("pard_token")}
    if reads := manifest.get("pard2"):
        settings |= {"pard2": True, "pard2_target_layers": list(reads["layers"]), "pard2_scale": reads["scale"]}
    return {name: value for name, value in settings.items() if value is not None}


def _as_tree(params: Any) -> dict:
    """Returns the parameters with string keys only, which Orbax restores unchanged."""
    return {**params, "layers": {str(i): layer for i, layer in params["layers"].items()}}


def _files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns all files below a directory, by relative path."""
    return {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}


def _sha256(file: pathlib.Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _check_files(folder: pathlib.Path, expected: Any, small: bool) -> None:
    """Raises CheckpointError unless the small files (or the others) have the expected checksums.

    For a manifest of an earlier version, which has no checksums, `expected` is empty and nothing is checked.
    """
    if not isinstance(expected, dict):
        raise CheckpointError(
            f"{folder.parent / MANIFEST}: sha256 is {expected!r:.80}, expected a checksum for each file"
        )
    files = _files(folder)
    for name, sha256 in expected.items():
        if name not in files:
            raise CheckpointError(f"{folder}: has no file {name:.80}, which the manifest lists; copy the model again")
        if (files[name].stat().st_size <= _MAX_SMALL_BYTES) == small and _sha256(files[name]) != sha256:
            raise CheckpointError(f"{files[name]}: is damaged: its sha256 differs from {MANIFEST}; copy it again")


def _tensors(
    folder: pathlib.Path, config: ModelConfig, sha256: Any
) -> tuple[dict[str, Callable[[], np.ndarray]], dict[str, StoredTensor]]:
    """Returns a function for each parameter that restores it from the Orbax checkpoint, and the stored tensors.

    `sha256` maps relative paths to checksums.
    """
    import jax
    import jax.numpy as jnp

    from jaxspec.checkpoints import orbax

    for name in ("_METADATA", "manifest.ocdbt"):  # Orbax fails in the background when one is missing
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: has no file {name}: not a valid Orbax checkpoint")
    _check_files(folder, sha256, small=True)
    check_others = functools.cache(functools.partial(_check_files, folder, sha256, small=False))
    try:
        leaves = _flatten(orbax.read_shapes(folder))
        shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
        sizes = {name: jnp.dtype(leaf.dtype) for name, leaf in leaves.items()}
    except (orbax.OrbaxError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{folder}: not a valid Orbax checkpoint: {error}") from None
    if config.num_layers > len(shapes):  # before anything is allocated per layer
        raise CheckpointError(f"{folder}: {config.num_layers} layers, but only {len(shapes)} tensors")
    expected = config.param_shapes()
    check_names(str(folder), expected, shapes)
    for name, shape in expected.items():
        check_shape(str(folder), name, shapes[name], shape)

    def read(name: str) -> np.ndarray:
        check_others()
        leaf: Any = jax.ShapeDtypeStruct(shapes[name], np.float32)
        for key in reversed(name.split(".")):
            leaf = {key: leaf}
        try:
            tree = orbax.read_part(folder, leaf)
        except orbax.OrbaxError as error:
            raise CheckpointError(f"{folder}: tensor {name} cannot be read: {error}") from None
        return np.asarray(_flatten(tree)[name], np.float32)

    stored = {
        name: StoredTensor(str(sizes[name]), shape, math.prod(shape) * sizes[name].itemsize)
        for name, shape in shapes.items()
    }
    return {name: lambda name=name: read(name) for name in expected}, stored


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of nested dicts, by dotted path."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        name: leaf
        for key, branch in tree.items()
        for name, leaf in _flatten(branch, f"{prefix}.{key}" if prefix else str(key)).items()
    }
