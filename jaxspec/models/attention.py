"""Attention of a window's tokens to the cache and the window, in one softmax over blocks of prefix and window."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import cache as caches
from jaxspec.core.cache import BLOCK_SLOTS
from jaxspec.core.records import KV, Cache, Window
from jaxspec.errors import InvalidConfig
from jaxspec.kernels import calls
from jaxspec.models import query_chunks
from jaxspec.models.attention_once import attend_once, block_size
from jaxspec.models.execution import Execution

NO_SINKS = "attention='pallas' has no attention sinks; use 'xla'"


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
    execution: Execution = Execution(),
    sinks: Float[Array, " Hq"] | None = None,
) -> Float[Array, "B H G T K"]:
    """Computes softmax attention of each query to the row's cached tokens and to the window tokens that the query sees.

    Use it in a `LanguageModel` of your own; see docs/own-model.md. Shapes: B rows, H key/value heads, G query heads per
    key/value head, T new tokens, W = P + T tokens of the window (the P earlier tokens first), head width K, and paths
    of D1 = D + 1 tokens.

    The prefix is read in blocks of fixed size up to the length of the longest row, with a running maximum and sum
    (Milakov and Gimelshein 2018, arXiv:1805.02867). The cost therefore depends on the text's length and not on the
    cache's capacity, and a block past a row's length adds exactly zero. Accumulation is in float32. A cache without
    slots is not read. The function then has no loop and is differentiable in reverse mode (`paths` needs slots).

    Without `paths`, sums over the prefix and over the window are added, which rounds differently as tokens move from
    the window to the cache. With `paths`, the last D + 1 tokens of each query's text are summed separately. The bits of
    the result then do not depend on which of these tokens are cached, at the cost of one gather per query. On a GPU and
    without `paths`, blocks are larger, and all slots of a cache of moderate size are read at once.

    Args:
        queries: the queries of the T new tokens, with position embeddings applied.
        prefix: `cache.stores`, of all layers.
        layer: the index of the layer to read.
        length: `cache.length`; slots at or past it are not read.
        window: the keys and values of the window in this layer: first the entries of `past[layer]`, if there is a
            `past`, then the keys and values of the new tokens.
        mask: `window.mask`: which of the W tokens each of the T tokens sees, including itself.
        paths: `window.paths`, or None.
        scale: the factor by which scores are multiplied, `K ** -0.5` in most models.
        first_seen: for sliding-window attention, the first position that each query sees; None for all. Blocks that no
            query sees are not read. The caller must also apply this limit to `mask`.
        execution: how to compute the attention. Kernels need a cache with slots, and they ignore `paths`. The CPU
            kernel sums in the order of positions, so that the bits do not depend on which tokens are cached.
        sinks: for each of the H G query heads, a score that takes part in its softmax and has no value; None for no
            sinks. There are no kernels with sinks, so XLA's operations compute them on a CPU.

    Returns:
        The attention outputs, in float32.

    Raises:
        InvalidConfig: there is no Pallas kernel for the platform, the type or the width of heads, or with sinks.
    """
    execution = execution.resolve()
    if sinks is not None and execution.attention == "pallas":
        raise InvalidConfig(NO_SINKS)
    assert execution.platform is not None
    if execution.attention == "pallas" and prefix.keys.shape[3]:
        from jaxspec.models.attention_pallas import attend_pallas  # a third of a second

        return attend_pallas(queries, prefix, layer, length, window, mask, scale, first_seen, execution.platform)
    if not prefix.keys.shape[3] and paths is None and queries.shape[3] > query_chunks.QUERIES_AT_ONCE:
        return _without_cache(queries, prefix, length, window, mask, scale, first_seen, sinks)
    size = block_size(prefix) if execution.on_gpu and paths is None else BLOCK_SLOTS
    if size == prefix.keys.shape[3] > BLOCK_SLOTS:
        return attend_once(queries, prefix, layer, length, window, mask, scale, first_seen, sinks)
    if not execution.kernels or not prefix.keys.shape[3] or sinks is not None:
        return _with_xla(queries, prefix, layer, length, window, mask, paths, scale, first_seen, size, sinks)

    def kernel(queries, prefix, length, window, mask, paths, first_seen):
        return calls.attend_with_kernel(queries, prefix, layer, length, window, mask, scale, first_seen)

    def other(queries, prefix, length, window, mask, paths, first_seen):
        return _with_xla(queries, prefix, layer, length, window, mask, paths, scale, first_seen, size)

    arrays = (queries, prefix, length, tuple(window), mask, paths, first_seen)
    return lax.platform_dependent(*arrays, cpu=kernel, default=other)


def sliding_window_mask(window: Window, size: int | None) -> tuple[Bool[Array, "B T PT"], Int[Array, "B T"] | None]:
    """Restricts the window's mask to sliding-window attention.

    Args:
        window: the tokens to read.
        size: the number of tokens that each token sees, including itself; None for all.

    Returns:
        The mask, and the first position that each token sees; None for all.

    Raises:
        InvalidConfig: the window has earlier tokens and is longer than `size`.
    """
    if size is None:
        return window.mask, None
    tokens, width = window.mask.shape[1:]
    first = window.positions - size + 1
    if width <= size:  # no two tokens of the window can be too far apart
        return window.mask, first
    if width > tokens:
        raise InvalidConfig(
            f"the draft tree is read in windows of {width} tokens, but the model's sliding attention sees only "
            f"{size}; use a smaller tree"
        )
    return window.mask & (window.positions[:, None, :] >= first[:, :, None]), first


def _without_cache(
    queries: Array,
    prefix: KV,
    length: Array,
    window: tuple[Array, Array],
    mask: Array,
    scale: float,
    first_seen: Array | None,
    sinks: Array | None,
) -> Array:
    """Computes `attend` without a cache for many queries, whose scores would be a large array."""

    def compute(queries: Array, mask: Array, first_seen: Array | None) -> Array:
        return _with_xla(queries, prefix, 0, length, window, mask, None, scale, first_seen, BLOCK_SLOTS, sinks)

    arrays, size = (queries, mask, first_seen), query_chunks.QUERIES_AT_ONCE
    return query_chunks.attend_in_chunks(compute, size, arrays, (3, 1, 1), (0, True, 0), out=3)


def _with_xla(
    queries: Array,
    prefix: KV,
    layer: int,
    length: Array,
    window: tuple[Array, Array],
    mask: Array,
    paths: Array | None,
    scale: float,
    first_seen: Array | None,
    size: int,
    sinks: Array | None = None,
) -> Array:
    """Computes `attend` with XLA's own operations, in blocks of `size` slots."""
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
        keys, values = caches.read_block(prefix, layer, i, size)
        slots = i * size + jnp.arange(size)
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
    # 0 x NaN is NaN: a non-finite node must affect the queries that see it, and no other queries.
    finite = jnp.isfinite(values)
    spoiled = (seen & ~finite.all(-1)[:, :, None, :]).any(-1)
    values = jnp.where(finite, values, 0)
    floor = None if first_seen is None else jnp.tile(first_seen, (1, groups))[:, None, :, None]
    first_block = 0 if first_seen is None else jnp.maximum(first_seen.min(), 0) // size
    if paths is None:
        border = length[:, None, None, None]
        own_score = scores(keys, seen)
    else:
        keys, values, real, border = _gather_near(prefix, layer, length, (keys, values), paths, groups)
        if floor is not None:  # entry j of D + 1 is D - j positions before the query
            position = jnp.tile(length[:, None] + (paths >= 0).sum(-1) - 1, (1, groups))[:, None, :, None]
            real &= position - jnp.arange(paths.shape[-1])[::-1] >= floor
        own_score = jnp.where(real, dot("bhqk,bhqjk->bhqj", flat, keys), -jnp.inf)

    # The first block is read with the window: most texts are short, and every token sees itself, so no sum is empty.
    first = block(first_block) if prefix.keys.shape[3] else None
    top, near, total = _begin(own_score, None if first is None else first[0], sinks)
    mixed = mix(near, values) if paths is None else dot("bhqj,bhqjk->bhqk", near.astype(values.dtype), values)
    if first is not None:  # without slots there is no loop, which would have no reverse-mode gradient
        weight = jnp.exp(first[0] - top[..., None])
        state = (top, weight.sum(-1) + total, mix(weight, first[1]) + mixed)
        with jax.named_scope("blocks"):
            _, total, mixed = lax.fori_loop(first_block + 1, (length.max() + size - 1) // size, join, state)
    mixed = jnp.where(spoiled[..., None], jnp.nan, mixed / total[..., None])
    return mixed.reshape(batch, heads, groups, tokens, width)


def _begin(own: Array, first: Array | None, sinks: Array | None) -> tuple[Array, Array, Array]:
    """Returns the maximum of scores, the exponentials of the window's scores, and their sum, to which sinks add.

    Args:
        own: the scores of the window `[B, H, G T, W]`.
        first: the scores of the first block of the cache `[B, H, G T, S]`, or None.
        sinks: see `attend`.
    """
    top = own.max(-1) if first is None else jnp.maximum(first.max(-1), own.max(-1))
    if sinks is None:
        near = jnp.exp(own - top[..., None])
        return top, near, near.sum(-1)
    _, heads, queries, _ = own.shape
    sink = jnp.repeat(sinks.reshape(heads, -1), heads * queries // sinks.size, axis=1)
    top = jnp.maximum(top, sink)
    near = jnp.exp(own - top[..., None])
    return top, near, near.sum(-1) + jnp.exp(sink - top)


def _gather_near(
    prefix: KV,
    layer: int,
    length: Int[Array, "B"],
    window: tuple[Array, Array],
    paths: Int[Array, "B T D1"],
    groups: int,
) -> tuple[Array, Array, Array, Array]:
    """Gathers the last D + 1 tokens of each query's text, which ends with the query, from the cache and the window.

    Returns:
        The keys and the values of these tokens `[B, H, G T, D1, K]`, whether each token exists `[B, 1, G T, D1]`, and
        the length of the text before these tokens `[B, 1, G T, 1]`.
    """
    batch, _, height = paths.shape
    height -= 1
    depth = (paths >= 0).sum(-1) - 1  # [B, T]
    position = length[:, None, None] + depth[:, :, None] - height + jnp.arange(height + 1)  # [B, T, D1]
    in_window = position - length[:, None, None]
    node = jnp.take_along_axis(paths, jnp.maximum(in_window, 0), axis=2)
    start = jnp.maximum(length - height, 0)  # the pool begins with the last D entries of the cache
    index = jnp.where(in_window >= 0, height + node, position - start[:, None, None])
    real = position >= 0
    index = jnp.tile(jnp.where(real, index, 0), (1, groups, 1)).reshape(batch, 1, -1, 1)

    def gather(new: Array, slots: Array) -> Array:
        tail = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, height, axis=1))(slots[layer], start)
        if tail.dtype != new.dtype:
            tail = lax.bitcast_convert_type(tail, new.dtype)
        pool = jnp.concatenate([tail, new], axis=2)
        near = jnp.take_along_axis(pool, index, axis=2)
        return near.reshape(batch, near.shape[1], -1, height + 1, near.shape[-1])

    border = jnp.tile(length[:, None] + depth - height, (1, groups))[:, None, :, None]
    real = jnp.tile(real, (1, groups, 1))[:, None]
    return gather(window[0], prefix.keys), gather(window[1], prefix.values), real, border


def side_by_side(mixed: Float[Array, "B H G T K"]) -> Float[Array, "B T J"]:
    """Returns the outputs of all heads of a token in one row."""
    batch, _, _, tokens, _ = mixed.shape
    return jnp.moveaxis(mixed, 3, 1).reshape(batch, tokens, -1)


def attend_split(
    heads: tuple[Float[Array, "B H G T K"], KV],
    cache: Cache,
    layer: int,
    past: KV | None,
    mask: Array,
    paths: Array | None,
    scale: float,
    first_seen: Array | None,
    execution: Execution,
    sinks: Float[Array, " Hq"] | None = None,
) -> tuple[Float[Array, "B T J"], KV]:
    """Computes `jaxspec.models.layer_calls.LayerCalls.attend` for heads that are rotated."""
    queries, new = heads
    seen = new if past is None else KV(*(jnp.concatenate(pair, 2) for pair in zip(past, new)))
    arrays = queries, cache.stores, layer, cache.length, seen, mask, paths, scale, first_seen
    return side_by_side(attend(*arrays, execution, sinks)), new
