"""Expected accepted length of a whole draft, by rule."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxspec.analysis import laws
from jaxspec.analysis.enumeration import Law, accepted_length
from jaxspec.analysis.laws import AnyArray
from jaxspec.analysis.position import match_probability
from jaxspec.core.checks import check_member
from jaxspec.core.draw import Noise
from jaxspec.core.rule import Rule
from jaxspec.core.topology import Topology
from jaxspec.errors import InvalidConfig, shown


class ChainLengths(NamedTuple):
    """Expected accepted lengths of a chain, given the drafted tokens."""

    token: Float[Array, "*b"]  # with the rule "rejection"
    block: Float[Array, "*b"]  # with the rules "block" and "traversal"
    bound: Float[Array, "*b"]  # the upper bound over all lossless rules


def chain_lengths(log_ratio: Float[AnyArray, "*b D"]) -> ChainLengths:
    """Returns the expected accepted length of a drafted chain by rule.

    The probability that at least i tokens are accepted is the product of the first i `min(1, ratio)` with the rule
    "rejection", and `w_i = min(1, w_(i-1) ratio_i)` with "block" (and "traversal") (Sun et al. 2025, arXiv:2403.10444).
    A lossless rule cannot emit a drafted text with a probability above the smaller of the text's two probabilities, so
    `min(1, product of the ratios)` is an upper bound for all lossless rules. The average of these lengths over drafts
    from the draft's law is the expected length of each rule.

    Args:
        log_ratio: log(target / draft) at each drafted token, `[*b, D]`.

    Returns:
        One length per chain, `[*b]` each.
    """
    laws.check_floats("log_ratio", log_ratio)
    sums = jnp.cumsum(log_ratio, -1)
    weights = sums - jnp.maximum(lax.cummax(sums, axis=sums.ndim - 1), 0.0)
    return ChainLengths(
        jnp.exp(jnp.cumsum(jnp.minimum(log_ratio, 0.0), -1)).sum(-1),
        jnp.exp(weights).sum(-1),
        jnp.exp(jnp.minimum(sums, 0.0)).sum(-1),
    )


def expected_length(rule: Rule, topology: Topology, target: Law, draft: Law) -> float:
    """Returns the exact expected accepted length of a round, by enumeration of all drafts.

    The time is exponential in the depth and the size of the tree, so use small vocabularies.

    Args:
        rule: any rule. A coupled rule needs a chain; its expected length is the sum over all texts of the products of
            `match_probability`.
        topology: the tree.
        target: the target's law after the tokens since the root.
        draft: the draft's law after the tokens since the root.

    Raises:
        InvalidConfig: a law is not a function that returns an array of floats, or the rule is coupled and the tree
            branches.
    """
    check_member("rule", rule, Rule)
    if not isinstance(topology, Topology):
        raise InvalidConfig(f"topology must be a Topology, such as jaxspec.chain(2), got {shown(topology)}")
    for name, law in (("target", target), ("draft", draft)):
        if not callable(law) or isinstance(law, type):
            raise InvalidConfig(f"{name} must be a function from the tokens since the root to a law, got {shown(law)}")
        laws.check_floats(f"{name}(())", first if isinstance(first := law(()), jax.Array) else np.asarray(first))
    if rule.noise is not Noise.SHARED:
        return accepted_length(rule, topology, target, draft)  # pyright: ignore[reportArgumentType]
    if not topology.is_chain:
        raise InvalidConfig(
            "the expected length of a coupled rule has a formula only for chains, got a tree with branches; "
            "decode with the rule and read the statistics instead"
        )

    def expected_below(text: tuple[int, ...], depth: int) -> float:
        if not depth:
            return 0.0
        with jax.enable_x64(True):
            matches = np.asarray(match_probability(jnp.asarray(target(text)), jnp.asarray(draft(text))))
        return float(
            sum(prob * (1 + expected_below((*text, token), depth - 1)) for token, prob in enumerate(matches) if prob)
        )

    return expected_below((), topology.shape.depth)
