"""Attention of a window on a cache: blocks of the prefix, then the window itself, in one softmax."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import cache as caches
from jaxspec.core.cache import BLOCK
from jaxspec.core.records import KV


def attend(
    queries: Float[Array, "B H G T K"],
    prefix: KV,
    layer: int,
    length: Int[Array, "B"],
    window: tuple[Float[Array, "B H W K"], Float[Array, "B H W K"]],
    mask: Bool[Array, "B T W"],
) -> Float[Array, "B H G T K"]:
    """Softmax attention of each query on the row's `length` cached tokens and on the window's tokens it sees.

    G queries share a key head. The prefix is read in blocks of fixed size up to the longest row's length, with
    a running maximum and sum (Milakov and Gimelshein 2018, arXiv:1805.02867): a step costs what the text's
    length costs, not the cache's, and a block beyond a row's length adds exactly zero. Float32 inside.
    """
    batch, heads, groups, tokens, width = queries.shape
    precision = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    flat = (queries * width**-0.5).astype(queries.dtype).reshape(batch, heads, groups * tokens, width)

    def dot(equation: str, a: Array, b: Array) -> Array:
        return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)

    def scores(keys: Array, seen: Array) -> Array:
        return jnp.where(seen, dot("bhqk,bhsk->bhqs", flat, keys), -jnp.inf)

    def mix(weights: Array, values: Array) -> Array:
        return dot("bhqs,bhsk->bhqk", weights.astype(values.dtype), values)

    def block(i: Array | int) -> tuple[Array, Array]:
        keys, values = caches.read(prefix, layer, i)
        seen = i * BLOCK + jnp.arange(BLOCK) < length[:, None]
        return scores(keys, seen[:, None, None, :]), values

    def join(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, mixed = state
        score, values = block(i)
        new_top = jnp.maximum(top, score.max(-1))
        weights = jnp.exp(score - new_top[..., None])
        fade = jnp.exp(top - new_top)
        return new_top, total * fade + weights.sum(-1), mixed * fade[..., None] + mix(weights, values)

    # The first block goes with the window: most texts are short, and every token sees itself, so no sum is empty.
    keys, values = window
    seen = jnp.broadcast_to(mask[:, None, :, :], (batch, groups, tokens, mask.shape[-1]))
    seen = seen.reshape(batch, 1, groups * tokens, -1)
    # 0 x NaN is NaN: a broken node must spoil those who see it, and nobody else.
    finite = jnp.isfinite(values)
    spoiled = (seen & ~finite.all(-1)[:, :, None, :]).any(-1)
    first_score, first_values = block(0)
    own_score = scores(keys, seen)
    top = jnp.maximum(first_score.max(-1), own_score.max(-1))
    first, own = jnp.exp(first_score - top[..., None]), jnp.exp(own_score - top[..., None])
    mixed = mix(first, first_values) + mix(own, jnp.where(finite, values, 0))
    state = (top, first.sum(-1) + own.sum(-1), mixed)
    _, total, mixed = lax.fori_loop(1, (length.max() + BLOCK - 1) // BLOCK, join, state)
    mixed = jnp.where(spoiled[..., None], jnp.nan, mixed / total[..., None])
    return mixed.reshape(batch, heads, groups, tokens, width)
