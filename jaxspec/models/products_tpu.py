"""The products of a transformer's layer as Pallas kernels for TPUs (Mosaic), whose rows do not depend on other rows.

A TPU runs the programs of a kernel one after the other. The first program of a group of rows norms the rows into
on-chip memory (VMEM); after that, blocks of the weights stream by. The rows come in tiles of 16, and every tile is
multiplied with a block by the same instruction. Each output is one chain of sums over the blocks of its inputs, in an
order that depends only on the shape of the weights. The bits of a row therefore depend neither on the number of rows
nor on the place of the row. The inputs of the products that add to the residual stream come in segments, which are
added as a balanced tree, as in `jaxspec.models.products_pallas` for GPUs.

Letters: M rows, a multiple of 16 (`padded_rows`); I inputs; O outputs; E the width of the residual stream; J the width
of all heads.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float

from jaxspec.backend.layout import LANES
from jaxspec.errors import InvalidConfig
from jaxspec.models.packed import Matrix
from jaxspec.models.products_pallas import MAX_SEGMENTS, ROW_TILE, add_in_tree, stored_values
from jaxspec.models.quantized import Quantized
from jaxspec.models.rows import Norm

MAX_ROW_TILES = 8
"""The largest number of row tiles in a program. The weights are read once for each group of so many tiles."""
VMEM_BYTES = 64 << 20
"""The on-chip memory that a kernel may use. The default of 16 MB is too small for blocks of many rows."""


class Block(NamedTuple):
    """The largest block of weights of a program. Only `inputs` changes the order of the sums."""

    outputs: int
    inputs: int


PLAIN_BLOCK, GATED_BLOCK = Block(1024, 1024), Block(512, 1024)


def segment_count(inputs: int) -> int:
    """Returns the number of segments of a product with this number of inputs: 8, 4, 2 or 1."""
    blocks = inputs // LANES
    return min(MAX_SEGMENTS, blocks & -blocks)


@functools.partial(jax.jit, static_argnames=("transposed", "interpret"))
def multiply(
    rows: Float[Array, "M I"],
    weight: Array | Matrix,
    norm: Norm | None = None,
    *,
    bias: Float[Array, " O"] | None = None,
    transposed: bool = False,
    interpret: bool = False,
) -> Float[Array, "M O"]:
    """Returns the product of rows and weights, in float32.

    Args:
        rows: float32 rows, or bfloat16 rows without a norm.
        weight: bfloat16 `[I, O]`, or `[O, I]` if `transposed`; or a `Quantized` `[O, I]`.
        norm: applied to the rows before they are rounded to bfloat16; None for no norm.
        bias: added to the outputs of every row.
        transposed: whether an array is `[O, I]`.
        interpret: whether to run the kernel as plain operations, on any device.

    Raises:
        InvalidConfig: there is no kernel for the type or the sizes of the weights.
    """
    product = _Product(rows, weight, PLAIN_BLOCK, norm, bias, transposed)
    return product.run(lambda sums, read: sums[0], jnp.float32, None, interpret, "multiply")


@functools.partial(jax.jit, static_argnames=("activation", "interpret"))
def multiply_gated(
    rows: Float[Array, "M I"],
    weight: Array | Matrix,
    activation: str,
    norm: Norm | None = None,
    *,
    bias: Float[Array, " O2"] | None = None,
    interpret: bool = False,
) -> BFloat16[Array, "M O"]:
    """Returns the activation of the first half of a product's outputs, times the second half, rounded to bfloat16.

    Args:
        weight: bfloat16 `[I, 2 O]`, or a `Quantized` `[2 O, I]`.
        activation: "silu" or "gelu_tanh".
        rows, norm, bias, interpret: see `multiply`.
    """
    product = _Product(rows, weight, GATED_BLOCK, norm, bias, halves=2)

    def finish(sums: Sequence[Array], read: Callable) -> Array:
        gate, up = sums
        gate = gate * (1 / (1 + jnp.exp(-gate))) if activation == "silu" else jax.nn.gelu(gate, approximate=True)
        return gate * up

    return product.run(finish, jnp.bfloat16, None, interpret, "multiply_gated")


@functools.partial(jax.jit, static_argnames=("interpret",))
def multiply_add(
    rows: Float[Array, "M I"],
    weight: Array | Matrix,
    residual: Float[Array, "M E"] | None,
    *,
    bias: Float[Array, "E"] | None = None,
    interpret: bool = False,
) -> Float[Array, "M E"]:
    """Returns the residual stream plus a product.

    Args:
        rows: rows, which are rounded to bfloat16.
        weight: bfloat16 `[I, E]`, or a `Quantized` `[E, I]`.
        residual: the residual stream; None for no sum.
        bias, interpret: see `multiply`.
    """
    product = _Product(rows, weight, PLAIN_BLOCK, None, bias, segments=segment_count(rows.shape[1]))

    def finish(sums: Sequence[Array], read: Callable) -> Array:
        return sums[0] if residual is None else read() + sums[0]

    return product.run(finish, jnp.float32, residual, interpret, "multiply_add")


@functools.partial(jax.jit, static_argnames=("segments", "interpret"))
def multiply_segments(
    rows: Float[Array, "M I"], weight: Array | Matrix, segments: int, *, interpret: bool = False
) -> Float[Array, "M O"]:
    """Returns the product over one device's share of the inputs, in this number of segments, without a scale.

    The products of all devices, added by `add_shares`, have the bits of `multiply_add` on one device.

    Args:
        rows: the device's share of the columns.
        weight: the device's share of the weights: bfloat16 `[I, O]`, or a `Quantized` `[O, I]`.
        segments: the number of segments of all inputs (`segment_count`), divided by the number of devices.
        interpret: see `multiply`.
    """
    product = _Product(rows, weight, PLAIN_BLOCK, None, None, segments=segments, scaled=False)
    return product.run(lambda sums, read: sums[0], jnp.float32, None, interpret, "multiply_segments")


@functools.partial(jax.jit, static_argnames=("interpret",))
def add_shares(
    shares: Float[Array, "D M E"],
    residual: Float[Array, "M E"] | None,
    *,
    output_scale: Float[Array, "E"] | None = None,
    bias: Float[Array, "E"] | None = None,
    interpret: bool = False,
) -> Float[Array, "M E"]:
    """Adds what D devices computed by `multiply_segments`; the results are the bits of `multiply_add` on one device.

    Args:
        shares: the results of all devices, in the order of their inputs.
        residual, bias, interpret: see `multiply_add`.
        output_scale: the scale of int8 weights; None for other weights.
    """
    devices, rows, width = shares.shape
    block = min(PLAIN_BLOCK.outputs, width)
    columns = pl.BlockSpec((ROW_TILE, block), lambda r, o: (r, o))
    vector = pl.BlockSpec((1, block), lambda r, o: (0, o))
    given = {"shares": (shares, pl.BlockSpec((devices, ROW_TILE, block), lambda r, o: (0, r, o)))}
    for name, array in (("output scale", output_scale), ("bias", bias)):
        if array is not None:
            given[name] = array.astype(jnp.float32)[None], vector
    if residual is not None:
        given["residual"] = residual, columns

    def kernel(*refs: Any) -> None:
        found, out_ref = dict(zip(given, refs)), refs[-1]
        x = add_in_tree([found["shares"][device] for device in range(devices)])
        if output_scale is not None:
            x = x * found["output scale"][...]
        if bias is not None:
            x = x + found["bias"][...]
        out_ref[...] = x if residual is None else found["residual"][...] + x

    return pl.pallas_call(
        kernel,
        grid=(rows // ROW_TILE, -(-width // block)),
        in_specs=[spec for _, spec in given.values()],
        out_specs=columns,
        out_shape=jax.ShapeDtypeStruct((rows, width), jnp.float32),
        interpret=interpret,
        name="add_shares",
    )(*(array for array, _ in given.values()))


@functools.partial(jax.jit, static_argnames=("interpret",))
def normalize(x: Float[Array, "M E"], norm: Norm, *, interpret: bool = False) -> Float[Array, "M E"]:
    """Applies RMSNorm; the bits of a row do not depend on the other rows."""
    rows, width = x.shape

    def kernel(x_ref: Any, scale_ref: Any, out_ref: Any) -> None:
        out_ref[...] = _normed(x_ref[...], scale_ref[...], norm.epsilon)

    tile = pl.BlockSpec((ROW_TILE, width), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        grid=(rows // ROW_TILE,),
        in_specs=[tile, pl.BlockSpec((1, width), lambda i: (0, 0))],
        out_specs=tile,
        out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        interpret=interpret,
        name="normalize",
    )(x, norm.scale.astype(jnp.float32)[None])


@functools.partial(jax.jit, static_argnames=("shared", "width", "dtype", "interpret"))
def rotate_heads(
    projected: Float[Array, "M J3"],
    rotation: tuple[Float[Array, "B 1 T R"], Float[Array, "B 1 T R"]],
    shared: int,
    width: int,
    dtype: DTypeLike,
    norms: Sequence[Norm | None] = (None, None),
    *,
    interpret: bool = False,
) -> Array:
    """Returns queries and keys, normed and rotated, and values, side by side as they were projected.

    Args:
        projected: for each row G queries for each of H keys, then keys, then values. The first B T rows are rotated.
        rotation: cosines and sines of the angles of the first 2 R values of a head.
        shared: H, the number of key heads.
        width: K, the width of a head, a multiple of 128.
        dtype: the dtype of the result.
        norms: the norm of queries and the norm of keys, before they are rotated; None for no norm.
        interpret: see `multiply`.
    """
    rows, size = projected.shape
    count, half = size // width, rotation[0].shape[-1]
    factors = [jnp.pad(part, ((0, rows - part.shape[0]), (0, 0))) for part in _turns(rotation, width)]

    def kernel(heads_ref: Any, *refs: Any) -> None:
        *scale_refs, same_ref, low_ref, high_ref, out_ref = refs
        scales = [None if norm is None else scale_refs.pop(0) for norm in norms]
        for head in range(count):
            at = slice(head * width, (head + 1) * width)
            x, kind = heads_ref[:, at], 0 if head < count - 2 * shared else 1
            if head < count - shared:
                norm, scale_ref = norms[kind], scales[kind]
                if norm is not None and scale_ref is not None:
                    x = _normed(x, scale_ref[...], norm.epsilon)
                turned = pltpu.roll(x, width - half, 1) * low_ref[...] + pltpu.roll(x, half, 1) * high_ref[...]
                x = x * same_ref[...] + turned
            out_ref[:, at] = x.astype(dtype)

    def tile(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((ROW_TILE, width), lambda i: (i, 0))

    given = [norm.scale.astype(jnp.float32)[None] for norm in norms if norm is not None]
    vector = pl.BlockSpec((1, width), lambda i: (0, 0))
    return pl.pallas_call(
        kernel,
        grid=(rows // ROW_TILE,),
        in_specs=[tile(size), *[vector] * len(given), *[tile(width)] * 3],
        out_specs=tile(size),
        out_shape=jax.ShapeDtypeStruct(projected.shape, dtype),
        interpret=interpret,
        name="rotate_heads",
    )(projected, *given, *factors)


def _turns(rotation: tuple[Array, Array], width: int) -> tuple[Array, Array, Array]:
    """Returns what a head is multiplied by, itself and shifted by R values to the left and to the right: `[B T, K]`."""
    cos, sin = (part.reshape(-1, part.shape[-1]) for part in rotation)
    rest, none = jnp.ones((len(cos), width - 2 * cos.shape[1]), jnp.float32), jnp.zeros_like(sin)
    same = jnp.concatenate([cos, cos, rest], 1)
    low, high = (jnp.concatenate([*pair, 0 * rest], 1) for pair in ((-sin, none), (none, sin)))
    return same, low, high


class _Product:
    """A product of rows and weights, before what is done to its sums; see `multiply` and its siblings."""

    def __init__(
        self,
        rows: Array,
        weight: Array | Matrix,
        block: Block,
        norm: Norm | None,
        bias: Array | None,
        transposed: bool = False,
        halves: int = 1,
        segments: int = 1,
        scaled: bool = True,
    ):
        self.values, self.scale = stored_values(weight)
        self.scale = self.scale if scaled else None
        self.transposed = transposed or isinstance(weight, Quantized)
        self.rows = rows.astype(jnp.bfloat16) if norm is None else rows
        self.norm, self.bias, self.halves, self.segments = norm, bias, halves, segments
        outputs, self.inputs = self.values.shape if self.transposed else self.values.shape[::-1]
        self.outputs = outputs // halves
        whole = self.outputs if halves == 1 else _divisor(self.outputs, block.outputs, "outputs")
        self.block = Block(min(block.outputs, whole), _divisor(self.inputs // segments, block.inputs, "inputs"))

    def run(
        self,
        finish: Callable[[Sequence[Array], Callable], Array],
        dtype: DTypeLike,
        residual: Array | None,
        interpret: bool,
        name: str,
    ) -> Array:
        """Runs the kernel.

        Args:
            finish: returns the results of one tile of rows, from the sums of each half and a function that reads the
                residual stream.
            dtype: the dtype of the results.
            residual: what `finish` reads; None if it reads nothing.
            interpret: see `multiply`.
            name: the name of the kernel.
        """
        rows, (outputs, inputs) = self.rows.shape[0], self.block
        group, steps = _row_group(rows), -(-self.outputs // outputs)
        last = self.inputs // inputs - 1
        columns = pl.BlockSpec((group, outputs), lambda r, o, i: (r, o))

        def vector(half: int) -> pl.BlockSpec:
            return pl.BlockSpec((1, outputs), lambda r, o, i: (0, half * steps + o))

        def matrix(half: int) -> pl.BlockSpec:
            if self.transposed:
                return pl.BlockSpec((outputs, inputs), lambda r, o, i: (half * steps + o, i))
            return pl.BlockSpec((inputs, outputs), lambda r, o, i: (i, half * steps + o))

        normed = self.norm is not None
        read_rows = (group, self.inputs) if normed else (group, inputs)
        given: dict[str, tuple[Array, pl.BlockSpec]] = {
            "rows": (self.rows, pl.BlockSpec(read_rows, lambda r, o, i: (r, 0 if normed else i)))
        }
        if self.norm is not None:
            scale = self.norm.scale.astype(jnp.float32)[None]
            given["norm"] = scale, pl.BlockSpec((1, self.inputs), lambda r, o, i: (0, 0))
        for half in range(self.halves):
            given[f"weight{half}"] = self.values, matrix(half)
            for kind, array in (("scale", self.scale), ("bias", self.bias)):
                if array is not None:
                    given[f"{kind}{half}"] = array.astype(jnp.float32)[None], vector(half)
        if residual is not None:
            given["residual"] = residual, columns

        def kernel(*refs: Any) -> None:
            found, (out_ref, sums_ref, *held) = dict(zip(given, refs)), refs[len(given) :]
            step = pl.program_id(2)
            if held:
                pl.when((pl.program_id(1) == 0) & (step == 0))(lambda: self._hold(found, held[0]))
            self._add(step, found, sums_ref, *held)

            @pl.when(step == last)
            def _() -> None:
                for at in _tiles(group):
                    sums = self._scaled(sums_ref, at, found)
                    out_ref[at, :] = finish(sums, lambda at=at: found["residual"][at, :]).astype(dtype)

        sums = pltpu.VMEM((self.segments * self.halves, group, outputs), jnp.float32)
        return pl.pallas_call(
            kernel,
            grid=(rows // group, steps, last + 1),
            in_specs=[spec for _, spec in given.values()],
            out_specs=columns,
            out_shape=jax.ShapeDtypeStruct((rows, self.outputs), dtype),
            scratch_shapes=[sums, *([pltpu.VMEM((group, self.inputs), jnp.bfloat16)] if normed else [])],
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
            interpret=interpret,
            name=name,
        )(*(array for array, _ in given.values()))

    def _hold(self, found: dict[str, Any], held: Any) -> None:
        """Norms and rounds the rows."""
        assert self.norm is not None
        for at in _tiles(held.shape[0]):
            held[at, :] = _normed(found["rows"][at, :], found["norm"][...], self.norm.epsilon).astype(jnp.bfloat16)

    def _add(self, step: Array, found: dict[str, Any], sums_ref: Any, held: Any = None) -> None:
        """Adds the products of one block of inputs to the sums of its segment."""
        per = self.inputs // self.segments // self.block.inputs
        place = pl.ds(pl.multiple_of(step * self.block.inputs, LANES), self.block.inputs)
        for half in range(self.halves):
            number = lax.div(step, per) * self.halves + half
            weights = found[f"weight{half}"][...].astype(jnp.bfloat16)
            for at in _tiles(sums_ref.shape[1]):
                rows = found["rows"][at, :] if held is None else held[at, place]
                before = jnp.where(lax.rem(step, per) == 0, 0.0, sums_ref[number, at, :])
                sums_ref[number, at, :] = before + _dot(rows, weights, self.transposed)

    def _scaled(self, sums_ref: Any, at: Any, found: dict[str, Any]) -> Sequence[Array]:
        """Returns the sums of one tile of rows for each half, after the scale of int8 weights and the bias."""
        sums = []
        for half in range(self.halves):
            part = add_in_tree([sums_ref[s * self.halves + half, at, :] for s in range(self.segments)])
            if self.scale is not None:
                part = part * found[f"scale{half}"][...]
            sums.append(part if self.bias is None else part + found[f"bias{half}"][...])
        return sums


def _normed(x: Float[Array, "M E"], scale: Float[Array, "1 E"], epsilon: float) -> Float[Array, "M E"]:
    return x * lax.rsqrt((x * x).sum(-1, keepdims=True) / x.shape[1] + epsilon) * scale


def _dot(a: Array, b: Array, transposed: bool) -> Array:
    # An explicit precision, because JAX's default may be set to another one, with other instructions.
    dimensions = ((1,), (1 if transposed else 0,)), ((), ())
    return lax.dot_general(a, b, dimensions, lax.Precision.DEFAULT, jnp.float32)


def _tiles(rows: int) -> list[Any]:
    return [pl.ds(start, ROW_TILE) for start in range(0, rows, ROW_TILE)]


def _row_group(rows: int) -> int:
    """Returns the number of rows of a program."""
    tiles = rows // ROW_TILE
    return ROW_TILE * max(count for count in range(1, MAX_ROW_TILES + 1) if tiles % count == 0)


def _divisor(size: int, most: int, what: str) -> int:
    """Returns the largest multiple of 128 up to `most` that divides a size."""
    if size % LANES:
        raise InvalidConfig(f"products='pallas' on a TPU needs a multiple of {LANES} {what}, got {size}; use 'xla'")
    return max(part for part in range(LANES, most + 1, LANES) if size % part == 0)
