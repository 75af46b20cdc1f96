"""How an array lies in memory, where XLA's own choice for it costs more than it saves."""

from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array

LANES = 128
"""Of a TPU: its arrays stand in tiles of so many columns."""


def row_major(values: Array) -> Array:
    """The same values, their last axis the densest on a TPU; elsewhere XLA lays them so by itself.

    There a layout travels from a small array to the large one that it meets: a window of several tokens, whose heads
    lie together, would have the whole cache or a layer's matrix laid anew, in a copy.
    """
    return _laid(values, tuple(range(values.ndim)))


def compact(values: Array) -> Array:
    """The same values `[..., rows, columns]`; where these are narrower than a TPU's lanes the rows densest there.

    So a TPU lays arrays of that shape by itself, since row by row they would be padded to 128. A part that is read of a
    cache could pull the other layout over the whole of it.
    """
    *most, rows, columns = range(values.ndim)
    narrow = values.shape[-1] < LANES <= values.shape[-2]
    return _laid(values, (*most, columns, rows)) if narrow else values


def _laid(values: Array, order: tuple[int, ...]) -> Array:
    """`order`: the axes, the densest last."""

    def laid(values: Array) -> Array:
        return with_layout_constraint(values, Layout(order))

    return lax.platform_dependent(values, tpu=laid, default=lambda values: values)
