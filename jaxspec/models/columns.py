"""The columns of fused matrices: in the order of the file, or grouped by device.

`qkv` holds the projections of queries, keys and values side by side, and `gate_up` holds the gate and up projections. A
model that is split over devices has the columns of each device together (`jaxspec.models.sharding`). All code that
needs the parameters in the order of the file (saving, exports, checksums, other placements) reads them through
`file_order`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core.mesh import to_host
from jaxspec.core.records import Params
from jaxspec.models.config import ModelConfig
from jaxspec.models.packed import is_packed
from jaxspec.models.placement import FUSED_PARAMS
from jaxspec.models.quantized import Quantized
from jaxspec.models.transformer import TransformerLM


def group_by_shard(name: str, leaf: Any, config: ModelConfig, shards: int) -> Any:
    """Reorders the columns of a fused parameter into `shards` parts, each with a share of every projection.

    Each device of a layer thereby has whole heads, and both gate and up projections of its MLP units. NumPy arrays
    stay NumPy arrays.

    Args:
        name: the last part of the parameter's name, in `FUSED_PARAMS`.
        leaf: the parameter in the order of the file: an array `[..., O]`, a `Quantized` `[..., O, I]`, or taps
            `[C, 1, F]`.
        config: the model's configuration.
        shards: the number of parts.
    """
    return _regroup(name, leaf, config, shards, _group)


def ungroup(name: str, leaf: Any, config: ModelConfig, shards: int) -> Any:
    """Reorders the columns of a fused parameter into the order of the file: the inverse of `group_by_shard`."""
    return _regroup(name, leaf, config, shards, _ungroup)


def file_order(lm: Any, params: Params) -> Params:
    """Returns a model's parameters in the order of its file, on whatever devices they are placed.

    Args:
        lm: the network; only a `TransformerLM` that is split over devices has parameters in another order.
        params: the parameters of the network.
    """
    if not isinstance(lm, TransformerLM) or lm.execution.shards == 1:
        return params
    config, shards = lm.config, lm.execution.shards

    def restore(path: tuple, leaf: Any) -> Any:
        name = str(getattr(path[-1], "key", ""))
        return ungroup(name, leaf, config, shards) if name in FUSED_PARAMS and not is_packed(leaf) else leaf

    return jax.tree_util.tree_map_with_path(restore, params, is_leaf=_is_matrix)


def gather(lm: Any, params: Params) -> tuple[Any, Params]:
    """Returns a network that is split over devices, and its parameters, as a network on the default device.

    A network that is not split is returned unchanged.
    """
    if not isinstance(lm, TransformerLM) or lm.execution.shards == 1:
        return lm, params
    whole = jax.tree.map(lambda leaf: jnp.asarray(to_host(leaf)), file_order(lm, params))
    return lm.with_execution(shards=1, platform=None), whole


def _regroup(name: str, leaf: Any, config: ModelConfig, shards: int, reorder: Any) -> Any:
    reorder = functools.partial(reorder, widths=config.projections(name), shards=shards)
    if isinstance(leaf, Quantized):
        return Quantized(reorder(leaf.values.swapaxes(-1, -2)).swapaxes(-1, -2), reorder(leaf.scale))
    return reorder(leaf.T).T if name == "conv" else reorder(leaf)


def _group(leaf: Any, widths: tuple[int, ...], shards: int) -> Any:
    xp = np if isinstance(leaf, np.ndarray) else jnp
    parts = xp.split(leaf, _borders(leaf.shape[-1], widths), axis=-1)
    return xp.concatenate([a.reshape(*leaf.shape[:-1], shards, -1) for a in parts], axis=-1).reshape(leaf.shape)


def _ungroup(leaf: Any, widths: tuple[int, ...], shards: int) -> Any:
    xp = np if isinstance(leaf, np.ndarray) else jnp
    grouped = leaf.reshape(*leaf.shape[:-1], shards, -1)
    parts = xp.split(grouped, _borders(grouped.shape[-1], widths), axis=-1)
    return xp.concatenate([a.reshape(*leaf.shape[:-1], -1) for a in parts], axis=-1)


def _borders(size: int, widths: tuple[int, ...]) -> list[int]:
    return [size * sum(widths[:i]) // sum(widths) for i in range(1, len(widths))]


def _is_matrix(leaf: Any) -> bool:
    return isinstance(leaf, Quantized) or is_packed(leaf)
