"""One level of a tree that is being drafted: the nodes that a drafter reads together."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.topology import Dynamic, Topology


class Level(NamedTuple):
    """The n nodes of one depth that are read together; some may be padding.

    A drafter keeps what it computes for a node in the node's slot: an array of its carry has one axis of length
    `count_slots(topology)`. `of_parents` and `put` read and write such arrays.
    """

    nodes: np.ndarray | Int[Array, "*b n"]  # ids of the nodes; with a batch axis in a dynamic tree
    tokens: Int[Array, "B n"]  # 0 for padding
    depth: Int[Array, ""] | int  # a Python integer where the loop is unrolled
    slots: Int[Array, "n"]  # the slot of each node
    parents: Int[Array, "B n"]  # the slot of each node's parent; at the first level, a slot with its initial value
    ancestors: Bool[Array, "B n S"]  # the slots of each node's ancestors, without its own

    def of_parents(self, kept: Float[Array, "B S *x"] | Int[Array, "B S *x"]) -> Array:
        """Returns the entries of the nodes' parents, `[B, n, *x]`."""
        index = self.parents.reshape(*self.parents.shape, *(1 for _ in kept.shape[2:]))
        return jnp.take_along_axis(kept, index, axis=1)

    def put(self, kept: Array, new: Array, axis: int = 1) -> Array:
        """Writes the entries of the nodes along the axis of slots."""
        return kept.at[(*(slice(None) for _ in range(axis)), self.slots)].set(new)


def count_slots(topology: Topology | Dynamic) -> int:
    """Returns S: the number of nodes that may be read, padding included."""
    if isinstance(topology, Dynamic):
        return topology.beam * topology.depth
    return topology.shape.nodes + 1
