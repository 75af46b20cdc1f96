"""Gumbel noise as a pure function of row key, absolute position and token.

Sampling is greedy decoding of perturbed scores: the token drawn from a law is `argmax(log law + noise)`
(Gumbel-max). Whoever draws the token at a position, with whatever draft, uses the same noise; that is why the
same key gives the same text.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

VERSION = 1
"""Bumped whenever the same key would give other noise; recorded with every result."""

_POSITION = 0x706F73  # the tag of noise keyed by position, apart from any other use of a row's key


def gumbel(keys: Array, positions: Int[Array, "B n"], vocab: int, wanted: Array | bool = True) -> Float[Array, "B n V"]:
    """The noise of the tokens at `positions` of each row.

    `wanted` is a scalar: where it is false (every row greedy) the noise is zero and costs nothing.
    `mode="high"` because the default draws no token of probability 1e-8: its noise ends at 15.9. Keys of
    the "rbg" kind must not be vmapped (all but the first key would be ignored), so they are mapped.
    """

    def draw() -> Array:
        def one(key: Array, position: Array) -> Array:
            key = jax.random.fold_in(jax.random.fold_in(key, _POSITION), position)
            return jax.random.gumbel(key, (vocab,), jnp.float32, mode="high")

        if str(jax.random.key_impl(keys)) == "threefry2x32":
            return jax.vmap(jax.vmap(one, (None, 0)))(keys, positions)
        return jax.lax.map(lambda row: jax.lax.map(lambda at: one(row[0], at), row[1]), (keys, positions))

    return jax.lax.cond(wanted, draw, lambda: jnp.zeros((*positions.shape, vocab), jnp.float32))
