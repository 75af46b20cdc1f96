"""How an array lies in memory, where XLA's own choice for it costs more than it saves."""

from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array


def row_major(values: Array) -> Array:
    """The same values, their last axis the densest on a TPU; elsewhere XLA lays them so by itself.

    There a layout travels from a small array to the large one that it meets: a window of several tokens, whose heads
    lie together, would have the whole cache or a layer's matrix laid anew, in a copy.
    """

    def laid(values: Array) -> Array:
        return with_layout_constraint(values, Layout(tuple(range(values.ndim))))

    return lax.platform_dependent(values, tpu=laid, default=lambda values: values)
