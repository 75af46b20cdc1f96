"""The products of a transformer's layer as Pallas kernels for GPUs (Triton), whose rows do not depend on other rows.

A program computes one tile of outputs for up to 64 rows. The rows come in tiles of 16, and each tile is multiplied with
the same tile of weights by the same instruction. Every accumulator is one chain of sums over the inputs, in an order
that depends only on the shape of the weights. The bits of a row therefore depend neither on the number of rows nor on
the place of the row. The inputs of products whose inputs devices may share come in segments, which are separate
chains; the segments are added as a balanced tree, so the bits do not depend on the number of devices either.

A product cannot norm its rows first, because each of its programs would repeat the work. Where rows are made, they are
multiplied by the scale of the next norm and rounded to bfloat16, and the sums of their squares are kept
(`PreparedRows`). The next product multiplies its outputs by the factor of the norm.

Every call is under `jax.jit`, so that the layers of a network trace and lower each kernel once.

Letters: M rows, a multiple of 16 (`padded_rows`); I inputs; O outputs; E the width of the residual stream; P the number
of partial sums of squares of a row.
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
from jaxtyping import Array, BFloat16, Float

from jaxspec.errors import InvalidConfig
from jaxspec.models.packed import Matrix
from jaxspec.models.quantized import Quantized

ROW_TILE = 16
"""The number of rows in one instruction's product."""
MAX_ROW_TILES = 4
"""The largest number of row tiles in a program, which keeps one accumulator for each of them."""
MAX_ACCUMULATORS = 16
"""The largest number of accumulators in a program. An H100 has registers for this number of tiles of 16 x 32 sums."""
MAX_SEGMENTS = 8
"""The number of segments of the inputs, where the shape of the weights allows it: the largest number of devices that
may share the inputs of a product."""
MIN_TILE = 16
"""The smallest tile of inputs or outputs that Triton multiplies."""


class Tile(NamedTuple):
    """How a product is cut into programs and iterations. Only `inputs` changes the order of the sums.

    Attributes:
        outputs: the number of outputs of a program. The sums of squares that a program writes are over these outputs.
        inputs: the number of inputs of a segment in one iteration.
        stages: the number of iterations whose operands are loaded ahead.
    """

    outputs: int
    inputs: int
    stages: int = 4


PLAIN_TILE, GATED_TILE, TABLE_TILE = Tile(32, 128), Tile(64, 64), Tile(128, 64)
SEGMENTED_TILE = Tile(32, 32, 3)
WARPS = 4


class PreparedRows(NamedTuple):
    """Rows as the product after a norm reads them.

    Attributes:
        rows: the rows times the norm's scale, rounded: bfloat16 `[M, E]`.
        squares: partial sums of the squares of the unscaled rows: float32 `[P, M]`.
    """

    rows: BFloat16[Array, "M E"]
    squares: Float[Array, "P M"]


