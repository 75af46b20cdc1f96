"""Drafting a tree whose topology is known before tracing; see `grow`."""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.draw import Candidates, Draw, Judged
from jaxspec.core.records import Proposal
from jaxspec.core.topology import Topology
from jaxspec.drafters._level import Level, count_slots


class FixedState(NamedTuple):
    """The nodes drafted so far. The last entry is for padding."""

    tokens: Int[Array, "B S"]  # -1: not drafted
    law: Float[Array, "B S V"] | None  # None unless the rule reads laws
    read: Int[Array, ""]  # the number of levels read, the root's level included


@dataclasses.dataclass(frozen=True, eq=False)
class FixedTree:
    """Drafts the nodes of a topology. A node's slot is its id.

    Attributes:
        topology: the tree.
        draw: draws the children.
        ids: the token of each logit; None for the whole vocabulary.
        first: the depth of the first level that is read.
    """

    topology: Topology
    draw: Draw
    ids: Int[Array, "R"] | None
    first: int

    def start(self, root: Int[Array, "B"]) -> FixedState:
        """Returns the tree with its root alone."""
        slots = count_slots(self.topology)
        tokens = jnp.full((root.shape[0], slots), -1, jnp.int32).at[:, 0].set(root)
        return FixedState(tokens, self.draw.empty_law(slots), jnp.int32(self.first))

    def drafts_below(self, state: FixedState, depth: Array | int) -> Bool[Array, ""]:
        """Returns whether any row drafts children of nodes at this depth."""
        nodes = self._nodes(depth)
        drafted = (state.tokens[:, nodes] >= 0) & (nodes < self.topology.shape.nodes)
        return (drafted & self.draw.below(depth)[:, None]).any()

    def level(self, state: FixedState, depth: Array | int) -> Level:
        """Returns the nodes of a depth that have children, padded to the widest level if the depth is traced."""
        batch, nodes = state.tokens.shape[0], self._nodes(depth)
        parents, ancestors = (jnp.asarray(table)[nodes] for table in self._above)
        return Level(
            nodes,
            jnp.maximum(state.tokens[:, nodes], 0),
            depth,
            jnp.asarray(nodes),
            jnp.broadcast_to(parents, (batch, *parents.shape)),
            jnp.broadcast_to(ancestors, (batch, *ancestors.shape)),
        )

    def add(self, state: FixedState, level: Level, logits: Float[Array, "B n R"] | Judged | Candidates) -> FixedState:
        """Draws the children of a level's nodes from their logits.

        If there are logits for a single node, all nodes of the level share its children, unless the rule reads laws or
        a processor changes the logits of each node by its path. Then the children of each node are drawn separately.
        """
        nodes = level.nodes
        if isinstance(nodes, np.ndarray):  # as many children as this level's nodes have
            below = self._children[nodes]
            below = below[:, : int((below < self.topology.shape.nodes).sum(-1).max())]
        else:
            below = jnp.asarray(self._children)[nodes]
        paths = self._paths(state, nodes) if self.draw.reads_paths else None
        if isinstance(logits, Candidates):
            tokens, law = self.draw.among(logits, level.depth, below.shape[1], paths)[0], None
        else:
            logits, estimate = logits if isinstance(logits, Judged) else (logits, None)
            if state.law is not None:
                logits = jnp.broadcast_to(logits, (logits.shape[0], len(nodes), logits.shape[2]))
            drawn = jnp.asarray(nodes[: logits.shape[1]])
            tokens, law = self.draw(logits, drawn, level.depth, below.shape[1], self.ids, estimate, paths)
        return FixedState(
            state.tokens.at[:, below].set(tokens),
            None if state.law is None or law is None else state.law.at[:, nodes].set(law),
            jnp.asarray(level.depth + 1, jnp.int32),
        )

    def finish(self, state: FixedState) -> tuple[Proposal, Int[Array, "B N"]]:
        """Returns the proposal, and the slot of every node; -1 if the node was not read."""
        tree, shape = self.topology.tree, self.topology.shape
        inner = tree.children[:, :1].max(-1, initial=-1) >= 0
        slots = jnp.where(jnp.asarray(inner) & (tree.depths < state.read), jnp.arange(shape.nodes), -1)
        slots = jnp.broadcast_to(slots.astype(jnp.int32), (state.tokens.shape[0], shape.nodes))
        law = None if state.law is None else state.law[:, :-1]
        return Proposal(state.tokens[:, :-1], tree, law), slots

    def _paths(self, state: FixedState, nodes: np.ndarray | Int[Array, "n"]) -> Int[Array, "B n D"]:
        """Returns the tokens from below the root to each node; -1 after the end of a path."""
        above = np.pad(self.topology.tree.paths[:, 1:], ((0, 1), (0, 0)), constant_values=-1)
        path = jnp.asarray(above)[jnp.asarray(nodes)]
        return jnp.where(path < 0, -1, jnp.maximum(state.tokens[:, jnp.maximum(path, 0)], 0))

    def _nodes(self, depth: Array | int) -> np.ndarray | Int[Array, "n"]:
        if isinstance(depth, int):
            return self.topology.parents_by_level[depth]
        return jnp.asarray(self._padded)[jnp.minimum(depth - self.first, len(self._padded) - 1)]

    @functools.cached_property
    def _padded(self) -> np.ndarray:
        """The nodes with children at each depth from `first` on, padded with the spare entry."""
        levels = self.topology.parents_by_level[self.first :]
        widest, spare = max(map(len, levels)), self.topology.shape.nodes
        return np.stack([np.pad(level, (0, widest - len(level)), constant_values=spare) for level in levels])

    @functools.cached_property
    def _children(self) -> np.ndarray:
        """The children of every node, `[S, C]`; the spare entry where there is no child."""
        spare, children = self.topology.shape.nodes, self.topology.tree.children
        return np.pad(np.where(children >= 0, children, spare), ((0, 1), (0, 0)), constant_values=spare)

    @functools.cached_property
    def _above(self) -> tuple[np.ndarray, np.ndarray]:
        """The parent of every node `[S]`, and its ancestors that are read `[S, S]`."""
        tree, spare = self.topology.tree, self.topology.shape.nodes
        parents = np.append(np.where(tree.parents >= 0, tree.parents, spare), spare)
        ancestors = np.pad(tree.ancestors & ~np.eye(spare, dtype=bool), (0, 1))
        ancestors[:, : self.first] = False
        return parents, ancestors
