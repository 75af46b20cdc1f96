"""Products with weight matrices in the layout of the CPU kernels."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxspec.kernels.library import kernels_available
from jaxspec.models.quantized import Quantized
from jaxspec.models.rows import Fused


class Multipliable(Protocol):
    """A weight matrix `[O, I]`, as a pytree."""

    def multiply(self, x: Array, fused: Fused) -> Array:
        """Returns `x @ matrix.T` with the operations of `fused`, computed by the kernel."""
        ...

    def unpack(self) -> Any:
        """Returns the matrix as an array or a `Quantized`."""
        ...

    def astype(self, dtype: DTypeLike) -> Array:
        """Returns the matrix in floating point."""
        ...


@jax.custom_jvp
def product(x: Array, matrix: Multipliable, fused: Fused) -> Array:
    """Returns `x @ matrix.T` with the operations of `fused`, computed by the kernel on a CPU if it is available."""
    kernel = _with_kernel if kernels_available() else _with_xla
    return lax.platform_dependent(x, matrix, fused, cpu=kernel, default=_with_xla)


@product.defjvp
def _product_jvp(primals: tuple[Array, Multipliable, Fused], tangents: tuple[Array, Any, Fused]) -> tuple[Array, Array]:
    x, matrix, fused = primals

    def exact(x: Array, fused: Fused) -> Array:
        return fused.around(lambda rows: rows @ matrix.astype(rows.dtype).T, x)

    _, tangent = jax.jvp(exact, (x, fused), (tangents[0], tangents[2]))  # the weights are frozen
    return product(x, matrix, fused), tangent


def _with_xla(x: Array, matrix: Multipliable, fused: Fused) -> Array:
    unpacked = matrix.unpack()

    if isinstance(unpacked, Quantized):
        return unpacked.product(x, fused)

    def multiply(x: Array) -> Array:
        return jnp.matmul(x.astype(unpacked.dtype), unpacked.T, precision="highest", preferred_element_type=jnp.float32)

    return fused.around(multiply, x)


@jax.custom_batching.custom_vmap
def _with_kernel(x: Array, matrix: Multipliable, fused: Fused) -> Array:
    return matrix.multiply(x, fused)


@_with_kernel.def_vmap
def _batched(size: int, mapped: Sequence[Any], x: Array, matrix: Multipliable, fused: Fused) -> tuple[Array, bool]:
    # Rows of the mapped axis are multiplied like other rows.
    if any(jax.tree.leaves((mapped[1], mapped[2]._replace(residual=None)))):  # several models at once
        axes = jax.tree.map(lambda leaf: 0 if leaf else None, tuple(mapped))
        return jax.vmap(_with_xla, axes)(x, matrix, fused), True

    def rows(array: Array, mapped: bool) -> Array:
        array = array if mapped else jnp.broadcast_to(array, (size, *array.shape))
        return array.reshape(-1, array.shape[-1])

    if fused.residual is not None:
        fused = fused._replace(residual=rows(fused.residual, mapped[2].residual))
    return _with_kernel(rows(x, mapped[0]), matrix, fused).reshape(size, x.shape[-2], -1), True
