"""Drafting a dynamic tree, as EAGLE-2 does (Li et al. 2024, arXiv:2406.16858, section 4); see `grow` and `Dynamic`.

The score of a node is at most the score of its parent, the parent comes first in level order, and `top_k` takes the
first of equal values. So the ancestors of every selected node are selected as well.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.draw import Candidates, Draw, Judged
from jaxspec.core.records import Proposal
from jaxspec.core.topology import Dynamic
from jaxspec.core.tree import build
from jaxspec.drafters._level import Level, count_slots


class DynamicState(NamedTuple):
    """All F candidates so far, level by level, the root first, and the M candidates to expand next, the best first.

    Every level has room for the children of a whole beam.
    """

    tokens: Int[Array, "B F"]
    scores: Float[Array, "B F"]  # the logarithm of the product of probabilities along the path
    parents: Int[Array, "B F"]
    slots: Int[Array, "B F"]  # -1: the candidate was not read
    beam: Int[Array, "B M"]  # indices of candidates; F and more for padding
    beam_parents: Int[Array, "B M"]  # indices in the beam of the level above
    beam_ancestors: Bool[Array, "B M S"]  # for each candidate of the beam, the slots of its ancestors


@dataclasses.dataclass(frozen=True, eq=False)
class DynamicTree:
    """Expands the best candidates of each level, and selects the best of all candidates.

    Slots are numbered level by level.

    Attributes:
        topology: the sizes of the tree.
        draw: draws the children.
        ids: the token of each logit; None for the whole vocabulary.
        first: the depth of the first level that is read.
    """

    topology: Dynamic
    draw: Draw
    ids: Int[Array, "R"] | None
    first: int

    def start(self, root: Int[Array, "B"]) -> DynamicState:
        """Returns the tree with its root alone."""
        batch, width = root.shape[0], self.topology.beam
        room = max(self.topology.found, 1 + width**2)
        return DynamicState(
            jnp.full((batch, room), -1, jnp.int32).at[:, 0].set(root),
            jnp.full((batch, room), -jnp.inf).at[:, 0].set(0.0),
            jnp.full((batch, room), -1, jnp.int32),
            jnp.full((batch, room), -1, jnp.int32),
            jnp.full((batch, width), room, jnp.int32).at[:, 0].set(0),
            jnp.zeros((batch, width), jnp.int32),
            jnp.zeros((batch, width, count_slots(self.topology)), bool),
        )

    def drafts_below(self, state: DynamicState, depth: Array | int) -> Bool[Array, ""]:
        """Returns whether any row drafts children of nodes at this depth."""
        return self.draw.below(depth).any()

    def level(self, state: DynamicState, depth: Array | int) -> Level:
        """Returns the nodes of the beam; the root alone at depth 0, unless the depth is traced."""
        width = 1 if isinstance(depth, int) and depth == 0 else self.topology.beam
        nodes, room = state.beam[:, :width], state.tokens.shape[1]
        tokens = jnp.take_along_axis(state.tokens, jnp.minimum(nodes, room - 1), 1)
        start = (depth - self.first) * self.topology.beam
        return Level(
            nodes,
            jnp.maximum(tokens, 0),
            depth,
            jnp.maximum(start + jnp.arange(width), -1),
            jnp.maximum(start - self.topology.beam + state.beam_parents[:, :width], 0),
            state.beam_ancestors[:, :width],
        )

    def add(
        self, state: DynamicState, level: Level, logits: Float[Array, "B n R"] | Judged | Candidates
    ) -> DynamicState:
        """Expands a level's nodes by their logits, and selects the next beam among their children.

        If there are logits for a single node, all nodes of the level share them, before processors change them.
        """
        nodes, depth, width, (batch, room) = level.nodes, level.depth, self.topology.beam, state.tokens.shape
        paths = self._paths(state, jnp.asarray(nodes), depth) if self.draw.reads_paths else None
        if isinstance(logits, Candidates):
            ranked = self.draw.among(logits, depth, width, paths)
        else:
            logits, estimate = logits if isinstance(logits, Judged) else (logits, None)
            ranked = self.draw.ranked(logits, depth, width, self.ids, estimate, paths)
        tokens, scores = (jnp.broadcast_to(a, (*nodes.shape, width)) for a in ranked)
        scores = scores + jnp.take_along_axis(state.scores, jnp.minimum(nodes, room - 1), 1)[:, :, None]
        scores = jnp.where((nodes < room)[:, :, None], scores, -jnp.inf)
        start = jnp.where(depth == 0, 1, 1 + width + (depth - 1) * width**2)  # overwrites children of depth-0 padding
        # With a constant offset, XLA:GPU makes the copy a call from the host, which a command buffer cannot contain.
        start = lax.optimization_barrier(start)

        def put(old: Array, new: Array) -> Array:
            return lax.dynamic_update_slice(old, new.reshape(batch, -1).astype(old.dtype), (0, start))

        best = lax.top_k(scores.reshape(batch, -1), width)[1]
        itself = jnp.arange(level.ancestors.shape[2]) == level.slots[:, None]
        slots = jnp.broadcast_to(level.slots, nodes.shape)
        return DynamicState(
            put(state.tokens, tokens),
            put(state.scores, scores),
            put(state.parents, jnp.broadcast_to(nodes[:, :, None], scores.shape)),
            state.slots.at[jnp.arange(batch)[:, None], nodes].set(slots, mode="drop"),
            start + best,
            best // width,
            jnp.take_along_axis(level.ancestors | itself, (best // width)[:, :, None], 1),
        )

    def _paths(self, state: DynamicState, nodes: Int[Array, "B n"], depth: Array | int) -> Int[Array, "B n D"]:
        """Returns the tokens from below the root to each node of a depth; -1 after the end of a path."""
        size, at, tokens = self.topology.depth, jnp.minimum(nodes, state.tokens.shape[1] - 1), []
        for _ in range(size):  # from the node to the root
            tokens.append(jnp.maximum(jnp.take_along_axis(state.tokens, at, 1), 0))
            at = jnp.maximum(jnp.take_along_axis(state.parents, at, 1), 0)
        order = jnp.broadcast_to(depth - 1 - jnp.arange(size), (*nodes.shape, size))
        path = jnp.take_along_axis(jnp.stack(tokens, -1), jnp.maximum(order, 0), 2)
        return jnp.where(order < 0, -1, path)

    def finish(self, state: DynamicState) -> tuple[Proposal, Int[Array, "B N"]]:
        """Returns the best candidates as a proposal, and the slot of every node; -1 if the node was not read.

        The schedule decides how many candidates are proposed.
        """
        topology, (batch, room) = self.topology, state.tokens.shape
        scores, best = lax.top_k(state.scores[:, 1 : topology.found], topology.nodes - 1)
        excluded = jnp.arange(topology.nodes - 1) >= self.draw.count_nodes(scores)[:, None]
        # In level order, root included. Nodes that are left out come last, so that a narrower call holds the other
        # nodes.
        order = jnp.pad(jnp.sort(jnp.where(excluded, room, 0) + best + 1, axis=1), ((0, 0), (1, 0)))
        selected, excluded = order % room, order >= room
        ids = jnp.broadcast_to(jnp.arange(topology.nodes), selected.shape)
        new = jnp.zeros((batch, room), jnp.int32).at[jnp.arange(batch)[:, None], selected].set(ids)
        above = jnp.take_along_axis(state.parents, selected, 1)
        parents = jnp.where(above >= 0, jnp.take_along_axis(new, jnp.maximum(above, 0), 1), -1)
        tree = jax.vmap(lambda parents: build(parents, topology.shape))(parents)
        tokens, slots = (jnp.take_along_axis(a, selected, 1) for a in (state.tokens, state.slots))
        return Proposal(jnp.where(excluded, -1, tokens), tree), slots
