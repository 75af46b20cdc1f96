"""Memory layouts of arrays where XLA's own choice costs a copy, and the platforms of programs."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array

LANES = 128
"""Columns of a TPU tile."""


def row_major(values: Array, on: str = "tpu") -> Array:
    """Returns the values with a row-major layout on one platform; other platforms use the layout that XLA chooses.

    On a TPU, XLA propagates the layout of a small array, such as a window of several tokens with adjacent heads, to the
    cache or weight matrix that it is combined with, and copies the cache or the matrix. On a CPU, XLA transposes the
    result of a gather, and transposes it back.
    """
    return _constrain(values, tuple(range(values.ndim)), on)


def compact(values: Array) -> Array:
    """Returns values `[..., rows, columns]`, on a TPU with rows as the minor axis if there are fewer columns than
    lanes.

    This is the TPU's default layout for such arrays, because a row-major layout would be padded to 128 columns. Without
    the constraint, a slice of a cache could impose another layout on the whole cache.
    """
    *batch_axes, rows, columns = range(values.ndim)
    narrow = values.shape[-1] < LANES <= values.shape[-2]
    return _constrain(values, (*batch_axes, columns, rows), "tpu") if narrow else values


def default_platform() -> str:
    """Returns the platform of JAX's default device, such as "cpu", "gpu" or "tpu"."""
    device: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return jax.default_backend() if device is None else getattr(device, "platform", device)


def multiplies_bfloat16() -> bool:
    """Returns False on an NVIDIA GPU older than Ampere, for which Triton has no products of bfloat16.

    On other platforms, and where programs are compiled for a GPU without one, it is True.
    """
    if default_platform() != "gpu":
        return True
    capability = str(jax.devices()[0].compute_capability)  # such as "9.0"; a name on AMD
    return not capability[:1].isdigit() or float(capability) >= 8


def gpu_dependent(*arrays: Any, gpu: Callable, default: Callable) -> Any:
    """Returns `gpu(*arrays)` in a program for a GPU, and `default(*arrays)` in a program for another platform.

    The choice is made when JAX lowers the program, so only one of the functions is compiled.
    """
    return lax.platform_dependent(*arrays, cuda=gpu, rocm=gpu, default=default)


def _constrain(values: Array, major_to_minor: tuple[int, ...], on: str) -> Array:
    """Constrains the layout on a platform; the minor (densest) axis comes last."""

    def constrain(values: Array) -> Array:
        return with_layout_constraint(values, Layout(major_to_minor))

    return lax.platform_dependent(values, default=lambda values: values, **{on: constrain})
