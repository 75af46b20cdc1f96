"""Weight matrices in the layout of the CPU kernels, whose products read memory in order.

A matrix `[O, I]` is stored as `[O / 16, I / g, 16, g]`, padded with zeros, where g values fill four bytes: 1 of
float32, 2 of bfloat16, 4 of int8. Int8 values are stored as uint8, with 128 added. A product first rounds its rows: to
bfloat16 if the matrix is bfloat16; to int8 if it is int8, with one scale for each 32 values (the largest magnitude is
127 steps), as llama.cpp does.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxspec.core.records import Params
from jaxspec.kernels import calls
from jaxspec.kernels.library import available
from jaxspec.models.config import is_table
from jaxspec.models.quantized import Quantized

LANES = 16
OFFSET = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A packed weight matrix `[O, I]`.

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
        """Packs a matrix `[O, I]`. NumPy arrays stay NumPy arrays."""
        values, scale = (matrix.values, matrix.scale) if isinstance(matrix, Quantized) else (matrix, None)
        xp = np if isinstance(values, np.ndarray) else jnp
        outputs, inputs = values.shape
        if values.dtype == jnp.int8:
            values = values.view(np.uint8) if xp is np else lax.bitcast_convert_type(values, jnp.uint8)
            values = values ^ np.uint8(OFFSET)
        group = 4 // values.dtype.itemsize
        padding = ((0, -outputs % LANES), (0, -inputs % group))
        values = xp.pad(values, padding, constant_values=0 if scale is None else OFFSET)
        values = values.reshape(values.shape[0] // LANES, LANES, -1, group).swapaxes(1, 2)
        return cls(np.ascontiguousarray(values) if xp is np else values, scale, outputs, inputs)

    def unpack(self) -> Any:
        """Returns the matrix `[O, I]` as an array, or a `Quantized` with int8 values."""
        blocks, _, lanes, _ = self.values.shape
        return self._rows(self.values.swapaxes(1, 2).reshape(blocks * lanes, -1, 1)[: self.outputs], self.scale)

    def _rows(self, values: Any, scale: Any) -> Any:
        """Returns rows that were read as `[*, I / g, g]`."""
        values = values.reshape(*values.shape[:-2], -1)[..., : self.inputs]
        if scale is None:
            return values
        signed = values ^ np.uint8(OFFSET)
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
        values = self.values[rows // LANES, :, rows % LANES]
        return self._rows(values, None if self.scale is None else self.scale[rows])

    def astype(self, dtype: DTypeLike) -> Array:
        """Returns the matrix in floating point, `[O, I]`."""
        return self.unpack().astype(dtype)

    def product(self, x: Float[Array, "N I"]) -> Float[Array, "N O"]:
        """Returns `x @ matrix.T`, accumulated in float32; see the module for how its rows are rounded."""
        return _product(x, self)


@jax.custom_jvp
def _product(x: Array, matrix: Packed) -> Array:
    kernel = _with_kernel if available() else _with_xla
    return lax.platform_dependent(x, matrix, cpu=kernel, default=_with_xla)


@_product.defjvp
def _product_jvp(primals: tuple[Array, Packed], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    x, matrix = primals
    return _product(x, matrix), tangents[0] @ matrix.astype(x.dtype).T  # the weights are frozen


def _with_xla(x: Array, matrix: Packed) -> Array:
    whole = matrix.unpack()
    if isinstance(whole, Quantized):
        return whole.product(x)
    return jnp.matmul(x.astype(whole.dtype), whole.T, precision="highest", preferred_element_type=jnp.float32)


@jax.custom_batching.custom_vmap
def _with_kernel(x: Array, matrix: Packed) -> Array:
    return calls.multiply(x, matrix.values, matrix.scale, matrix.outputs)


@_with_kernel.def_vmap
def _batched(size: int, mapped: Sequence[Any], x: Array, matrix: Packed) -> tuple[Array, bool]:
    # Rows of the mapped axis count like other rows.
    if any(jax.tree.leaves(mapped[1])):  # several models at once
        axes = (0 if mapped[0] else None, jax.tree.map(lambda leaf: 0 if leaf else None, mapped[1]))
        return jax.vmap(_with_xla, axes)(x, matrix), True
    return _with_kernel(x.reshape(-1, x.shape[-1]), matrix).reshape(size, x.shape[1], -1), True


def pack_param(name: str, leaf: Any) -> Any:
    """Packs a parameter of a transformer if it is a matrix. `name` is the last part of its name."""
    if isinstance(leaf, Quantized) or (leaf.ndim > 1 and is_table(name)):
        return Packed.pack(leaf)
    return Packed.pack(leaf.T) if leaf.ndim > 1 else leaf


def unpack_param(name: str, leaf: Any) -> Any:
    """Returns a parameter as it was before `pack_param`."""
    if not is_packed(leaf):
        return leaf
    whole = leaf.unpack()
    return whole if isinstance(whole, Quantized) or is_table(name) else whole.T


def pack(params: Params) -> Params:
    """Returns a transformer's parameters with every matrix packed."""
    return _map(pack_param, params)


def unpack(params: Params) -> Params:
    """Returns parameters with no matrix packed."""
    return _map(unpack_param, params)


def _map(convert: Callable[[str, Any], Any], params: Params) -> Params:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: convert(path[-1].key, leaf),
        params,
        is_leaf=lambda leaf: isinstance(leaf, (Quantized, Packed)),
    )


def is_packed(leaf: Any) -> bool:
    return isinstance(leaf, Packed)


def is_quantized(params: Params) -> bool:
    """Returns True if any matrix is int8."""
    return any(getattr(leaf, "dtype", None) in (np.int8, np.uint8) for leaf in jax.tree.leaves(params))
