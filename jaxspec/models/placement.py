"""How the devices of the mesh axis "model" share each parameter of a transformer."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxspec.core.mesh import MODEL
from jaxspec.core.records import Params
from jaxspec.models.config import is_table
from jaxspec.models.quantized import Quantized

FUSED_PARAMS = (
    "qkv",
    "gate_up",
    "qkv_bias",
    "gate_up_bias",
    "qkvz",
    "rates",
    "conv",
    "experts_gate_up",
    "shared_gate_up",
)
"""Parameters that hold several projections side by side, or what belongs to their outputs."""
_ROW_SPLIT = ("out", "down", "shared_down", "embed", "head")


def param_spec(name: str, leaf: Any, size: int) -> Any:
    """Returns the partition spec of each of a parameter's arrays.

    Args:
        name: the last part of the parameter's name, which decides the split.
        leaf: an array or a `Quantized`.
        size: the number of devices. An axis that this number does not divide is not split.
    """

    def split(array: Any, axis: int | None) -> P:
        whole = size == 1 or axis is None or array.shape[axis] % size
        return P() if whole else P(*[None] * (axis or 0), MODEL)

    if isinstance(leaf, Quantized):
        outputs = name in FUSED_PARAMS or is_table(name)
        lead = leaf.scale.ndim - 1  # an axis of experts
        return jax.tree.map(
            lambda array: split(array, lead if outputs else lead + 1 if array.ndim > lead + 1 else None), leaf
        )
    if name == "conv":
        return split(leaf, 0)
    if name == "experts_down":
        return split(leaf, 1)
    return split(leaf, leaf.ndim - 1 if name in FUSED_PARAMS else 0 if name in _ROW_SPLIT else None)


def param_specs(params: Params, size: int) -> Params:
    """Returns the partition specs of a transformer's parameters."""

    def spec(path: tuple, leaf: Any) -> Any:
        return param_spec(str(getattr(path[-1], "key", "")), leaf, size)

    return jax.tree_util.tree_map_with_path(spec, params, is_leaf=lambda leaf: isinstance(leaf, Quantized))
