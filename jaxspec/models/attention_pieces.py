"""Attention of a window's tokens in pieces of a fixed number of slots, as Pallas kernels for GPUs (Triton).

A text is cut at multiples of `PIECE_SLOTS` slots. One program adds up the slots of one piece for a tile of queries, so
the programs of a long text run in parallel. One more program adds up the last tokens of each query's text, one after
the other, whether they are in the cache or in the window. A second kernel joins the sums of the pieces in the order of
the text, and those of the last tokens at the end.

The pieces have a fixed size and not a fixed number. A piece without tokens adds exactly zero. The order of the sums
therefore depends only on the position of the query: neither on the numbers of rows and tokens, nor on the capacity of
the cache, nor on which tokens are cached. See `jaxspec.models.attention_pallas` for the boundary between both parts.

The programs rotate the queries and the window's keys that they read, so that a layer has no launch for the rotation.

Letters: B rows, H key/value heads, G query heads per key/value head, T tokens of the window, P tokens before them, K
the width of a head, Q the padded queries of a head, N pieces.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.cache import as_values
from jaxspec.core.records import KV
from jaxspec.models import products_pallas, softmax_sums
from jaxspec.models.softmax_sums import GROUP_TOKENS, LOWEST_SCORE, SoftmaxSums, TokenGroup

PIECE_SLOTS = 512
"""The number of slots of a piece. Another size changes the order of the sums."""
QUERY_TILE = 16
"""The number of queries in one product."""
BLOCK = 64
"""The number of slots in one product; it divides `PIECE_SLOTS`."""
JOINED_AT_ONCE = 4
"""The number of pieces whose sums are loaded before they are added."""


class ProjectedHeads(NamedTuple):
    """Queries, keys and values before their rotation.

    Attributes:
        rows: G queries for each of H keys, then keys, then values: `[M, (G + 2) H K]`. The first B T rows are read.
        rotation: cosines and sines of the angles of the first 2 R values of a head: `[B, 1, T, R]`.
        norms: scales of RMSNorm of queries and keys, before they are rotated; None for no norm.
    """

    rows: Float[Array, "M J"]
    rotation: tuple[Float[Array, "B 1 T R"], Float[Array, "B 1 T R"]]
    norms: tuple[Float[Array, "K"] | None, Float[Array, "K"] | None] = (None, None)


@functools.partial(jax.jit, static_argnames=("heads", "dtype", "rows", "scale", "epsilon", "piece", "interpret"))
def attend_rows(
    projected: ProjectedHeads,
    prefix: KV,
    layer: Int[Array, "1"],
    length: Int[Array, "B"],
    past: KV | None,
    mask: Bool[Array, "B T W"],
    scale: float,
    first_seen: Int[Array, "B T"] | None,
    heads: int,
    dtype: DTypeLike,
    rows: int,
    epsilon: float = 0.0,
    *,
    piece: int = PIECE_SLOTS,
    interpret: bool = False,
) -> tuple[Float[Array, "M O"], KV]:
    """Rotates heads and computes their attention, from the rows of a product to those that the next product reads.

    The layer is an array, so that the layers of a network trace and lower the kernels once.

    Args:
        projected: the heads of the window's tokens.
        prefix, length, scale, first_seen: see `jaxspec.models.attention.attend`.
        layer: the index of the layer to read.
        past: keys and values `[B, H, P, K]` of earlier tokens of the window; None for none.
        mask: which of the P + T tokens of the window each token sees.
        heads: H, the number of key/value heads.
        dtype: the dtype of rotated queries, keys and values, and of the result.
        rows: M, the number of rows of the result, at least B T.
        epsilon: the epsilon of the norms of heads.
        piece: the number of slots of a piece, a multiple of `BLOCK`.
        interpret: whether to run the kernels as plain operations, on any device.

    Returns:
        The outputs of all heads of a token side by side, and the keys and values of the T tokens `[B, H, T, K]`. Rows
        after the first B T are undefined.
    """
    width = prefix.keys.shape[-1]
    groups = projected.rows.shape[1] // width // heads - 2
    table, before = _table(length, mask, first_seen, groups, 0 if past is None else past.keys.shape[2])
    own = () if past is None else tuple(softmax_sums.pad(part, GROUP_TOKENS, 2) for part in past)
    (batch, tokens), slots = mask.shape[:2], prefix.keys.shape[3]
    sizes = _Sizes(batch, tokens, heads, groups, width, before, slots, piece)
    half = projected.rotation[0].shape[-1]
    flat = [part.reshape(sizes.batch * sizes.tokens, half) for part in projected.rotation]
    norms = [None if norm is None else norm.astype(jnp.float32) for norm in projected.norms]
    arrays = [projected.rows, *flat, *(norm for norm in norms if norm is not None)]

    def rotate(refs: Sequence[Any]) -> "_Rotation":
        scales = list(refs[3:])
        return _Rotation(*refs[:3], tuple(None if norm is None else scales.pop(0) for norm in norms), epsilon)  # pyright: ignore

    whole = [_whole(array) for array in arrays]
    sums, mixed, *new = _sum_pieces(layer, arrays, whole, rotate, prefix, own, table, sizes, scale, dtype, interpret)
    shape = jax.ShapeDtypeStruct((rows, heads * groups * width), dtype)
    place = pl.BlockSpec(
        (None, width),
        lambda b, h, n: (b * sizes.tokens + n % sizes.tokens, h * groups + n // sizes.tokens),
    )
    return _join_pieces(sums, mixed, table, sizes, shape, place, interpret), KV(*new)


def attend_heads(
    queries: Float[Array, "B H G T K"],
    prefix: KV,
    layer: int,
    length: Int[Array, "B"],
    window: tuple[Float[Array, "B H W K"], Float[Array, "B H W K"]],
    mask: Bool[Array, "B T W"],
    scale: float,
    first_seen: Int[Array, "B T"] | None,
    *,
    piece: int = PIECE_SLOTS,
    interpret: bool = False,
) -> Float[Array, "B H G T K"]:
    """Computes `jaxspec.models.attention.attend` for heads that are rotated; see `attend_rows` for other arguments."""
    batch, heads, groups, tokens, width = queries.shape
    table, before = _table(length, mask, first_seen, groups, mask.shape[2])
    own = jnp.concatenate([softmax_sums.pad(part, GROUP_TOKENS, 2) for part in window], 2)  # takes one launch
    sizes = _Sizes(batch, tokens, heads, groups, width, before, prefix.keys.shape[3], piece)
    flat = softmax_sums.pad(queries.reshape(batch, heads, groups * tokens, width), QUERY_TILE, 2)
    tile = pl.BlockSpec((None, None, QUERY_TILE, width), lambda b, h, i: (b, h, i % sizes.tiles, 0))
    number = jnp.full(1, layer, jnp.int32)
    sums, mixed = _sum_pieces(
        number, [flat], [tile], None, prefix, (own, own), table, sizes, scale, flat.dtype, interpret
    )
    shape = jax.ShapeDtypeStruct((batch, heads, groups * tokens, width), jnp.float32)
    place = pl.BlockSpec((None, None, None, width), lambda b, h, n: (b, h, n, 0))
    return _join_pieces(sums, mixed, table, sizes, shape, place, interpret).reshape(queries.shape)


class _Sizes(NamedTuple):
    """Sizes of a call; `before` counts the tokens of the window that are not rotated here, padded."""

    batch: int
    tokens: int
    heads: int
    groups: int
    width: int
    before: int
    slots: int
    piece: int

    @property
    def tiles(self) -> int:
        return -(-self.groups * self.tokens // QUERY_TILE)

    @property
    def pieces(self) -> int:
        return -(-self.slots // self.piece)


class _Rotation(NamedTuple):
    """Reads heads of the rows of a product, and norms and rotates them."""

    rows: Any
    cos: Any
    sin: Any
    norms: tuple[Any, Any]
    epsilon: float

    def read(self, row: Int[Array, "R 1"], head: Array | int, width: int, norm: Any) -> Float[Array, "R K"]:
        """Returns a head of each row, normed and rotated."""
        column = lax.broadcasted_iota(jnp.int32, (row.shape[0], width), 1)
        half, row = self.cos.shape[1], jnp.broadcast_to(row, column.shape)
        other = jnp.where(column < half, column + half, jnp.where(column < 2 * half, column - half, column))
        values, others = (triton.load(self.rows.at[row, head * width + at]) for at in (column, other))
        if norm is not None:
            factor = lax.rsqrt(products_pallas.add_columns(values * values)[:, None] / width + self.epsilon)
            values, others = (x * factor * triton.load(norm.at[at]) for x, at in ((values, column), (others, other)))
        angle = jnp.minimum(jnp.where(column < half, column, column - half), half - 1)
        cos, sin = (triton.load(part.at[row, angle]) for part in (self.cos, self.sin))
        along, across = values * cos, others * sin
        turned = jnp.where(column < half, along - across, along + across)
        return jnp.where(column < 2 * half, turned, values)


def _table(
    length: Int[Array, "B"], mask: Bool[Array, "B T W"], first_seen: Int[Array, "B T"] | None, groups: int, before: int
) -> tuple[Int[Array, "B Q W8"], int]:
    """Returns the integers that a program reads in one array, which XLA:GPU computes in one kernel.

    The columns are the mask, whose first `before` tokens and the others are padded apart, then 2 limits of the query,
    then 4 numbers of the row (see `softmax_sums.limits`), then 2 zeros. The second result is `before`, padded.
    """
    spans, seen, limits = softmax_sums.limits(length, mask, first_seen, groups, BLOCK)
    parts = [softmax_sums.pad(part, GROUP_TOKENS, 2) for part in (seen[..., :before], seen[..., before:])]
    spans = jnp.broadcast_to(spans[:, None], (*seen.shape[:2], spans.shape[-1]))
    table = jnp.concatenate([*parts, limits, spans, jnp.zeros_like(limits)], -1)
    return softmax_sums.pad(table, QUERY_TILE, 1), parts[0].shape[2]


def _whole(array: Array) -> pl.BlockSpec:
    return pl.BlockSpec(array.shape, lambda b, h, i: (0,) * array.ndim)


def _sum_pieces(
    layer: Array,
    heads: Sequence[Array],
    specs: Sequence[pl.BlockSpec],
    rotate: Callable[[Sequence[Any]], _Rotation] | None,
    prefix: KV,
    own: Sequence[Array],
    table: Array,
    sizes: _Sizes,
    scale: float,
    dtype: DTypeLike,
    interpret: bool,
) -> Sequence[Array]:
    """Runs a program for each row, head, tile of queries, and piece of the text or its last tokens.

    Args:
        heads, specs: the arrays with the queries, and what a program reads of each.
        rotate: returns how to read heads from the references of `heads`; None if these are rotated queries.
        own: rotated keys and values of the window: none, two arrays, or twice one array that holds both.
        layer, prefix, table, sizes, scale, dtype, interpret: see `attend_rows`.

    Returns:
        The largest score and the sum of weights `[2, B, H, N + 1, Q]`, the weighted sum of values
        `[B, H, N + 1, Q, K]`, and the keys and values that were rotated `[B, H, T, K]`.
    """
    s, read = sizes, _cached_and_own(sizes, len(prefix.keys), own)
    shapes, outs = _results(s, None if rotate is None else dtype)

    def kernel(layer_ref: Any, *refs: Any) -> None:
        first, refs = refs[: len(heads)], refs[len(heads) :]
        keys, values, *others = refs
        own_refs, (table_ref, sums, mixed, *new) = others[: len(own)], others[len(own) :]
        number = pl.program_id(2)
        place = pl.program_id(0), pl.program_id(1), number % s.tiles, number // s.tiles
        program = _Program(s, *place, layer_ref[0], keys, values, own_refs, table_ref, dtype)
        source = None if rotate is None else rotate(first)

        def write(result: SoftmaxSums) -> None:
            top, total, values = result
            sums[0, :], sums[1, :] = (part.reshape(QUERY_TILE) for part in (top, total))
            mixed[...] = values

        def queries() -> Array:
            heads = first[0][...] if source is None else program.rotated_queries(source)
            return (heads.astype(jnp.float32) * scale).astype(dtype)

        @pl.when(program.has_slots())
        def _() -> None:
            write(program.sum_piece(queries()))

        @pl.when(program.piece == s.pieces)
        def _() -> None:
            write(program.sum_last_tokens(queries(), source, new))

    return pl.pallas_call(
        kernel,
        grid=(s.batch, s.heads, (s.pieces + 1) * s.tiles),
        in_specs=[
            pl.BlockSpec((1,), lambda b, h, i: (0,)),
            *specs,
            *read,
            pl.BlockSpec((None, QUERY_TILE, table.shape[-1]), lambda b, h, i: (b, i % s.tiles, 0)),
        ],
        out_specs=outs,
        out_shape=shapes,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="attend_pieces",
    )(layer, *heads, *prefix, *own, table)


def _cached_and_own(sizes: _Sizes, layers: int, own: Sequence[Array]) -> list[pl.BlockSpec]:
    """Returns what a program reads of the cache and of rotated keys and values of the window."""
    s, joined = sizes, len(own) == 2 and own[0] is own[1]
    cached = pl.BlockSpec((layers, None, None, s.slots, s.width), lambda b, h, i: (0, b, h, 0, 0))
    given = [
        pl.BlockSpec((None, None, s.before, s.width), lambda b, h, i, part=part: (b, h, part, 0))
        for part in (0, int(joined))[: len(own)]
    ]
    return [cached, cached, *given]


def _results(sizes: _Sizes, dtype: DTypeLike | None) -> tuple[list[jax.ShapeDtypeStruct], list[pl.BlockSpec]]:
    """Returns the results of all programs, and what a program writes; `dtype` is None without keys and values."""
    s, count = sizes, sizes.pieces + 1
    shapes = [
        jax.ShapeDtypeStruct((2, s.batch, s.heads, count, s.tiles * QUERY_TILE), jnp.float32),
        jax.ShapeDtypeStruct((s.batch, s.heads, count, s.tiles * QUERY_TILE, s.width), jnp.float32),
    ]
    outs = [
        pl.BlockSpec((2, None, None, None, QUERY_TILE), lambda b, h, i: (0, b, h, i // s.tiles, i % s.tiles)),
        pl.BlockSpec((None, None, None, QUERY_TILE, s.width), lambda b, h, i: (b, h, i // s.tiles, i % s.tiles, 0)),
    ]
    if dtype is not None:
        shapes += [jax.ShapeDtypeStruct((s.batch, s.heads, s.tokens, s.width), dtype)] * 2
        outs += [pl.BlockSpec((None, None, s.tokens, s.width), lambda b, h, i: (b, h, 0, 0))] * 2
    return shapes, outs


class _Program(NamedTuple):
    """What one program reads: the slots of a piece for a tile of queries of a row and a head.

    The numbers are read before any condition, because operations that interpret a kernel do not know them inside one.
    """

    sizes: _Sizes
    row: Array
    head: Array
    tile: Array
    piece: Array
    layer: Array
    keys: Any
    values: Any
    own: Sequence[Any]
    table: Any
    dtype: DTypeLike

    @property
    def _columns(self) -> int:
        return self.table.shape[1] - 8

    @property
    def _limits(self) -> list[Array]:
        return [self.table[:, self._columns + i : self._columns + i + 1] for i in range(2)]

    def _span(self, number: int) -> Array:
        return self.table[0, self._columns + 2 + number]

    def has_slots(self) -> Array:
        """Returns whether a query of the row sees slots of the piece."""
        piece = self.piece
        blocks = self.sizes.piece // BLOCK
        return (piece < self.sizes.pieces) & (piece * blocks < self._span(1)) & ((piece + 1) * blocks > self._span(0))

    def rotated_queries(self, source: _Rotation) -> Float[Array, "R K"]:
        """Returns the tile of queries: those of token t in group g are number g T + t."""
        s = self.sizes
        number = lax.broadcasted_iota(jnp.int32, (QUERY_TILE, 1), 0)
        number = jnp.minimum(self.tile * QUERY_TILE + number, s.groups * s.tokens - 1)
        row, head = self.row * s.tokens + number % s.tokens, self.head * s.groups + number // s.tokens
        return source.read(row, head, s.width, source.norms[0]).astype(self.dtype)

    def sum_piece(self, queries: Array) -> SoftmaxSums:
        """Adds the slots of a piece."""
        length, limits, blocks = self._span(2), self._limits, self.sizes.piece // BLOCK
        piece = self.piece

        def step(block: Array, sums: SoftmaxSums) -> SoftmaxSums:
            at = pl.ds(block * BLOCK, BLOCK)
            seen = softmax_sums.cached(limits, block * BLOCK, BLOCK, length, before=True)
            keys, values = (as_values(ref[self.layer, at]) for ref in (self.keys, self.values))
            return softmax_sums.join(sums, queries, keys, values, seen)

        begin, end = jnp.maximum(self._span(0), piece * blocks), jnp.minimum(self._span(1), (piece + 1) * blocks)
        return lax.fori_loop(begin, end, step, softmax_sums.nothing(*queries.shape))

    def sum_last_tokens(self, queries: Array, source: _Rotation | None, new: Sequence[Any]) -> SoftmaxSums:
        """Adds the last tokens of each query's text, and writes the keys and values that it rotates."""
        near = [self._near(queries, i) for i in range(2)]
        own = [self._own(queries, i * GROUP_TOKENS) for i in range(self.sizes.before // GROUP_TOKENS)]
        if source is not None:
            starts = range(0, self.sizes.tokens, GROUP_TOKENS)
            own += [self._rotated(queries, start, source, new) for start in starts]
        return softmax_sums.add_tokens(softmax_sums.nothing(*queries.shape), [*near, *own])

    def _near(self, queries: Array, number: int) -> TokenGroup:
        start = (self._span(3) + number) * GROUP_TOKENS
        place = jnp.minimum(start, self.sizes.slots - GROUP_TOKENS)
        seen = softmax_sums.cached(self._limits, start, GROUP_TOKENS, self._span(2), before=False)
        keys = as_values(self.keys[self.layer, pl.ds(place, GROUP_TOKENS)])
        scores = softmax_sums.dot(queries, keys, transposed=True)
        return scores, lambda j: as_values(self.values[self.layer, pl.ds(place + j, 1)]), seen

    def _own(self, queries: Array, start: int) -> TokenGroup:
        keys, values = self.own
        part = pl.ds(start, GROUP_TOKENS)
        scores = softmax_sums.own_scores(queries, keys[part], values[part])
        return scores, lambda j: values[pl.ds(start + j, 1)], self.table[:, part] != 0

    def _rotated(self, queries: Array, start: int, source: _Rotation, new: Sequence[Any]) -> TokenGroup:
        s = self.sizes
        token = start + lax.broadcasted_iota(jnp.int32, (GROUP_TOKENS, 1), 0)
        row = self.row * s.tokens + jnp.minimum(token, s.tokens - 1)
        head = s.heads * s.groups + self.head
        column = lax.broadcasted_iota(jnp.int32, (GROUP_TOKENS, s.width), 1)
        place = (head + s.heads) * s.width
        keys = source.read(row, head, s.width, source.norms[1]).astype(self.dtype)
        values = triton.load(source.rows.at[jnp.broadcast_to(row, column.shape), place + column]).astype(self.dtype)
        written = (token < s.tokens) & (self.tile == 0)
        for ref, part in zip(new, (keys, values)):
            at = ref.at[jnp.broadcast_to(token, column.shape), column]
            triton.store(at, part, mask=jnp.broadcast_to(written, column.shape))

        def value(j: Array) -> Array:
            row = self.row * s.tokens + jnp.minimum(start + j, s.tokens - 1)
            return source.rows[pl.ds(row, 1), pl.ds(place, s.width)].astype(self.dtype)

        seen = self.table[:, pl.ds(s.before + start, GROUP_TOKENS)] != 0
        return softmax_sums.own_scores(queries, keys, values), value, seen


def _join_pieces(
    sums: Float[Array, "2 B H N1 Q"],
    mixed: Float[Array, "B H N1 Q K"],
    table: Array,
    sizes: _Sizes,
    shape: jax.ShapeDtypeStruct,
    place: pl.BlockSpec,
    interpret: bool,
) -> Array:
    """Joins the sums of all pieces of each query in the order of the text, and returns the outputs."""
    s, columns = sizes, table.shape[-1] - 8
    padded = 1 << s.pieces.bit_length()  # a power of two, at least N + 1

    def kernel(sums_ref: Any, mixed_ref: Any, table_ref: Any, out: Any) -> None:
        blocks = s.piece // BLOCK
        first = table_ref[0, columns + 2] // blocks
        last = jnp.minimum((table_ref[0, columns + 3] + blocks - 1) // blocks, s.pieces)

        def is_written(piece: Array) -> Array:
            return ((piece >= first) & (piece < last)) | (piece == s.pieces)

        every = lax.broadcasted_iota(jnp.int32, (padded,), 0)
        kind = jnp.zeros_like(every)
        top = triton.load(sums_ref.at[kind, every], mask=is_written(every), other=LOWEST_SCORE).max()

        def read(piece: Array) -> SoftmaxSums:
            return sums_ref[0, piece], sums_ref[1, piece], mixed_ref[piece]

        def add(sums: tuple[Array, Array], part: SoftmaxSums) -> tuple[Array, Array]:
            weight = jnp.exp(part[0] - top)
            return sums[0] + part[1] * weight, sums[1] + part[2] * weight

        def step(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            numbers = [first + i * JOINED_AT_ONCE + j for j in range(JOINED_AT_ONCE)]
            for number, part in [(number, read(jnp.minimum(number, last - 1))) for number in numbers]:
                kept = [jnp.where(number < last, *pair) for pair in zip(part, (LOWEST_SCORE, 0.0, 0.0))]
                sums = add(sums, (kept[0], kept[1], kept[2]))
            return sums

        steps = (last - first + JOINED_AT_ONCE - 1) // JOINED_AT_ONCE
        sums = lax.fori_loop(0, steps, step, (jnp.float32(0), jnp.zeros(s.width, jnp.float32)))
        total, values = add(sums, read(jnp.int32(s.pieces)))
        out[...] = (values / total).astype(out.dtype)

    return pl.pallas_call(
        kernel,
        grid=(s.batch, s.heads, s.groups * s.tokens),
        in_specs=[
            pl.BlockSpec((2, None, None, s.pieces + 1, None), lambda b, h, n: (0, b, h, 0, n)),
            pl.BlockSpec((None, None, s.pieces + 1, None, s.width), lambda b, h, n: (b, h, 0, n, 0)),
            pl.BlockSpec((None, *table.shape[1:]), lambda b, h, n: (b, 0, 0)),
        ],
        out_specs=place,
        out_shape=shape,
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="join_pieces",
    )(sums, mixed, table)
