"""Attention of a window's tokens in one pass, for GPUs: no loop, and no copy of a layer of the cache."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import cache as caches
from jaxspec.core.records import KV
from jaxspec.core.sizes import BLOCK

MOST = 2**25
"""Elements of a layer's keys that are read at once: in 20 us on an H100, as long as ten kernels take to launch."""

FEW = 16
"""Tokens of a window whose scores are sums of products."""


def block_size(prefix: KV) -> int:
    """Returns the number of slots that a GPU reads in a turn: all, or of large caches a power of two times `BLOCK`."""
    _, batch, heads, slots, width = prefix.keys.shape
    at_once = MOST // (batch * heads * width)
    if slots <= at_once:
        return slots
    size = BLOCK
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
) -> Float[Array, "B H G T K"]:
    """Computes `jaxspec.models.attention.attend`.

    The mixture of the window's values is a sum of products, and so are their scores if it has few tokens: XLA would
    merge a product that shares an operand with the cache's, and copy both to be adjacent. With many tokens the scores
    are a product with operands of its own. The last barrier keeps them out of the kernel that joins both scores, in
    which one thread would compute each, and rotate the query and the key for it.
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
    # 0 x NaN is NaN: a non-finite node must affect the queries that see it, and no others.
    finite = jnp.isfinite(own_values)
    if own_keys.shape[2] > FEW:
        own = dot("bhqk,bhwk->bhqw", *lax.optimization_barrier((flat, own_keys)))
        own = jnp.where(finite.all(-1)[:, :, None], own, jnp.nan)
    else:
        products = flat[:, :, :, None].astype(jnp.float32) * own_keys[:, :, None].astype(jnp.float32)
        own = (products + jnp.where(finite, 0.0, jnp.nan)[:, :, None]).sum(-1)
    own = lax.optimization_barrier(own)
    scores = jnp.where(cached, dot("bhqk,bhsk->bhqs", flat, keys), -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([scores, jnp.where(seen, own, -jnp.inf)], -1), -1).astype(values.dtype)
    near = jnp.where(finite, own_values, 0)[:, :, None].astype(jnp.float32)
    near = (weights[..., slots.size :, None].astype(jnp.float32) * near).sum(3)
    mixed = dot("bhqs,bhsk->bhqk", weights[..., : slots.size], values) + near
    return mixed.reshape(batch, heads, groups, tokens, width)
