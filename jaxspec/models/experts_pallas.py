"""The matrices of a mixture of experts as two Pallas kernels for GPUs (Triton), which read only the experts in use.

XLA:GPU copies an expert out of the array of all experts before it multiplies it, and launches some ten kernels for each
expert. Here, one launch computes the hidden units of all rows by all experts in use. A second launch computes the
outputs: each of its programs adds the weighted outputs of a fixed range of experts, in ascending order. The sums of
the ranges are added as a balanced tree.

The bits of a row do not depend on the other rows. Every accumulator is one chain of sums, in an order that depends only
on the sizes of the layer, as in `jaxspec.models.products_pallas`. An expert that a row does not have adds nothing to
the row, and changes no bit of it.

Letters: M rows, 16 times a power of two; E the width of the residual stream; X experts; I the width of an
expert, or a device's share of it; U the largest number of experts in use; R ranges of experts.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, BFloat16, Bool, Float, Int

from jaxspec.models.products_pallas import (
    MAX_SEGMENTS,
    MIN_TILE,
    ROW_TILE,
    WARPS,
    add_in_tree,
    multiply_tile,
    row_group,
    stored_values,
    tile_size,
)
from jaxspec.models.quantized import Quantized
from jaxspec.models.rows import Gate

MAX_INT8_SIZE = 2**31
"""The size of int8 matrices from which on there are no kernels."""
MAX_ROWS = 128
"""The most rows for which the kernels are used: every row is multiplied with every expert in use."""
OUTPUTS, INPUTS, STAGES = 32, 64, 4
"""The outputs of a program, the inputs of an iteration, and the iterations whose operands are loaded ahead."""


class Used(NamedTuple):
    """The experts that any row has.

    Attributes:
        order: their indices in ascending order, then other indices: int32 `[U]`.
        number: how many there are: int32 `[1]`.
        starts: for each range of experts, the place in `order` at which it starts, and the end of the last: `[R + 1]`.
    """

    order: Int[Array, " U"]
    number: Int[Array, "1"]
    starts: Int[Array, " R1"]


def has_kernels(rows: int, gate_up: Any, down: Any) -> bool:
    """Returns True if there are kernels for the number of rows, and for the type and the sizes of the matrices."""
    for matrix in (gate_up, down):
        if not isinstance(matrix, Quantized) and getattr(matrix, "dtype", None) != jnp.bfloat16:
            return False
        if any(size % MIN_TILE for size in matrix.shape[1:]):
            return False
        # Triton's offsets have 32 bits, and a sign, up to 4 GiB: enough for all but int8 arrays of 2 GiB or more.
        if isinstance(matrix, Quantized) and math.prod(matrix.shape) >= MAX_INT8_SIZE:
            return False
    return rows <= MAX_ROWS


@functools.partial(jax.jit, static_argnames=("most", "activation", "interpret"))
def mix(
    rows: Float[Array, "N E"],
    has: Bool[Array, "N X"],
    weights: Float[Array, "N X"],
    gate_up: Array | Quantized,
    down: Array | Quantized,
    bias: Float[Array, "X I2"] | None = None,
    *,
    most: int,
    activation: str,
    interpret: bool = False,
) -> Float[Array, "N E"]:
    """Returns the weighted sums of the outputs of each row's experts.

    Args:
        rows: the rows, which are rounded to bfloat16.
        has: which experts each row has.
        weights: their weights.
        gate_up: bfloat16 `[X, E, 2 I]`, or a `Quantized` `[X, 2 I, E]`.
        down: bfloat16 `[X, I, E]`, or a `Quantized` `[X, E, I]`.
        bias: added to the products with `gate_up`.
        most: U, the largest number of experts in use.
        activation: the activation, see `jaxspec.models.rows.Gate`.
        interpret: whether to run the kernels as plain operations, on any device.
    """
    count = len(rows)
    padded = max(ROW_TILE, 1 << (count - 1).bit_length())  # three tiles of rows would spill registers
    more = ((0, padded - count), (0, 0))
    rows, has, weights = jnp.pad(rows.astype(jnp.bfloat16), more), jnp.pad(has, more), jnp.pad(weights, more)
    used = _find_used(has, most)
    hidden = hidden_units(rows, used, gate_up, bias, activation, interpret)
    parts = weighted_outputs(hidden, used, has.T.astype(jnp.int32), weights.T, down, interpret)
    return add_in_tree(list(parts))[:count]


def _find_used(has: Bool[Array, "M X"], most: int) -> Used:
    used, experts = has.any(0), has.shape[1]
    ranges = min(MAX_SEGMENTS, 1 << (experts.bit_length() - 1))
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(used, dtype=jnp.int32)])
    ends = jnp.array([experts * i // ranges for i in range(ranges + 1)])
    order = jnp.argsort(~used)[:most]  # stable: the experts in use come first, in ascending order
    return Used(order.astype(jnp.int32), before[-1:], before[ends])


def hidden_units(
    rows: BFloat16[Array, "M E"],
    used: Used,
    gate_up: Array | Quantized,
    bias: Float[Array, "X I2"] | None,
    activation: str,
    interpret: bool,
) -> BFloat16[Array, "U M I"]:
    """Returns the hidden units of all rows by the experts in use, in the order of `used`; of other experts, 0.

    Args:
        rows: the rows.
        used: the experts in use.
        gate_up, bias, activation, interpret: see `mix`.
    """
    values, scale = stored_values(gate_up)
    transposed = isinstance(gate_up, Quantized)
    inputs, width = rows.shape[1], values.shape[1 if transposed else 2] // 2
    outputs, step = tile_size(width, OUTPUTS, "units"), tile_size(inputs, INPUTS, "inputs")
    group = row_group(len(rows), 2)
    given = {"rows": (rows, pl.BlockSpec((group, inputs), lambda u, i, r: (r, 0)))}
    for name, array in (("order", used.order), ("number", used.number), ("values", values), ("scale", scale)):
        if array is not None:
            given[name] = array, _whole(array)
    if bias is not None:
        given["bias"] = bias.astype(jnp.float32), _whole(bias)

    def kernel(*refs: Any) -> None:
        found, out = dict(zip(given, refs)), refs[-1]
        place = pl.program_id(0)
        expert = found["order"][place]
        columns = [pl.ds(half * width + pl.program_id(1) * outputs, outputs) for half in range(2)]

        def add(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            at, new = pl.ds(i * step, step), iter(sums)
            matrices = [_read(found["values"], expert, at, own, transposed) for own in columns]
            tiles = (found["rows"][pl.ds(t * ROW_TILE, ROW_TILE), at] for t in range(group // ROW_TILE))
            return tuple(next(new) + multiply_tile(tile, matrix, transposed) for tile in tiles for matrix in matrices)

        zero = jnp.zeros((ROW_TILE, outputs), jnp.float32)
        # Triton's loops do not take the result of `jnp.where` as a bound.
        steps = jnp.clip(found["number"][0] - place, 0, 1) * (inputs // step)
        sums = iter(lax.fori_loop(0, steps, add, (zero,) * (2 * group // ROW_TILE)))
        for t in range(group // ROW_TILE):
            both = [_scaled(next(sums), found, expert, own) for own in columns]
            out[pl.ds(t * ROW_TILE, ROW_TILE), :] = Gate(activation).of_halves(*both).astype(jnp.bfloat16)

    most = len(used.order)
    return pl.pallas_call(
        kernel,
        grid=(most, width // outputs, len(rows) // group),
        in_specs=[spec for _, spec in given.values()],
        out_specs=pl.BlockSpec((None, group, outputs), lambda u, i, r: (u, r, i)),
        out_shape=jax.ShapeDtypeStruct((most, len(rows), width), jnp.bfloat16),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="expert_units",
    )(*(array for array, _ in given.values()))


def weighted_outputs(
    hidden: BFloat16[Array, "U M I"],
    used: Used,
    has: Int[Array, "X M"],
    weights: Float[Array, "X M"],
    down: Array | Quantized,
    interpret: bool,
) -> Float[Array, "R M E"]:
    """Returns the weighted sums of the outputs of each range of experts.

    Args:
        hidden: the hidden units by the experts in use.
        used: the experts in use.
        has: 1 for each expert that a row has, and 0 for the others.
        weights: their weights.
        down, interpret: see `mix`.
    """
    values, scale = stored_values(down)
    transposed = isinstance(down, Quantized)
    most, rows, inputs = hidden.shape
    width = values.shape[1 if transposed else 2]
    outputs, step = tile_size(width, OUTPUTS, "outputs"), tile_size(inputs, INPUTS, "units")
    group, ranges = row_group(rows, 2), len(used.starts) - 1
    by_row = pl.BlockSpec((len(has), group), lambda i, s, r: (0, r))
    given = {
        "hidden": (hidden, pl.BlockSpec((most, group, inputs), lambda i, s, r: (0, r, 0))),
        "has": (has, by_row),
        "weights": (weights, by_row),
    }
    for name, array in (("order", used.order), ("starts", used.starts), ("values", values), ("scale", scale)):
        if array is not None:
            given[name] = array, _whole(array)

    def kernel(*refs: Any) -> None:
        found, out = dict(zip(given, refs)), refs[-1]
        own = pl.ds(pl.program_id(0) * outputs, outputs)
        tiles = [pl.ds(t * ROW_TILE, ROW_TILE) for t in range(group // ROW_TILE)]
        zero = jnp.zeros((ROW_TILE, outputs), jnp.float32)

        def add_expert(place: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
            expert = found["order"][place]

            def add(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
                at = pl.ds(i * step, step)
                matrix = _read(found["values"], expert, at, own, transposed)
                return tuple(
                    total + multiply_tile(found["hidden"][place, tile, at], matrix, transposed)
                    for total, tile in zip(sums, tiles)
                )

            new = []
            for total, out, tile in zip(totals, lax.fori_loop(0, inputs // step, add, (zero,) * len(tiles)), tiles):
                out = _scaled(out, found, expert, own) * found["weights"][expert, tile][:, None]
                # Not a product with 0: an expert may overflow on a row that it does not belong to.
                new.append(total + jnp.where(found["has"][expert, tile][:, None] > 0, out, 0))
            return tuple(new)

        first, last = (found["starts"][pl.program_id(1) + i] for i in range(2))
        for tile, total in zip(tiles, lax.fori_loop(first, last, add_expert, (zero,) * len(tiles))):
            out[tile, :] = total

    return pl.pallas_call(
        kernel,
        grid=(width // outputs, ranges, rows // group),
        in_specs=[spec for _, spec in given.values()],
        out_specs=pl.BlockSpec((None, group, outputs), lambda i, s, r: (s, r, i)),
        out_shape=jax.ShapeDtypeStruct((ranges, rows, width), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="expert_outputs",
    )(*(array for array, _ in given.values()))


def _whole(array: Array) -> pl.BlockSpec:
    return pl.BlockSpec(array.shape, lambda *program: (0,) * array.ndim)


def _read(values: Any, expert: Array, inputs: Any, outputs: Any, transposed: bool) -> Array:
    """Returns a tile of the matrix of an expert, in bfloat16."""
    tile = values[expert, outputs, inputs] if transposed else values[expert, inputs, outputs]
    return tile.astype(jnp.bfloat16)


def _scaled(sums: Array, found: dict[str, Any], expert: Array, columns: Any) -> Array:
    """Applies the scale of int8 weights, and the bias of the expert."""
    if "scale" in found:
        sums = sums * found["scale"][expert, columns][None, :]
    return sums + found["bias"][expert, columns][None, :] if "bias" in found else sums
