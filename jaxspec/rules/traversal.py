"""Traversal verification: a tree is weighed from its leaves to its root, each path as a whole.

Weng et al. 2025 (arXiv:2505.12398), algorithm 2. On a chain it is block verification. Nodes are tested in post-order;
a node's weight depends on its ancestors and on the elder siblings along its path alone, so one pass from the root
gives the weights of all, and the order of the tests only their products.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxspec.core.draw import Noise
from jaxspec.core.records import Ends, Proposal
from jaxspec.core.tree import Tree, TreeShape
from jaxspec.rules._siblings import after, children, rejected


@dataclasses.dataclass(frozen=True)
class Traversal:
    """Takes every tree; siblings must be drawn without replacement."""

    noise: ClassVar[Noise] = Noise.FRESH
    lossless: ClassVar[bool] = True

    def check(self, shape: TreeShape) -> None:
        """Takes every tree."""

    def __call__(self, law: Float[Array, "N V"], proposal: Proposal) -> Ends:
        tree, tokens = proposal.tree, children(proposal)
        inner = (tokens >= 0).any(-1)
        order = jnp.argsort(~inner, stable=True)  # those that have children come first, a parent before its own

        def down(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            weights, node = carry[0], order[i]
            draft = None if proposal.law is None else proposal.law[node]
            below, own, _ = rejected(jnp.exp(law[node]), draft, tokens[node], weights[node])
            places = jnp.where(tree.children[node] >= 0, tree.children[node], weights.size)
            return weights.at[places].set(below, mode="drop"), carry[1].at[node].set(own)

        start = jnp.full_like(law[:, 0], -jnp.inf).at[0].set(0.0)
        weights, kept = lax.fori_loop(0, inner.sum(), down, (start, start))
        kept = jnp.where(inner, kept, weights)
        kept = jnp.exp(kept).at[0].set(1.0)
        earlier = jnp.where(post_order(tree), 1 - kept[None, :], 1.0).prod(-1)
        return Ends(kept * earlier, lambda node: after(law, proposal, node, weights[node]))


def post_order(tree: Tree) -> Bool[Array, "N N"]:
    """[n, m]: m is tested before n: it stands below n, or in an elder branch."""
    nodes = tree.parents.shape[0]
    ranks = jnp.where(tree.paths >= 0, tree.ranks[jnp.maximum(tree.paths, 0)], nodes)  # an end comes last
    mine, other = ranks[:, None], ranks[None, :]
    fork = jnp.argmax(mine != other, axis=-1)[..., None]
    return jnp.squeeze(jnp.take_along_axis(other < mine, fork, axis=-1), -1)
