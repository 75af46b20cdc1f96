"""A block of a decoder-only transformer of the Llama family: attention and a gated MLP."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxspec.core import cache as caches
from jaxspec.core.records import KV, Cache, Window
from jaxspec.models.attention import sliding_window_mask
from jaxspec.models.config import ModelConfig
from jaxspec.models.execution import Execution
from jaxspec.models.layer_calls import FusedCalls, FusedInput, LayerCalls, calls_of, side_by_side
from jaxspec.models.rows import Linear, Norm


class TransformerBlock(nnx.Module):
    """A pre-norm transformer block: attention and gated MLP, each with a residual connection.

    Activations are float32 between matmuls. Matrices have the model's dtype; norms and biases are float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        execution: Execution = Execution(),
    ):
        """Draws parameters of these shapes, `config.block_shapes()` by default."""
        shapes = config.block_shapes() if shapes is None else shapes

        def matrix(name: str) -> nnx.Param:
            rows, columns = shapes[name]
            init = nnx.initializers.normal(rows**-0.5)
            return nnx.Param(init(rngs.params(), (rows, columns), jnp.float32).astype(dtype))

        def vector(name: str, value: float) -> nnx.Param | None:
            shape = shapes.get(name)
            return None if shape is None else nnx.Param(jnp.full(shape, value, jnp.float32))

        self.config, self.execution = config, execution
        self.attn_norm, self.mlp_norm = vector("attn_norm", 1), vector("mlp_norm", 1)
        self.qkv, self.out = matrix("qkv"), matrix("out")
        self.gate_up, self.down = matrix("gate_up"), matrix("down")
        self.qkv_bias, self.out_bias = vector("qkv_bias", 0), vector("out_bias", 0)
        self.gate_up_bias, self.down_bias = vector("gate_up_bias", 0), vector("down_bias", 0)
        self.q_norm, self.k_norm = vector("q_norm", 1), vector("k_norm", 1)
        self.post_attn_norm, self.post_mlp_norm = vector("post_attn_norm", 1), vector("post_mlp_norm", 1)

    def __call__(
        self,
        read: Any,
        layer: int,
        rotation: tuple[Array, Array],
        window: Window,
        cache: Cache,
        past: KV | None,
        following: Norm | None,
    ) -> tuple[Any, KV]:
        """Runs the block.

        Args:
            read: the input, as `LayerCalls.begin` makes it with the norm before attention.
            layer: the number of the layer.
            rotation: the cosines and sines of the tokens' positions.
            window: the tokens.
            cache: the keys and values of earlier tokens.
            past: the keys and values of earlier tokens of the same window.
            following: the first norm of the next block; None if no block follows.

        Returns:
            The input of the next block, and this layer's keys and values `[B, H, T, K]`.
        """
        calls = calls_of(self.execution)
        mixed, new = self._mix(calls, read, layer, rotation, window, cache, past)
        out, down = Linear.of(self.out, self.out_bias), Linear.of(self.down, self.down_bias)
        read = calls.add(read, mixed, out, self.norm_of(self.post_attn_norm), self.norm_of(self.mlp_norm))
        gated = calls.gate(read, Linear.of(self.gate_up, self.gate_up_bias), self.config.activation)
        return calls.add(read, gated, down, self.norm_of(self.post_mlp_norm), following), new

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
        c, dtype = self.config, caches.value_dtype(cache.stores.keys.dtype)
        queries, new = self._split(calls, read, rotation, dtype)
        seen = new if past is None else KV(*(jnp.concatenate([a[layer], b], 2) for a, b in zip(past, new)))
        mask, first_seen = sliding_window_mask(window, c.window_of(layer))
        scale = c.head_dim**-0.5 if c.query_scale is None else c.query_scale
        return calls.attend(queries, cache, layer, seen, mask, window.paths, scale, first_seen), new

    def _split(self, calls: LayerCalls, read: Any, rotation: tuple[Array, Array], dtype: DTypeLike) -> tuple[Any, KV]:
        c, norms = self.config, (self.norm_of(self.q_norm), self.norm_of(self.k_norm))
        projected = calls.project(read, Linear.of(self.qkv, self.qkv_bias))
        return calls.split_heads(projected, rotation, c.num_kv_heads, c.head_dim, dtype, norms)

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
    ) -> tuple[Float[Array, "B H G T K"], KV]:
        """Returns an input's rotated queries, and its keys and values."""
        return self._split(self._fused, FusedInput(read, None), rotation, dtype)

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

    def join(self, mixed: Float[Array, "B H G T K"]) -> Float[Array, "B T E"]:
        """Projects the outputs of all heads to the width of the residual stream."""
        return self._leave(side_by_side(mixed))

    def mlp(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Returns the residual stream after the MLP."""
        return self._feed(FusedInput(x, self.norm_of(self.mlp_norm)), x)

    def feed(self, read: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Returns the output of the MLP."""
        return self._feed(FusedInput(read, None), None)

    @property
    def _fused(self) -> FusedCalls:
        return FusedCalls(self.execution)

    def _leave(self, mixed: Float[Array, "B T J"]) -> Float[Array, "B T E"]:
        return self._fused.leave(mixed, Linear.of(self.out, self.out_bias), self.norm_of(self.post_attn_norm))

    def _feed(self, read: FusedInput, residual: Float[Array, "B T E"] | None) -> Float[Array, "B T E"]:
        gated = self._fused.gate(read, Linear.of(self.gate_up, self.gate_up_bias), self.config.activation)
        down = Linear.of(self.down, self.down_bias)
        return self._fused.leave(gated, down, self.norm_of(self.post_mlp_norm), residual)
