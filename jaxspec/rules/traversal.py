"""Traversal verification: tests a tree from its leaves to its root, each path as a whole.

Weng et al. 2025 (arXiv:2505.12398), algorithm 2. On a chain it is block verification. Nodes are tested in post-order.
A node's weight depends only on its ancestors and on the elder siblings along its path, so one pass from the root
computes all weights; post-order matters only for the products of the tests.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxspec.core.draw import Noise
from jaxspec.core.records import Proposal, StopLaw
from jaxspec.core.rule import refuse_pruned
from jaxspec.core.tree import Tree, TreeShape
from jaxspec.rules._siblings import child_tokens, reject_in_order, residual_law


@dataclasses.dataclass(frozen=True)
class Traversal:
    """Accepts a path of any tree, tested from its leaf to the root; on a chain it is block verification."""

    noise = Noise.FRESH
    lossless = True

    def check(self, shape: TreeShape) -> None:
        """Supports every fixed tree."""
        refuse_pruned(self, shape)

    def __call__(self, law: Float[Array, "N V"], proposal: Proposal) -> StopLaw:
        tree, tokens = proposal.tree, child_tokens(proposal)
        inner = (tokens >= 0).any(-1)
        order = jnp.argsort(~inner, stable=True)  # nodes with children first, parents before children

        def down(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            weights, node = carry[0], order[i]
            draft = None if proposal.law is None else proposal.law[node]
            below, rejected, _ = reject_in_order(jnp.exp(law[node]), draft, tokens[node], weights[node])
            targets = jnp.where(tree.children[node] >= 0, tree.children[node], weights.size)
            return weights.at[targets].set(below, mode="drop"), carry[1].at[node].set(rejected)

        start = jnp.full_like(law[:, 0], -jnp.inf).at[0].set(0.0)
        weights, accepted = lax.fori_loop(0, inner.sum(), down, (start, start))
        accepted = jnp.where(inner, accepted, weights)
        accepted = jnp.exp(accepted).at[0].set(1.0)
        earlier = jnp.where(tested_before(tree), 1 - accepted[None, :], 1.0).prod(-1)
        return StopLaw(accepted * earlier, lambda node: residual_law(law, proposal, node, weights[node]))


def tested_before(tree: Tree) -> Bool[Array, "N N"]:
    """Returns whether node m is tested before node n, at `[n, m]`: whether m is below n or in an elder branch."""
    nodes = tree.parents.shape[0]
    ranks = jnp.where(tree.paths >= 0, tree.ranks[jnp.maximum(tree.paths, 0)], nodes)  # the end of a path sorts last
    own, other = ranks[:, None], ranks[None, :]
    fork = jnp.argmax(own != other, axis=-1)[..., None]
    return jnp.squeeze(jnp.take_along_axis(other < own, fork, axis=-1), -1)
