"""A mixture of experts in place of a gated MLP (Shazeer et al. 2017, arXiv:1701.06538).

A router computes a probability for each expert, and the experts with the highest probabilities read the token. Each
expert is a gated MLP. A token's output is the sum of the outputs of its experts times their weights, always in
ascending order of the experts' indices: it does not depend on the order of the probabilities, which may be nearly
equal. Some networks add a shared expert that reads every token.

There are four forms of the same sum:

- `_with_kernel`: on a CPU, each expert that any token of the call has is read once, and multiplied by the rows that
  have it. A row's bits do not depend on the other rows.
- `_with_loop`: a loop over the experts that any token of the call has. Each is read once, and multiplied by all rows.
- `_grouped`: rows sorted by expert, and XLA's products of groups. It has gradients, and is faster for many rows on
  accelerators.
- `_with_pallas`: on NVIDIA GPUs, two Pallas kernels for few rows, which read the experts in use once; see
  `jaxspec.models.experts_pallas`. XLA:GPU copies each expert of the loop, and (JAX 0.10) transposes the matrices of all
  experts for its products of groups.

Letters: N rows, E the width of the residual stream, X experts, k experts of a row, I the width of an expert, S devices
that share the layer.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxspec.backend.layout import multiplies_bfloat16
from jaxspec.core.mesh import MODEL
from jaxspec.core.records import Params
from jaxspec.core.theory import ExpertReads
from jaxspec.kernels import calls
from jaxspec.kernels.library import kernels_available
from jaxspec.models.config import EXPERT_MATRICES, Experts, ModelConfig
from jaxspec.models.layers import matmul
from jaxspec.models.packed import is_packed, unpack_param
from jaxspec.models.placement import param_spec
from jaxspec.models.quantized import Quantized
from jaxspec.models.rows import Fused, Gate

NO_EXPERTS = "products='pallas' has no mixtures of experts; use 'xla'"


class ExpertParams(NamedTuple):
    """A layer's parameters; see `ModelConfig.param_shapes`. Those of a shared expert, and biases, may be None."""

    router: Any
    gate_up: Any
    down: Any
    shared_gate_up: Any = None
    shared_down: Any = None
    shared_gate: Any = None
    router_bias: Any = None
    gate_up_bias: Any = None
    down_bias: Any = None


class _How(NamedTuple):
    """The static arguments of a layer: its sizes, the activation, and the number of devices that share it."""

    sizes: Experts
    activation: str
    shards: int


class _Routes(NamedTuple):
    """The experts of each row, in ascending order, and their weights."""

    chosen: Int[Array, "N k"]
    weights: Float[Array, "N k"]


