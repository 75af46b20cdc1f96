"""Gated DeltaNet (Yang et al. 2025, arXiv:2412.06464, section 3) over a window of tokens that may be a tree.

A layer is attention without a softmax. Each token leaves entries: a key, a delta and a decay. A later token on its path
reads (query . key) times the delta, times the decays in between. The state of a row is this sum over its whole text. A
window therefore needs only its mask, and a commit adds the entries of the accepted path to the state.

For a token with query q, key k, value v, update rate b and decay g (a logarithm, at most 0), and the state S of the
token before it:

    delta = b (v - exp(g) S' k)
    S     = exp(g) S + k delta'
    out   = S' q

Queries, keys and values are first mixed with the last inputs of the token's own path, by a convolution per channel.

On a CPU, a kernel runs this recurrence from each token's parent, and the commit runs the same step: the bits do not
depend on the window, the tree or the batch. Elsewhere the deltas of a window are one triangular system. Both forms are
the same sum in another order.

Letters: B rows, T new tokens, P earlier tokens of the window, W = P + T, M committed tokens, Hk key heads, Hv value
heads, Kk and Kv their widths, C channels of the convolution, F its taps.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.records import Window
from jaxspec.kernels import calls
from jaxspec.models.config import DeltaSizes
from jaxspec.models.execution import Execution

SYSTEM_TOKENS = 64
"""The largest number of tokens in a triangular system; longer windows are solved one part after the other."""
NORM_EPSILON = 1e-6
"""The epsilon under the root with which queries and keys are scaled to length 1."""


class DeltaStore(NamedTuple):
    """A layer's text: the last inputs of the convolution, the oldest first, and the states. Float32."""

    inputs: Float[Array, "B F1 C"]  # F - 1 tokens; zeros before the text
    state: Float[Array, "B Hv Kk Kv"]

    @classmethod
    def empty(cls, sizes: DeltaSizes, batch: int) -> "DeltaStore":
        """Returns the stores of rows without text."""
        s = sizes
        shapes = (batch, s.taps - 1, s.channels), (batch, s.value_heads, s.key_width, s.value_width)
        return cls(*(jnp.zeros(shape, jnp.float32) for shape in shapes))


class DeltaEntries(NamedTuple):
    """What the tokens of a window leave behind. Float32; the first axis has one layer."""

    inputs: Float[Array, "1 B 1 T C"]  # of the convolution
    keys: Float[Array, "1 B Hk T Kk"]  # of length 1
    deltas: Float[Array, "1 B Hv T Kv"]
    decays: Float[Array, "1 B Hv T 1"]  # logarithms, at most 0


class DeltaParams(NamedTuple):
    """A layer's parameters beside its projections; see `ModelConfig.param_shapes`."""

    conv: Float[Array, "C 1 F"]
    decay: Float[Array, " Hv"]
    decay_bias: Float[Array, " Hv"]
    gate_norm: Float[Array, " Kv"]


class _Heads(NamedTuple):
    """Queries, keys, values, update rates and decays of some tokens."""

    queries: Float[Array, "B Hk T Kk"]
    keys: Float[Array, "B Hk T Kk"]
    values: Float[Array, "B Hv T Kv"]
    rates: Float[Array, "B Hv T"]
    decays: Float[Array, "B Hv T"]


