"""The kernels as functions of arrays. Programs that call them run on CPUs only."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.records import KV

TYPES = ("float32", "bfloat16", "int8", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""Types of packed matrices, in the order of `Type` in src/table.h."""


def multiply(
    x: Float[Array, "N I"], values: Array, scale: Float[Array, " O"] | None, outputs: int, kind: str
) -> Float[Array, "N O"]:
    """Multiplies rows with a packed matrix; see `jaxspec.models.packed` and `jaxspec.models.blocks`.

    Each output is one chain of sums over I, so the bits of a row do not depend on the other rows.
    """
    out = jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32)
    scale = jnp.zeros(0, jnp.float32) if scale is None else scale
    call = jax.ffi.ffi_call("jaxspec_multiply", out, vmap_method="sequential")
    return call(x.astype(jnp.float32), values, scale, kind=np.int64(TYPES.index(kind)))


def attend(
    queries: Float[Array, "B H G T K"],
    prefix: KV,
    layer: int,
    length: Int[Array, "B"],
    window: tuple[Float[Array, "B H W K"], Float[Array, "B H W K2"]],
    mask: Bool[Array, "B T W"],
    scale: float = 1.0,
    first_seen: Int[Array, "B T"] | None = None,
) -> Float[Array, "B H G T K2"]:
    """Computes `jaxspec.models.attention.attend`, summed in the order of positions in the text.

    The tokens of the window that a query sees must be the last ones of its text, in order.
    """
    out = jax.ShapeDtypeStruct((*queries.shape[:4], prefix.values.shape[-1]), jnp.float32)
    first = jnp.zeros(0, jnp.int32) if first_seen is None else first_seen.astype(jnp.int32)
    call = jax.ffi.ffi_call("jaxspec_attend", out, vmap_method="sequential")
    arrays = queries, prefix.keys, prefix.values, length.astype(jnp.int32), *window, mask, first
    return call(*arrays, layer=np.int64(layer), scale=np.float32(scale))


def rms_norm(x: Float[Array, "*b E"], scale: Float[Array, "E"], epsilon: float) -> Float[Array, "*b E"]:
    """Applies RMSNorm over the last axis; the bits of a row do not depend on the other rows."""
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    call = jax.ffi.ffi_call("jaxspec_rms_norm", out, vmap_method="sequential")
    return call(x.astype(jnp.float32), scale.astype(jnp.float32), epsilon=np.float32(epsilon))


def rotate(
    x: Float[Array, "B T H K"], cosines: Float[Array, "B 1 T R"], sines: Float[Array, "B 1 T R"]
) -> Float[Array, "B H T K"]:
    """Applies rotary position embeddings in the half-split form to the first 2 R values of each head."""
    batch, tokens, heads, width = x.shape
    out = jax.ShapeDtypeStruct((batch, heads, tokens, width), jnp.float32)
    call = jax.ffi.ffi_call("jaxspec_rotate", out, vmap_method="sequential")
    return call(x.astype(jnp.float32), cosines, sines)
