"""What a draft is worth, by the acceptance of its tokens and its costs (Leviathan et al. 2023, arXiv:2211.17192)."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.errors import InvalidConfig


def expected_tokens(acceptance: Float[Array, "*b D"]) -> Float[Array, "*b D1"]:
    """Tokens of a round that drafts to depth 0, 1, ..., D, the target's own included; section 3.1.

    `acceptance` is that of each depth, where the one before was accepted.
    """
    reached = jnp.cumprod(jnp.asarray(acceptance), -1)
    return 1 + jnp.concatenate([jnp.zeros_like(reached, shape=(*reached.shape[:-1], 1)), jnp.cumsum(reached, -1)], -1)


def best_length(acceptance: float, cost: float, longest: int) -> int:
    """The length of a chain, up to `longest`, that decodes fastest if every token is accepted with one probability.

    A token more pays while `acceptance^(g + 1) (1 + (1 - acceptance)(g + 1 / cost)) > 1`, g the length without it:
    the speedup of section 3.3 has one maximum in g.

    Args:
        acceptance: 0 to 1.
        cost: of drafting one token, in target calls; those are taken to cost the same at any width.
        longest: the length not to be exceeded; with acceptance 1, or cost 0, longer is always better.

    Raises:
        InvalidConfig: a value outside its range.
    """
    if not 0 <= acceptance <= 1:
        raise InvalidConfig(f"acceptance must be from 0 to 1, got {acceptance!r}")
    if not (math.isfinite(cost) and cost >= 0):
        raise InvalidConfig(f"cost must be finite and at least 0, got {cost!r}")
    if isinstance(longest, bool) or not isinstance(longest, int) or longest < 0:
        raise InvalidConfig(f"longest must be a whole number from 0, got {longest!r}")

    def pays(length: int) -> bool:
        # Both sides times the cost, which may be 0.
        return acceptance ** (length + 1) * (cost + (1 - acceptance) * (length * cost + 1)) > cost

    length = 0
    while length < longest and (pays(length) or (acceptance == 1 and cost < 1)):
        length += 1
    return length