def mix(
    projected: Float[Array, "B T J"],
    rates: Float[Array, "B T R"],
    params: DeltaParams,
    sizes: DeltaSizes,
    window: Window,
    store: DeltaStore,
    length: Int[Array, "B"],
    past: DeltaEntries | None,
    epsilon: float,
    execution: Execution = Execution(),
) -> tuple[Float[Array, "B T O"], DeltaEntries]:
    """Returns the layer's outputs, gated and normed, and the entries of the new tokens.

    Args:
        projected: the projections to the C channels of the convolution, and to the gate. If several devices share the
            layer, each device's queries, keys, values and gates are together.
        rates: the projections to update rates, and to decays; grouped by device as well.
        params: the layer's other parameters.
        sizes: the sizes of the layer.
        window: the tokens; an ancestor's ancestors must be among a token's ancestors, in ascending order.
        store: the layer's text.
        length: the number of tokens of text in each row; rows of length 0 are empty.
        past: the entries of the window's earlier tokens.
        epsilon: the epsilon of the norm before the gate.
        execution: how to compute the layer, and how many devices share it.
    """

    def plain(*arrays: Any) -> tuple[Array, DeltaEntries]:
        return _with_xla(sizes, epsilon, execution.shards, *arrays)

    def kernel(
        projected: Array,
        rates: Array,
        params: DeltaParams,
        mask: Array,
        store: DeltaStore,
        length: Array,
        past: DeltaEntries | None,
    ) -> tuple[Array, DeltaEntries]:
        past = _no_entries(sizes, len(length)) if past is None else past
        earlier = past.inputs[0, :, 0], past.keys[0], past.deltas[0], past.decays[0, ..., 0]
        results = calls.delta_net(
            projected, rates, params, mask, length, store, earlier, epsilon, NORM_EPSILON, sizes.tiled
        )
        out, keys, deltas, decays = results
        inputs = projected[None, :, None, :, : sizes.channels]
        return out, DeltaEntries(inputs, keys[None], deltas[None], decays[None, ..., None])

    arrays = projected, rates, params, window.mask, store, length, past
    if not execution.kernels or execution.shards > 1:
        return plain(*arrays)
    return lax.platform_dependent(*arrays, cpu=kernel, default=plain)


def _with_xla(
    sizes: DeltaSizes,
    epsilon: float,
    shards: int,
    projected: Float[Array, "B T J"],
    rates: Float[Array, "B T R"],
    params: DeltaParams,
    mask: Bool[Array, "B T W"],
    store: DeltaStore,
    length: Int[Array, "B"],
    past: DeltaEntries | None,
) -> tuple[Float[Array, "B T O"], DeltaEntries]:
    """Computes `mix` with XLA's own operations."""
    s = sizes
    batch, tokens, _ = projected.shape
    inputs, gate = _split(projected, (s.keys, s.keys, s.values, s.values), shards, (3,))
    update, fade = _split(rates, (s.value_heads, s.value_heads), shards, (1,))
    started = length > 0
    mixed = jax.nn.silu(_convolve(params.conv, inputs, store, started, past, mask))
    queries, keys, values = _split(mixed, (s.keys, s.keys, s.values), shards, (1, 2))
    queries, keys = (_unit(_by_head(a, s.key_heads)) for a in (queries, keys))
    decays = -jnp.exp(params.decay) * jax.nn.softplus(fade + params.decay_bias)
    heads = _Heads(
        queries * s.key_width**-0.5,
        keys,
        _by_head(values, s.value_heads),
        jnp.moveaxis(jax.nn.sigmoid(update), 2, 1),
        jnp.moveaxis(decays, 2, 1),
    )
    # 0 x NaN is NaN: a token that is not finite must spoil its descendants, and no other tokens.
    finite = functools.reduce(jnp.logical_and, (jnp.isfinite(_last(a)).all((1, -1)) for a in heads))
    spoiled = (mask[:, :, mask.shape[2] - tokens :] & ~finite[:, None, :]).any(-1)
    heads = _Heads(*(jnp.where(_over(finite, a), a, 0) for a in heads))
    seen = None if past is None else DeltaEntries(*(a[0] for a in past))
    state = jnp.where(started[:, None, None, None], store.state, 0)
    read = _in_parts if tokens > SYSTEM_TOKENS else _at_once
    out, deltas = read(heads, mask, state, seen, sizes.tiled)
    out, deltas = (jnp.where(spoiled[:, None, :, None], jnp.nan, a) for a in (out, deltas))
    scale = lax.rsqrt(jnp.mean(out * out, -1, keepdims=True) + epsilon)
    gated = out * scale * params.gate_norm * jax.nn.silu(_by_head(gate, s.value_heads))
    entries = DeltaEntries(inputs[None, :, None], heads.keys[None], deltas[None], heads.decays[None, ..., None])
    return jnp.moveaxis(gated, 1, 2).reshape(batch, tokens, -1), entries


