"""Parts of a transformer's layers as functions of arrays: products, embeddings, rotation of heads, RMSNorm."""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.kernels import calls
from jaxspec.models.packed import Matrix
from jaxspec.models.rope import Rope


def matmul(x: Float[Array, "B T I"], weight: Array | Matrix, transposed: bool = False) -> Float[Array, "B T O"]:
    """Returns `x @ weight` in the weight's dtype, accumulated in float32.

    A `transposed` array and a `Matrix` are `[O, I]`; other weights are `[I, O]`.
    """
    batch, tokens, width = x.shape
    rows = x.reshape(batch * tokens, width)
    if isinstance(weight, Matrix):
        return weight.product(rows).reshape(batch, tokens, -1)
    rows = rows.astype(weight.dtype)
    if len(rows) == 1 and weight.dtype == jnp.bfloat16:  # XLA:CPU's naive loop for one row takes 8 times as long as two
        rows = jnp.pad(rows, ((0, 1), (0, 0)))
    out = lax.dot_general(
        rows,
        weight,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return out[: batch * tokens].reshape(batch, tokens, -1)


def look_up(table: Float[Array, "V E"] | Matrix, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
    """Returns the embeddings of the tokens, in float32.

    XLA:CPU converts a bfloat16 table before the gather and hoists the conversion out of the decode loop, which copies
    the table on every call. With the barrier the table depends on the tokens, and only the gathered rows are converted.
    A gather of one row becomes a slice, for which XLA:GPU collects a table that devices share; so two are gathered.
    """
    table, tokens = lax.optimization_barrier((table, tokens))
    if tokens.size == 1 and not isinstance(table, Matrix):
        return table[jnp.pad(tokens, ((0, 0), (0, 1)))][:, :1].astype(jnp.float32)
    return table[tokens].astype(jnp.float32)


def rotation(positions: Int[Array, "B T"], rope: Rope, width: int) -> tuple[Array, Array]:
    """Returns cosines and sines for heads of this width, each `[B, 1, T, K / 2]` or shorter."""
    angles = positions[:, None, :, None].astype(jnp.float32) * rope.frequencies(width)
    # Without the barrier XLA:CPU computes them again for every head in every layer.
    return lax.optimization_barrier((jnp.cos(angles) * rope.scale, jnp.sin(angles) * rope.scale))


def rotate(x: Float[Array, "B T H K"], rotation: tuple[Array, Array], kernels: bool = False) -> Float[Array, "B H T K"]:
    """Applies rotary position embeddings, in the half-split form of Hugging Face checkpoints."""

    def plain(x: Array, cos: Array, sin: Array) -> Array:
        x, half = x.swapaxes(1, 2), cos.shape[-1]
        low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return jnp.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)

    return lax.platform_dependent(x, *rotation, cpu=calls.rotate, default=plain) if kernels else plain(x, *rotation)


def rms_norm(
    x: Float[Array, "*b E"], scale: Float[Array, "E"], epsilon: float, kernels: bool = False
) -> Float[Array, "*b E"]:
    """Applies RMSNorm over the last axis; with `kernels`, a row's bits do not depend on the other rows."""

    def plain(x: Array, scale: Array) -> Array:
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * lax.rsqrt(variance + epsilon) * scale.astype(jnp.float32)

    if not kernels:
        return plain(x, scale)
    kernel = functools.partial(calls.rms_norm, epsilon=epsilon)
    return lax.platform_dependent(x, scale, cpu=kernel, default=plain)
