"""The kernels as functions of arrays. Programs that call them run on CPUs only."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.cache import as_bits, as_values
from jaxspec.core.records import KV

MATRIX_TYPES = ("float32", "bfloat16", "int8", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""Types of packed matrices, in the order of `Type` in src/table.h."""
PREPARATIONS = ("nothing", "norm", "silu", "gelu_tanh")
"""Operations that a product can apply to its rows first, in the order of `Preparation` in src/table.h."""


def multiply(
    x: Float[Array, "N J"],
    values: Array,
    scale: Float[Array, " O"] | None,
    outputs: int,
    kind: str,
    preparation: str = "nothing",
    norm: Float[Array, " I"] | None = None,
    epsilon: float = 0.0,
    bias: Float[Array, " O"] | None = None,
    residual: Float[Array, "N O"] | None = None,
) -> Float[Array, "N O"]:
    """Multiplies rows with a packed matrix; see `jaxspec.models.packed` and `jaxspec.models.blocks`.

    Each output is one chain of sums over I, so the bits of a row do not depend on the other rows.

    Args:
        x: rows; J is I, or 2 I with a gate ("silu", "gelu_tanh").
        values: the packed matrix.
        scale: scales of the outputs of an int8 matrix.
        outputs: the number of outputs, O.
        kind: one of `MATRIX_TYPES`.
        preparation: one of `PREPARATIONS`.
        norm: scale of RMSNorm.
        epsilon: epsilon of RMSNorm.
        bias: added to the outputs of every row.
        residual: added last.
    """
    out = jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32)
    call = jax.ffi.ffi_call("jaxspec_multiply", out, vmap_method="sequential")
    arrays = [_optional(array) for array in (scale, norm, bias, residual)]
    attributes = {"kind": np.int64(MATRIX_TYPES.index(kind)), "preparation": np.int64(PREPARATIONS.index(preparation))}
    return call(x.astype(jnp.float32), values, *arrays, epsilon=np.float32(epsilon), **attributes)


def _optional(array: Array | None) -> Array:
    return jnp.zeros(0, jnp.float32) if array is None else array.astype(jnp.float32)


def attend_with_kernel(
    queries: Float[Array, "B H G T K"],
    prefix: KV,
    layer: int,
    length: Int[Array, "B"],
    window: tuple[Float[Array, "B H W K"], Float[Array, "B H W K2"]],
    mask: Bool[Array, "B T W"],
    scale: float = 1.0,
    first_seen: Int[Array, "B T"] | None = None,
) -> Float[Array, "B H G T K2"]:
    """Computes `jaxspec.models.attention.attend`; sums are in the order of positions in the text.

    The tokens of the window that a query attends to must be the last tokens of its text, in order.
    """
    batch, heads, groups, tokens, _ = queries.shape
    out = jax.ShapeDtypeStruct((batch, tokens, heads, groups, prefix.values.shape[-1]), jnp.float32)
    first = jnp.zeros(0, jnp.int32) if first_seen is None else first_seen.astype(jnp.int32)
    call = jax.ffi.ffi_call("jaxspec_attend", out, vmap_method="sequential")
    queries, *new = map(as_bits, (queries, *window))
    arrays = queries, prefix.keys, prefix.values, length.astype(jnp.int32), *new, mask, first
    return jnp.moveaxis(call(*arrays, layer=np.int64(layer), scale=np.float32(scale)), 1, 3)


def rms_norm_with_kernel(x: Float[Array, "*b E"], scale: Float[Array, "E"], epsilon: float) -> Float[Array, "*b E"]:
    """Applies RMSNorm over the last axis; the bits of a row do not depend on the other rows."""
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    call = jax.ffi.ffi_call("jaxspec_rms_norm", out, vmap_method="sequential")
    return call(x.astype(jnp.float32), scale.astype(jnp.float32), epsilon=np.float32(epsilon))


