"""Loads and saves draft heads, in jaxspec's own layout or in the layouts of other systems (`jaxspec.heads.layouts`).

A directory in jaxspec's layout holds `heads.json` (sizes, tree) and `heads.safetensors`. In other layouts the shapes of
the tensors determine the sizes. If config.json states other sizes, a note says so.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxspec.checkpoints.base import FLOAT_DTYPES
from jaxspec.core.checks import check_arguments, flag, one_of
from jaxspec.core.topology import Topology
from jaxspec.errors import CheckpointError, InvalidConfig, shown
from jaxspec.heads.copies import share_tables
from jaxspec.heads.find import HEADS_MANIFEST, HEADS_TENSORS
from jaxspec.heads.headers import FIRST_KIND, LAYOUT_VERSION, open_heads
from jaxspec.heads.network import DraftHeads, check_heads, flatten, unflatten
from jaxspec.models.config import FLOAT32_MATRICES
from jaxspec.models.model import Model
from jaxspec.storage.reading import check_path, read_json_file
from jaxspec.storage.writing import full, is_full, reason, write_whole


@check_arguments
def load_heads(
    source: str | os.PathLike,
    *,
    target: Any = None,
    dtype: DTypeLike | None = "float32",
    allow_pickle: bool = False,
) -> DraftHeads:
    """Loads draft heads in jaxspec's own layout, or in a layout of another system (`jaxspec.heads.layouts`).

    A missing tensor is an error, and a tensor that the layout does not have is also an error. Each block of Medusa
    heads has its own parameters; files of Medusa's own trainer with two or more blocks per head hold copies of one
    block. If `target` is given, heads share the target's embedding or projection instead of their copies of it
    (`HeadSizes.copies`).

    Args:
        source: a directory, a `.safetensors` or `.pt` file, a repository of the Hugging Face Hub, or heads that come
            with this package: the name of a preset for Medusa heads, or "PRESET/eagle" for an EAGLE head.
        target: the model that the heads draft for; heads that do not fit it are refused. Required if the files do not
            state the size of the vocabulary.
        dtype: the dtype of the matrices and of their products: "float32" or "bfloat16", or a type such as
            `jnp.bfloat16`; None: the dtype of the file.
        allow_pickle: whether to also read `.pt` files. They are pickles; no code in them is executed, and only tensors
            are read.

    Raises:
        CheckpointError: there are no heads, or the tensors do not fit together; the message names file and tensor.
        InvalidConfig, ShapeMismatch: the heads do not fit the target.
    """
    allow_pickle = flag("allow_pickle", allow_pickle)
    if target is not None and not isinstance(target, Model):
        raise InvalidConfig(f"target must be a Model, as jaxspec.load returns it; got {shown(target)}")
    dtype = None if dtype is None else one_of("dtype", dtype, tuple(FLOAT_DTYPES))
    opened = open_heads(source, allow_pickle=allow_pickle)
    config = opened.config(target)
    params = {}
    for name, reader in opened.readers.items():
        array = reader()
        if dtype is not None and name != "tokens":
            small = array.ndim < 2 or name.rpartition(".")[2] in FLOAT32_MATRICES
            array = array.astype(FLOAT_DTYPES["float32" if small else dtype], copy=False)
        params[name] = jnp.asarray(array)
    if target is not None:
        config, params = share_tables(config, params, target)
    name = opened.path.name if opened.path.is_dir() else opened.path.parent.name
    return DraftHeads(config, unflatten(params), opened.tree, name, opened.notes)


def save_heads(heads: DraftHeads, directory: str | os.PathLike) -> pathlib.Path:
    """Saves heads in jaxspec's own layout, which `load_heads` reads; `export_heads` writes for other systems.

    Raises:
        CheckpointError: the directory holds heads already, or cannot be written.
    """
    check_heads(heads)
    tree = None if heads.tree is None else heads.tree.parents
    manifest = {
        "format": "jaxspec-heads",
        "version": LAYOUT_VERSION,
        "config": dataclasses.asdict(heads.config),
        "tree": tree,
    }
    if heads.config.drafter != FIRST_KIND:
        manifest["kind"] = heads.config.drafter
    return write_head_files(directory, HEADS_TENSORS, flatten(heads.params), HEADS_MANIFEST, manifest)


def set_tree(directory: str | os.PathLike, tree: Topology | None) -> None:
    """Replaces the tree of heads in jaxspec's own layout atomically, without changing their parameters.

    Raises:
        CheckpointError: the directory holds no such heads.
        StorageError: the file cannot be written; it is then unchanged.
    """
    path = check_path(directory, "the directory of heads") / HEADS_MANIFEST
    manifest = read_json_file(path) | {"tree": None if tree is None else tree.parents}
    text = json.dumps(manifest, indent=1) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))


def write_head_files(
    directory: str | os.PathLike, file: str, tensors: Mapping[str, Any], manifest: str, settings: Mapping[str, Any]
) -> pathlib.Path:
    """Writes the tensors, then the settings, each under a temporary name first; returns the directory's path."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path = check_path(directory, "the directory of heads")
    for name in (manifest, file):
        if (path / name).exists():
            raise CheckpointError(f"{path}: already has a {name}; choose another directory")
    try:
        path.mkdir(parents=True, exist_ok=True)
        part = path / f".{file}"
        save_file({name: np.ascontiguousarray(leaf) for name, leaf in tensors.items()}, part)
        os.replace(part, path / file)
        part = path / f".{manifest}"
        part.write_text(json.dumps(settings, indent=1) + "\n")
        os.replace(part, path / manifest)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {reason(error, path)}") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path}: cannot be written: {full(path) if is_full(error) else error}") from None
    return path
