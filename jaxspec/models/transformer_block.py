"""A block of a decoder-only transformer of the Llama family: a mixer, and a gated MLP or a mixture of experts."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxspec.core import cache as caches
from jaxspec.core.records import KV, Cache, Window
from jaxspec.models import delta
from jaxspec.models.attention import side_by_side, sliding_window_mask
from jaxspec.models.config import FLOAT32_MATRICES, Experts, ModelConfig
from jaxspec.models.delta import DeltaEntries, DeltaParams
from jaxspec.models.execution import Execution
from jaxspec.models.experts import ExpertParams
from jaxspec.models.layer_calls import FusedCalls, FusedInput, LayerCalls, calls_of
from jaxspec.models.rows import Linear, Norm


class TransformerBlock(nnx.Module):
    """A pre-norm transformer block: a mixer and a feed-forward layer, each with a residual connection.

    The feed-forward layer is a gated MLP or a mixture of experts. The mixer is attention or Gated DeltaNet. It reads
    the tokens before a token, and is all that reads a cache.
    Activations are float32 between matmuls. Matrices have the model's dtype; norms and biases are float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        shapes: Mapping[str, tuple[int, ...]],
        execution: Execution = Execution(),
    ):
        """Draws parameters of these shapes, such as `config.layer_shapes(0)`."""

        def matrix(name: str) -> nnx.Param | None:
            if name not in shapes:
                return None
            init = nnx.initializers.normal(shapes[name][-2] ** -0.5)
            own = jnp.float32 if name in FLOAT32_MATRICES else dtype
            return nnx.Param(init(rngs.params(), shapes[name], jnp.float32).astype(own))

        def vector(name: str, value: float) -> nnx.Param | None:
            shape = shapes.get(name)
            return None if shape is None else nnx.Param(jnp.full(shape, value, jnp.float32))

        def taps() -> nnx.Param | None:
            if "conv" not in shapes:
                return None
            draw = nnx.initializers.normal(shapes["conv"][-1] ** -0.5)
            return nnx.Param(draw(rngs.params(), shapes["conv"], jnp.float32))

        self.config, self.execution = config, execution
        self.attn_norm, self.mlp_norm = vector("attn_norm", 1), vector("mlp_norm", 1)
        self.qkv, self.out = matrix("qkv"), matrix("out")
        self.gate_up, self.down = matrix("gate_up"), matrix("down")
        self.qkv_bias, self.out_bias = vector("qkv_bias", 0), vector("out_bias", 0)
        self.gate_up_bias, self.down_bias = vector("gate_up_bias", 0), vector("down_bias", 0)
        self.q_norm, self.k_norm = vector("q_norm", 1), vector("k_norm", 1)
        self.post_attn_norm, self.post_mlp_norm = vector("post_attn_norm", 1), vector("post_mlp_norm", 1)
        self.qkvz, self.rates = matrix("qkvz"), matrix("rates")
        self.decay, self.decay_bias = vector("decay", 0), vector("decay_bias", 0)
        self.gate_norm, self.conv = vector("gate_norm", 1), taps()
        self.router = matrix("router")
        self.experts_gate_up, self.experts_down = matrix("experts_gate_up"), matrix("experts_down")
        self.shared_gate_up, self.shared_down = matrix("shared_gate_up"), matrix("shared_down")
        self.shared_gate = matrix("shared_gate")
        self.sinks, self.router_bias = vector("sinks", 0), vector("router_bias", 0)
        self.experts_gate_up_bias = vector("experts_gate_up_bias", 0)
        self.experts_down_bias = vector("experts_down_bias", 0)

    def __call__(
        self,
        read: Any,
        layer: int,
        rotation: tuple[Array, Array],
        window: Window,
        cache: Cache,
        past: Any,
        following: Norm | None,
    ) -> tuple[Any, Any]:
        """Runs the block.

        Args:
            read: the input, as `LayerCalls.begin` makes it with the norm before attention.
            layer: the number of the layer.
            rotation: the cosines and sines of the tokens' positions.
            window: the tokens.
            cache: the text, in the stores of the layers of this kind: a `KV`, or a `DeltaStore` for each layer.
            past: the entries of earlier tokens of the same window, of the layers of this kind.
            following: the first norm of the next block; None if no block follows.

        Returns:
            The input of the next block, and this layer's entries: keys and values `[B, H, T, K]`, or `DeltaEntries`.
        """
        calls = calls_of(self.execution)
        if self.config.is_recurrent(layer):
            mixed, new = self._mix_recurrently(calls, read, layer, window, cache, past)
        else:
            mixed, new = self._mix(calls, read, layer, rotation, window, cache, past)
        out, after = Linear.of(self.out, self.out_bias), self.norm_of(self.post_mlp_norm)
        read = calls.add(read, mixed, out, self.norm_of(self.post_attn_norm), self.norm_of(self.mlp_norm))
        if (experts := self._experts()) is not None:
            return calls.experts(read, *experts, self.config.activation, after, following), new
        down = Linear.of(self.down, self.down_bias)
        gated = calls.gate(read, Linear.of(self.gate_up, self.gate_up_bias), self.config.activation)
        return calls.add(read, gated, down, after, following), new

    def _experts(self) -> tuple[ExpertParams, Experts] | None:
        """Returns the parameters and the sizes of the mixture of experts; None if there is none."""
        if self.router is None:
            return None
        names = "router", "experts_gate_up", "experts_down", "shared_gate_up", "shared_down", "shared_gate"
        names += "router_bias", "experts_gate_up_bias", "experts_down_bias"
        params = (getattr(self, name) for name in names)
        assert self.config.experts is not None
        return ExpertParams(*(None if param is None else param[...] for param in params)), self.config.experts

    def _mix(
        self,
        calls: LayerCalls,
        read: Any,
        layer: int,
        rotation: tuple[Array, Array],
        window: Window,
        cache: Cache,
        past: KV | None,
    ) -> tuple[Any, KV]:
        """Returns the outputs of all heads, for `LayerCalls.add`, and this layer's keys and values `[B, H, T, K]`."""
        c, dtype, place = self.config, caches.value_dtype(cache.stores.keys.dtype), self.config.place(layer)
        heads, gate = self._split(calls, read, rotation, dtype)
        before = None if past is None else KV(past.keys[place], past.values[place])
        mask, first_seen = sliding_window_mask(window, c.window_of(layer))
        scale = c.head_dim**-0.5 if c.query_scale is None else c.query_scale
        sinks = None if self.sinks is None else self.sinks[...]
        mixed, new = calls.attend(heads, cache, place, before, mask, window.paths, scale, first_seen, sinks)
        return mixed if gate is None else _gated(mixed, gate), new

    def _mix_recurrently(
        self, calls: LayerCalls, read: Any, layer: int, window: Window, cache: Cache, past: Any
    ) -> tuple[Float[Array, "B T J"], DeltaEntries]:
        """Returns the outputs of Gated DeltaNet, and this layer's entries."""
        c, place = self.config, self.config.place(layer)
        assert c.delta is not None
        vectors: Any = (self.conv, self.decay, self.decay_bias, self.gate_norm)
        params = DeltaParams(*(vector[...] for vector in vectors))
        projected = calls.project(read, Linear.of(self.qkvz, None))
        rates = calls.project(read, Linear.of(self.rates, None))
        store, before = cache.stores[place], None if past is None else past[place]
        return delta.mix(
            projected, rates, params, c.delta, window, store, cache.length, before, c.norm_eps, self.execution
        )

    def _split(
        self, calls: LayerCalls, read: Any, rotation: tuple[Array, Array], dtype: DTypeLike
    ) -> tuple[Any, Float[Array, "B T J"] | None]:
        """Returns the heads, for `LayerCalls.attend`, and the projection of the gate."""
        c, norms, gate = self.config, (self.norm_of(self.q_norm), self.norm_of(self.k_norm)), None
        projected = calls.project(read, Linear.of(self.qkv, self.qkv_bias))
        if c.out_gate:
            projected, gate = _split_gate(projected, c, self.execution.shards)
        return calls.split_heads(projected, rotation, c.num_kv_heads, c.head_dim, dtype, norms), gate

    def norm_of(self, scale: nnx.Param | None) -> Norm | None:
        """Returns the RMSNorm with this scale; None without a scale."""
        return None if scale is None else Norm(scale[...], self.config.norm_eps, self.execution.kernels)

    def norm(self, x: Float[Array, "*b E"], scale: nnx.Param | None) -> Float[Array, "*b E"]:
        """Applies RMSNorm, if there is a scale."""
        norm = self.norm_of(scale)
        return x if norm is None else norm(x)

    # Draft heads put the sublayers together in ways of their own, from these parts. They always run as `FusedCalls`.

    def heads(
        self, read: Float[Array, "B T I"], rotation: tuple[Array, Array], dtype: DTypeLike
    ) -> tuple[Float[Array, "B H G T K"], KV, Float[Array, "B T J"] | None]:
        """Returns an input's rotated queries, its keys and values, and the gate for `join`, if there is one."""
        (queries, new), gate = self._split(self._fused, FusedInput(read, None), rotation, dtype)
        return queries, new, gate

    def attention(
        self,
        read: Float[Array, "B T I"],
        layer: int,
        rotation: tuple[Array, Array],
        window: Window,
        cache: Cache,
        past: KV | None,
    ) -> tuple[Float[Array, "B T E"], KV]:
        """Returns the output of attention to an input, and this layer's keys and values `[B, H, T, K]`."""
        mixed, new = self._mix(self._fused, FusedInput(read, None), layer, rotation, window, cache, past)
        return self._leave(mixed), new

    def join(
        self, mixed: Float[Array, "B H G T K"], gate: Float[Array, "B T J"] | None = None
    ) -> Float[Array, "B T E"]:
        """Projects the outputs of all heads, after their gate, to the width of the residual stream."""
        rows = side_by_side(mixed)
        return self._leave(rows if gate is None else _gated(rows, gate))

    def mlp(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Returns the residual stream after the feed-forward layer."""
        return self._feed(FusedInput(x, self.norm_of(self.mlp_norm)), x)

    def feed(self, read: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Returns the output of the feed-forward layer."""
        return self._feed(FusedInput(read, None), None)

    @property
    def _fused(self) -> FusedCalls:
        return FusedCalls(self.execution)

    def _leave(self, mixed: Float[Array, "B T J"]) -> Float[Array, "B T E"]:
        return self._fused.leave(mixed, Linear.of(self.out, self.out_bias), self.norm_of(self.post_attn_norm))

    def _feed(self, read: FusedInput, residual: Float[Array, "B T E"] | None) -> Float[Array, "B T E"]:
        if (experts := self._experts()) is not None:
            after = self.norm_of(self.post_mlp_norm)
            return self._fused.feed_experts(read, *experts, self.config.activation, after, residual)
        gated = self._fused.gate(read, Linear.of(self.gate_up, self.gate_up_bias), self.config.activation)
        down = Linear.of(self.down, self.down_bias)
        return self._fused.leave(gated, down, self.norm_of(self.post_mlp_norm), residual)


def _split_gate(
    projected: Float[Array, "B T J"], config: ModelConfig, shards: int
) -> tuple[Float[Array, "B T J2"], Float[Array, "B T J3"]]:
    """Returns the projection without the gate, which follows the query of each head, and the gate of all heads."""
    c, lead = config, projected.shape[:-1]
    each = projected.reshape(*lead, shards, -1)
    queries = c.num_heads // shards
    both = each[..., : 2 * queries * c.head_dim].reshape(*lead, shards, queries, 2, c.head_dim)
    plain = both[..., 0, :].reshape(*lead, shards, -1)
    rest = jnp.concatenate([plain, each[..., 2 * queries * c.head_dim :]], -1)
    return rest.reshape(*lead, -1), both[..., 1, :].reshape(*lead, -1)


def _gated(mixed: Float[Array, "B T J"], gate: Float[Array, "B T J"]) -> Float[Array, "B T J"]:
    # With the barriers, XLA compiles this operation alone, and its bits do not depend on what surrounds it.
    return lax.optimization_barrier(mixed * jax.nn.sigmoid(lax.optimization_barrier(gate)))
