"""Int8 quantization of weight matrices.

Each output channel has one float32 scale: absmax quantization to 127 steps (vector-wise, Dettmers et al. 2022,
arXiv:2208.07339, section 3). A quantized model is a different model, close to the original. Every guarantee holds for
the quantized model.
"""

import dataclasses
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from jaxspec.core.records import Params
from jaxspec.models.config import is_matrix, is_table
from jaxspec.models.rows import NO_FUSION, Fused

TILE_ROWS = 32  # rows of int8 in a tile of a TPU's memory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An int8 weight matrix `[O, I]`, one row per output channel; or one for each expert, `[X, O, I]`.

    Attributes:
        values: int8 `[O, I]`, from -127 to 127.
        scale: float32 `[O]`, such that a row is `scale * values`.
    """

    values: Any
    scale: Any

    @classmethod
    def quantize(cls, matrix: Array | np.ndarray, transposed: bool = False) -> "Quantized":
        """Quantizes float matrices `[..., I, O]`, or `[..., O, I]` if `transposed`. NumPy arrays stay NumPy arrays."""
        xp = np if isinstance(matrix, np.ndarray) else jnp
        rows = xp.asarray(matrix if transposed else matrix.swapaxes(-1, -2), xp.float32)
        scale = abs(rows).max(axis=-1) * xp.float32(1 / 127)
        values = xp.rint(rows / xp.where(scale > 0, scale, xp.float32(1))[..., None])
        return cls(values.astype(xp.int8), scale)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, rows: Any) -> "Quantized":
        size = len(self.values)
        if (
            isinstance(rows, jax.Array) and size % TILE_ROWS == 0 and rows.size * TILE_ROWS <= size
        ):  # else a copy reads less
            values = lax.platform_dependent(self.values, rows, tpu=_rows_of_tiles, default=operator.getitem)
        else:
            values = self.values[rows]
        return Quantized(values, self.scale[rows])

    def astype(self, dtype: DTypeLike) -> Array:
        """Returns the matrix in floating point, `[O, I]`."""
        return (self.values.astype(jnp.float32) * self.scale[..., None]).astype(dtype)

    def product(self, x: Float[Array, "N J"], fused: Fused = NO_FUSION) -> Float[Array, "N O"]:
        """Returns `x @ matrix.T`, in float32 on a CPU, elsewhere in bfloat16 with sums in float32."""

        def multiply(x: Array) -> Array:
            # Only XLA knows the target platform: a program for a TPU may be compiled on another machine.
            return lax.platform_dependent(x, self.values, cpu=_on_cpu, default=_elsewhere) * self.scale

        return fused.around(multiply, x)


def quantize(params: Params) -> Params:
    """Returns a transformer's parameters with every matrix quantized to int8; other arrays stay float32."""

    def convert(path: tuple, leaf: Any) -> Any:
        name = path[-1].key
        return Quantized.quantize(leaf, is_table(name)) if is_matrix(name, leaf.ndim) else leaf

    return jax.tree_util.tree_map_with_path(convert, params)


def _rows_of_tiles(values: Int8[Array, "O I"], rows: Int[Array, "*n"]) -> Int8[Array, "*n I"]:
    """Returns rows of a table, which are read with their tiles because XLA:TPU copies the table to read single rows."""
    tiles = values.reshape(-1, TILE_ROWS, values.shape[1])[rows // TILE_ROWS]
    selected = rows[..., None] % TILE_ROWS == jnp.arange(TILE_ROWS)
    return jnp.where(selected[..., None], tiles, 0).sum(-2, dtype=values.dtype)


def _on_cpu(x: Array, values: Array) -> Array:
    def tile(part: Array) -> Array:
        part, rows = lax.optimization_barrier((part, x))
        return jnp.matmul(rows, part.T.astype(jnp.float32), precision=lax.Precision.HIGHEST)

    # Without the loop and the barrier, XLA holds all weights in float32 at once.
    outputs, inputs = values.shape
    count = math.gcd(outputs, 64)
    parts = lax.map(tile, values.reshape(count, outputs // count, inputs))
    return parts.swapaxes(0, 1).reshape(len(x), outputs)


def _elsewhere(x: Array, values: Array) -> Array:
    rows, values = x.astype(jnp.bfloat16), values.astype(jnp.bfloat16)  # every int8 is a bfloat16
    if len(rows) == 1:  # XLA:GPU multiplies two rows faster than one
        rows = jnp.pad(rows, ((0, 1), (0, 0)))
    return jnp.matmul(rows, values.T, preferred_element_type=jnp.float32)[: len(x)]