def heads(
    x: Float[Array, "B T J"],
    cosines: Float[Array, "B 1 T R"],
    sines: Float[Array, "B 1 T R"],
    shared: int,
    width: int,
    dtype: DTypeLike,
    norms: Sequence[Array | None] = (None, None),
    epsilon: float = 0.0,
) -> tuple[Float[Array, "B H G T K"], Float[Array, "B H T K"], Float[Array, "B H T K"]]:
    """Splits the rows of a projection into queries, keys and values; see `jaxspec.models.layers.split_heads`.

    Args:
        x: G queries for each of H keys, then keys, then values; J is (G + 2) H K.
        cosines: cosines of the angles of the first 2 R values of a head, which are rotated in the half-split form.
        sines: sines of the same angles.
        shared: the number of key heads, H.
        width: the width of a head, K.
        dtype: dtype of the result, float32 or bfloat16.
        norms: scales of RMSNorm of queries and keys, before they are rotated.
        epsilon: epsilon of RMSNorm.
    """
    batch, tokens, all_heads = x.shape[0], x.shape[1], x.shape[2] // width
    bits = jnp.uint16 if jnp.dtype(dtype) == jnp.bfloat16 else dtype
    head_shape = jax.ShapeDtypeStruct((batch, shared, tokens, width), bits)
    queries = jax.ShapeDtypeStruct((batch, shared, all_heads // shared - 2, tokens, width), bits)
    call = jax.ffi.ffi_call("jaxspec_heads", (queries, head_shape, head_shape), vmap_method="sequential")
    queries, keys, values = call(
        x.astype(jnp.float32), cosines, sines, *map(_optional, norms), epsilon=np.float32(epsilon)
    )
    return as_values(queries), as_values(keys), as_values(values)


def delta_net(
    projected: Float[Array, "B T J"],
    rates: Float[Array, "B T R"],
    params: Sequence[Array],
    mask: Bool[Array, "B T W"],
    length: Int[Array, "B"],
    store: Sequence[Array],
    past: Sequence[Array],
    epsilon: float,
    unit_epsilon: float,
    tiled: bool,
) -> tuple[Float[Array, "B T O"], Float[Array, "B Hk T Kk"], Float[Array, "B Hv T Kv"], Float[Array, "B Hv T"]]:
    """Computes a layer with Gated DeltaNet; see `jaxspec.models.delta.mix`.

    Args:
        projected: inputs of the convolution, and of the gate.
        rates: projections to update rates, and to decays.
        params: `DeltaParams`.
        mask: which tokens of the window are on the path of each token.
        length: the number of tokens of text in each row.
        store: `DeltaStore`.
        past: inputs `[B, P, C]`, keys `[B, Hk, P, Kk]`, deltas `[B, Hv, P, Kv]` and decays `[B, Hv, P]`.
        epsilon: the epsilon of the norm before the gate.
        unit_epsilon: the epsilon under the root with which queries and keys are scaled to length 1.
        tiled: see `DeltaSizes`.

    Returns:
        The gated outputs, keys, deltas and decays.
    """
    (batch, tokens, _), (_, heads, keys, values) = projected.shape, store[1].shape
    shared = past[1].shape[1]
    shapes = (batch, tokens, heads * values), (batch, shared, tokens, keys), (batch, heads, tokens, values)
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (*shapes, shapes[2][:3])]
    call = jax.ffi.ffi_call("jaxspec_delta", results, vmap_method="sequential")
    arrays = projected, rates, *params, mask, length.astype(jnp.int32), *store, *past
    attributes = {"epsilon": np.float32(epsilon), "unit_epsilon": np.float32(unit_epsilon), "tiled": np.int64(tiled)}
    out, keys, deltas, decays = call(*arrays, **attributes)
    return out, keys, deltas, decays


def commit_delta_net(
    state: Float[Array, "B Hv Kk Kv"],
    keys: Float[Array, "B Hk T Kk"],
    deltas: Float[Array, "B Hv T Kv"],
    decays: Float[Array, "B Hv T"],
    nodes: Int[Array, "B M"] | None,
    count: Int[Array, "B"],
    length: Int[Array, "B"],
    tiled: bool,
) -> Float[Array, "B Hv Kk Kv"]:
    """Adds the first `count` nodes of each row to its states; see `jaxspec.models.delta.commit`."""
    nodes = jnp.zeros((len(count), 0), jnp.int32) if nodes is None else nodes.astype(jnp.int32)
    out = jax.ShapeDtypeStruct(state.shape, jnp.float32)
    call = jax.ffi.ffi_call("jaxspec_delta_commit", out, vmap_method="sequential", input_output_aliases={0: 0})
    whole = count.astype(jnp.int32), length.astype(jnp.int32)
    return call(state, keys, deltas, decays, nodes, *whole, tiled=np.int64(tiled))


class PackedExperts(NamedTuple):
    """Packed matrices, one for each expert; the arguments of `multiply` with one more axis at the front."""

    values: Array
    scale: Float[Array, "X O"] | None
    kind: str


def mix_experts(
    x: Float[Array, "N E"],
    logits: Float[Array, "N X"],
    gate_up: PackedExperts,
    down: PackedExperts,
    activation: str,
    per_token: int,
    width: int,
    normalise: bool,
) -> Float[Array, "N E"]:
    """Computes a mixture of experts; see `jaxspec.models.experts`. The bits of a row do not depend on the other rows.

    Args:
        x: rows, which are normed already.
        logits: the logits of the router.
        gate_up: the gate and up projections of the experts.
        down: the projections out of them.
        activation: "silu" or "gelu_tanh".
        per_token: the number of experts of a row.
        width: the width of an expert.
        normalise: whether the weights of a row's experts are scaled to the sum 1.
    """
    call = jax.ffi.ffi_call("jaxspec_experts", jax.ShapeDtypeStruct(x.shape, jnp.float32), vmap_method="sequential")
    matrices = (part for one in (gate_up, down) for part in (one.values, _optional(one.scale)))
    numbers = {
        "gate_up_kind": MATRIX_TYPES.index(gate_up.kind),
        "down_kind": MATRIX_TYPES.index(down.kind),
        "gate": PREPARATIONS.index(activation),
        "each": per_token,
        "width": width,
        "normalise": normalise,
    }
    attributes = {name: np.int64(number) for name, number in numbers.items()}
    return call(x.astype(jnp.float32), logits.astype(jnp.float32), *matrices, **attributes)
