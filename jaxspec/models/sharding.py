"""Tensor parallelism: each layer's matrices are split over the devices of the mesh axis "model".

The split is that of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): projections into heads and MLP
units by columns, projections out of them by rows, and embedding tables by tokens.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.core.mesh import MODEL, check, place, replicate
from jaxspec.core.records import Params
from jaxspec.errors import InvalidConfig
from jaxspec.models.config import ModelConfig, is_table
from jaxspec.models.out_major import OutMajor
from jaxspec.models.transformer import TransformerLM, group_by_shard

if TYPE_CHECKING:
    from jaxspec.models.model import Model

_FUSED = ("qkv", "gate_up", "qkv_bias", "gate_up_bias")  # split by columns
_BY_ROW = ("out", "down", "embed", "head")


def shard(model: "Model", mesh: Mesh) -> "Model":
    """Places a model on a mesh: matrices are split over the axis "model", everything else is replicated.

    `generate` does this on every call with a mesh; call it once to generate repeatedly. The parameters of a network
    other than `TransformerLM` are replicated.

    Raises:
        InvalidConfig: the number of devices does not divide the model's heads or MLP units, or the model is already
            split over another number of devices.
    """
    check(mesh)
    lm, params = model.lm, model.params
    if not isinstance(lm, TransformerLM):
        return dataclasses.replace(model, params=replicate(params, mesh))
    size = mesh.shape[MODEL]
    check_divisible(lm.config, mesh, model.name)
    if lm.shards not in (1, size):
        raise InvalidConfig(f"{model.name} is split over {lm.shards} devices; this mesh has {size} on its axis 'model'")

    def put(path: tuple, leaf: Any) -> Any:
        return place_param(str(getattr(path[-1], "key", "")), leaf, lm.config, mesh, lm.shards)

    params = jax.tree_util.tree_map_with_path(put, params, is_leaf=_is_out_major)
    return dataclasses.replace(model, lm=dataclasses.replace(lm, shards=size), params=params)


def check_divisible(config: ModelConfig, mesh: Mesh, name: str) -> None:
    """Raises InvalidConfig unless the axis "model" divides the heads and MLP units of each layer."""
    size = mesh.shape[MODEL]
    sizes = {"heads": config.num_heads, "key heads": config.num_kv_heads, "units": config.intermediate_size}
    for what, count in sizes.items():
        if count % size:
            raise InvalidConfig(f"{name} has {count} {what} in a layer, which {size} devices cannot share evenly")


def place_param(name: str, leaf: Any, config: ModelConfig, mesh: Mesh, shards: int = 1) -> Any:
    """Places one parameter on the mesh. Each device receives only its part of a NumPy array.

    Args:
        name: last part of the parameter's name, which decides the split.
        leaf: the array, or an `OutMajor`.
        config: the model's configuration.
        mesh: the devices.
        shards: number of parts that the columns of a fused matrix are grouped in; see `group_by_shard`.
    """
    size = mesh.shape[MODEL]
    if name in _FUSED and shards != size:
        if isinstance(leaf, OutMajor):
            leaf = jax.tree.map(lambda array: group_by_shard(name, array.T, config, size).T, leaf)
        else:
            leaf = group_by_shard(name, leaf, config, size)
    return jax.tree.map(place, leaf, _shardings(name, leaf, mesh))


def _shardings(name: str, leaf: Any, mesh: Mesh) -> Any:
    """Returns the sharding of each of a parameter's arrays."""
    size = mesh.shape[MODEL]

    def split(array: Any, axis: int | None) -> NamedSharding:
        whole = size == 1 or axis is None or array.shape[axis] % size
        return NamedSharding(mesh, P() if whole else P(*[None] * (axis or 0), MODEL))

    if isinstance(leaf, OutMajor):
        outputs = name in _FUSED or is_table(name)
        return jax.tree.map(lambda array: split(array, 0 if outputs else 1 if array.ndim > 1 else None), leaf)
    return split(leaf, leaf.ndim - 1 if name in _FUSED else 0 if name in _BY_ROW else None)


def param_shardings(params: Params, mesh: Mesh) -> Params:
    """Returns the shardings of a transformer's parameters; tables whose rows "model" does not divide are replicated."""

    def sharding(path: tuple, leaf: Any) -> Any:
        return _shardings(str(getattr(path[-1], "key", "")), leaf, mesh)

    return jax.tree_util.tree_map_with_path(sharding, params, is_leaf=_is_out_major)


def _is_out_major(leaf: Any) -> bool:
    return isinstance(leaf, OutMajor)