def _no_entries(sizes: DeltaSizes, batch: int) -> DeltaEntries:
    """Returns the entries of a window of no tokens."""
    s = sizes
    shapes = (1, 0, s.channels), (s.key_heads, 0, s.key_width), (s.value_heads, 0, s.value_width), (s.value_heads, 0, 1)
    return DeltaEntries(*(jnp.zeros((1, batch, *shape), jnp.float32) for shape in shapes))


def commit(
    store: DeltaStore,
    entries: DeltaEntries,
    nodes: Int[Array, "B M"] | None,
    count: Int[Array, "B"],
    length: Int[Array, "B"],
    tiled: bool = False,
    execution: Execution = Execution(),
) -> DeltaStore:
    """Returns the store after some tokens of a window have become text; see `LanguageModel.commit`.

    Entries that are not finite are added as zeros.

    Args:
        store: the text.
        entries: the entries of the window's tokens.
        nodes: the tokens to commit, in their order; None for the window's tokens in their own order.
        count: the number of tokens to commit in each row.
        length: the number of tokens of text in each row; rows of length 0 are empty.
        tiled: see `DeltaSizes`.
        execution: how to compute the states.
    """
    size = entries.keys.shape[3] if nodes is None else nodes.shape[1]
    real, started = jnp.arange(size) < count[:, None], length > 0
    text = jnp.where(started[:, None, None], store.inputs, 0)
    pool = jnp.concatenate([text, _select(entries.inputs[0], nodes, real)[:, 0]], 1)
    at = count[:, None] + jnp.arange(store.inputs.shape[1])
    kept = jnp.take_along_axis(pool, at[..., None], axis=1, mode="promise_in_bounds")

    def plain(state: Array, entries: DeltaEntries, nodes: Array | None) -> Array:
        keys, deltas, decays = (_select(a[0], nodes, real) for a in entries[1:])
        decays = decays[..., 0]
        keys = _spread(keys, state.shape[1], tiled) * jnp.exp(_sum_after(decays))[..., None]
        left = jnp.where(started[:, None, None, None], jnp.exp(decays.sum(-1))[..., None, None], 0)
        return state * left + _dot("bhmk,bhmv->bhkv", keys, deltas)

    def kernel(state: Array, entries: DeltaEntries, nodes: Array | None) -> Array:
        keys, deltas, decays = (a[0] for a in entries[1:])
        return calls.commit_delta_net(state, keys, deltas, decays[..., 0], nodes, count, length, tiled)

    if not execution.kernels or execution.shards > 1:
        return DeltaStore(kept, plain(store.state, entries, nodes))
    return DeltaStore(kept, lax.platform_dependent(store.state, entries, nodes, cpu=kernel, default=plain))


def _select(a: Array, nodes: Int[Array, "B M"] | None, real: Bool[Array, "B M"]) -> Array:
    """Returns the entries of nodes, with zeros for padding and in place of values that are not finite."""
    if nodes is not None:
        a = jnp.take_along_axis(a, jnp.maximum(nodes, 0)[:, None, :, None], 2, mode="promise_in_bounds")
    return jnp.where(real[:, None, :, None] & jnp.isfinite(a), a, 0)


