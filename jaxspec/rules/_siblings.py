"""Sequential acceptance of siblings, shared by the rules that compare laws.

A child drawn from the draft's law is accepted with probability min(1, target / draft). After a rejection, the target's
law is replaced by the normalised residual max(target - draft, 0), and the rejected token is removed from the draft's
law, because the next sibling was drawn without replacement. With one child, this is speculative sampling (Leviathan et
al. 2023, arXiv:2211.17192, section 2.3; Chen et al. 2023, arXiv:2302.01318). With several children, it is the recursion
of SpecInfer (arXiv:2305.09781, section 4.3) and Sequoia (arXiv:2402.12374, section 3.2).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core.records import Proposal, StopLaw
from jaxspec.core.tree import Tree


def excess(target: Float[Array, "*b V"], draft: Float[Array, "*b V"]) -> Float[Array, "*b V"]:
    """Returns max(target - exp(draft), 0); `target` holds probabilities, possibly scaled, and `draft` is a log-law."""
    return jnp.maximum(target - jnp.exp(draft), 0.0)


def child_tokens(proposal: Proposal) -> Int[Array, "N C"]:
    """Returns the tokens of each node's children by rank, -1 where nothing is proposed."""
    tree = proposal.tree
    return jnp.where(tree.children >= 0, proposal.tokens[jnp.maximum(tree.children, 0)], -1)


def reject_in_order(
    target: Float[Array, "V"],
    draft: Float[Array, "V"] | None,
    tokens: Int[Array, "C"],
    weight: Float[Array, ""] | float = 0.0,
    log_lenience: float = 0.0,
) -> tuple[Float[Array, "C"], Float[Array, ""], Float[Array, "V"]]:
    """Tests a node's children in draw order, and returns the log-weight of each child at its test.

    The target's law is kept as probabilities: the mass of the residual is the probability of the rejection, so a
    residual that matters does not underflow. The draft's law stays logarithmic, because removing likely tokens may
    leave only very unlikely ones.

    Args:
        target: the target's law after the node, as probabilities.
        draft: the log-law the children were drawn from; None for point masses.
        tokens: the children's tokens in the order they were drawn, -1 for none.
        weight: the log-weight of the path to the node. At 0, the path is accepted with certainty and the first
            child is tested against the whole of the target's law.
        log_lenience: a logarithm that is added to the draft's log-probabilities; if it is below 0, the rule is lossy.

    Returns:
        Each child's log-weight, given that its elder siblings were rejected (at weight 0, its log-probability of
        acceptance), `[C]`; the node's log-weight after all of them were rejected; and the residual law `[V]`, as
        probabilities.
    """
    vocab, weight, weights = jnp.arange(target.shape[0]), jnp.asarray(weight, target.dtype), []
    for rank in range(tokens.shape[0]):
        token, proposed = jnp.maximum(tokens[rank], 0), tokens[rank] >= 0
        law = (jnp.where(vocab == token, 0.0, -jnp.inf) if draft is None else draft) + log_lenience
        ratio = jnp.log(target[token]) - jnp.where(law[token] > -jnp.inf, law[token], jnp.inf)
        weights.append(jnp.where(proposed, jnp.minimum(weight + ratio, 0.0), -jnp.inf))
        residual = excess(jnp.exp(weight) * target, law)
        mass = residual.sum()
        total = mass - jnp.expm1(weight)  # mass + (1 - exp(weight))
        rejected = jnp.where(total > 0, jnp.log(mass) - jnp.log(jnp.where(total > 0, total, 1.0)), 0.0)
        weight = jnp.where(proposed, rejected, weight)
        target = jnp.where(proposed & (mass > 0), residual / jnp.where(mass > 0, mass, 1.0), target)
        if draft is not None:
            draft = jnp.where(proposed, remove_token(draft, token), draft)
    return jnp.stack(weights) if weights else jnp.zeros((0,), target.dtype), weight, target


def remove_token(law: Float[Array, "V"], token: Int[Array, ""]) -> Float[Array, "V"]:
    """Returns the log-law without `token`, renormalised; a law without another token is returned unchanged."""
    rest = jnp.where(jnp.arange(law.shape[0]) == token, -jnp.inf, law)
    rest = jnp.where(rest.max() > -jnp.inf, rest, law)
    return rest - jax.nn.logsumexp(rest)


def residual_law(
    law: Float[Array, "N V"],
    proposal: Proposal,
    node: Int[Array, ""],
    weight: Float[Array, ""] | float = 0.0,
    log_lenience: float = 0.0,
) -> Float[Array, "V"]:
    """Returns the target's log-law after a node whose children were all rejected.

    For `weight` and `log_lenience`, see `reject_in_order`.
    """
    draft, tokens = None if proposal.law is None else proposal.law[node], child_tokens(proposal)[node]
    target = reject_in_order(jnp.exp(law[node]), draft, tokens, weight, log_lenience)[2]
    return jnp.where((tokens >= 0).any(), jnp.log(target), law[node])


def sequential_acceptance(law: Float[Array, "N V"], proposal: Proposal, log_lenience: float = 0.0) -> StopLaw:
    """Tests the children of each node in order and descends into the first accepted child."""

    def acceptance(law: Array, draft: Array | None, tokens: Array) -> Array:
        return jnp.exp(reject_in_order(jnp.exp(law), draft, tokens, log_lenience=log_lenience)[0])

    accepted = jax.vmap(acceptance)(law, proposal.law, child_tokens(proposal))
    return StopLaw(
        stop_probabilities(accepted, proposal.tree),
        lambda node: residual_law(law, proposal, node, log_lenience=log_lenience),
    )


def stop_probabilities(acceptance: Float[Array, "N C"], tree: Tree) -> Float[Array, "N"]:
    """Returns the probability that the walk from the root stops at each node.

    Args:
        acceptance: the acceptance probability of each child, by rank, given that its elder siblings were rejected.
        tree: the tree of the proposal.
    """
    none = jnp.zeros_like(acceptance, shape=(acceptance.shape[0], 1))
    elder = jnp.cumprod(jnp.concatenate([none + 1, 1 - acceptance], axis=1), axis=1)
    taken = jnp.concatenate([acceptance * elder[:, :-1], none], axis=1)
    step = taken[jnp.maximum(tree.parents, 0), tree.ranks].at[0].set(1.0)
    return jnp.where(tree.ancestors, step, 1.0).prod(-1) * elder[:, -1]
