"""Traversal verification: a tree is weighed from its leaves to its root, each path as a whole.

Weng et al. 2025 (arXiv:2505.12398), algorithm 2. On a chain it is block verification. Nodes are tested in post-order;
a node's weight depends on its ancestors and on the elder siblings along its path alone, so one pass from the root
gives the weights of all, and the order of the tests only their products.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.draw import Noise
from jaxspec.core.records import Ends, Proposal
from jaxspec.core.tree import Tree, TreeShape
from jaxspec.rules.siblings import children, excess, normalised


@dataclasses.dataclass(frozen=True)
class Traversal:
    """Takes every tree; siblings must be drawn without replacement."""

    noise: ClassVar[Noise] = Noise.FRESH
    lossless: ClassVar[bool] = True

    def check(self, shape: TreeShape) -> None:
        """Takes every tree."""

    def __call__(self, law: Float[Array, "N V"], proposal: Proposal) -> Ends:
        tree, tokens = proposal.tree, children(proposal)

        def at(node: Array, weight: Array) -> tuple[Array, Array, Array]:
            draft = None if proposal.law is None else proposal.law[node]
            return removals(law[node], draft, tokens[node], weight)

        def down(weights: Array, node: Array) -> tuple[Array, Array]:
            below, own, _ = at(node, weights[node])
            places = jnp.where(tree.children[node] >= 0, tree.children[node], weights.size)
            return weights.at[places].set(below, mode="drop"), own

        start = jnp.full_like(law[:, 0], -jnp.inf).at[0].set(0.0)
        weights, kept = lax.scan(down, start, jnp.arange(law.shape[0]))
        kept = jnp.exp(kept).at[0].set(1.0)
        earlier = jnp.where(post_order(tree), 1 - kept[None, :], 1.0).prod(-1)
        return Ends(kept * earlier, lambda node: at(node, weights[node])[2])


def removals(
    target: Float[Array, "V"], draft: Float[Array, "V"] | None, tokens: Int[Array, "C"], weight: Float[Array, ""]
) -> tuple[Float[Array, "C"], Float[Array, ""], Float[Array, "V"]]:
    """The log-weights of the children, that of the node once all were rejected, and the target's law then."""
    places, entered = jnp.arange(target.shape[0]), []
    for rank in range(tokens.shape[0]):
        token, proposed = jnp.maximum(tokens[rank], 0), tokens[rank] >= 0
        point = places == token
        law = jnp.where(point, 0.0, -jnp.inf) if draft is None else draft
        ratio = target[token] - jnp.where(law[token] > -jnp.inf, law[token], jnp.inf)
        entered.append(jnp.where(proposed, jnp.minimum(weight + ratio, 0.0), -jnp.inf))
        rest = excess(weight + target, law)
        left = jnp.exp(jax.nn.logsumexp(rest))
        spent = left - jnp.expm1(weight)  # left + (1 - weight)
        now = jnp.where(spent > 0, jnp.log(left) - jnp.log(jnp.where(spent > 0, spent, 1.0)), 0.0)
        weight = jnp.where(proposed, now, weight)
        target = jnp.where(proposed, normalised(rest, target), target)
        if draft is not None:
            draft = jnp.where(proposed, normalised(jnp.where(point, -jnp.inf, draft), draft), draft)
    return jnp.stack(entered) if entered else jnp.zeros((0,), target.dtype), weight, target


def post_order(tree: Tree) -> Bool[Array, "N N"]:
    """[n, m]: m is tested before n: it stands below n, or in an elder branch."""
    nodes = tree.parents.shape[0]
    ranks = jnp.where(tree.paths >= 0, tree.ranks[jnp.maximum(tree.paths, 0)], nodes)  # an end comes last
    mine, other = ranks[:, None], ranks[None, :]
    fork = jnp.argmax(mine != other, axis=-1)[..., None]
    return jnp.squeeze(jnp.take_along_axis(other < mine, fork, axis=-1), -1)
