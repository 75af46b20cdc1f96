"""Parts of a transformer's layers as functions of arrays: products, embeddings, heads and their rotation."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxspec.core.records import KV
from jaxspec.kernels import calls
from jaxspec.models.execution import Execution
from jaxspec.models.packed import Matrix
from jaxspec.models.rope import Rope
from jaxspec.models.rows import NO_FUSION, Fused, Norm
from jaxspec.models.split_table import SplitTable


def matmul(
    x: Float[Array, "B T J"], weight: Array | Matrix, transposed: bool = False, fused: Fused = NO_FUSION
) -> Float[Array, "B T O"]:
    """Returns `x @ weight` in the weight's dtype, accumulated in float32, with the operations of `fused`.

    A `transposed` array and a `Matrix` are `[O, I]`; other weights are `[I, O]`. `fused.residual` is `[B, T, O]`.
    """
    if not isinstance(weight, Matrix):
        return fused.around(functools.partial(_with_array, weight, transposed), x)
    batch, tokens, width = x.shape
    if fused.residual is not None:
        fused = fused._replace(residual=fused.residual.reshape(batch * tokens, -1))
    return weight.product(x.reshape(batch * tokens, width), fused).reshape(batch, tokens, -1)


def project(x: Float[Array, "B T J"], weight: nnx.Param, bias: nnx.Param | None) -> Float[Array, "B T O"]:
    """Applies a linear layer."""
    return matmul(x, weight[...], fused=Fused(None, None if bias is None else bias[...]))


def _with_array(weight: Array, transposed: bool, x: Array) -> Array:
    batch, tokens, width = x.shape
    rows = x.reshape(batch * tokens, width).astype(weight.dtype)
    if len(rows) == 1 and weight.dtype == jnp.bfloat16:  # XLA:CPU takes 8 times as long for one row as for two
        rows = jnp.pad(rows, ((0, 1), (0, 0)))
    out = lax.dot_general(
        rows,
        weight,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return out[: batch * tokens].reshape(batch, tokens, -1)


def look_up(table: Float[Array, "V E"] | Matrix | SplitTable, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
    """Returns the embeddings of the tokens, in float32.

    XLA:CPU converts a bfloat16 table before the gather and hoists the conversion out of the decode loop, which copies
    the table on every call. With the barrier the table depends on the tokens, and only the gathered rows are converted.
    XLA:GPU lowers a gather of one row to a slice, and all-gathers a sharded table for it. Two rows are therefore
    gathered.
    """
    table, tokens = lax.optimization_barrier((table, tokens))
    if tokens.size == 1 and not isinstance(table, Matrix):
        return table[jnp.pad(tokens, ((0, 0), (0, 1)))][:, :1].astype(jnp.float32)
    return table[tokens].astype(jnp.float32)


def rotation(positions: Int[Array, "B T"], rope: Rope, width: int) -> tuple[Array, Array]:
    """Returns cosines and sines for heads of this width, each `[B, 1, T, K / 2]` or shorter."""
    angles = positions[:, None, :, None].astype(jnp.float32) * rope.frequencies(width)
    # Without the barrier, XLA:CPU recomputes sines and cosines for every head in every layer.
    return lax.optimization_barrier((jnp.cos(angles) * rope.scale, jnp.sin(angles) * rope.scale))


def rotate(x: Float[Array, "B T H K"], rotation: tuple[Array, Array]) -> Float[Array, "B H T K"]:
    """Applies rotary position embeddings, in the half-split form of Hugging Face checkpoints."""
    cos, sin = rotation
    x, half = x.swapaxes(1, 2), cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)


def split_heads(
    projected: Float[Array, "B T J"],
    rotation: tuple[Array, Array],
    shared: int,
    width: int,
    dtype: DTypeLike,
    norms: Sequence[Norm | None] = (None, None),
    execution: Execution = Execution(),
) -> tuple[Float[Array, "B H G T K"], KV]:
    """Returns queries and keys, normed and rotated, and values.

    Args:
        projected: for each shard, its queries, G for each key, then its keys, then its values.
        rotation: the cosines and sines of the tokens' positions, see `rotation`.
        shared: H, the number of heads of keys and values.
        width: K, the width of a head.
        dtype: the dtype of the result.
        norms: the norm of queries and the norm of keys; None for no norm.
        execution: whether to use the CPU kernel, and how many devices share the layer.
    """
    (batch, tokens, size), shards = projected.shape, execution.shards

    def plain(projected: Array, rotation: tuple[Array, Array], norms: Sequence[Norm | None]) -> tuple[Array, KV]:
        heads = projected.reshape(batch, tokens, shards, -1, width)
        borders = size // width // shards - 2 * shared // shards, size // width // shards - shared // shards
        parts = jnp.split(heads, borders, axis=3)
        queries, keys, values = (a.reshape(batch, tokens, -1, width) for a in parts)
        queries, keys = (a if norm is None else norm(a) for a, norm in zip((queries, keys), norms))
        queries, keys = (rotate(a, rotation).astype(dtype) for a in (queries, keys))
        new = KV(keys, values.swapaxes(1, 2).astype(dtype))
        return queries.reshape(batch, shared, -1, tokens, width), new

    def kernel(projected: Array, rotation: tuple[Array, Array], norms: Sequence[Norm | None]) -> tuple[Array, KV]:
        scales = [None if norm is None else norm.scale for norm in norms]
        epsilon = max((norm.epsilon for norm in norms if norm is not None), default=0.0)
        queries, keys, values = calls.heads(projected, *rotation, shared, width, dtype, scales, epsilon)
        return queries, KV(keys, values)

    if not execution.kernels or shards > 1:
        return plain(projected, rotation, norms)
    return lax.platform_dependent(projected, rotation, norms, cpu=kernel, default=plain)