def _split(a: Array, widths: tuple[int, ...], shards: int, borders: tuple[int, ...]) -> list[Array]:
    """Splits the last axis, on which each shard has its share of every width, before the widths of these indices.

    Each part is again grouped by shard.
    """
    ends = [sum(widths[:border]) // shards for border in borders]
    parts = jnp.split(a.reshape(*a.shape[:-1], shards, -1), ends, axis=-1)
    return [part.reshape(*a.shape[:-1], -1) for part in parts]


def _by_head(a: Float[Array, "B T I"], heads: int) -> Float[Array, "B H T K"]:
    return jnp.moveaxis(a.reshape(*a.shape[:2], heads, -1), 2, 1)


def _last(a: Array) -> Array:
    """Returns `[B, H, T, K]`, given rates `[B, H, T]` or vectors `[B, H, T, K]`."""
    return a if a.ndim == 4 else a[..., None]


def _over(rows: Bool[Array, "B T"], a: Array) -> Array:
    return rows[:, None, :, None] if a.ndim == 4 else rows[:, None, :]


def _unit(a: Float[Array, "B H T K"]) -> Float[Array, "B H T K"]:
    return a * lax.rsqrt((a * a).sum(-1, keepdims=True) + NORM_EPSILON)


def _spread(a: Float[Array, "B Hk T K"], heads: int, tiled: bool) -> Float[Array, "B Hv T K"]:
    """Repeats key heads for the value heads that read them."""
    count = heads // a.shape[1]
    return a if count == 1 else jnp.tile(a, (1, count, 1, 1)) if tiled else jnp.repeat(a, count, axis=1)


def _dot(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST)


def _sum_after(a: Float[Array, "*b W"]) -> Float[Array, "*b W"]:
    """Returns the sum of the entries after each entry, without a difference of long sums, which would lose digits."""
    later = lax.cumsum(a, axis=a.ndim - 1, reverse=True)[..., 1:]
    return jnp.concatenate([later, jnp.zeros_like(a[..., :1])], axis=-1)


def _convolve(
    taps: Float[Array, "C 1 F"],
    inputs: Float[Array, "B T C"],
    store: DeltaStore,
    started: Bool[Array, "B"],
    past: DeltaEntries | None,
    mask: Bool[Array, "B T W"],
) -> Float[Array, "B T C"]:
    """Returns the causal convolution along the path of each token."""
    size = taps.shape[2]
    text = jnp.where(started[:, None, None], store.inputs, 0)
    pool = jnp.concatenate([text, *([] if past is None else [past.inputs[0, :, 0]]), inputs], axis=1)
    rank, depth = jnp.cumsum(mask, -1) - 1, mask.sum(-1) - 1
    out = jnp.zeros_like(inputs)
    for back in range(size - 1, -1, -1):
        # The ancestor `back` steps above a token; above the window are the last tokens of the text.
        inside = (mask & (rank == (depth - back)[..., None])).argmax(-1)
        at = jnp.where(depth >= back, inside, depth - back) + size - 1
        rows = jnp.take_along_axis(pool, at[..., None], axis=1, mode="promise_in_bounds")
        out += taps[:, 0, size - 1 - back] * rows
    return out


def _in_parts(
    heads: _Heads, mask: Bool[Array, "B T W"], state: Array, past: DeltaEntries | None, tiled: bool
) -> tuple[Float[Array, "B Hv T Kv"], Float[Array, "B Hv T Kv"]]:
    """Returns outputs and deltas of a long window, of which each part reads the parts before it as its past."""
    tokens, width = mask.shape[1:]
    count = -(-tokens // SYSTEM_TOKENS)
    padding = count * SYSTEM_TOKENS - tokens

    def padded(a: Array) -> Array:
        return jnp.pad(a, [(0, 0), (0, 0), (0, padding), *[(0, 0)] * (a.ndim - 3)])

    heads, mask = _Heads(*map(padded, heads)), jnp.pad(mask, ((0, 0), (0, padding), (0, padding)))
    empty = DeltaEntries(mask[:0], heads.keys, jnp.zeros_like(heads.values), heads.decays[..., None])
    before = empty if past is None else _join(past._replace(inputs=mask[:0]), empty)

    def part(deltas: Array, i: Array) -> tuple[Array, tuple[Array, Array]]:
        def own(a: Array, axis: int) -> Array:
            return lax.dynamic_slice_in_dim(a, i * SYSTEM_TOKENS, SYSTEM_TOKENS, axis)

        inside = own(mask, 1)
        # A token sees the parts before its own as past, and its own part as new tokens.
        earlier = jnp.arange(inside.shape[2]) < width - tokens + i * SYSTEM_TOKENS
        here = lax.dynamic_slice_in_dim(inside, width - tokens + i * SYSTEM_TOKENS, SYSTEM_TOKENS, 2)
        both = jnp.concatenate([inside & earlier, here], 2)
        seen = before._replace(deltas=deltas)
        out, new = _at_once(_Heads(*(own(a, 2) for a in heads)), both, state, seen, tiled, chain=True)
        deltas = lax.dynamic_update_slice_in_dim(deltas, new, width - tokens + i * SYSTEM_TOKENS, 2)
        return deltas, (out, new)

    _, results = lax.scan(part, before.deltas, jnp.arange(count))
    out, deltas = (jnp.moveaxis(a, 0, 2).reshape(*a.shape[1:3], -1, a.shape[-1]) for a in results)
    return out[:, :, :tokens], deltas[:, :, :tokens]


def _join(first: DeltaEntries, second: DeltaEntries) -> DeltaEntries:
    return jax.tree.map(lambda a, b: a if a.ndim < 4 else jnp.concatenate([a, b], 2), first, second)


def _at_once(
    heads: _Heads,
    mask: Bool[Array, "B T W"],
    state: Array,
    past: DeltaEntries | None,
    tiled: bool,
    chain: bool = False,
) -> tuple[Float[Array, "B Hv T Kv"], Float[Array, "B Hv T Kv"]]:
    """Returns outputs and deltas of a window by one triangular system; `chain` says that it is probably a chain.

    Row n of the system reads delta n + sum over its ancestors m of rate n * between(n, m) * (key n . key m) * delta m
    = rate n * (value n - what it reads of the state and of `past`).
    """
    tokens, width = mask.shape[1:]
    earlier, count = width - tokens, heads.values.shape[1]
    keys, decays = heads.keys, heads.decays
    if past is not None:
        keys, decays = jnp.concatenate([past.keys, keys], 2), jnp.concatenate([past.decays[..., 0], decays], 2)
    on_path = jnp.where(mask[:, None], decays[:, :, None, :], 0)  # [B, Hv, T, W]; indices of a path ascend
    between = jnp.where(mask[:, None], jnp.exp(_sum_after(on_path)), 0)
    whole = jnp.exp(on_path.sum(-1))[..., None]

    def scores(a: Array) -> Array:
        return _spread(_dot("bhtk,bhwk->bhtw", a, keys), count, tiled) * between

    def of_state(a: Array) -> Array:
        return _dot("bhtk,bhkv->bhtv", _spread(a, count, tiled), state) * whole

    weights = scores(heads.keys)
    wanted = heads.values - of_state(heads.keys)
    if past is not None:
        wanted -= _dot("bhtw,bhwv->bhtv", weights[..., :earlier], past.deltas)
    rates = heads.rates[..., None]
    strict = jnp.where(jnp.eye(tokens, dtype=bool), 0, weights[..., earlier:] * rates)
    right = rates * wanted
    if tokens == 1:
        deltas = right
    elif chain:
        deltas = _solve(strict, right)
    else:
        deltas = _by_levels(strict, right, mask[..., earlier:].sum(-1).max())
    seen = deltas if past is None else jnp.concatenate([past.deltas, deltas], 2)
    return of_state(heads.queries) + _dot("bhtw,bhwv->bhtv", scores(heads.queries), seen), deltas


def _solve(strict: Array, right: Array) -> Array:
    """Solves (1 + strict) x = right, token by token."""
    whole = strict + jnp.eye(strict.shape[-1])
    return jax.scipy.linalg.solve_triangular(whole, right, lower=True, unit_diagonal=True)


@jax.custom_vjp
def _by_levels(strict: Array, right: Array, height: Array) -> Array:
    """Solves (1 + strict) x = right for a tree: after n turns, the tokens above level n are exact."""

    def turn(_: Array, x: Array) -> Array:
        return right - _dot("bhtw,bhwv->bhtv", strict, x)

    return lax.fori_loop(1, height, turn, right)


def _levels_forward(strict: Array, right: Array, height: Array) -> tuple[Array, tuple[Array, Array]]:
    solved = _by_levels(strict, right, height)
    return solved, (strict, solved)


def _levels_backward(saved: tuple[Array, Array], change: Array) -> tuple[Array, Array, None]:
    strict, solved = saved
    whole = strict + jnp.eye(strict.shape[-1])
    back = jax.scipy.linalg.solve_triangular(whole, change, trans="T", lower=True, unit_diagonal=True)
    return -_dot("bhtv,bhwv->bhtw", back, solved), back, None


_by_levels.defvjp(_levels_forward, _levels_backward)
