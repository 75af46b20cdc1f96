"""Attention of a window's tokens in one pass, for GPUs: no loop, and no copy of a layer of the cache."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import cache as caches
from jaxspec.core.records import KV
from jaxspec.core.sizes import BLOCK_SLOTS

MAX_ELEMENTS = 2**25
"""The largest number of elements of a layer's keys that are read at once. An H100 reads them in 20 us, which is the
time to launch ten kernels."""

MAX_SUMMED_TOKENS = 16
"""The largest number of tokens in a window whose scores are computed as sums of products."""


def block_size(prefix: KV) -> int:
    """Returns how many slots a GPU reads at once: all slots, or in large caches a power of two times `BLOCK_SLOTS`."""
    _, batch, heads, slots, width = prefix.keys.shape
    at_once = MAX_ELEMENTS // (batch * heads * width)
    if slots <= at_once:
        return slots
    size = BLOCK_SLOTS
    while 8 * size <= at_once and slots % (2 * size) == 0:  # in a loop the blocks are copied
        size *= 2
    return size


def attend_once(
    queries: Float[Array, "B H G T K"],
    prefix: KV,
    layer: int,
    length: Int[Array, "B"],
    window: tuple[Float[Array, "B H W K"], Float[Array, "B H W K"]],
    mask: Bool[Array, "B T W"],
    scale: float,
    first_seen: Int[Array, "B T"] | None,
    sinks: Float[Array, " Hq"] | None = None,
) -> Float[Array, "B H G T K"]:
    """Computes `jaxspec.models.attention.attend`.

    The window's values are mixed by a sum of products, and not by a matrix product. The window's scores are also sums
    of products if the window has few tokens: XLA would merge two matrix products that share an operand, and would copy
    the cache's and the window's arrays next to each other. If the window has many tokens, its scores are a matrix
    product with operands of their own. The last barrier stops XLA from fusing the scores into the concatenation, where
    one thread would compute each score and redo its rotary embedding.
    """
    batch, heads, groups, tokens, width = queries.shape
    precision = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    flat = (queries * scale).astype(queries.dtype).reshape(batch, heads, groups * tokens, width)
    keys, values = caches.read_layer(prefix, layer)
    own_keys, own_values = window

    def dot(equation: str, a: Array, b: Array) -> Array:
        return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)

    slots = jnp.arange(keys.shape[2])
    cached = slots < length[:, None, None, None]
    if first_seen is not None:
        cached &= slots >= jnp.tile(first_seen, (1, groups))[:, None, :, None]
    seen = jnp.broadcast_to(mask[:, None], (batch, groups, *mask.shape[1:])).reshape(batch, 1, groups * tokens, -1)
    # 0 x NaN is NaN: a non-finite node must affect the queries that see it, and no other queries.
    finite = jnp.isfinite(own_values)
    if own_keys.shape[2] > MAX_SUMMED_TOKENS:
        own_scores = dot("bhqk,bhwk->bhqw", *lax.optimization_barrier((flat, own_keys)))
        own_scores = jnp.where(finite.all(-1)[:, :, None], own_scores, jnp.nan)
    else:
        products = flat[:, :, :, None].astype(jnp.float32) * own_keys[:, :, None].astype(jnp.float32)
        own_scores = (products + jnp.where(finite, 0.0, jnp.nan)[:, :, None]).sum(-1)
    own_scores = lax.optimization_barrier(own_scores)
    scores = jnp.where(cached, dot("bhqk,bhsk->bhqs", flat, keys), -jnp.inf)
    parts = [scores, jnp.where(seen, own_scores, -jnp.inf)]
    if sinks is not None:
        sink = jnp.repeat(sinks.reshape(heads, groups), tokens, axis=1)[..., None]
        parts.append(jnp.broadcast_to(sink, (batch, *sink.shape)))
    weights = jax.nn.softmax(jnp.concatenate(parts, -1), -1).astype(values.dtype)
    near = jnp.where(finite, own_values, 0)[:, :, None].astype(jnp.float32)
    near = (weights[..., slots.size : slots.size + own_keys.shape[2], None].astype(jnp.float32) * near).sum(3)
    mixed = dot("bhqs,bhsk->bhqk", weights[..., : slots.size], values) + near
    return mixed.reshape(batch, heads, groups, tokens, width)
