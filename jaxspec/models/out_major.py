"""Matrices that stand an output a row, as checkpoints store them: the way round that some products are faster in.

In bytes, int8 values and a float32 scale per output: each output's weights are rounded to 127 steps of its largest
(vector-wise, Dettmers et al. 2022, arXiv:2208.07339, section 3). The model that results is another one, close to the
one that was read; every promise holds of it. In floats it is the same model.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxspec.backend.cpu import FUSED_COLUMNS, STREAMED_ROWS, TILE_WEIGHTS, WEIGHTS_FIRST_ROWS, kernel_rows
from jaxspec.models.config import is_table


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ByOutput:
    """A matrix `[O, I]`, an output a row, whatever way round the matrix stood that it was made of.

    Attributes:
        values: float32 or bfloat16 `[O, I]`, or int8 from -127 to 127.
        scale: float32 `[O]` beside int8 values, a row is `scale * values`; None beside floats.
    """

    values: Any
    scale: Any = None

    @classmethod
    def rounded(cls, matrix: Any, transposed: bool = False) -> "ByOutput":
        """Rounds a float matrix `[I, O]`, or `[O, I]` where it is `transposed` already; a numpy array stays one."""
        own = np if isinstance(matrix, np.ndarray) else jnp
        rows = own.asarray(matrix if transposed else matrix.T, own.float32)
        scale = abs(rows).max(axis=1) * own.float32(1 / 127)
        values = own.rint(rows / own.where(scale > 0, scale, own.float32(1))[:, None])
        return cls(values.astype(own.int8), scale)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, rows: Any) -> "ByOutput":
        return ByOutput(self.values[rows], None if self.scale is None else self.scale[rows])

    def astype(self, dtype: Any) -> Array:
        """The matrix in floats `[O, I]`."""
        if self.scale is None:
            return self.values.astype(dtype)
        return (self.values.astype(jnp.float32) * self.scale[..., None]).astype(dtype)

    def product(self, x: Float[Array, "N I"]) -> Float[Array, "N O"]:
        """The product of every row of x with every output's weights, with float32 sums.

        Floats are multiplied in their own dtype; bytes with float32, off the CPU with bfloat16.
        """
        # Which platform this is compiled for is known to XLA alone: a TPU's program may be compiled elsewhere.
        x = x if self.scale is not None else x.astype(self.values.dtype)
        out = lax.platform_dependent(x, self.values, cpu=_on_cpu, default=_elsewhere)
        return out if self.scale is None else out * self.scale


def quantize(params: Any) -> Any:
    """A transformer's parameters with every matrix in bytes; vectors stay float32."""

    def of(path: tuple, leaf: Any) -> Any:
        return leaf if leaf.ndim < 2 else ByOutput.rounded(leaf, is_table(path[-1].key))

    return jax.tree_util.tree_map_with_path(of, params)


def by_input(params: Any) -> Any:
    """A transformer's parameters with every float matrix as `[I, O]`, the form that is saved and that has a sha256."""

    def of(leaf: Any) -> Any:
        return leaf.values.T if isinstance(leaf, ByOutput) and leaf.scale is None else leaf

    return jax.tree.map(of, params, is_leaf=lambda leaf: isinstance(leaf, ByOutput))


@jax.custom_batching.custom_vmap
def _in_rows(x: Array, values: Array) -> Array:
    # Behind a barrier conversions cannot be done ahead of the loops around, in a float32 copy of all weights.
    def single(row: Array, start: int = 0) -> Array:
        matrix, row = lax.optimization_barrier((values, row))
        row, matrix = row[start : start + FUSED_COLUMNS], matrix[:, start : start + FUSED_COLUMNS]
        # The transpose makes XLA convert inside the product.
        return jnp.matmul(row.astype(jnp.float32), matrix.T.astype(jnp.float32), precision=lax.Precision.HIGHEST)

    def in_loops(row: Array) -> Array:
        # Loops that XLA takes for longer ones, else it makes the row anew, norm and all, for every output, and joins
        # the products with what adds them.
        turns, rows = lax.optimization_barrier(jnp.int32(1)), jnp.stack([row, row])
        empty = jnp.zeros(len(values))
        starts = range(0, len(row), FUSED_COLUMNS)
        parts = [lax.fori_loop(0, turns, lambda turn, _, i=i: single(rows[turn], i), empty) for i in starts]
        return functools.reduce(jnp.add, parts)

    def tile(part: Array) -> Array:
        part, rows = lax.optimization_barrier((part, x))
        return _dot(rows, part.astype(jnp.float32))

    if x.shape[0] == 1:
        return in_loops(x[0])[None]
    if x.shape[0] <= STREAMED_ROWS[str(values.dtype)]:
        return lax.map(single if x.shape[1] <= FUSED_COLUMNS else in_loops, x)
    if values.dtype == jnp.float32 and len(x) <= WEIGHTS_FIRST_ROWS:
        return _weights_first(x, values)
    if values.dtype != jnp.int8:
        return _dot(x, values)
    outputs, inputs = values.shape
    counts = (n for n in range(1, outputs // 64 + 1) if outputs % n == 0 and outputs // n * inputs <= TILE_WEIGHTS)
    count = next(counts, 1)  # a vocabulary that nothing divides is one tile
    parts = lax.map(tile, values.reshape(count, outputs // count, inputs))
    return parts.swapaxes(0, 1).reshape(len(x), outputs)


@_in_rows.def_vmap
def _in_more_rows(size: int, mapped: Sequence[bool], x: Array, values: Array) -> tuple[Array, bool]:
    # How many rows there are decides how they are multiplied: those of a vmap are rows like others.
    if mapped[1]:  # several models at once
        return jax.vmap(_dot, (0 if mapped[0] else None, 0))(x, values.astype(x.dtype)), True
    return _in_rows(x.reshape(-1, x.shape[-1]), values).reshape(size, x.shape[1], -1), True


@jax.custom_jvp
def _on_cpu(x: Array, values: Array) -> Array:
    return _in_rows(x, values)


@_on_cpu.defjvp
def _derivative(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    # The loops have no derivative by themselves.
    (x, values), (dx, dvalues) = primals, tangents
    if values.dtype == jnp.int8:
        return _on_cpu(x, values), _dot(dx, values.astype(dx.dtype))
    return _on_cpu(x, values), _dot(dx, values) + _dot(x, dvalues)


def _weights_first(x: Array, values: Array) -> Array:
    rows = len(x)
    out = _dot(values, jnp.pad(x, ((0, kernel_rows(rows) - rows), (0, 0))))
    # Without the barrier XLA turns the product round again, so that nothing is left to transpose.
    return lax.optimization_barrier(out).T[:rows]


def _elsewhere(x: Array, values: Array) -> Array:
    if values.dtype == jnp.int8:
        x, values = x.astype(jnp.bfloat16), values.astype(jnp.bfloat16)  # every int8 is a bfloat16
    return _dot(x, values)


def _dot(x: Array, matrix: Array) -> Array:
    precision = lax.Precision.HIGHEST if matrix.dtype == jnp.float32 else None
    dimensions = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, matrix, dimensions, precision=precision, preferred_element_type=jnp.float32)
