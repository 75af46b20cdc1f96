"""Memory layouts of arrays where XLA's own choice costs a copy, and whether programs are for GPUs."""

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array

LANES = 128
"""Columns of a TPU tile."""


def row_major(values: Array, on: str = "tpu") -> Array:
    """Returns the values with a row-major layout on a platform; the others use what XLA chooses.

    On a TPU XLA propagates the layout of a small array, such as a window of several tokens with adjacent heads, to the
    cache or weight matrix that it meets, and copies that. On a CPU it transposes what a gather returns, and back.
    """
    return _constrain(values, tuple(range(values.ndim)), on)


def compact(values: Array) -> Array:
    """Returns values `[..., rows, columns]` with rows minor on a TPU if there are fewer columns than lanes.

    That is the TPU's own layout for such arrays, since a row-major one would be padded to 128 columns. A slice of a
    cache could otherwise impose another layout on the whole cache.
    """
    *batch_axes, rows, columns = range(values.ndim)
    narrow = values.shape[-1] < LANES <= values.shape[-2]
    return _constrain(values, (*batch_axes, columns, rows), "tpu") if narrow else values


def on_gpu() -> bool:
    """Returns whether JAX's default platform is a GPU, where few large kernels are faster than many small ones."""
    return jax.default_backend() == "gpu"


def _constrain(values: Array, major_to_minor: tuple[int, ...], on: str) -> Array:
    """Constrains the layout on a platform, the minor (densest) axis last."""

    def laid(values: Array) -> Array:
        return with_layout_constraint(values, Layout(major_to_minor))

    return lax.platform_dependent(values, default=lambda values: values, **{on: laid})
