"""Attention of a window on a cache: blocks of the prefix, then the window itself, in one softmax."""

import jax
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
    paths: Int[Array, "B T D1"] | None = None,
    scale: float = 1.0,
    first_seen: Int[Array, "B T"] | None = None,
) -> Float[Array, "B H G T K"]:
    """Computes softmax attention of each query on the row's cached tokens and on the window's tokens it sees.

    This is the attention of a `LanguageModel` of your own: see docs/own-model.md. B rows, H key heads, G queries that
    share one, T new tokens, W = P + T tokens of the window (P earlier ones of it first), K wide; D1 tokens of a path.

    The prefix is read in blocks of fixed size up to the longest row's length, with
    a running maximum and sum (Milakov and Gimelshein 2018, arXiv:1805.02867): a step costs what the text's
    length costs, not the cache's, and a block beyond a row's length adds exactly zero. Float32 inside. Of a cache
    without slots nothing is read; then there is no loop, and a gradient (but `paths` needs slots).

    A sum over the prefix and one over the window, added, round otherwise than one over a longer prefix. With
    `paths` the keys are parted by their distance from the query instead, the last D and itself from the rest, so
    that a token's bits do not depend on which of its ancestors are cached; it costs a gather per query.

    Args:
        queries: of the T new tokens, rotated by their positions where the model does so.
        prefix: `cache.kv`, of all layers.
        layer: which of them to read.
        length: `cache.length`: slots at or past it are not read.
        window: keys and values of the window in this layer: those of `past[layer]`, where `past` was given, and then
            those of the new tokens.
        mask: `window.mask`: which of the W tokens each of the T sees, itself among them.
        paths: `window.paths`, or None.
        scale: factor of the scores, `K ** -0.5` in most models.
        first_seen: the first position each query sees, for sliding attention; None for all. Blocks that no query
            sees are not read. In `mask` it is the caller's to apply.

    Returns:
        The mixed values in float32.
    """
    batch, heads, groups, tokens, width = queries.shape
    precision = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    flat = (queries * scale).astype(queries.dtype).reshape(batch, heads, groups * tokens, width)

    def dot(equation: str, a: Array, b: Array) -> Array:
        return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)

    def scores(keys: Array, seen: Array) -> Array:
        return jnp.where(seen, dot("bhsk,bhqk->bhsq", keys, flat).swapaxes(2, 3), -jnp.inf)

    def mix(weights: Array, values: Array) -> Array:
        return dot("bhqs,bhsk->bhqk", weights.astype(values.dtype), values)

    def block(i: Array | int) -> tuple[Array, Array]:
        keys, values = caches.read(prefix, layer, i)
        slots = i * BLOCK + jnp.arange(BLOCK)
        seen = slots < border
        return scores(keys, seen if floor is None else seen & (slots >= floor)), values

    def join(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, mixed = state
        score, values = block(i)
        new_top = jnp.maximum(top, score.max(-1))
        weights = jnp.exp(score - new_top[..., None])
        fade = jnp.exp(top - new_top)
        return new_top, total * fade + weights.sum(-1), mixed * fade[..., None] + mix(weights, values)

    keys, values = window
    seen = jnp.broadcast_to(mask[:, None, :, :], (batch, groups, tokens, mask.shape[-1]))
    seen = seen.reshape(batch, 1, groups * tokens, -1)
    # 0 x NaN is NaN: a broken node must spoil those who see it, and nobody else.
    finite = jnp.isfinite(values)
    spoiled = (seen & ~finite.all(-1)[:, :, None, :]).any(-1)
    values = jnp.where(finite, values, 0)
    floor = None if first_seen is None else jnp.tile(first_seen, (1, groups))[:, None, :, None]
    first_block = 0 if first_seen is None else jnp.maximum(first_seen.min(), 0) // BLOCK
    if paths is None:
        border = length[:, None, None, None]
        own_score = scores(keys, seen)
    else:
        keys, values, real, border = _near(prefix, layer, length, (keys, values), paths, groups)
        if floor is not None:  # place j of D + 1 stands D - j before the query
            ahead = jnp.tile(length[:, None] + (paths >= 0).sum(-1) - 1, (1, groups))[:, None, :, None]
            real &= ahead - jnp.arange(paths.shape[-1])[::-1] >= floor
        own_score = jnp.where(real, dot("bhqk,bhqjk->bhqj", flat, keys), -jnp.inf)

    # The first block goes with the window: most texts are short, and every token sees itself, so no sum is empty.
    top, first = own_score.max(-1), block(first_block) if prefix.keys.shape[3] else None
    if first is not None:
        top = jnp.maximum(first[0].max(-1), top)
    own = jnp.exp(own_score - top[..., None])
    total = own.sum(-1)
    mixed = mix(own, values) if paths is None else dot("bhqj,bhqjk->bhqk", own.astype(values.dtype), values)
    if first is not None:  # without a cache there is no loop either: it has no gradient
        weight = jnp.exp(first[0] - top[..., None])
        state = (top, weight.sum(-1) + total, mix(weight, first[1]) + mixed)
        _, total, mixed = lax.fori_loop(first_block + 1, (length.max() + BLOCK - 1) // BLOCK, join, state)
    mixed = jnp.where(spoiled[..., None], jnp.nan, mixed / total[..., None])
    return mixed.reshape(batch, heads, groups, tokens, width)


def _near(
    prefix: KV,
    layer: int,
    length: Int[Array, "B"],
    window: tuple[Array, Array],
    paths: Int[Array, "B T D1"],
    groups: int,
) -> tuple[Array, Array, Array, Array]:
    """The D + 1 tokens of each query's text that end with itself, from cache or window.

    Returns their keys and values `[B, H, G T, D1, K]`, which of them exist `[B, 1, G T, D1]`, and where the rest of
    the text ends `[B, 1, G T, 1]`.
    """
    batch, _, far = paths.shape
    far -= 1
    depth = (paths >= 0).sum(-1) - 1  # [B, T]
    place = length[:, None, None] + depth[:, :, None] - far + jnp.arange(far + 1)  # [B, T, D1], absolute
    below = place - length[:, None, None]
    node = jnp.take_along_axis(paths, jnp.maximum(below, 0), axis=2)
    start = jnp.maximum(length - far, 0)  # the cache's last D entries come first in the pool
    index = jnp.where(below >= 0, far + node, place - start[:, None, None])
    real = place >= 0
    index = jnp.tile(jnp.where(real, index, 0), (1, groups, 1)).reshape(batch, 1, -1, 1)

    def gather(new: Array, slots: Array) -> Array:
        tail = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, far, axis=1))(slots[layer], start)
        if tail.dtype != new.dtype:
            tail = lax.bitcast_convert_type(tail, new.dtype)
        pool = jnp.concatenate([tail, new], axis=2)
        near = jnp.take_along_axis(pool, index, axis=2)
        return near.reshape(batch, near.shape[1], -1, far + 1, near.shape[-1])

    border = jnp.tile(length[:, None] + depth - far, (1, groups))[:, None, :, None]
    real = jnp.tile(real, (1, groups, 1))[:, None]
    return gather(window[0], prefix.keys), gather(window[1], prefix.values), real, border
