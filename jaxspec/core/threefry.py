"""The random numbers of JAX's default keys, as expressions that a compiler fuses.

`jax.random` computes the same numbers, but on a CPU it loops over arrays in memory, which takes longer. The generator
is Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 4.2). Keys
are the data that `jax.random.key_data` returns, two words each.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)


def words(key: tuple[Array, Array], high: Array, low: Array) -> tuple[Array, Array]:
    """Returns the two words that the generator makes from the two words of a key and of a counter."""
    first, second = key
    schedule = (first, second, first ^ second ^ PARITY)
    left, right = high + schedule[0], low + schedule[1]
    for step in range(5):
        for bits in ROTATIONS[step % 2]:
            left = left + right
            right = left ^ (right << np.uint32(bits) | right >> np.uint32(32 - bits))
        left = left + schedule[(step + 1) % 3]
        right = right + schedule[(step + 2) % 3] + np.uint32(step + 1)
    return left, right


def fold_in(key: UInt32[Array, "... 2"], *numbers: Int[Array, "..."] | int) -> UInt32[Array, "... 2"]:
    """Returns the data of `jax.random.fold_in(key, number)`, applied to one number after the other."""
    pair = key[..., 0], key[..., 1]  # stacked at the end only, so that XLA:GPU folds all numbers in one kernel
    for number in numbers:
        pair = words(pair, jnp.uint32(0), jnp.asarray(number, jnp.int32).astype(jnp.uint32))
    return jnp.stack(pair, -1)


def bits(key: UInt32[Array, "... 2"], size: int, start: int = 0) -> UInt32[Array, "... S"]:
    """Returns the entries of `jax.random.bits(key, (start + size,), jnp.uint32)` from `start` on."""
    pair = key[..., 0, None], key[..., 1, None]
    left, right = words(pair, jnp.uint32(0), jax.lax.iota(jnp.uint32, size) + np.uint32(start))
    return left ^ right


def gumbel(key: UInt32[Array, "... 2"], size: int) -> Float[Array, "... S"]:
    """Returns `jax.random.gumbel(key, (size,), jnp.float32, mode="high")`."""
    return _gumbel(*(_unit(bits(key, size, start)) for start in (0, size)))


def gumbel_at(
    key: UInt32[Array, "... 2"], indices: Int[Array, "... M"], size: Int[Array, ""] | int
) -> Float[Array, "... M"]:
    """Returns entries of `gumbel(key, size)`."""

    def draw(start: Array) -> Float[Array, "... M"]:
        left, right = words((key[..., 0, None], key[..., 1, None]), jnp.uint32(0), indices.astype(jnp.uint32) + start)
        return _unit(left ^ right)

    return _gumbel(draw(jnp.uint32(0)), draw(jnp.asarray(size).astype(jnp.uint32)))


def _gumbel(high: Float[Array, "*b"], low: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Returns the Gumbel noise of two random numbers, the second of which adds digits to a small first."""
    rest = np.float32(2.0**-23) * low + np.finfo(np.float32).tiny
    return -jnp.log(-jnp.log1p(-jnp.where(high >= 0.5, high, high + rest)))


def _unit(bits: UInt32[Array, "*b"]) -> Float[Array, "*b"]:
    """Returns numbers in [0, 1) with 23 random bits."""
    return jax.lax.bitcast_convert_type(bits >> np.uint32(9) | np.uint32(0x3F800000), jnp.float32) - 1.0
