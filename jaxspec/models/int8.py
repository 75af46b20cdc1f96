"""Weights of one byte: int8 values and a float32 scale per output; activations stay what they are.

Each output's weights are rounded to 127 steps of its largest (vector-wise, Dettmers et al. 2022, arXiv:2208.07339,
section 3). The model that results is another one, close to the one that was read; every promise holds of it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxspec.models.config import is_table

ROWS, TILE = 12, 1 << 19
"""On CPU up to so many rows read the bytes once each; more of them meet tiles of so many weights in float32."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8:
    """A matrix `[O, I]`, an output a row, whatever way round the float matrix stands.

    Attributes:
        values: int8 `[O, I]`, from -127 to 127.
        scale: float32 `[O]`; a row is `scale * values`.
    """

    values: Any
    scale: Any

    @classmethod
    def of(cls, matrix: Any, transposed: bool = False) -> "Int8":
        """Rounds a float matrix `[I, O]`, or `[O, I]` where it is `transposed` already; a numpy array stays one."""
        own = np if isinstance(matrix, np.ndarray) else jnp
        rows = own.asarray(matrix if transposed else matrix.T, own.float32)
        scale = abs(rows).max(axis=1) * own.float32(1 / 127)
        values = own.rint(rows / own.where(scale > 0, scale, own.float32(1))[:, None])
        return cls(values.astype(own.int8), scale)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, rows: Any) -> "Int8":
        return Int8(self.values[rows], self.scale[rows])

    def astype(self, dtype: Any) -> Array:
        """The matrix in floats `[O, I]`."""
        return (self.values.astype(jnp.float32) * self.scale[..., None]).astype(dtype)

    def product(self, x: Float[Array, "N I"]) -> Float[Array, "N O"]:
        """The product of every row of x with every output's weights, in float32 (off the CPU, of x in bfloat16)."""
        # Which platform this is compiled for is known to XLA alone: a TPU's program may be compiled elsewhere.
        out = lax.platform_dependent(x, self.values, cpu=_on_cpu, default=_elsewhere)
        return out * self.scale


def quantize(params: Any) -> Any:
    """A transformer's parameters with every matrix as `Int8`; vectors stay float32."""

    def of(path: tuple, leaf: Any) -> Any:
        return leaf if leaf.ndim < 2 else Int8.of(leaf, is_table(path[-1].key))

    return jax.tree_util.tree_map_with_path(of, params)


def _on_cpu(x: Array, values: Array) -> Array:
    # Behind a barrier conversions cannot be done ahead of the loops around, in a float32 copy of all weights.
    def single(row: Array) -> Array:
        matrix, row = lax.optimization_barrier((values, row))
        return row @ matrix.T.astype(jnp.float32)  # the transpose makes XLA convert inside the product

    def tile(part: Array) -> Array:
        part, rows = lax.optimization_barrier((part, x))
        return lax.dot_general(rows, part.astype(jnp.float32), (((1,), (1,)), ((), ())))

    if x.shape[0] == 1:
        # A loop that XLA takes for a longer one, else it makes x anew, norm and all, for every output.
        turns, rows = lax.optimization_barrier(jnp.int32(1)), jnp.concatenate([x, x])
        empty = jnp.zeros((1, len(values)))
        return lax.fori_loop(0, turns, lambda turn, _: single(rows[turn])[None], empty)
    if x.shape[0] <= ROWS:
        return lax.map(single, x)
    outputs, inputs = values.shape
    counts = (n for n in range(1, outputs // 64 + 1) if outputs % n == 0 and outputs // n * inputs <= TILE)
    count = next(counts, 1)  # a vocabulary that nothing divides is one tile
    parts = lax.map(tile, values.reshape(count, outputs // count, inputs))
    return parts.swapaxes(0, 1).reshape(len(x), outputs)


def _elsewhere(x: Array, values: Array) -> Array:
    rows, matrix = x.astype(jnp.bfloat16), values.astype(jnp.bfloat16)  # every int8 is a bfloat16
    return lax.dot_general(rows, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
