"""Draft heads in files: a directory of ours is `heads.json` (sizes, tree) beside `heads.safetensors`."""

import dataclasses
import json
import os
import pathlib

import jax.numpy as jnp
import numpy as np

from jaxspec.core.tree import Topology
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.models.heads import DraftHeads, HeadsConfig, flatten, unflatten

MANIFEST, TENSORS, VERSION = "heads.json", "heads.safetensors", 1


def save_heads(heads: DraftHeads, directory: str | os.PathLike) -> pathlib.Path:
    """Saves heads, to be loaded from the directory.

    Raises:
        CheckpointError: the directory holds heads already, or cannot be written.
    """
    from safetensors.numpy import save

    place = pathlib.Path(directory).expanduser()
    if (place / MANIFEST).exists():
        raise CheckpointError(f"{place}: holds heads already; name another directory")
    tree = None if heads.tree is None else heads.tree.parents
    manifest = {"format": "jaxspec-heads", "version": VERSION, "config": dataclasses.asdict(heads.config), "tree": tree}
    try:
        place.mkdir(parents=True, exist_ok=True)
        tensors = {name: np.ascontiguousarray(leaf) for name, leaf in flatten(heads.params).items()}
        for name, data in ((TENSORS, save(tensors)), (MANIFEST, json.dumps(manifest, indent=1).encode())):
            part = place / f".{name}"
            part.write_bytes(data)
            os.replace(part, place / name)
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be written: {error.strerror}") from None
    return place


def load_heads(source: str | os.PathLike) -> DraftHeads:
    """Heads from a directory that `save_heads` has written.

    Raises:
        CheckpointError: it holds none, or what it holds does not fit together; naming the file.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    place = pathlib.Path(source).expanduser()
    where = place / MANIFEST
    try:
        manifest = json.loads(where.read_text("utf-8"))
        if manifest.get("format") != "jaxspec-heads" or manifest.get("version") != VERSION:
            raise CheckpointError(f"{where}: expected format jaxspec-heads, version {VERSION}")
        config = HeadsConfig(**manifest["config"])
        tree = None if manifest["tree"] is None else Topology(tuple(manifest["tree"]))
        tensors = load((place / TENSORS).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from None
    except (InvalidConfig, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"{where}: {error}") from None
    check_tensors(str(place / TENSORS), {name: a.shape for name, a in tensors.items()}, config)
    return DraftHeads(config, unflatten({name: jnp.asarray(a) for name, a in tensors.items()}), tree, place.name)


def check_tensors(where: str, found: dict[str, tuple[int, ...]], config: HeadsConfig) -> None:
    """Every tensor is there, none is left over, and each has its shape.

    Raises:
        CheckpointError: naming the tensor.
    """
    wanted = config.param_shapes()
    for name in sorted(wanted.keys() ^ found.keys()):
        raise CheckpointError(f"{where}: tensor {name} {'is missing' if name in wanted else 'is not known'}")
    for name, shape in wanted.items():
        if tuple(found[name]) != shape:
            raise CheckpointError(f"{where}: tensor {name} has shape {tuple(found[name])}, expected {shape}")
