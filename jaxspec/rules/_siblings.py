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


def excess(target: Float[Array, "*b V"], draft: Float[Array, "*b V"]) -> Float[Array, "*b V"]:
    """What probabilities have beyond those of a log-law; they may be scaled down."""
    return jnp.maximum(target - jnp.exp(draft), 0.0)


def children(proposal: Proposal) -> Int[Array, "N C"]:
    """The tokens of each node's children by rank, -1 where nothing is proposed."""
    tree = proposal.tree
    return jnp.where(tree.children >= 0, proposal.tokens[jnp.maximum(tree.children, 0)], -1)


def rejected(
    target: Float[Array, "V"],
    draft: Float[Array, "V"] | None,
    tokens: Int[Array, "C"],
    weight: Float[Array, ""] | float = 0.0,
    log_lenience: float = 0.0,
) -> tuple[Float[Array, "C"], Float[Array, ""], Float[Array, "V"]]:
    """The children of a node rejected one after the other.

    The target's law is in probabilities: what is left of it after a rejection has the mass of that rejection, so none
    that matters is too small for them. The draft's stays a logarithm: it may be left with its smallest.

    Args:
        target: the law after the parent, in probabilities.
        draft: the log-law its children were drawn from; None for point masses.
        tokens: of the children, in the order they were drawn, -1 for none.
        weight: log, of the text up to the parent. With 0 all of the target's law is to be had, and stays so.
        log_lenience: added to the draft's log-probabilities; lossy below 0.

    Returns:
        The log-weight of each child when its turn comes: with weight 0, of the probability of keeping it. And once all
        were rejected the weight, and the target's law, in probabilities.
    """
    places, weight, entered = jnp.arange(target.shape[0]), jnp.asarray(weight, target.dtype), []
    for rank in range(tokens.shape[0]):
        token, proposed = jnp.maximum(tokens[rank], 0), tokens[rank] >= 0
        point = places == token
        law = (jnp.where(point, 0.0, -jnp.inf) if draft is None else draft) + log_lenience
        ratio = jnp.log(target[token]) - jnp.where(law[token] > -jnp.inf, law[token], jnp.inf)
        entered.append(jnp.where(proposed, jnp.minimum(weight + ratio, 0.0), -jnp.inf))
        rest = excess(jnp.exp(weight) * target, law)
        left = rest.sum()
        spent = left - jnp.expm1(weight)  # left + (1 - weight)
        now = jnp.where(spent > 0, jnp.log(left) - jnp.log(jnp.where(spent > 0, spent, 1.0)), 0.0)
        weight = jnp.where(proposed, now, weight)
        target = jnp.where(proposed & (left > 0), rest / jnp.where(left > 0, left, 1.0), target)
        if draft is not None:
            draft = jnp.where(proposed, without(draft, token), draft)
    return jnp.stack(entered) if entered else jnp.zeros((0,), target.dtype), weight, target


def without(law: Float[Array, "V"], token: Int[Array, ""]) -> Float[Array, "V"]:
    """The log-law without a token; as it is where that was all of it."""
    rest = jnp.where(jnp.arange(law.shape[0]) == token, -jnp.inf, law)
    rest = jnp.where(rest.max() > -jnp.inf, rest, law)
    return rest - jax.nn.logsumexp(rest)


def after(
    law: Float[Array, "N V"],
    proposal: Proposal,
    node: Int[Array, ""],
    weight: Float[Array, ""] | float = 0.0,
    log_lenience: float = 0.0,
) -> Float[Array, "V"]:
    """The target's log-law after a node whose children were all rejected; the rest is as in `rejected`."""
    draft, tokens = None if proposal.law is None else proposal.law[node], children(proposal)[node]
    target = rejected(jnp.exp(law[node]), draft, tokens, weight, log_lenience)[2]
    return jnp.where((tokens >= 0).any(), jnp.log(target), law[node])


def tried(law: Float[Array, "N V"], proposal: Proposal, log_lenience: float = 0.0) -> Ends:
    """The walk down: at every node the children are tried in order, the first that is kept is gone on from."""

    def chances(law: Array, draft: Array | None, tokens: Array) -> Array:
        return jnp.exp(rejected(jnp.exp(law), draft, tokens, log_lenience=log_lenience)[0])

    kept = jax.vmap(chances)(law, proposal.law, children(proposal))
    return Ends(walk(kept, proposal.tree), lambda node: after(law, proposal, node, log_lenience=log_lenience))


def walk(kept: Float[Array, "N C"], tree: Tree) -> Float[Array, "N"]:
    """Where a walk ends that keeps each child with its probability, given that its elder siblings were not kept."""
    none = jnp.zeros_like(kept, shape=(kept.shape[0], 1))
    elder = jnp.cumprod(jnp.concatenate([none + 1, 1 - kept], axis=1), axis=1)
    taken = jnp.concatenate([kept * elder[:, :-1], none], axis=1)
    step = taken[jnp.maximum(tree.parents, 0), tree.ranks].at[0].set(1.0)
    return jnp.where(tree.ancestors, step, 1.0).prod(-1) * elder[:, -1]
