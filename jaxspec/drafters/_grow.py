"""The one loop over the levels of a drafted tree, for every drafter that draws from logits."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.draw import Candidates, Draw, Judged
from jaxspec.core.records import Proposal
from jaxspec.core.topology import Dynamic, Topology
from jaxspec.drafters._beam import DynamicTree
from jaxspec.drafters._fixed import FixedTree
from jaxspec.drafters._level import Level

Carry = Any  # a pytree of arrays
ReadLevel = Callable[[Level, Carry], tuple[Float[Array, "B n R"] | Judged | Candidates, Carry]]


class Grown(NamedTuple):
    """A drafted tree."""

    proposal: Proposal
    carry: Carry  # after the last read
    slots: Int[Array, "B N"]  # the slot of every node; -1: it was not read


def grow(
    topology: Topology | Dynamic,
    root: Int[Array, "B"],
    draw: Draw,
    read: ReadLevel,
    carry: Carry,
    *,
    root_logits: Callable[[], Float[Array, "B 1 R"]] | None = None,
    ids: Int[Array, "R"] | None = None,
    unroll: bool = False,
) -> Grown:
    """Drafts a tree level by level: reads the nodes of a level, and draws their children.

    The loop ends with the last level at which some row has a child to draw. If no row drafts, nothing is computed.

    Args:
        topology: the tree, or the sizes of a dynamic tree.
        root: the last token of each row's text.
        draw: draws the children.
        read: `read(level, carry)` returns the logits after the nodes of a level, `[B, n, R]`, and the new carry. Logits
            `[B, 1, R]` serve all nodes of the level. A drafter that estimates its acceptance returns `Judged` logits. A
            drafter without a distribution of its own may return `Candidates`, unless the rule reads laws.
        carry: what `read` needs beyond the level's tokens. The drafter decides what this is: nothing, keys and values,
            the tokens of paths, or hidden states. Arrays with one entry for each slot let a node read the entries of
            its parent or its ancestors; see `Level`. Every entry starts with the value that the first level reads.
        root_logits: returns the logits after the root if the drafter already has them. Then reading starts with the
            root's children.
        ids: the token of each logit, in ascending order, if the logits cover only a part of the vocabulary.
        unroll: compile `read` once per level, for its exact number of nodes and with the depth as a Python integer,
            instead of once for all levels, padded to the widest level.
    """
    first, depth = int(root_logits is not None), topology.shape.depth
    if isinstance(topology, Dynamic):
        tree: Any = DynamicTree(topology, draw, ids, first)
    else:
        tree = FixedTree(topology, draw, ids, first)
    state = tree.start(root)
    if root_logits is not None:
        state = lax.cond(
            tree.drafts_below(state, 0),
            lambda state: tree.add(state, tree.level(state, 0), root_logits()),
            lambda same: same,
            state,
        )

    def descend(depth: Array | int, state: Any, carry: Carry) -> tuple[Any, Carry]:
        level = tree.level(state, depth)
        logits, carry = read(level, carry)
        return tree.add(state, level, logits), carry

    if unroll:
        for level in range(first, depth):
            descend_level = functools.partial(descend, level)
            state, carry = lax.cond(tree.drafts_below(state, level), descend_level, lambda *same: same, state, carry)
    elif first < depth:

        def unfinished(loop: tuple[Array, Any, Carry]) -> Bool[Array, ""]:
            return (loop[0] < depth) & tree.drafts_below(loop[1], loop[0])

        def step(loop: tuple[Array, Any, Carry]) -> tuple[Array, Any, Carry]:
            return loop[0] + 1, *descend(*loop)

        _, state, carry = lax.while_loop(unfinished, step, (jnp.int32(first), state, carry))
    proposal, slots = tree.finish(state)
    return Grown(proposal, carry, slots)
