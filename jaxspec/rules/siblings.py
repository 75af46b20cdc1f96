"""Siblings tried one after the other: what the rules that weigh laws child by child share.

A child drawn from the draft's law is kept with probability min(1, target / draft). Else what is left of the target's
law is its excess over the draft's, and the next child was drawn from the draft's law without the tokens tried. With
one child this is speculative sampling (Leviathan et al. 2023, arXiv:2211.17192, section 2.3; Chen et al. 2023,
arXiv:2302.01318), with more the recursion of SpecInfer (arXiv:2305.09781, section 4.3) and Sequoia
(arXiv:2402.12374, section 3.2).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core.records import Ends, Proposal
from jaxspec.core.tree import Tree


def excess(target: Float[Array, "V"], draft: Float[Array, "V"]) -> Float[Array, "V"]:
    """`log max(exp(target) - exp(draft), 0)`, without leaving log-space: tiny probabilities keep their digits."""
    less = draft < target
    ratio = jnp.where(less & (draft > -jnp.inf), draft - jnp.where(less, target, 0.0), -jnp.inf)
    return jnp.where(less, target + jnp.log1p(-jnp.exp(ratio)), -jnp.inf)


def normalised(weights: Float[Array, "V"], otherwise: Float[Array, "V"]) -> Float[Array, "V"]:
    """The log-law of log-weights; `otherwise` where no weight is left."""
    some = weights.max() > -jnp.inf
    weights = jnp.where(some, weights, otherwise)
    return weights - jax.nn.logsumexp(weights)


def children(proposal: Proposal) -> Int[Array, "N C"]:
    """The tokens of each node's children by rank, -1 where nothing is proposed."""
    tree = proposal.tree
    return jnp.where(tree.children >= 0, proposal.tokens[jnp.maximum(tree.children, 0)], -1)


def trial(
    target: Float[Array, "V"], draft: Float[Array, "V"] | None, tokens: Int[Array, "C"], log_lenience: float = 0.0
) -> tuple[Float[Array, "C"], Float[Array, "V"]]:
    """The probability of keeping each child if it is tried, and the target's law once all were rejected.

    Args:
        target: the log-law after the parent.
        draft: the log-law its children were drawn from; None for point masses.
        tokens: of the children, in the order they were drawn, -1 for none.
        log_lenience: added to the draft's log-probabilities; lossy below 0.
    """
    places, kept = jnp.arange(target.shape[0]), []
    for rank in range(tokens.shape[0]):
        token, proposed = jnp.maximum(tokens[rank], 0), tokens[rank] >= 0
        point = places == token
        law = jnp.where(point, 0.0, -jnp.inf) if draft is None else draft
        law = law + log_lenience
        chance = jnp.exp(jnp.minimum(target[token] - jnp.where(law[token] > -jnp.inf, law[token], jnp.inf), 0.0))
        kept.append(jnp.where(proposed, chance, 0.0))
        target = jnp.where(proposed, normalised(excess(target, law), target), target)
        if draft is not None:
            draft = jnp.where(proposed, normalised(jnp.where(point, -jnp.inf, draft), draft), draft)
    return jnp.stack(kept) if kept else jnp.zeros((0,), target.dtype), target


def tried(law: Float[Array, "N V"], proposal: Proposal, log_lenience: float = 0.0) -> Ends:
    """The walk down: at every node the children are tried in order, the first that is kept is gone on from."""
    tokens = children(proposal)

    def chances(target: Array, draft: Array | None, tokens: Array) -> Array:
        return trial(target, draft, tokens, log_lenience)[0]

    def after(node: Array) -> Array:
        draft = None if proposal.law is None else proposal.law[node]
        return trial(law[node], draft, tokens[node], log_lenience)[1]

    return Ends(walk(jax.vmap(chances)(law, proposal.law, tokens), proposal.tree), after)


def walk(kept: Float[Array, "N C"], tree: Tree) -> Float[Array, "N"]:
    """Where a walk ends that keeps each child with its probability, given that its elder siblings were not kept."""
    none = jnp.zeros_like(kept, shape=(kept.shape[0], 1))
    elder = jnp.cumprod(jnp.concatenate([none + 1, 1 - kept], axis=1), axis=1)
    taken = jnp.concatenate([kept * elder[:, :-1], none], axis=1)
    step = taken[jnp.maximum(tree.parents, 0), tree.ranks].at[0].set(1.0)
    return jnp.where(tree.ancestors, step, 1.0).prod(-1) * elder[:, -1]
