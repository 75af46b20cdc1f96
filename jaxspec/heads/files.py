"""Draft heads in files: our own directory, and the layouts of other systems (`jaxspec.heads.layouts`).

A directory of ours is `heads.json` (sizes, tree) beside `heads.safetensors`. Of other layouts the tensors decide what
the heads are; where config.json says something else, that is noted and not believed.
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

from jaxspec.checkpoints.base import DTYPES
from jaxspec.core.checks import flag, named, one_of
from jaxspec.errors import CheckpointError, InvalidConfig, shown
from jaxspec.heads.find import MANIFEST, TENSORS
from jaxspec.heads.headers import VERSION, open_heads
from jaxspec.heads.network import DraftHeads, check_heads, flatten, unflatten
from jaxspec.models.model import Model
from jaxspec.storage.reading import check_path


@named()
def load_heads(
    source: str | os.PathLike,
    *,
    target: Any = None,
    dtype: DTypeLike | None = "float32",
    allow_pickle: bool = False,
) -> DraftHeads:
    """Loads draft heads: our own directory, or Medusa's in any of four layouts (`jaxspec.heads.layouts`).

    Every tensor is accounted for. Blocks are independent here: files of Medusa's own trainer with two or more per head
    hold one block so many times.

    Args:
        source: a directory, a `.safetensors` or `.pt` file, a repository of the Hugging Face Hub, or the name of a
            preset whose heads come with this package.
        target: the model they draft for; then what does not fit is refused at once. Needed where the files do not tell
            the size of the vocabulary.
        dtype: of the matrices, in which they are multiplied: "float32" or "bfloat16", or a type such as
            `jnp.bfloat16`; None: as the file has them.
        allow_pickle: also read `.pt` files. They are pickles; of one nothing is run, and all but tensors refused.

    Raises:
        CheckpointError: no heads are there, or they do not fit together; naming file and tensor.
        InvalidConfig, ShapeMismatch: they are not for this target.
    """
    allow_pickle = flag("allow_pickle", allow_pickle)
    if target is not None and not isinstance(target, Model):
        raise InvalidConfig(f"target must be a Model, as jaxspec.load returns it; got {shown(target)}")
    dtype = None if dtype is None else one_of("dtype", dtype, tuple(DTYPES))
    found = open_heads(source, allow_pickle=allow_pickle)
    config = found.config(target)
    params = {}
    for name, reader in found.readers.items():
        array = reader()
        if dtype is not None and name != "tokens":
            array = array.astype(DTYPES[dtype if array.ndim > 1 else "float32"], copy=False)
        params[name] = jnp.asarray(array)
    name = found.path.name if found.path.is_dir() else found.path.parent.name
    return DraftHeads(config, unflatten(params), found.tree, name, found.notes)


def save_heads(heads: DraftHeads, directory: str | os.PathLike) -> pathlib.Path:
    """Saves heads in our own layout, to be loaded from the directory. For other systems: `export_heads`.

    Raises:
        CheckpointError: the directory holds heads already, or cannot be written.
    """
    check_heads(heads)
    tree = None if heads.tree is None else heads.tree.parents
    manifest = {"format": "jaxspec-heads", "version": VERSION, "config": dataclasses.asdict(heads.config), "tree": tree}
    return write(directory, TENSORS, flatten(heads.params), MANIFEST, manifest)


def write(
    directory: str | os.PathLike, file: str, tensors: Mapping[str, Any], manifest: str, settings: Mapping[str, Any]
) -> pathlib.Path:
    """Writes tensors and then their settings, each beside its place first; gives the directory's path."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    place = check_path(directory, "the directory of heads")
    for name in (manifest, file):
        if (place / name).exists():
            raise CheckpointError(f"{place}: has a {name} already; name another directory")
    try:
        place.mkdir(parents=True, exist_ok=True)
        part = place / f".{file}"
        save_file({name: np.ascontiguousarray(leaf) for name, leaf in tensors.items()}, part)
        os.replace(part, place / file)
        part = place / f".{manifest}"
        part.write_text(json.dumps(settings, indent=1) + "\n")
        os.replace(part, place / manifest)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{place}: cannot be written: {error}") from None
    return place
