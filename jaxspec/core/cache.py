"""Storage of caches of keys and values, and the only function that writes to them.

Bfloat16 values are stored as their bits, in uint16: XLA:CPU cannot slice bfloat16 arrays, and would convert the whole
cache to float32 and back in every round. On a GPU they are stored as bfloat16, because XLA:GPU reads a layer of a cache
directly in the kernel that multiplies it, unless their dtype must be changed first.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxspec.backend.layout import compact, default_platform, row_major
from jaxspec.core.checks import whole
from jaxspec.core.records import KV, Cache
from jaxspec.core.sizes import BLOCK_SLOTS as BLOCK_SLOTS
from jaxspec.core.sizes import round_to_blocks
from jaxspec.errors import InvalidConfig, shown


def storage_dtype(dtype, platform: str | None = None) -> jnp.dtype:
    """Returns the dtype in which a cache stores values of `dtype`; for `platform`, see `empty_cache`."""
    platform = default_platform() if platform is None else platform
    as_bits = jnp.dtype(dtype) == jnp.bfloat16 and platform != "gpu"
    return jnp.dtype(jnp.uint16 if as_bits else dtype)


def value_dtype(dtype) -> jnp.dtype:
    """Returns the dtype of the values in a cache stored as `dtype`."""
    return jnp.dtype(jnp.bfloat16 if dtype == jnp.uint16 else dtype)


def empty_cache(
    layers: int,
    batch: int,
    heads: int,
    capacity: int,
    width: int,
    dtype,
    value_width: int = 0,
    platform: str | None = None,
) -> Cache:
    """Returns an empty cache of zeros, as `attend` reads it.

    Args:
        layers: L, the number of layers.
        batch: B, the number of rows.
        heads: H, the number of key/value heads.
        capacity: the number of slots per row; it is rounded up to whole blocks.
        width: K, the width of a key.
        dtype: the dtype of keys and values; bfloat16 is stored as uint16 except on a GPU, a difference that `attend`
            and the decoder handle.
        value_width: the width of a value; 0 for the width of a key.
        platform: the platform of the devices, such as "cpu", "gpu" or "tpu"; None for JAX's default device.

    Raises:
        InvalidConfig: a size is not a whole number from 0, or `dtype` is not a dtype.
    """
    sizes = {"layers": layers, "batch": batch, "heads": heads, "capacity": capacity, "width": width}
    layers, batch, heads, capacity, width = (whole(name, size, 0) for name, size in sizes.items())
    value_width = whole("value_width", value_width, 0)
    try:
        number = dtype is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.number)
    except Exception:  # not a dtype
        number = False
    if not number:
        raise InvalidConfig(f"dtype must be a numeric dtype such as jnp.float32, got {shown(dtype)}")
    slots, stored = round_to_blocks(capacity), storage_dtype(jax.dtypes.canonicalize_dtype(dtype), platform)
    keys = jnp.zeros((layers, batch, heads, slots, width), stored)
    values = jnp.zeros((layers, batch, heads, slots, value_width or width), stored)
    return Cache(KV(keys, values), jnp.zeros((batch,), jnp.int32))


def read_block(kv: KV, layer: int, block: Array | int, size: int = BLOCK_SLOTS) -> KV:
    """Reads one block of `size` slots of one layer, `[B, H, size, K]`."""

    def read(slots: Array) -> Array:
        _, batch, heads, _, width = slots.shape
        part = lax.dynamic_slice(slots, (layer, 0, 0, block * size, 0), (1, batch, heads, size, width))
        return as_values(compact(part)[0])

    return KV(read(kv.keys), read(kv.values))


def read_layer(kv: KV, layer: int) -> KV:
    """Reads all slots of one layer, `[B, H, S, K]`."""
    return KV(as_values(kv.keys[layer]), as_values(kv.values[layer]))


def as_values(stored: Array) -> Array:
    """Returns a part of a cache in the dtype of its values: stored bits become bfloat16 again."""
    dtype = value_dtype(stored.dtype)
    return stored if stored.dtype == dtype else lax.bitcast_convert_type(stored, dtype)


def stack_layers(entries: Sequence[KV]) -> KV:
    """Stacks the keys and values of single layers, `[B, H, T, K]`, into arrays of all layers, `[L, B, H, T, K]`."""

    def stack(_: tuple, *layers: Array) -> Array:
        return jnp.stack(layers)

    return KV(*(_by_bits(stack, (), *layers) for layers in zip(*entries)))


def select_entries(kv: KV, nodes: Int[Array, "B M"]) -> KV:
    """Selects keys and values of window tokens, `[L, B, H, M, K]`; -1 selects the first token, as padding."""
    if kv.keys.shape[3] == nodes.shape[1] == 1:
        return kv

    def take(nodes: Array, a: Array) -> Array:
        index = jnp.maximum(nodes, 0)[None, :, None, :, None]
        return row_major(jnp.take_along_axis(a, index, axis=3, mode="promise_in_bounds"), on="cpu")

    return KV(*(_by_bits(take, nodes, a) for a in kv))


def as_bits(values: Array) -> Array:
    """Returns the bits of bfloat16 values, and values of other dtypes unchanged."""
    return lax.bitcast_convert_type(values, jnp.uint16) if values.dtype == jnp.bfloat16 else values


def _by_bits(move: Callable[..., Array], where: Any, *arrays: Array) -> Array:
    """Applies `move` to arrays; on a CPU it moves the bits of bfloat16 arrays.

    XLA:CPU would otherwise convert each value to float32 and back, with a function call for each value.
    """

    def cpu(where: Any, *arrays: Array) -> Array:
        return as_values(move(where, *map(as_bits, arrays)))

    @jax.custom_jvp
    def moved(where: Any, *arrays: Array) -> Array:
        return lax.platform_dependent(where, *arrays, cpu=cpu, default=move)

    @moved.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple[Array, Array]:  # bits have no derivatives
        return moved(*primals), move(primals[0], *tangents[1:])

    return moved(where, *arrays) if arrays[0].dtype == jnp.bfloat16 else move(where, *arrays)


def append_to_cache(
    cache: Cache, entries: KV, nodes: Int[Array, "B M"] | None, count: Int[Array, "B"], after: Array | int = 0
) -> Cache:
    """Writes the keys and values of some tokens of a window at the end of each row's text.

    This is `LanguageModel.commit` for a model whose cache is made by `empty_cache`.

    Args:
        cache: the cache.
        entries: keys and values of the window's T tokens, `[L, B, H, T, K]`.
        nodes: the indices in the window of the tokens to write, in the order of the text, -1 for padding; None for the
            window's tokens in their own order.
        count: the number of tokens to write in each row, 0 to M.
        after: an array that must be computed before the write, `[B, ...]`, such as the window's features or the tokens
            drawn from them. Without it, XLA may schedule the write before the last layer has read the cache, and then
            copies the whole cache in every round.
    """
    entries = entries if nodes is None else select_entries(entries, nodes)
    if not isinstance(after, int) and jnp.issubdtype(after.dtype, jnp.floating):
        after = jnp.isnan(after[:, 0, 0]).astype(jnp.int32)
    return Cache(write_entries(cache, entries, count, after), cache.length + count)


def write_entries(cache: Cache, entries: KV, count: Int[Array, "B"], after: Int[Array, "B"] | int = 0) -> KV:
    """Returns the slots with the first `count` (0 to M) of `entries` [L, B, H, M, K] written at each row's length.

    Entries past the count may also be written, but only to scratch slots. Values that are not finite are written as
    zeros, because a masked NaN still spreads (0 x NaN).

    Args:
        cache: the cache.
        entries: the keys and values of M tokens per row.
        count: the number of tokens to write in each row.
        after: a non-negative value on which the write depends, such as the drawn token; see `append_to_cache`.
    """
    start = jnp.minimum(cache.length, cache.length + after)

    def put(slots: Array, new: Array) -> Array:
        layers, batch, heads, size, width = new.shape

        def stored(new: Array) -> Array:
            new = jnp.where(jnp.isfinite(new), new, 0).astype(value_dtype(slots.dtype))
            return row_major(new if slots.dtype == new.dtype else lax.bitcast_convert_type(new, slots.dtype))

        # XLA turns a vmapped update into a scatter that transposes the cache twice. A loop updates the cache in place.
        def row_by_row(slots: Array) -> Array:
            entries = stored(new)

            def row(b: Array, slots: Array) -> Array:
                entry = lax.dynamic_slice_in_dim(entries, b, 1, axis=1)
                return lax.dynamic_update_slice(slots, entry, (0, b, 0, start[b], 0))

            return lax.fori_loop(0, batch, row, slots)

        # Rounds are short on a CPU, so writing a whole path would be slow when only one token was committed.
        def token_by_token(slots: Array) -> Array:
            bits = as_bits(new)

            def token(b: Array, at: Array, slots: Array) -> Array:
                entry = lax.dynamic_slice(bits, (0, b, 0, at, 0), (layers, 1, heads, 1, width))
                return lax.dynamic_update_slice(slots, stored(as_values(entry)), (0, b, 0, start[b] + at, 0))

            def row(b: Array, slots: Array) -> Array:
                return lax.fori_loop(0, count[b], functools.partial(token, b), slots)

            return lax.fori_loop(0, batch, row, slots)

        return lax.platform_dependent(slots, cpu=token_by_token if size > 1 else row_by_row, default=row_by_row)

    return KV(*jax.tree.map(put, tuple(cache.stores), tuple(entries)))