def feed(
    rows: Float[Array, "B T E"], params: ExpertParams, sizes: Experts, activation: str, shards: int = 1
) -> Float[Array, "B T E"]:
    """Returns the outputs of the layer for rows that are normed already.

    Args:
        rows: the rows.
        params: the layer's parameters.
        sizes: the sizes of the layer.
        activation: the activation of the experts, see `jaxspec.models.rows.Gate`.
        shards: the number of devices that share the layer. Each has a part of every expert.
    """
    logits = matmul(rows, params.router)
    logits = logits if params.router_bias is None else logits + params.router_bias
    how = _How(sizes, activation, shards)
    flat = rows.reshape(-1, rows.shape[-1]), logits.reshape(-1, sizes.count)
    out = _mix(how, *flat, params.gate_up, params.down, params.gate_up_bias)
    if params.down_bias is not None:
        weights = _weigh(sizes, flat[1])[1]
        out = out + jnp.einsum("nx,xe->ne", weights, params.down_bias, precision=lax.Precision.HIGHEST)
    out = out.reshape(rows.shape)
    if params.shared_gate is None:
        return out
    both = matmul(rows, params.shared_gate_up)
    shared = matmul(both, params.shared_down, fused=Fused(Gate(activation, shards)))
    gate = matmul(rows, params.shared_gate)
    # With the barriers, XLA compiles this operation alone, and its bits do not depend on what surrounds it.
    return out + lax.optimization_barrier(shared * jax.nn.sigmoid(lax.optimization_barrier(gate)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _mix(
    how: _How,
    rows: Float[Array, "N E"],
    logits: Float[Array, "N X"],
    gate_up: Any,
    down: Any,
    bias: Array | None = None,
) -> Array:
    """Returns the sum of the outputs of each row's experts; `bias` is added to the gate and up projections."""
    return _batchable(how)(rows, logits, gate_up, down, bias)


@_mix.defjvp
def _mix_jvp(
    how: _How, primals: tuple[Array, Array, Any, Any, Array | None], tangents: tuple[Any, ...]
) -> tuple[Array, Array]:
    # A loop of as many iterations as there are experts in use has no derivative in reverse.
    rows, logits, *matrices, bias = primals
    if all(isinstance(matrix, jax.Array) for matrix in matrices):
        _, tangent = jax.jvp(functools.partial(_grouped, how), primals, tangents)
    else:  # packed and int8 weights are frozen
        first, second = map(_as_array, matrices)
        of_rows = functools.partial(_grouped, how)
        _, tangent = jax.jvp(
            lambda rows, logits: of_rows(rows, logits, first, second, bias), (rows, logits), tangents[:2]
        )
    return _mix(how, *primals), tangent


@functools.cache
def _batchable(how: _How) -> Callable[..., Array]:
    """Returns the function of all arguments that are arrays, in which rows of a mapped axis are rows like others."""
    mix = jax.custom_batching.custom_vmap(functools.partial(_choose_form, how))

    @mix.def_vmap
    def _(size: int, mapped: Sequence[Any], *arrays: Any) -> tuple[Array, bool]:
        if any(jax.tree.leaves(mapped[2:])):  # several models at once
            axes = jax.tree.map(lambda leaf: 0 if leaf else None, tuple(mapped))
            return jax.vmap(functools.partial(_with_loop, how), axes)(*arrays), True
        flat = (a if m else jnp.broadcast_to(a, (size, *a.shape)) for a, m in zip(arrays[:2], mapped[:2]))
        out = mix(*(a.reshape(-1, a.shape[-1]) for a in flat), *arrays[2:])
        return out.reshape(size, -1, out.shape[-1]), True

    return mix


def _choose_form(how: _How, rows: Array, logits: Array, gate_up: Any, down: Any, bias: Array | None = None) -> Array:
    loop = functools.partial(_with_loop, how)
    arrays = rows, logits, gate_up, down, bias
    if is_packed(gate_up):
        kernel = functools.partial(_with_kernel, how) if kernels_available() and bias is None else loop
        return lax.platform_dependent(*arrays, cpu=kernel, default=loop)
    # Beyond this number of rows, most experts are read anyway.
    many = len(rows) * how.sizes.per_token > how.sizes.count
    grouped = many and how.shards == 1 and isinstance(gate_up, jax.Array)
    elsewhere = functools.partial(_grouped, how) if grouped else loop
    on_gpu = functools.partial(_with_pallas, how) if _suits_pallas(how, len(rows), gate_up, down) else elsewhere
    return lax.platform_dependent(*arrays, cpu=loop, cuda=on_gpu, default=elsewhere)


def _with_kernel(
    how: _How, rows: Float[Array, "N E"], logits: Float[Array, "N X"], gate_up: Any, down: Any, bias: None = None
) -> Array:
    sizes, matrices = how.sizes, (gate_up.of_experts(), down.of_experts())
    return calls.mix_experts(rows, logits, *matrices, how.activation, sizes.per_token, sizes.width, sizes.normalise)


def route(sizes: Experts, logits: Float[Array, "N X"]) -> _Routes:
    """Returns the experts of each row, and their weights."""
    weights, chosen = lax.top_k(jax.nn.softmax(logits, -1), sizes.per_token)
    weights = weights / weights.sum(-1, keepdims=True) if sizes.normalise else weights
    order = jnp.argsort(chosen, -1)
    return _Routes(*(jnp.take_along_axis(a, order, -1, mode="promise_in_bounds") for a in (chosen, weights)))


def _weigh(sizes: Experts, logits: Float[Array, "N X"]) -> tuple[Bool[Array, "N X"], Float[Array, "N X"]]:
    """Returns which experts each row has, and their weights, which are 0 elsewhere."""
    routes = route(sizes, logits)
    own: Bool[Array, "N k X"] = routes.chosen[..., None] == jnp.arange(sizes.count)
    return own.any(1), jnp.where(own, routes.weights[..., None], 0).sum(1)


def _with_loop(
    how: _How,
    rows: Float[Array, "N E"],
    logits: Float[Array, "N X"],
    gate_up: Any,
    down: Any,
    bias: Array | None = None,
) -> Array:
    """Computes the layer by a loop over the experts that any row has."""
    gate_up, down = (unpack_param(name, a) for name, a in zip(EXPERT_MATRICES, (gate_up, down)))
    has, weights = _weigh(how.sizes, logits)
    used = has.any(0)
    order = jnp.argsort(~used)  # stable: the experts in use come first, in ascending order

    def add(i: Array, total: Array) -> Array:
        expert = order[i]
        first, second = (_take(matrix, expert) for matrix in (gate_up, down))
        both = _product(rows, first)
        both = both if bias is None else both + lax.dynamic_index_in_dim(bias, expert, 0)
        hidden = Gate(how.activation, how.shards)(both)
        out = _partial_products(hidden, second, how.shards)
        mine, weight = (lax.dynamic_index_in_dim(a, expert, 1)[..., None] for a in (has, weights))
        # Not a product with 0: an expert may overflow on a row that it does not belong to.
        return total + jnp.where(mine, out * weight, 0)

    total = jnp.zeros((len(rows), how.shards, rows.shape[1]), jnp.float32)
    if how.shards > 1:  # each device sums over its own units, so that there is one sum over devices for a layer
        total = lax.with_sharding_constraint(total, jax.P(jax.P.UNCONSTRAINED, MODEL))
    with jax.named_scope("experts"):  # a name in compiled programs
        total = lax.fori_loop(0, used.sum(), add, total)
    return total.sum(1)


def _grouped(
    how: _How,
    rows: Float[Array, "N E"],
    logits: Float[Array, "N X"],
    gate_up: Array,
    down: Array,
    bias: Array | None = None,
) -> Array:
    """Computes the layer by products of groups of rows."""
    chosen, weights = route(how.sizes, logits)
    count, each = chosen.shape
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=how.sizes.count).astype(jnp.int32)

    def product(x: Array, matrices: Array) -> Array:
        precision = lax.Precision.HIGHEST if matrices.dtype == jnp.float32 else None
        x = x.astype(matrices.dtype)
        return lax.ragged_dot(x, matrices, sizes, precision=precision, preferred_element_type=jnp.float32)

    both = product(rows[order // each], gate_up)
    both = both if bias is None else both + bias[chosen.reshape(-1)[order]]
    hidden = Gate(how.activation, how.shards)(both)
    out = product(hidden, down)[jnp.argsort(order)].reshape(count, each, -1)
    return (out * weights[..., None]).sum(1)


def _suits_pallas(how: _How, rows: int, gate_up: Any, down: Any) -> bool:
    """Returns True if `_with_pallas` computes the layer: for a share of each expert on each device."""
    mesh = jax.sharding.get_abstract_mesh()
    others = set(mesh.auto_axes) - {MODEL}
    if any(mesh.shape[axis] > 1 for axis in others) or (how.shards > 1 and mesh.shape.get(MODEL) != how.shards):
        return False  # XLA does not split the kernels over devices
    if not multiplies_bfloat16():
        return False
    from jaxspec.models import experts_pallas  # Pallas takes a while to import

    return experts_pallas.has_kernels(rows, gate_up, down)


def _with_pallas(
    how: _How,
    rows: Float[Array, "N E"],
    logits: Float[Array, "N X"],
    gate_up: Any,
    down: Any,
    bias: Array | None = None,
    interpret: bool = False,
) -> Array:
    """Computes the layer by kernels that read the experts in use."""
    from jaxspec.models import experts_pallas

    most = min(len(rows) * how.sizes.per_token, how.sizes.count)
    kernels = functools.partial(experts_pallas.mix, most=most, activation=how.activation, interpret=interpret)
    arrays = rows, *_weigh(how.sizes, logits), gate_up, down, bias
    mesh = jax.sharding.get_abstract_mesh()
    if MODEL not in mesh.auto_axes:
        return kernels(*arrays)
    names = (*EXPERT_MATRICES, "experts_gate_up_bias")
    shares = [None if a is None else param_spec(name, a, how.shards) for name, a in zip(names, arrays[3:])]

    def share(*arrays: Any) -> Array:
        out = kernels(*arrays)
        return out if how.shards == 1 else lax.psum(out, MODEL)

    return jax.shard_map(
        share, mesh=mesh, in_specs=(P(), P(), P(), *shares), out_specs=P(), axis_names={MODEL}, check_vma=False
    )(*arrays)


def _product(rows: Float[Array, "N J"], matrix: Any) -> Float[Array, "N O"]:
    return matmul(rows[None], matrix)[0]


def _partial_products(hidden: Float[Array, "N I"], matrix: Any, shards: int) -> Float[Array, "N S O"]:
    """Returns the products of each device's part of the rows with its part of the matrix."""
    if shards == 1:
        return _product(hidden, matrix)[:, None]
    hidden = hidden.reshape(len(hidden), shards, -1)
    if isinstance(matrix, Quantized):
        parts = matrix.values.reshape(len(matrix.scale), shards, -1)
        return jnp.einsum("nsi,osi->nso", hidden, parts.astype(jnp.float32), precision="highest") * matrix.scale
    parts = matrix.reshape(shards, -1, matrix.shape[-1])
    precision = "highest" if matrix.dtype == jnp.float32 else None
    return jnp.einsum(
        "nsi,sio->nso",
        hidden.astype(matrix.dtype),
        parts,
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _take(matrices: Any, expert: Array) -> Any:
    """Returns the matrix of an expert.

    With the barrier, XLA:CPU converts a bfloat16 matrix in the iteration that reads it, and not all of them before.
    """
    one = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, expert, 0, keepdims=False), matrices)
    return lax.optimization_barrier(one)


def _as_array(matrices: Any) -> Float[Array, "X I O"]:
    """Returns matrices as an array, `[in, out]` for each expert."""
    if isinstance(matrices, Quantized) or is_packed(matrices):
        return matrices.astype(jnp.float32).swapaxes(1, 2)
    return matrices


def count_reads(lm: Any, params: Params) -> ExpertReads | None:
    """Returns what a call of a network reads; None if it has no mixtures of experts.

    Args:
        lm: the network.
        params: its parameters.
    """
    config = getattr(lm, "config", None)
    if not isinstance(config, ModelConfig) or config.experts is None:
        return None
    none, one = (count_bytes(params, config.experts, tokens) for tokens in (0, 1))
    rows = 0 if config.tie_embeddings else count_bytes(params["embed"])  # a call reads single rows of the embeddings
    return ExpertReads(config.experts.count, config.experts.per_token, (one - none) / (one - rows))


def count_bytes(params: Params, experts: Experts | None = None, tokens: int = 1) -> float:
    """Returns the bytes of parameters; of the experts' matrices, only the expected bytes of tokens in one call.

    Args:
        params: the parameters.
        experts: the sizes of the mixtures of experts; None if there are none.
        tokens: the number of tokens, which choose their experts independently.
    """
    total = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        share = 1.0
        if experts is not None and {getattr(key, "key", None) for key in path} & set(EXPERT_MATRICES):
            share = ExpertReads(experts.count, experts.per_token, 1.0).expected(tokens) / experts.count
        total += share * leaf.size * leaf.dtype.itemsize
    return total
