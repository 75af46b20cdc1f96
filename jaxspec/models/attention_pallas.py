"""Attention of a window's tokens as Pallas kernels, for TPUs (Mosaic) and GPUs (`jaxspec.models.attention_pieces`).

See `jaxspec.models.softmax_sums` for the two parts in which the text of a query is summed. On a TPU a program reads the
first part in blocks, which begin at multiples of their size. The order of the sums therefore depends neither on the
numbers of rows and of tokens of the window, nor on which tokens are cached, as long as the paths of the window have at
most `GROUP_TOKENS` tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.cache import as_values
from jaxspec.core.records import KV
from jaxspec.core.sizes import BLOCK_SLOTS
from jaxspec.errors import InvalidConfig
from jaxspec.models import attention_pieces, softmax_sums
from jaxspec.models.softmax_sums import (
    GROUP_TOKENS,
    TokenGroup,
    add_tokens,
    cached,
    dot,
    join,
    nothing,
    own_scores,
    pad,
)

QUERIES_PER_PRODUCT = 64
"""The number of queries in one product on a TPU, which reads the cache once for all queries."""
PLATFORMS = ("tpu", "gpu")


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
    piece: int = attention_pieces.PIECE_SLOTS,
) -> Float[Array, "B H G T K"]:
    """Computes `jaxspec.models.attention.attend`.

    The tokens of the window that a query sees must be the last tokens of its text, in order.

    Args:
        queries, prefix, layer, length, window, mask, scale, first_seen: see `attend`.
        platform: "tpu" or "gpu".
        interpret: whether to run the kernel as plain operations, on any device.
        piece: the number of slots of a piece on a GPU; see `jaxspec.models.attention_pieces`.

    Raises:
        InvalidConfig: there is no kernel for this platform, type or width of heads.
    """
    batch, heads, groups, tokens, width = queries.shape
    check_pallas(platform, queries.dtype, width, interpret)
    if platform == "gpu":
        return attention_pieces.attend_heads(
            queries, prefix, layer, length, window, mask, scale, first_seen, piece=piece, interpret=interpret
        )
    spans, seen, limits = softmax_sums.limits(length, mask, first_seen, groups, BLOCK_SLOTS)
    own = jnp.concatenate([pad(part, GROUP_TOKENS, 2) for part in window], 2)
    flat = pad((queries * scale).astype(queries.dtype).reshape(batch, heads, -1, width), QUERIES_PER_PRODUCT, 2)
    seen, limits = pad(pad(seen, QUERIES_PER_PRODUCT, 1), GROUP_TOKENS, 2), pad(limits, QUERIES_PER_PRODUCT, 1)
    out = _on_tpu(layer, spans, (flat, *prefix, own, own, seen, limits), interpret)
    return out[:, :, : groups * tokens].reshape(batch, heads, groups, tokens, width)


def check_pallas(platform: str, dtype: Any, width: int, interpret: bool = False) -> None:
    """Raises InvalidConfig if there is no kernel for this platform, dtype of the cache and width of heads."""
    if platform not in PLATFORMS:
        raise InvalidConfig(f"attention='pallas' is for TPUs and GPUs, but the model runs on {platform!r}; use 'xla'")
    if (name := jnp.dtype(dtype).name) not in ("float32", "bfloat16"):
        raise InvalidConfig(f"attention='pallas' reads float32 and bfloat16, but the cache holds {name}; use 'xla'")
    tiled = width % 128 == 0 if platform == "tpu" else width >= 16 and width & (width - 1) == 0
    if not tiled and not interpret:
        needed = "a multiple of 128 on a TPU" if platform == "tpu" else "a power of two, at least 16, on a GPU"
        raise InvalidConfig(f"attention='pallas' needs heads whose width is {needed}, got {width}; use 'xla'")


def _on_tpu(layer: int, spans: Array, arrays: Sequence[Array], interpret: bool) -> Array:
    """Runs a step for each row, head and block of the text; the cache's blocks are fetched one step ahead."""
    flat, keys, values, *others = arrays
    batch, heads, rows, width = flat.shape
    slots, window = keys.shape[3], others[0].shape[2] // 2

    def block(b: Array, h: Array, i: Array, spans: Any) -> tuple:
        return layer, b, h, jnp.minimum(spans[b, 0] + i, spans[b, 1] - 1), 0

    def near(offset: int) -> Callable:
        return lambda b, h, i, spans: (layer, b, h, jnp.minimum(spans[b, 3] + offset, slots // GROUP_TOKENS - 1), 0)

    def stored(count: int, index: Callable) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, count, width), index)

    def each(count: int, part: int = 0) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, count, width), lambda b, h, i, spans: (b, h, part, 0))

    def shared(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda b, h, i, spans: (b, 0, 0))

    nearby = [stored(GROUP_TOKENS, near(offset)) for offset in (0, 1)]
    kernel = pl.pallas_call(
        _tpu_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, (spans[:, 1] - spans[:, 0]).max()),
            in_specs=[
                each(rows),
                *[stored(BLOCK_SLOTS, block)] * 2,
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
    row, step, tile = pl.program_id(0), pl.program_id(2), QUERIES_PER_PRODUCT
    length = spans[row, 2]

    @pl.when(step == 0)
    def _() -> None:
        top[...], total[...], mixed[...] = nothing(*q.shape)

    def each_tile(do: Callable) -> None:
        lax.fori_loop(0, q.shape[0] // tile, lambda i, _: do(pl.ds(i * tile, tile)), None)

    keys, values = as_values(k[...]), as_values(v[...])

    def far(rows: Any) -> None:
        seen = cached(
            [limits[rows, i : i + 1] for i in (0, 1)],
            (spans[row, 0] + step) * BLOCK_SLOTS,
            BLOCK_SLOTS,
            length,
            before=True,
        )
        sums = top[rows], total[rows], mixed[rows]
        top[rows], total[rows], mixed[rows] = join(sums, q[rows], keys, values, seen)

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
                    scores = dot(q[rows], as_values((k0, k1)[i][...]), transposed=True)
                    near = [limits[rows, i : i + 1] for i in (0, 1)]
                    mask = cached(near, (spans[row, 3] + i) * GROUP_TOKENS, GROUP_TOKENS, length, before=False)
                else:
                    own = pl.ds((i - 2) * GROUP_TOKENS, GROUP_TOKENS)
                    scores, mask = own_scores(q[rows], own_k[own], own_v[own]), seen[rows, own] != 0
                return scores, lambda j: pool[pl.ds(i * GROUP_TOKENS + j, 1)], mask

            parts = [part(i) for i in range(pool.shape[0] // GROUP_TOKENS)]
            _, weights, values = add_tokens((top[rows], total[rows], mixed[rows]), parts)
            out[rows] = values / weights

        each_tile(finish)
