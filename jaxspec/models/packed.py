"""Weight matrices in the layout of the CPU kernels, whose products read memory in order.

A matrix `[O, I]` is stored as `[O / 16, I / g, 16, g]`, padded with zeros, where g values fill four bytes: 1 of
float32, 2 of bfloat16, 4 of int8 (I is then padded to a multiple of 32). Int8 values are stored as uint8, with 128
added. A product first rounds the rows of the other factor. It rounds them to bfloat16 if the matrix is bfloat16, and to
int8 if the matrix is int8, with one scale for each 32 values (the largest magnitude is 127 steps), as llama.cpp does.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxspec.core.records import Params
from jaxspec.kernels import calls
from jaxspec.models.block_kinds import BLOCK_INPUTS, UNIT_OUTPUTS
from jaxspec.models.blocks import Blocks
from jaxspec.models.config import EXPERT_MATRICES, is_table
from jaxspec.models.products import product
from jaxspec.models.quantized import Quantized
from jaxspec.models.rows import NO_FUSION, Fused

INT8_OFFSET = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A packed weight matrix `[O, I]`, or one for each expert, whose arrays have one more axis at the front.

    Attributes:
        values: float32, bfloat16 or uint8 `[O / 16, I / g, 16, g]`.
        scale: float32 `[O]` with uint8 values, such that row o is `scale[o] * (values - 128)`; None with floats.
        outputs: O.
        inputs: I.
    """

    values: Any
    scale: Any = None
    outputs: int = dataclasses.field(default=0, metadata={"static": True})
    inputs: int = dataclasses.field(default=0, metadata={"static": True})

    @classmethod
    def pack(cls, matrix: Array | np.ndarray | Quantized) -> "Packed":
        """Packs a matrix `[O, I]`, or one for each expert `[X, O, I]`. NumPy arrays stay NumPy arrays."""
        values, scale = (matrix.values, matrix.scale) if isinstance(matrix, Quantized) else (matrix, None)
        xp = np if isinstance(values, np.ndarray) else jnp
        *lead, outputs, inputs = values.shape
        if values.dtype == jnp.int8:
            values = values.view(np.uint8) if xp is np else lax.bitcast_convert_type(values, jnp.uint8)
            values = values ^ np.uint8(INT8_OFFSET)
        group = 4 // values.dtype.itemsize
        padding = [(0, 0)] * len(lead)
        padding += [(0, -outputs % UNIT_OUTPUTS), (0, -inputs % (group if scale is None else BLOCK_INPUTS))]
        values = xp.pad(values, padding, constant_values=0 if scale is None else INT8_OFFSET)
        values = values.reshape(*lead, values.shape[-2] // UNIT_OUTPUTS, UNIT_OUTPUTS, -1, group).swapaxes(-3, -2)
        return cls(np.ascontiguousarray(values) if xp is np else values, scale, outputs, inputs)

    def unpack(self) -> Any:
        """Returns the matrix `[O, I]` as an array, or a `Quantized` with int8 values."""
        *lead, blocks, _, lanes, _ = self.values.shape
        values = self.values.swapaxes(-3, -2).reshape(*lead, blocks * lanes, -1, 1)
        return self._rows(values[..., : self.outputs, :, :], self.scale)

    def _rows(self, values: Any, scale: Any) -> Any:
        """Returns rows that were read as `[*, I / g, g]`."""
        values = values.reshape(*values.shape[:-2], -1)[..., : self.inputs]
        if scale is None:
            return values
        signed = values ^ np.uint8(INT8_OFFSET)
        numpy = isinstance(signed, np.ndarray)
        return Quantized(signed.view(np.int8) if numpy else lax.bitcast_convert_type(signed, jnp.int8), scale)

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs

    def __getitem__(self, rows: Any) -> Any:
        if rows is Ellipsis:
            return self
        if isinstance(rows, slice):
            return self.unpack()[rows]
        values = self.values[rows // UNIT_OUTPUTS, :, rows % UNIT_OUTPUTS]
        return self._rows(values, None if self.scale is None else self.scale[rows])

    def astype(self, dtype: DTypeLike) -> Array:
        """Returns the matrix in floating point, `[O, I]`."""
        return self.unpack().astype(dtype)

    def product(self, x: Float[Array, "N J"], fused: Fused = NO_FUSION) -> Float[Array, "N O"]:
        """Returns `x @ matrix.T`, accumulated in float32; see the module for the rounding of `x`."""
        return product(x, self, fused)

    def multiply(self, x: Float[Array, "N J"], fused: Fused = NO_FUSION) -> Float[Array, "N O"]:
        """Returns the product that the kernel computes."""
        return calls.multiply(x, self.values, self.scale, self.outputs, self._kind, **fused.options())

    @property
    def _kind(self) -> str:
        return "int8" if self.scale is not None else str(self.values.dtype)

    def of_experts(self) -> calls.PackedExperts:
        """Returns the arrays of the experts' matrices, for the kernel."""
        return calls.PackedExperts(self.values, self.scale, self._kind)


Matrix = Quantized | Packed | Blocks
"""A weight matrix `[O, I]` that is not an array."""


def pack_param(name: str, leaf: Any) -> Any:
    """Packs a parameter of a transformer if it is a matrix. `name` is the last part of its name."""
    if isinstance(leaf, Blocks):
        return leaf
    if isinstance(leaf, Quantized) or (leaf.ndim == 2 and is_table(name)):
        return Packed.pack(leaf)
    return Packed.pack(leaf.swapaxes(-1, -2)) if leaf.ndim == 2 or name in EXPERT_MATRICES else leaf


def unpack_param(name: str, leaf: Any) -> Any:
    """Returns a parameter as it was before `pack_param`."""
    if not is_packed(leaf):
        return leaf
    unpacked = leaf.unpack()
    return unpacked if isinstance(unpacked, Quantized) or is_table(name) else unpacked.swapaxes(-1, -2)


def pack_params(params: Params) -> Params:
    """Returns a transformer's parameters with every matrix packed."""
    return _map(pack_param, params)


def unpack_params(params: Params) -> Params:
    """Returns a transformer's parameters with every matrix unpacked."""
    return _map(unpack_param, params)


def _map(convert: Callable[[str, Any], Any], params: Params) -> Params:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: convert(path[-1].key, leaf),
        params,
        is_leaf=lambda leaf: isinstance(leaf, Matrix),
    )


def take_rows(table: Float[Array, "V E"] | Matrix, rows: Int[Array, "R"]) -> Any:
    """Returns some rows of a table. The rows of a table in blocks stay in blocks."""
    return table.take(rows) if isinstance(table, Blocks) else table[rows]


def is_packed(leaf: Any) -> bool:
    return isinstance(leaf, Packed | Blocks)


def has_blocks(params: Params) -> bool:
    """Returns True if any matrix is in the blocks of a GGUF file."""
    return any(isinstance(leaf, Blocks) for leaf in jax.tree.leaves(params, is_leaf=is_packed))


def stored_types(leaf: Any) -> tuple[str, ...]:
    """Returns the names of the number formats of a parameter."""
    return leaf.kinds if isinstance(leaf, Blocks) else tuple(str(array.dtype) for array in jax.tree.leaves(leaf))


def is_quantized(params: Params) -> bool:
    """Returns True if any matrix is int8 or in blocks."""
    return any(getattr(leaf, "dtype", None) in (np.int8, np.uint8) for leaf in jax.tree.leaves(params))
