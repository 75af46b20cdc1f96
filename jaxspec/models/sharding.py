"""A model's parameters on a mesh: each layer's matrices are shared by the devices of the axis "model".

The split is that of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): by columns what goes into heads and
gated units, by rows what comes out of them, and tables by tokens.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.core.mesh import MODEL, check, everywhere, lay
from jaxspec.core.records import Params
from jaxspec.errors import InvalidConfig
from jaxspec.models.config import ModelConfig, is_table
from jaxspec.models.out_major import ByOutput
from jaxspec.models.transformer import TransformerLM, joined

if TYPE_CHECKING:
    from jaxspec.models.model import Model

_JOINED = ("qkv", "gate_up", "qkv_bias", "gate_up_bias")  # split by columns
_BY_ROW = ("out", "down", "embed", "head")


def shard(model: "Model", mesh: Mesh) -> "Model":
    """The model on the mesh: its matrices split over "model", the rest on every device.

    `generate` does it by itself; do it once where you call that more than once. A network that is no `TransformerLM` is
    laid on every device as it is.

    Raises:
        InvalidConfig: the devices cannot share its heads or its gated units evenly, or it is split otherwise.
    """
    check(mesh)
    lm, params = model.lm, model.params
    if not isinstance(lm, TransformerLM):
        return dataclasses.replace(model, params=everywhere(params, mesh))
    size = mesh.shape[MODEL]
    check_shares(lm.config, mesh, model.name)
    if lm.shards not in (1, size):
        raise InvalidConfig(f"{model.name} is split over {lm.shards} devices; this mesh has {size} on its axis 'model'")

    def put(path: tuple, leaf: Any) -> Any:
        return place(str(getattr(path[-1], "key", "")), leaf, lm.config, mesh, lm.shards)

    params = jax.tree_util.tree_map_with_path(put, params, is_leaf=_whole)
    return dataclasses.replace(model, lm=dataclasses.replace(lm, shards=size), params=params)


def check_shares(config: ModelConfig, mesh: Mesh, name: str) -> None:
    """Raises InvalidConfig where the devices cannot share each layer of the model evenly."""
    size = mesh.shape[MODEL]
    sizes = {"heads": config.num_heads, "key heads": config.num_kv_heads, "units": config.intermediate_size}
    for what, count in sizes.items():
        if count % size:
            raise InvalidConfig(f"{name} has {count} {what} in a layer, which {size} devices cannot share evenly")


def place(name: str, leaf: Any, config: ModelConfig, mesh: Mesh, shards: int = 1) -> Any:
    """One parameter on the mesh, by the last part of its name. Of a numpy array each device is sent its part alone.

    `shards`: the parts that the columns of a joined matrix stand in so far.
    """
    size = mesh.shape[MODEL]
    if name in _JOINED and shards != size:
        if isinstance(leaf, ByOutput):
            leaf = jax.tree.map(lambda array: joined(name, array.T, config, size).T, leaf)
        else:
            leaf = joined(name, leaf, config, size)
    return jax.tree.map(lay, leaf, _laid(name, leaf, mesh))


def _laid(name: str, leaf: Any, mesh: Mesh) -> Any:
    """How a parameter lies on the mesh, a sharding for each of its arrays."""
    size = mesh.shape[MODEL]

    def split(array: Any, axis: int | None) -> NamedSharding:
        whole = size == 1 or axis is None or array.shape[axis] % size
        return NamedSharding(mesh, P() if whole else P(*[None] * (axis or 0), MODEL))

    if isinstance(leaf, ByOutput):
        outputs = name in _JOINED or is_table(name)
        return jax.tree.map(lambda array: split(array, 0 if outputs else 1 if array.ndim > 1 else None), leaf)
    return split(leaf, leaf.ndim - 1 if name in _JOINED else 0 if name in _BY_ROW else None)


def param_shardings(params: Params, mesh: Mesh) -> Params:
    """How a transformer's parameters lie on the mesh; tables whose rows "model" does not divide are on every device."""

    def of(path: tuple, leaf: Any) -> Any:
        return _laid(str(getattr(path[-1], "key", "")), leaf, mesh)

    return jax.tree_util.tree_map_with_path(of, params, is_leaf=_whole)


def _whole(leaf: Any) -> bool:
    return isinstance(leaf, ByOutput)
