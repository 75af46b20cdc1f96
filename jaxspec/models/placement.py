"""How the devices of the mesh axis "model" share each parameter of a transformer."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxspec.core.mesh import DATA, MODEL
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
    "experts_gate_up_bias",
    "shared_gate_up",
)
"""Parameters that hold several projections side by side, or what belongs to their outputs."""
_ROW_SPLIT = ("out", "down", "shared_down", "embed", "head")


def param_spec(name: str, leaf: Any, size: int, groups: int = 1) -> Any:
    """Returns the partition spec of each of a parameter's arrays.

    Args:
        name: the last part of the parameter's name, which decides the split.
        leaf: an array or a `Quantized`.
        size: the number of devices on the axis "model". An axis that this number does not divide is not split.
        groups: the number of devices on the axis "data", over which the other dimension of matrices is split as well.
    """

    def split(array: Any, axis: int | None, other: int | None = None) -> P:
        axes: list[str | None] = [None] * array.ndim
        for mesh_axis, count, at in ((MODEL, size, axis), (DATA, groups, other)):
            if at is not None and count > 1 and array.shape[at] % count == 0:
                axes[at] = mesh_axis
        while axes and axes[-1] is None:
            axes.pop()
        return P(*axes)

    if isinstance(leaf, Quantized):
        outputs = name in FUSED_PARAMS or is_table(name)
        lead = leaf.scale.ndim - 1  # an axis of experts

        def of(array: Any) -> P:
            if array.ndim == lead + 1:  # scales
                return split(array, lead if outputs else None)
            return split(array, *((lead, lead + 1) if outputs else (lead + 1, lead)))

        return jax.tree.map(of, leaf)
    if name == "conv":
        return split(leaf, 0)
    if name == "experts_down":
        return split(leaf, 1, 2)
    last = leaf.ndim - 1
    if name in FUSED_PARAMS:
        return split(leaf, last, last - 1 if last else None)
    return split(leaf, 0, 1) if name in _ROW_SPLIT else split(leaf, None)


def param_specs(params: Params, size: int, groups: int = 1) -> Params:
    """Returns the partition specs of a transformer's parameters; see `param_spec`."""

    def spec(path: tuple, leaf: Any) -> Any:
        return param_spec(str(getattr(path[-1], "key", "")), leaf, size, groups)

    return jax.tree_util.tree_map_with_path(spec, params, is_leaf=lambda leaf: isinstance(leaf, Quantized))
