"""Weight matrices stored `[out, in]`, as in PyTorch, which some matmuls read faster; int8 quantization.

Int8 matrices have one float32 scale per output channel: absmax quantization to 127 steps (vector-wise, Dettmers et al.
2022, arXiv:2208.07339, section 3). A quantized model is a different model, close to the original; every guarantee
holds for it. Floating-point matrices stored `[out, in]` are the same model.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxspec.backend.cpu import FUSED_COLUMNS, STREAMED_ROWS, TILE_WEIGHTS, WEIGHTS_FIRST_ROWS, kernel_rows
from jaxspec.core.records import Params
from jaxspec.models.config import is_table


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OutMajor:
    """A weight matrix `[O, I]`, one row per output channel.

    Attributes:
        values: float32 or bfloat16 `[O, I]`, or int8 from -127 to 127.
        scale: float32 `[O]` with int8 values, such that a row is `scale * values`; None with floats.
    """

    values: Any
    scale: Any = None

    @classmethod
    def quantize(cls, matrix: Array | np.ndarray, transposed: bool = False) -> "OutMajor":
        """Quantizes a float matrix `[I, O]`, or `[O, I]` if `transposed`, to int8. NumPy arrays stay NumPy arrays."""
        own = np if isinstance(matrix, np.ndarray) else jnp
        rows = own.asarray(matrix if transposed else matrix.T, own.float32)
        scale = abs(rows).max(axis=1) * own.float32(1 / 127)
        values = own.rint(rows / own.where(scale > 0, scale, own.float32(1))[:, None])
        return cls(values.astype(own.int8), scale)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, rows: Any) -> "OutMajor":
        return OutMajor(self.values[rows], None if self.scale is None else self.scale[rows])

    def astype(self, dtype: DTypeLike) -> Array:
        """Returns the matrix in floating point, `[O, I]`."""
        if self.scale is None:
            return self.values.astype(dtype)
        return (self.values.astype(jnp.float32) * self.scale[..., None]).astype(dtype)

    def product(self, x: Float[Array, "N I"]) -> Float[Array, "N O"]:
        """Returns `x @ matrix.T`, accumulated in float32.

        Floats are multiplied in their own dtype; int8 in float32 on a CPU and in bfloat16 elsewhere.
        """
        # Only XLA knows the target platform: a program for a TPU may be compiled on another machine.
        x = x if self.scale is not None else x.astype(self.values.dtype)
        out = lax.platform_dependent(x, self.values, cpu=_on_cpu, default=_elsewhere)
        return out if self.scale is None else out * self.scale


def quantize(params: Params) -> Params:
    """Returns a transformer's parameters with every matrix quantized to int8; vectors stay float32."""

    def convert(path: tuple, leaf: Any) -> Any:
        return leaf if leaf.ndim < 2 else OutMajor.quantize(leaf, is_table(path[-1].key))

    return jax.tree_util.tree_map_with_path(convert, params)


def to_in_out(params: Params) -> Params:
    """Returns a transformer's parameters with every float matrix as `[in, out]`, the layout of saved models."""

    def convert(leaf: Any) -> Any:
        return leaf.values.T if isinstance(leaf, OutMajor) and leaf.scale is None else leaf

    return jax.tree.map(convert, params, is_leaf=lambda leaf: isinstance(leaf, OutMajor))


@jax.custom_batching.custom_vmap
def _by_row_count(x: Array, values: Array) -> Array:
    """Multiplies with the fastest method for this number of rows."""

    # The barrier keeps XLA from hoisting the conversion out of enclosing loops, as a float32 copy of all weights.
    def single(row: Array, start: int = 0) -> Array:
        matrix, row = lax.optimization_barrier((values, row))
        row, matrix = row[start : start + FUSED_COLUMNS], matrix[:, start : start + FUSED_COLUMNS]
        # The transpose makes XLA fuse the conversion into the product.
        return jnp.matmul(row.astype(jnp.float32), matrix.T.astype(jnp.float32), precision=lax.Precision.HIGHEST)

    def in_loops(row: Array) -> Array:
        # An opaque trip count stops XLA from fusing the row's producers (its norm, say) into the product, where they
        # would run once per output, and from fusing the product with the sum of the parts.
        count, rows = lax.optimization_barrier(jnp.int32(1)), jnp.stack([row, row])
        empty = jnp.zeros(len(values))
        starts = range(0, len(row), FUSED_COLUMNS)
        parts = [lax.fori_loop(0, count, lambda turn, _, i=i: single(rows[turn], i), empty) for i in starts]
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
    count = next(counts, 1)  # if no number of tiles fits, one tile
    parts = lax.map(tile, values.reshape(count, outputs // count, inputs))
    return parts.swapaxes(0, 1).reshape(len(x), outputs)


@_by_row_count.def_vmap
def _batched(size: int, mapped: Sequence[bool], x: Array, values: Array) -> tuple[Array, bool]:
    # Rows of the mapped axis count like other rows.
    if mapped[1]:  # several models at once
        return jax.vmap(_dot, (0 if mapped[0] else None, 0))(x, values.astype(x.dtype)), True
    return _by_row_count(x.reshape(-1, x.shape[-1]), values).reshape(size, x.shape[1], -1), True


@jax.custom_jvp
def _on_cpu(x: Array, values: Array) -> Array:
    return _by_row_count(x, values)


@_on_cpu.defjvp
def _on_cpu_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    # The loops have no reverse-mode derivative.
    (x, values), (dx, dvalues) = primals, tangents
    if values.dtype == jnp.int8:
        return _on_cpu(x, values), _dot(dx, values.astype(dx.dtype))
    return _on_cpu(x, values), _dot(dx, values) + _dot(x, dvalues)


def _weights_first(x: Array, values: Array) -> Array:
    rows = len(x)
    out = _dot(values, jnp.pad(x, ((0, kernel_rows(rows) - rows), (0, 0))))
    # Without the barrier XLA folds the transpose into the product and swaps the factors back.
    return lax.optimization_barrier(out).T[:rows]


def _elsewhere(x: Array, values: Array) -> Array:
    if values.dtype == jnp.int8:
        x, values = x.astype(jnp.bfloat16), values.astype(jnp.bfloat16)  # every int8 is a bfloat16
    return _dot(x, values)


def _dot(x: Array, matrix: Array) -> Array:
    precision = lax.Precision.HIGHEST if matrix.dtype == jnp.float32 else None
    dimensions = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, matrix, dimensions, precision=precision, preferred_element_type=jnp.float32)