def padded_rows(count: int) -> int:
    """Returns the number of rows that the kernels compute for `count` rows: a multiple of 16, and of 64 above 64."""
    multiple = ROW_TILE if count <= ROW_TILE * MAX_ROW_TILES else ROW_TILE * MAX_ROW_TILES
    return -(-count // multiple) * multiple


def segment_count(inputs: int) -> int:
    """Returns the number of segments of a product with this number of inputs: 8, 4, 2 or 1."""
    return min(MAX_SEGMENTS, _power_of_two(inputs // MIN_TILE))


def add_in_tree(parts: Sequence[Any]) -> Any:
    """Adds a power of two of arrays as a balanced tree: neighbors first."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]


@functools.partial(jax.jit, static_argnames=("interpret",))
def prepare(x: Float[Array, "M E"], scale: Float[Array, "E"], *, interpret: bool = False) -> PreparedRows:
    """Prepares rows for the product after a norm with this scale, as `multiply_add` does."""
    (rows, width), tile = x.shape, tile_size(x.shape[1], SEGMENTED_TILE.outputs, "outputs")

    def kernel(x_ref: Any, scale_ref: Any, rows_ref: Any, squares_ref: Any) -> None:
        for i in range(x_ref.shape[0] // ROW_TILE):
            at = pl.ds(i * ROW_TILE, ROW_TILE)
            _write_prepared(x_ref[at, :], scale_ref, rows_ref, squares_ref, at)

    group = row_group(rows, 1)
    columns = pl.BlockSpec((group, tile), lambda r, i: (r, i))
    out = pl.pallas_call(
        kernel,
        grid=(rows // group, width // tile),
        in_specs=[columns, pl.BlockSpec((tile,), lambda r, i: (i,))],
        out_specs=[columns, pl.BlockSpec((None, group), lambda r, i: (i, r))],
        out_shape=_prepared_shapes(rows, width, tile),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="prepare",
    )(x, scale.astype(jnp.float32))
    return PreparedRows(*out)


@functools.partial(
    jax.jit,
    static_argnames=(
        "epsilon",
        "transposed",
        "count",
        "interpret",
    ),
)
def multiply(
    rows: Float[Array, "M I"] | PreparedRows,
    weight: Array | Matrix,
    *,
    epsilon: float = 0.0,
    bias: Float[Array, " O"] | None = None,
    transposed: bool = False,
    count: int | None = None,
    interpret: bool = False,
) -> Float[Array, "N O"]:
    """Returns the product of rows and weights, in float32.

    Args:
        rows: rows, which are rounded to bfloat16, or prepared rows, whose norm is part of the product.
        weight: bfloat16 `[I, O]`, or `[O, I]` if `transposed`; or a `Quantized` `[O, I]`.
        epsilon: the epsilon of the norm.
        bias: added to the outputs of every row.
        transposed: whether an array is `[O, I]`.
        count: N, the number of rows of the result, without the padding; None for all M rows.
        interpret: whether to run the kernel as plain operations, on any device.

    Raises:
        InvalidConfig: there is no kernel for the type or the sizes of the weights.
    """
    form = TABLE_TILE if transposed else PLAIN_TILE
    product = _Product(rows, weight, form, transposed, epsilon, bias)

    def finish(sums: Sequence[Array], at: Any, read: Callable, outs: Sequence[Any]) -> None:
        if count is None:
            outs[0][at, :] = sums[0]
            return
        row, column = (lax.broadcasted_iota(jnp.int32, sums[0].shape, axis) for axis in (0, 1))
        row += pl.program_id(0) * product.group + at.start
        column += pl.program_id(1) * product.tile.outputs
        triton.store(outs[0].at[row, column], sums[0], mask=row < count)

    return product.run(finish, [(jnp.float32, None)], {}, interpret, "multiply", count)[0]


@functools.partial(
    jax.jit,
    static_argnames=(
        "activation",
        "epsilon",
        "interpret",
    ),
)
def multiply_gated(
    rows: PreparedRows,
    weight: Array | Matrix,
    activation: str,
    *,
    epsilon: float = 0.0,
    bias: Float[Array, " O2"] | None = None,
    interpret: bool = False,
) -> BFloat16[Array, "M O"]:
    """Returns the activation of the first half of a product's outputs, times the second half, rounded to bfloat16.

    Args:
        rows: prepared rows; see `multiply` for the other arguments.
        weight: bfloat16 `[I, 2 O]`, or a `Quantized` `[2 O, I]`.
        activation: "silu" or "gelu_tanh".
        epsilon, bias, interpret: see `multiply`.
    """
    product = _Product(rows, weight, GATED_TILE, False, epsilon, bias, halves=2)

    def finish(sums: Sequence[Array], at: Any, read: Callable, outs: Sequence[Any]) -> None:
        gate, up = sums
        gate = gate * (1 / (1 + jnp.exp(-gate))) if activation == "silu" else jax.nn.gelu(gate, approximate=True)
        outs[0][at, :] = (gate * up).astype(jnp.bfloat16)

    return product.run(finish, [(jnp.bfloat16, None)], {}, interpret, "multiply_gated")[0]


@functools.partial(
    jax.jit,
    static_argnames=(
        "segments",
        "interpret",
    ),
)
def multiply_segments(
    rows: Float[Array, "M I"], weight: Array | Matrix, segments: int, *, interpret: bool = False
) -> Float[Array, "M O"]:
    """Returns the product over one device's share of the inputs, in this number of segments, without a scale.

    The products of all devices, added by `add_in_tree`, have the bits of one device that has all segments. The scale
    of a `Quantized` comes after this sum.

    Args:
        rows: the device's share of the columns.
        weight: the device's share of the weights: bfloat16 `[I, O]`, or a `Quantized` `[O, I]`.
        segments: the number of segments of all inputs (`segment_count`), divided by the number of devices.
        interpret: see `multiply`.
    """
    product = _Product(rows, weight, SEGMENTED_TILE, False, segments=segments, scaled=False)

    def finish(sums: Sequence[Array], at: Any, read: Callable, outs: Sequence[Any]) -> None:
        outs[0][at, :] = sums[0]

    return product.run(finish, [(jnp.float32, None)], {}, interpret, "multiply_segments")[0]


@functools.partial(jax.jit, static_argnames=("interpret",))
def multiply_add(
    rows: Float[Array, "M I"],
    weight: Array | Matrix,
    residual: Float[Array, "M E"] | None,
    scale: Float[Array, "E"] | None = None,
    *,
    bias: Float[Array, "E"] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "M E"], PreparedRows | None]:
    """Returns the residual stream plus a product, and these rows prepared for the next product.

    Args:
        rows: rows, which are rounded to bfloat16.
        weight: bfloat16 `[I, E]`, or a `Quantized` `[E, I]`.
        residual: the residual stream; None for no sum.
        scale: the scale of the next norm; None to prepare nothing.
        bias, interpret: see `multiply`.
    """
    segments = segment_count(rows.shape[1])
    product = _Product(rows, weight, SEGMENTED_TILE, False, bias=bias, segments=segments)

    def finish(sums: Sequence[Array], at: Any, read: Callable, outs: Sequence[Any]) -> None:
        x = sums[0] if residual is None else read("residual")[at, :] + sums[0]
        outs[0][at, :] = x
        if scale is not None:
            _write_prepared(x, read("scale"), outs[1], outs[2], at)

    shapes: list[tuple[DTypeLike, str | None]] = [(jnp.float32, None)]
    more = {} if residual is None else {"residual": (residual, "columns")}
    if scale is not None:
        shapes += [(jnp.bfloat16, None), (jnp.float32, "squares")]
        more["scale"] = scale.astype(jnp.float32), "outputs"
    x, *prepared = product.run(finish, shapes, more, interpret, "multiply_add")
    return x, PreparedRows(*prepared) if prepared else None


@functools.partial(jax.jit, static_argnames=("interpret",))
def add_shares(
    shares: Float[Array, "D M E"],
    residual: Float[Array, "M E"] | None,
    scale: Float[Array, "E"] | None = None,
    *,
    output_scale: Float[Array, "E"] | None = None,
    bias: Float[Array, "E"] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "M E"], PreparedRows | None]:
    """Adds what D devices computed by `multiply_segments`; the results are the bits of `multiply_add` on one device.

    Args:
        shares: the results of all devices, in the order of their inputs.
        residual, scale, bias, interpret: see `multiply_add`.
        output_scale: the scale of int8 weights; None for other weights.
    """
    devices, rows, width = shares.shape
    tile, group = tile_size(width, SEGMENTED_TILE.outputs, "outputs"), row_group(rows, devices)
    columns = pl.BlockSpec((group, tile), lambda r, i: (r, i))
    vector = pl.BlockSpec((tile,), lambda r, i: (i,))
    given = {"shares": (shares, pl.BlockSpec((devices, group, tile), lambda r, i: (0, r, i)))}
    if residual is not None:
        given["residual"] = residual, columns
    for name, array in (("output scale", output_scale), ("bias", bias), ("scale", scale)):
        if array is not None:
            given[name] = array.astype(jnp.float32), vector

    def kernel(*refs: Any) -> None:
        found, outs = dict(zip(given, refs)), refs[len(given) :]
        for t in range(group // ROW_TILE):
            at = pl.ds(t * ROW_TILE, ROW_TILE)
            x = add_in_tree([found["shares"][device, at, :] for device in range(devices)])
            if output_scale is not None:
                x = x * found["output scale"][...][None, :]
            if bias is not None:
                x = x + found["bias"][...][None, :]
            if residual is not None:
                x = found["residual"][at, :] + x
            outs[0][at, :] = x
            if scale is not None:
                _write_prepared(x, found["scale"], outs[1], outs[2], at)

    shapes = [jax.ShapeDtypeStruct((rows, width), jnp.float32)]
    shapes += _prepared_shapes(rows, width, tile) if scale is not None else []
    x, *prepared = pl.pallas_call(
        kernel,
        grid=(rows // group, width // tile),
        in_specs=[spec for _, spec in given.values()],
        out_specs=[columns, columns, pl.BlockSpec((None, group), lambda r, i: (i, r))][: len(shapes)],
        out_shape=shapes,
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="add_shares",
    )(*(array for array, _ in given.values()))
    return x, PreparedRows(*prepared) if prepared else None


@functools.partial(
    jax.jit,
    static_argnames=(
        "epsilon",
        "count",
        "interpret",
    ),
)
def normalize(
    x: Float[Array, "M E"], scale: Float[Array, "E"], epsilon: float, count: int | None = None, *,
    interpret: bool = False,
) -> Float[Array, "N E"]:  # fmt: skip
    """Applies RMSNorm to the first `count` rows, or to all of them; the bits of a row do not depend on other rows."""
    rows, width = len(x) if count is None else count, x.shape[1]

    def kernel(x_ref: Any, scale_ref: Any, out_ref: Any) -> None:
        parts = _powers_of_two(width)
        factor = lax.rsqrt(sum(_squares(x_ref[at]) for at in parts) / width + epsilon)
        for at in parts:
            out_ref[at] = x_ref[at] * factor * scale_ref[at]

    row = pl.BlockSpec((None, width), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        grid=(rows,),
        in_specs=[row, pl.BlockSpec((width,), lambda i: (0,))],
        out_specs=row,
        out_shape=jax.ShapeDtypeStruct((rows, width), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="normalize",
    )(x, scale.astype(jnp.float32))


class _Product:
    """A product of rows and weights, before what is done to its sums; see `multiply` and its siblings."""

    def __init__(
        self,
        rows: Array | PreparedRows,
        weight: Array | Matrix,
        tile: Tile,
        transposed: bool,
        epsilon: float = 0.0,
        bias: Array | None = None,
        halves: int = 1,
        segments: int = 1,
        scaled: bool = True,
    ):
        self.values, self.scale = stored_values(weight)
        self.transposed = transposed or isinstance(weight, Quantized)
        self.scale = self.scale if scaled else None
        self.squares = rows.squares if isinstance(rows, PreparedRows) else None
        self.rows = rows.rows if isinstance(rows, PreparedRows) else rows.astype(jnp.bfloat16)
        self.epsilon, self.bias, self.halves, self.segments = epsilon, bias, halves, segments
        outputs, self.inputs = self.values.shape if self.transposed else self.values.shape[::-1]
        self.outputs = outputs // halves
        if self.inputs % (segments * MIN_TILE):
            raise InvalidConfig(
                f"products='pallas' needs a multiple of {segments * MIN_TILE} inputs, got {self.inputs}; use 'xla'"
            )
        inputs = tile_size(self.inputs // segments, tile.inputs, "inputs")
        self.tile = Tile(tile_size(self.outputs, tile.outputs, "outputs"), inputs, tile.stages)
        self.group = row_group(len(self.rows), segments * halves)

    def sums(self, rows_ref: Any, weight_refs: Sequence[Any]) -> list[list[Array]]:
        """Returns for each tile of rows the sums of each half `[16, outputs of a tile]`."""
        tiles, part = rows_ref.shape[0] // ROW_TILE, self.inputs // self.segments

        def step(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            new = iter(sums)
            out = []
            for segment in range(self.segments):
                at = pl.ds(segment * part + i * self.tile.inputs, self.tile.inputs)
                weights = [(ref[:, at] if self.transposed else ref[at, :]).astype(jnp.bfloat16) for ref in weight_refs]
                for t in range(tiles):
                    rows = rows_ref[pl.ds(t * ROW_TILE, ROW_TILE), at]
                    out += [next(new) + multiply_tile(rows, weight, self.transposed) for weight in weights]
            return tuple(out)

        count = self.segments * tiles * self.halves
        zero = jnp.zeros((ROW_TILE, self.tile.outputs), jnp.float32)
        sums = lax.fori_loop(0, part // self.tile.inputs, step, (zero,) * count)
        return [
            [add_in_tree(sums[t * self.halves + half :: tiles * self.halves]) for half in range(self.halves)]
            for t in range(tiles)
        ]

    def run(
        self,
        finish: Callable[[Sequence[Array], Any, Callable, Sequence[Any]], None],
        outs: Sequence[tuple[DTypeLike, str | None]],
        more: dict[str, tuple[Array, str]],
        interpret: bool,
        name: str,
        count: int | None = None,
    ) -> Sequence[Array]:
        """Runs the kernel.

        Args:
            finish: writes the results of one tile of rows, from the sums of each half, the rows' place, a function from
                the name of an array to its reference, and the references of the outputs.
            outs: the dtype of each output, and "squares" for partial sums of squares.
            more: arrays that `finish` reads by name: `[M, O]` ("columns") or `[O]` ("outputs").
            interpret: see `multiply`.
            name: the name of the kernel.
            count: the number of rows of each output; `finish` then gets references to whole outputs. None for M rows.
        """
        rows, tile, group = self.rows.shape[0], self.tile, self.group
        steps = self.outputs // tile.outputs
        columns = pl.BlockSpec((group, tile.outputs), lambda r, i: (r, i))

        def vector(half: int) -> pl.BlockSpec:
            return pl.BlockSpec((tile.outputs,), lambda r, i: (half * steps + i,))

        def matrix(half: int) -> pl.BlockSpec:
            if self.transposed:
                return pl.BlockSpec((tile.outputs, self.inputs), lambda r, i: (half * steps + i, 0))
            return pl.BlockSpec((self.inputs, tile.outputs), lambda r, i: (0, half * steps + i))

        given: dict[str, tuple[Array, pl.BlockSpec]] = {
            "rows": (self.rows, pl.BlockSpec((group, self.inputs), lambda r, i: (r, 0)))
        }
        for half in range(self.halves):
            given[f"weight{half}"] = self.values, matrix(half)
            for kind, array in (("scale", self.scale), ("bias", self.bias)):
                if array is not None:
                    given[f"{kind}{half}"] = array.astype(jnp.float32), vector(half)
        if self.squares is not None:
            given["squares"] = self.squares, pl.BlockSpec((len(self.squares), group), lambda r, i: (0, r))
        for key, (array, kind) in more.items():
            given[key] = array, columns if kind == "columns" else vector(0)

        def kernel(*refs: Any) -> None:
            found = dict(zip(given, refs))
            weights = [found[f"weight{half}"] for half in range(self.halves)]
            for t, sums in enumerate(self.sums(found["rows"], weights)):
                at = pl.ds(t * ROW_TILE, ROW_TILE)
                finish(self._scaled(sums, at, found), at, found.__getitem__, refs[len(given) :])

        written = pl.BlockSpec((None, group), lambda r, i: (i, r))
        if count is not None:
            rows, columns = count, pl.BlockSpec((count, self.outputs), lambda r, i: (0, 0))
        return pl.pallas_call(
            kernel,
            grid=(len(self.rows) // group, steps),
            in_specs=[spec for _, spec in given.values()],
            out_specs=[written if kind else columns for _, kind in outs],
            out_shape=[
                jax.ShapeDtypeStruct((steps, rows) if kind else (rows, self.outputs), dtype) for dtype, kind in outs
            ],
            compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=tile.stages),
            interpret=interpret,
            name=name,
        )(*(array for array, _ in given.values()))

    def _scaled(self, sums: Sequence[Array], at: Any, found: dict[str, Any]) -> Sequence[Array]:
        """Applies the scale of int8 weights, the factor of the norm, and the bias."""
        if self.scale is not None:
            sums = [part * found[f"scale{half}"][...][None, :] for half, part in enumerate(sums)]
        if self.squares is not None:
            squares = found["squares"]
            total = sum(squares[part, at].sum(0) for part in _powers_of_two(squares.shape[0]))
            factor = lax.rsqrt(total / self.inputs + self.epsilon)[:, None]
            sums = [part * factor for part in sums]
        if self.bias is not None:
            sums = [part + found[f"bias{half}"][...][None, :] for half, part in enumerate(sums)]
        return sums


def stored_values(weight: Array | Matrix) -> tuple[Array, Array | None]:
    """Returns the stored values of weights, and the scales of int8 values."""
    if isinstance(weight, Quantized):
        return weight.values, weight.scale
    kind = getattr(weight, "dtype", None)
    if kind != jnp.bfloat16:
        held = type(weight).__name__ if kind is None else kind
        raise InvalidConfig(f"products='pallas' multiplies bfloat16 and int8 weights, got {held}; use 'xla'")
    return weight, None  # pyright: ignore[reportReturnType]


def _write_prepared(x: Array, scale_ref: Any, rows_ref: Any, squares_ref: Any, at: Any) -> None:
    """Writes one tile of rows as a `PreparedRows`."""
    rows_ref[at, :] = (x * scale_ref[...][None, :]).astype(jnp.bfloat16)
    squares_ref[at] = add_columns(x * x)


def _prepared_shapes(rows: int, width: int, tile: int) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct((rows, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((width // tile, rows), jnp.float32),
    ]


def multiply_tile(a: Array, b: Array, transposed: bool) -> Array:
    # An explicit precision, because JAX's default may be set to another one, with other instructions.
    dimensions = ((1,), (1 if transposed else 0,)), ((), ())
    return lax.dot_general(a, b, dimensions, lax.Precision.DEFAULT, jnp.float32)


def add_columns(values: Float[Array, "R C"]) -> Float[Array, "R"]:
    """Adds the halves of the columns repeatedly; the order of a reduction of Triton depends on the kernel around it."""
    while (size := values.shape[1]) > 1:
        low, high = lax.split(values, (size // 2,) * 2, 1)
        values = low + high
    return values.reshape(-1)


def _squares(x: Array) -> Array:
    return (x * x).sum()


def row_group(rows: int, accumulators: int) -> int:
    """Returns the number of rows of a program that has so many accumulators for each tile of rows."""
    tiles = rows // ROW_TILE
    most = max(1, min(MAX_ROW_TILES, MAX_ACCUMULATORS // accumulators))
    return ROW_TILE * max(count for count in range(1, most + 1) if tiles % count == 0)


def _power_of_two(number: int) -> int:
    """Returns the largest power of two that divides a number."""
    return number & -number


def tile_size(size: int, most: int, what: str) -> int:
    """Returns the largest power of two up to `most` that divides a size."""
    tile = min(most, _power_of_two(size))
    if tile < MIN_TILE:
        raise InvalidConfig(f"products='pallas' needs a multiple of {MIN_TILE} {what}, got {size}; use 'xla'")
    return tile


@functools.cache
def _powers_of_two(size: int, start: int = 0) -> tuple[slice, ...]:
    """Returns slices from `start` to `size` whose lengths are powers of two, which is what Triton can read."""
    found = []
    while start < size:
        stop = start + (1 << ((size - start).bit_length() - 1))
        found.append(slice(start, stop))
        start = stop
    return tuple(found)
