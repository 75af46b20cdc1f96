"""What the rules keep of a whole draft."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxspec.analysis.enumeration import Law, accepted_length
from jaxspec.analysis.position import match
from jaxspec.core.draw import Noise
from jaxspec.core.protocols import Rule
from jaxspec.core.tree import Topology
from jaxspec.errors import InvalidConfig


class ChainLengths(NamedTuple):
    """Accepted tokens of a chain, given what was drafted."""

    token: Float[Array, "*b"]
    block: Float[Array, "*b"]
    bound: Float[Array, "*b"]


def chain_lengths(log_ratio: Float[Array, "*b D"]) -> ChainLengths:
    """The expected accepted length of a drafted chain; the mean over drafts from the draft's law is the rule's.

    The rule "rejection" keeps i tokens with the product of `min(1, ratio)`, "block" (and "traversal") with
    `w_i = min(1, w_(i-1) ratio_i)` (Sun et al. 2025, arXiv:2403.10444). No lossless rule keeps a text more often than
    the smaller of its two probabilities, on average `min(1, product of the ratios)`: the bound.

    Args:
        log_ratio: log of target/draft at each drafted token.
    """
    sums = jnp.cumsum(log_ratio, -1)
    weights = sums - jnp.maximum(lax.cummax(sums, axis=sums.ndim - 1), 0.0)
    return ChainLengths(
        jnp.exp(jnp.cumsum(jnp.minimum(log_ratio, 0.0), -1)).sum(-1),
        jnp.exp(weights).sum(-1),
        jnp.exp(jnp.minimum(sums, 0.0)).sum(-1),
    )


def expected_length(rule: Rule, topology: Topology, target: Law, draft: Law) -> float:
    """The exact mean of the tokens that a round accepts, for small vocabularies: all drafts are enumerated.

    Args:
        rule: any; a coupled one on chains, where its walk has a formula: the sum over all texts of the products of
            `match`.
        topology: the tree.
        target: the target's law after the tokens since the root.
        draft: the draft's.

    Raises:
        InvalidConfig: a coupled rule on a tree.
    """
    if rule.noise is not Noise.SHARED:
        return accepted_length(rule, topology, target, draft)  # pyright: ignore[reportArgumentType]
    if not topology.is_chain:
        raise InvalidConfig(
            "the coupled rule has no formula on trees with branches; decode, and look at the statistics"
        )

    def below(text: tuple[int, ...], depth: int) -> float:
        if not depth:
            return 0.0
        with jax.enable_x64(True):
            both = np.asarray(match(jnp.asarray(target(text)), jnp.asarray(draft(text))))
        return float(sum(share * (1 + below((*text, token), depth - 1)) for token, share in enumerate(both) if share))

    return below((), topology.shape.depth)
