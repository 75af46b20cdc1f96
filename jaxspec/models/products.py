"""Products with weight matrices in the layout of the CPU kernels."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxspec.kernels.library import available
from jaxspec.models.quantized import Quantized


class Multipliable(Protocol):
    """A weight matrix `[O, I]`, as a pytree."""

    def multiply(self, x: Array) -> Array:
        """Returns `x @ matrix.T`, computed by the kernel."""
        ...

    def unpack(self) -> Any:
        """Returns the matrix as an array or a `Quantized`."""
        ...

    def astype(self, dtype: DTypeLike) -> Array:
        """Returns the matrix in floating point."""
        ...


@jax.custom_jvp
def product(x: Array, matrix: Multipliable) -> Array:
    """Returns `x @ matrix.T`, computed by the kernel if the program runs on a CPU that has it."""
    kernel = _with_kernel if available() else _with_xla
    return lax.platform_dependent(x, matrix, cpu=kernel, default=_with_xla)


@product.defjvp
def _product_jvp(primals: tuple[Array, Multipliable], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    x, matrix = primals
    return product(x, matrix), tangents[0] @ matrix.astype(x.dtype).T  # the weights are frozen


def _with_xla(x: Array, matrix: Multipliable) -> Array:
    whole = matrix.unpack()
    if isinstance(whole, Quantized):
        return whole.product(x)
    return jnp.matmul(x.astype(whole.dtype), whole.T, precision="highest", preferred_element_type=jnp.float32)


@jax.custom_batching.custom_vmap
def _with_kernel(x: Array, matrix: Multipliable) -> Array:
    return matrix.multiply(x)


@_with_kernel.def_vmap
def _batched(size: int, mapped: Sequence[Any], x: Array, matrix: Multipliable) -> tuple[Array, bool]:
    # Rows of the mapped axis count like other rows.
    if any(jax.tree.leaves(mapped[1])):  # several models at once
        axes = (0 if mapped[0] else None, jax.tree.map(lambda leaf: 0 if leaf else None, mapped[1]))
        return jax.vmap(_with_xla, axes)(x, matrix), True
    return _with_kernel(x.reshape(-1, x.shape[-1]), matrix).reshape(size, x.shape[1], -1), True
