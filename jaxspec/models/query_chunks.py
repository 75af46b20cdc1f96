"""Arrays in chunks of one axis, for attention of many queries, whose scores are computed a few queries at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

QUERIES_AT_ONCE = 256
"""Number of queries of each row whose attention scores exist at once."""


def split_axis(array: Array, axis: int, size: int, fill: Any = 0) -> Array:
    """Returns an array with one of its axes in chunks, `[n, ..., size, ...]`. `fill` pads the last chunk."""
    if missing := -array.shape[axis] % size:
        padding = [(0, missing if i == axis else 0) for i in range(array.ndim)]
        array = jnp.pad(array, padding, constant_values=fill)
    return jnp.moveaxis(array.reshape(*array.shape[:axis], -1, size, *array.shape[axis + 1 :]), axis, 0)


def join_axis(chunks: Array, axis: int, length: int) -> Array:
    """Returns the first `length` entries of an axis that `split_axis` divided."""
    whole = jnp.moveaxis(chunks, 0, axis)
    whole = whole.reshape(*whole.shape[:axis], -1, *whole.shape[axis + 2 :])
    return lax.slice_in_dim(whole, 0, length, axis=axis)


def attend_in_chunks(
    attend: Callable[..., Array], size: int, arrays: Sequence[Any], axes: Sequence[int], fills: Sequence[Any], out: int
) -> Array:
    """Computes attention for `size` queries of each row at a time. The backward pass recomputes the scores of a chunk.

    Args:
        attend: a function from the chunks of `arrays` to the outputs of their queries.
        size: number of queries of a chunk.
        arrays: pytrees of arrays with an axis of queries.
        axes: for each of `arrays`, the axis of the queries.
        fills: for each of `arrays`, what the last chunk is padded with. Padded queries must have finite outputs, since
            a gradient of zero times NaN is NaN.
        out: the axis of the queries in the outputs.
    """
    length = jax.tree.leaves(arrays[0])[0].shape[axes[0]]
    parts = tuple(
        jax.tree.map(lambda leaf, axis=axis, fill=fill: split_axis(leaf, axis, size, fill), array)
        for array, axis, fill in zip(arrays, axes, fills, strict=True)
    )
    compute = jax.checkpoint(attend, prevent_cse=False)
    return join_axis(lax.map(lambda part: compute(*part), parts), out, length)
