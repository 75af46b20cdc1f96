"""Attention of a window's tokens as one Pallas kernel, for TPUs (Mosaic) and GPUs (Triton).

The text of a query is summed in the order of positions, in two parts. With G = `GROUP_TOKENS`, all tokens but the last
G to 2 G - 1 are read in blocks of slots, with a running maximum and sum. The last tokens are added one after the other,
whether they are in the cache or in the window. The boundary between the parts depends only on the position of the
query, blocks begin at multiples of their size, and every product has the same shape. The order of the sums therefore
depends neither on the numbers of rows and of tokens of the window, nor on which tokens are cached, as long as the paths
of the window have at most `GROUP_TOKENS` tokens.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.cache import as_values
from jaxspec.core.records import KV
from jaxspec.core.sizes import BLOCK_SLOTS
from jaxspec.errors import InvalidConfig

GROUP_TOKENS = 32
"""The part of a text that is summed token by token begins at a multiple of this number of slots. One product also reads
this number of tokens of the window."""
QUERIES_PER_PRODUCT = {"tpu": 64, "gpu": 16}
"""The number of queries in one product. A TPU reads the cache once for all queries; a GPU runs the products in
parallel."""
SLOTS_PER_PRODUCT = {"tpu": BLOCK_SLOTS, "gpu": 64}
"""The number of slots in one product."""
MAX_MASK_ELEMENTS = 2**18
"""The largest product of the number of queries of a head and the number of tokens in the window. The limit exists
because a TPU holds the mask in its on-chip memory."""
LOWEST_SCORE = -1e30  # finite, because -inf - -inf is not a number

SoftmaxSums = tuple[
    Array, Array, Array
]  # the maximum, the sum of weights, the weighted sum of values: [R, 1], [R, 1], [R, K]
TokenGroup = tuple[
    Array, Callable, Array
]  # scores of GROUP tokens, a token's value by its number, what each query sees


def attend_pallas(
    queries: Float[Array, "B H G T K"],
    prefix: KV,
    layer: int,
    length: Int[Array, "B"],
    window: tuple[Float[Array, "B H W K"], Float[Array, "B H W K"]],
    mask: Bool[Array, "B T W"],
    scale: float,
    first_seen: Int[Array, "B T"] | None,
    platform: str,
    interpret: bool = False,
) -> Float[Array, "B H G T K"]:
    """Computes `jaxspec.models.attention.attend`.

    The tokens of the window that a query sees must be the last tokens of its text, in order.

    Args:
        queries, prefix, layer, length, window, mask, scale, first_seen: see `attend`.
        platform: "tpu" or "gpu".
        interpret: whether to run the kernel as plain operations, on any device.

    Raises:
        InvalidConfig: there is no kernel for this platform, type or width of heads.
    """
    batch, heads, groups, tokens, width = queries.shape
    check_pallas(platform, queries.dtype, width, interpret)
    rows = QUERIES_PER_PRODUCT[platform]
    spans, seen, limits = _limits(length, mask, first_seen, groups, platform)
    own = jnp.concatenate(
        [_pad(part, GROUP_TOKENS, 2) for part in window], 2
    )  # one array, which takes one launch on a GPU
    flat = queries.reshape(batch, heads, groups * tokens, width)
    if platform == "tpu":
        arrays = _pad((flat * scale).astype(flat.dtype), rows, 2), *prefix, own, own, seen, limits
        out = _on_tpu(layer, spans, arrays, interpret)
    else:
        arrays = _pad(flat, rows, 2), *prefix, own, own, _side_by_side(seen, limits, spans)
        out = _on_gpu(jnp.full(1, layer, jnp.int32), arrays, interpret, scale)
    return out[:, :, : groups * tokens].reshape(batch, heads, groups, tokens, width)


def query_rows(count: int) -> int:
    """Returns the number of rows of padded queries of a head on a GPU, for `attend_rows`."""
    return count + -count % QUERIES_PER_PRODUCT["gpu"]


def window_slots(tokens: int) -> int:
    """Returns the number of tokens of a padded window, for `attend_rows`."""
    return tokens + -tokens % GROUP_TOKENS


@functools.partial(jax.jit, static_argnames=("groups", "rows", "scale", "interpret"))
def attend_rows(
    queries: Float[Array, "B H Q K"],
    prefix: KV,
    layer: Int[Array, "1"],
    length: Int[Array, "B"],
    window: tuple[Float[Array, "B H W K"], Float[Array, "B H W K"]],
    mask: Bool[Array, "B T P"],
    scale: float,
    first_seen: Int[Array, "B T"] | None,
    groups: int,
    rows: int,
    *,
    interpret: bool = False,
) -> Float[Array, "M J"]:
    """Computes `attend_pallas` on a GPU, from padded heads to the rows that the next product reads, in one launch.

    The layer is an array, so that the layers of a network trace and lower the kernel once.

    Args:
        queries: the queries of a head: those of token t in group g are row g T + t of the first G T rows. What the
            other rows hold has no effect.
        prefix, length, scale, first_seen: see `attend_pallas`.
        layer: the index of the layer to read.
        window: keys and values, padded to a multiple of `GROUP_TOKENS` tokens. What the padding holds has no effect.
        mask: which tokens of the window each token sees; the padding is left out.
        groups: G, the number of queries for each key.
        rows: M, the number of rows of the result, at least B T.
        interpret: whether to run the kernel as plain operations, on any device.

    Returns:
        The outputs of all heads of a token side by side, rounded to the type of the queries. Rows after the first B T
        are undefined.
    """
    check_pallas("gpu", queries.dtype, queries.shape[-1], interpret)
    spans, seen, limits = _limits(length, mask, first_seen, groups, "gpu")
    table = _side_by_side(seen, limits, spans)
    return _on_gpu(layer, (queries, *prefix, *window, table), interpret, scale, mask.shape[1], groups, rows)


def _limits(
    length: Int[Array, "B"],
    mask: Bool[Array, "B T W"],
    first_seen: Int[Array, "B T"] | None,
    groups: int,
    platform: str,
) -> tuple[Array, Array, Array]:
    """Returns which slots each row reads, and which tokens of the window and slots each query sees, padded."""
    if (most := int((MAX_MASK_ELEMENTS / groups) ** 0.5)) < mask.shape[-1]:
        raise InvalidConfig(f"attention='pallas' reads at most {most} tokens at once, got {mask.shape[-1]}; use 'xla'")
    rows, size = QUERIES_PER_PRODUCT[platform], SLOTS_PER_PRODUCT[platform]
    first = jnp.zeros(mask.shape[:2], jnp.int32) if first_seen is None else jnp.maximum(first_seen, 0)
    position = jnp.maximum(length[:, None], first) + mask.sum(-1) - 1
    near = jnp.maximum(position // GROUP_TOKENS - 1, 0) * GROUP_TOKENS
    begin = first.min(1) // size
    end = jnp.maximum(-(-jnp.minimum(near.max(1), length) // size), begin + 1)
    spans = jnp.stack([begin, end, length, jnp.maximum(length // GROUP_TOKENS - 1, 0)], -1).astype(jnp.int32)
    limits = jnp.tile(jnp.stack([first, near], -1), (1, groups, 1)).astype(jnp.int32)
    seen = jnp.tile(mask, (1, groups, 1)).astype(jnp.int32)
    return spans, _pad(_pad(seen, rows, 1), GROUP_TOKENS, 2), _pad(limits, rows, 1)


def _side_by_side(seen: Int[Array, "B R W"], limits: Int[Array, "B R 2"], spans: Int[Array, "B 4"]) -> Array:
    """Returns the integers that a program reads, in one array `[B, R, W + 8]`, which XLA:GPU computes in one kernel."""
    spans = jnp.broadcast_to(spans[:, None], (*seen.shape[:2], spans.shape[-1]))
    return jnp.concatenate([seen, limits, spans, jnp.zeros_like(limits)], -1)


def check_pallas(platform: str, dtype: Any, width: int, interpret: bool = False) -> None:
    """Raises InvalidConfig if there is no kernel for this platform, dtype of the cache and width of heads."""
    if platform not in QUERIES_PER_PRODUCT:
        raise InvalidConfig(f"attention='pallas' is for TPUs and GPUs, but the model runs on {platform!r}; use 'xla'")
    if (name := jnp.dtype(dtype).name) not in ("float32", "bfloat16"):
        raise InvalidConfig(f"attention='pallas' reads float32 and bfloat16, but the cache holds {name}; use 'xla'")
    tiled = width % 128 == 0 if platform == "tpu" else width >= 16 and width & (width - 1) == 0
    if not tiled and not interpret:
        needed = "a multiple of 128 on a TPU" if platform == "tpu" else "a power of two, at least 16, on a GPU"
        raise InvalidConfig(f"attention='pallas' needs heads whose width is {needed}, got {width}; use 'xla'")


def _pad(values: Array, multiple: int, axis: int) -> Array:
    sizes = [(0, -values.shape[axis] % multiple if i == axis else 0) for i in range(values.ndim)]
    return jnp.pad(values, sizes)


def _on_tpu(layer: int, spans: Array, arrays: Sequence[Array], interpret: bool) -> Array:
    """Runs a step for each row, head and block of the text; the cache's blocks are fetched one step ahead."""
    flat, keys, values, *others = arrays
    batch, heads, rows, width = flat.shape
    slots, window = keys.shape[3], others[0].shape[2] // 2

    def block(b: Array, h: Array, i: Array, spans: Any) -> tuple:
        return layer, b, h, jnp.minimum(spans[b, 0] + i, spans[b, 1] - 1), 0

    def near(offset: int) -> Callable:
        return lambda b, h, i, spans: (layer, b, h, jnp.minimum(spans[b, 3] + offset, slots // GROUP_TOKENS - 1), 0)

    def cached(count: int, index: Callable) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, count, width), index)

    def each(count: int, part: int = 0) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, count, width), lambda b, h, i, spans: (b, h, part, 0))

    def shared(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda b, h, i, spans: (b, 0, 0))

    nearby = [cached(GROUP_TOKENS, near(offset)) for offset in (0, 1)]
    kernel = pl.pallas_call(
        _tpu_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, (spans[:, 1] - spans[:, 0]).max()),
            in_specs=[
                each(rows),
                *[cached(SLOTS_PER_PRODUCT["tpu"], block)] * 2,
                *nearby * 2,
                *[each(window, part) for part in (0, 1)],
                shared(rows, window),
                shared(rows, 2),
            ],
            out_specs=each(rows),
            scratch_shapes=[
                *[pltpu.VMEM((rows, count), jnp.float32) for count in (1, 1, width)],
                pltpu.VMEM((2 * GROUP_TOKENS + window, width), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(flat.shape, jnp.float32),
        interpret=interpret,
        name="attend",
    )
    return kernel(spans, flat, keys, values, *[keys] * 2, *[values] * 2, *others)


def _tpu_kernel(
    spans: Any, q: Any, k: Any, v: Any, k0: Any, k1: Any, v0: Any, v1: Any, own_k: Any, own_v: Any, seen: Any,
    limits: Any, out: Any, top: Any, total: Any, mixed: Any, pool: Any,
) -> None:  # fmt: skip
    row, step, tile = pl.program_id(0), pl.program_id(2), QUERIES_PER_PRODUCT["tpu"]
    length = spans[row, 2]

    @pl.when(step == 0)
    def _() -> None:
        top[...], total[...], mixed[...] = _nothing(*q.shape)

    def each_tile(do: Callable) -> None:
        lax.fori_loop(0, q.shape[0] // tile, lambda i, _: do(pl.ds(i * tile, tile)), None)

    keys, values = as_values(k[...]), as_values(v[...])

    def far(rows: Any) -> None:
        seen = _cached(
            [limits[rows, i : i + 1] for i in (0, 1)],
            (spans[row, 0] + step) * SLOTS_PER_PRODUCT["tpu"],
            SLOTS_PER_PRODUCT["tpu"],
            length,
            before=True,
        )
        sums = top[rows], total[rows], mixed[rows]
        top[rows], total[rows], mixed[rows] = _join(sums, q[rows], keys, values, seen)

    @pl.when(spans[row, 0] + step < spans[row, 1])
    def _() -> None:
        each_tile(far)

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        # In float32, because a single row of a float32 array can be read.
        pool[...] = jnp.concatenate([as_values(part[...]).astype(jnp.float32) for part in (v0, v1, own_v)])

        def finish(rows: Any) -> None:
            def part(i: int) -> TokenGroup:
                if i < 2:
                    scores = _dot(q[rows], as_values((k0, k1)[i][...]), transposed=True)
                    near = [limits[rows, i : i + 1] for i in (0, 1)]
                    mask = _cached(near, (spans[row, 3] + i) * GROUP_TOKENS, GROUP_TOKENS, length, before=False)
                else:
                    own = pl.ds((i - 2) * GROUP_TOKENS, GROUP_TOKENS)
                    scores, mask = _own_scores(q[rows], own_k[own], own_v[own]), seen[rows, own] != 0
                return scores, lambda j: pool[pl.ds(i * GROUP_TOKENS + j, 1)], mask

            parts = [part(i) for i in range(pool.shape[0] // GROUP_TOKENS)]
            out[rows] = _finish((top[rows], total[rows], mixed[rows]), parts)

        each_tile(finish)


def _on_gpu(
    layer: Array,
    arrays: Sequence[Array],
    interpret: bool,
    scale: float,
    tokens: int | None = None,
    groups: int = 1,
    rows: int = 0,
) -> Array:
    """Runs a program for each row, head and tile of queries, which loops over the blocks of the text.

    Args:
        layer: the index of the layer, an array of one number.
        arrays, interpret: the other inputs of the kernel.
        scale: the factor of the queries.
        tokens: the number of tokens of a row, to write the result of `attend_rows`; None to write heads.
        groups, rows: see `attend_rows`.
    """
    flat, keys, _, own_keys, own_values, *_ = arrays
    batch, heads, count, width = flat.shape
    layers, slots, tile = keys.shape[0], keys.shape[3], QUERIES_PER_PRODUCT["gpu"]
    joined = own_keys is own_values
    window = own_keys.shape[2] // (1 + joined)
    queries = pl.BlockSpec((None, None, tile, width), lambda b, h, i: (b, h, i, 0))
    cached = pl.BlockSpec((layers, None, None, slots, width), lambda b, h, i: (0, b, h, 0, 0))
    own = [
        pl.BlockSpec((None, None, window, width), lambda b, h, i, part=part: (b, h, part, 0))
        for part in (0, int(joined))
    ]
    by_rows = tokens is not None
    shape = (rows, heads * groups * width) if by_rows else flat.shape
    kernel = pl.pallas_call(
        functools.partial(_gpu_kernel, scale=scale, tokens=tokens, groups=groups),
        grid=(batch, heads, count // tile),
        in_specs=[
            pl.BlockSpec((1,), lambda b, h, i: (0,)),
            queries,
            *[cached] * 2,
            *own,
            pl.BlockSpec((None, tile, arrays[-1].shape[-1]), lambda b, h, i: (b, i, 0)),
        ],
        out_specs=pl.BlockSpec(shape, lambda b, h, i: (0, 0)) if by_rows else queries,
        out_shape=jax.ShapeDtypeStruct(shape, flat.dtype if by_rows else jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="attend",
    )
    return kernel(layer, *arrays)


def _gpu_kernel(
    layer_ref: Any, q: Any, k: Any, v: Any, own_k: Any, own_v: Any, table: Any, out: Any, *,
    scale: float, tokens: int | None, groups: int,
) -> None:  # fmt: skip
    queries = (q[...].astype(jnp.float32) * scale).astype(q.dtype)
    layer, size, window = layer_ref[0], SLOTS_PER_PRODUCT["gpu"], own_k.shape[0]
    limits = [table[:, window + i : window + i + 1] for i in range(2)]
    begin, end, length, first_group = (table[0, window + 2 + i] for i in range(4))

    def far(block: Array, sums: SoftmaxSums) -> SoftmaxSums:
        slots = pl.ds(block * size, size)
        cached = _cached(limits, block * size, size, length, before=True)
        return _join(sums, queries, as_values(k[layer, slots]), as_values(v[layer, slots]), cached)

    def near(i: int) -> TokenGroup:
        start = (first_group + i) * GROUP_TOKENS
        place = jnp.minimum(start, k.shape[1] - GROUP_TOKENS)
        cached = _cached(limits, start, GROUP_TOKENS, length, before=False)
        scores = _dot(queries, as_values(k[layer, pl.ds(place, GROUP_TOKENS)]), transposed=True)
        return scores, lambda j: as_values(v[layer, pl.ds(place + j, 1)]), cached

    def own(i: int) -> TokenGroup:
        part = pl.ds(i * GROUP_TOKENS, GROUP_TOKENS)
        scores = _own_scores(queries, own_k[part], own_v[part])
        return scores, lambda j: own_v[pl.ds(i * GROUP_TOKENS + j, 1)], table[:, part] != 0

    sums = lax.fori_loop(begin, end, far, _nothing(*q.shape))
    result = _finish(sums, [*map(near, range(2)), *map(own, range(window // GROUP_TOKENS))])
    if tokens is None:
        out[...] = result
        return
    # Rows of one tile belong to different tokens and groups, so each number has its own place in the result.
    number, column = (lax.broadcasted_iota(jnp.int32, result.shape, axis) for axis in (0, 1))
    number = pl.program_id(2) * q.shape[0] + number
    row, head = pl.program_id(0) * tokens + number % tokens, pl.program_id(1) * groups + number // tokens
    real = number < groups * tokens
    triton.store(out.at[row, head * q.shape[1] + column], result.astype(out.dtype), mask=real)


def _nothing(rows: int, width: int) -> SoftmaxSums:
    return jnp.full((rows, 1), LOWEST_SCORE), jnp.zeros((rows, 1)), jnp.zeros((rows, width))


def _cached(limits: Sequence[Array], start: Array, count: int, length: Array, before: bool) -> Array:
    """Returns which of the `count` slots from `start` on each query sees.

    A query sees slots before its near part if `before` is True, and slots in its near part otherwise. The near part
    consists of the last tokens, which are added one after the other.
    """
    first, near = limits
    slots = start + lax.broadcasted_iota(jnp.int32, (first.shape[0], count), 1)
    part = slots < near if before else slots >= near
    return part & (slots >= first) & (slots < length)


def _dot(a: Array, b: Array, transposed: bool = False) -> Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contracted = ((1,), (1 if transposed else 0,))
    return lax.dot_general(a, b, (contracted, ((), ())), precision, jnp.float32)


def _join(sums: SoftmaxSums, queries: Array, keys: Array, values: Array, seen: Array) -> SoftmaxSums:
    """Adds a block of slots."""
    top, total, mixed = sums
    scores = jnp.where(seen, _dot(queries, keys, transposed=True), LOWEST_SCORE)
    new = jnp.maximum(top, scores.max(-1, keepdims=True))
    weights, fade = jnp.where(seen, jnp.exp(scores - new), 0.0), jnp.exp(top - new)
    mixed = mixed * fade + _dot(weights.astype(values.dtype), values)
    return new, total * fade + weights.sum(-1, keepdims=True), mixed


def _own_scores(queries: Array, keys: Array, values: Array) -> Array:
    """Returns the scores of the window's tokens; NaN for tokens whose value is not finite, because 0 x inf is NaN."""
    return _dot(queries, keys, transposed=True) + _dot(jnp.zeros_like(queries), values, transposed=True)


def _finish(sums: SoftmaxSums, parts: Sequence[TokenGroup]) -> Array:
    """Adds the last tokens of each query's text one after the other, and returns the outputs `[R, K]`."""
    top, total, mixed = sums
    scores = [jnp.where(seen, score, LOWEST_SCORE) for score, _, seen in parts]
    new = functools.reduce(jnp.maximum, (score.max(-1, keepdims=True) for score in scores), top)
    fade = jnp.exp(top - new)
    total, mixed = total * fade, mixed * fade
    for score, (_, value, seen) in zip(scores, parts):
        weights = jnp.where(seen, jnp.exp(score - new), 0.0)
        columns = lax.broadcasted_iota(jnp.int32, weights.shape, 1)

        def add(i: Array, sums: tuple[Array, Array], weights=weights, columns=columns, value=value):
            weight = jnp.where(columns == i, weights, 0.0).sum(-1, keepdims=True)
            entry = value(i).astype(jnp.float32)
            entry = jnp.where(jnp.abs(entry) < jnp.inf, entry, 0.0)  # for queries that do not see the token
            return sums[0] + weight, sums[1] + weight * entry

        total, mixed = lax.fori_loop(0, GROUP_TOKENS, add, (total, mixed))
    return mixed / total
