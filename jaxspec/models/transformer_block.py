"""A block of a decoder-only transformer of the Llama family: attention and a gated MLP."""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxspec.backend.layout import row_major
from jaxspec.core import cache as caches
from jaxspec.core.records import KV, Cache, Window
from jaxspec.models.attention import attend, sliding_window_mask
from jaxspec.models.config import ModelConfig
from jaxspec.models.execution import Execution
from jaxspec.models.layers import matmul, split_heads
from jaxspec.models.rows import Fused, Gate, Norm


def project(
    x: Float[Array, "B T J"],
    weight: nnx.Param,
    bias: nnx.Param | None,
    before: Norm | Gate | None = None,
    residual: Float[Array, "B T O"] | None = None,
) -> Float[Array, "B T O"]:
    """Applies a linear layer after `before`, and adds the residual stream, if they are given."""
    return matmul(x, weight[...], fused=Fused(before, None if bias is None else bias[...], residual))


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
        x: Float[Array, "B T E"],
        layer: int,
        rotation: tuple[Array, Array],
        window: Window,
        cache: Cache,
        past: KV | None,
    ) -> tuple[Float[Array, "B T E"], KV]:
        """Returns the residual stream after this block, and this layer's keys and values `[B, H, T, K]`."""
        x, new = self.attention(x, layer, rotation, window, cache, past, self.norm_of(self.attn_norm), x)
        return self.mlp(x), new

    def norm_of(self, scale: nnx.Param | None) -> Norm | None:
        """Returns the RMSNorm with this scale; None without a scale."""
        return None if scale is None else Norm(scale[...], self.config.norm_eps, self.execution.kernels)

    def norm(self, x: Float[Array, "*b E"], scale: nnx.Param | None) -> Float[Array, "*b E"]:
        """Applies RMSNorm, if there is a scale."""
        norm = self.norm_of(scale)
        return x if norm is None else norm(x)

    def heads(
        self,
        read: Float[Array, "B T I"],
        rotation: tuple[Array, Array],
        dtype: DTypeLike,
        before: Norm | None = None,
    ) -> tuple[Float[Array, "B H G T K"], KV]:
        """Returns an input's rotated queries, and its keys and values. `before` norms the input, if it is given."""
        c = self.config
        projected = row_major(project(read, self.qkv, self.qkv_bias, before))
        norms = self.norm_of(self.q_norm), self.norm_of(self.k_norm)
        return split_heads(projected, rotation, c.num_kv_heads, c.head_dim, dtype, norms, self.execution)

    def attention(
        self,
        read: Float[Array, "B T I"],
        layer: int,
        rotation: tuple[Array, Array],
        window: Window,
        cache: Cache,
        past: KV | None,
        before: Norm | None = None,
        residual: Float[Array, "B T E"] | None = None,
    ) -> tuple[Float[Array, "B T E"], KV]:
        """Returns the output of attention to an input, and this layer's keys and values `[B, H, T, K]`.

        `before` norms the input, and the residual stream is added to the output, if they are given.
        """
        c, dtype = self.config, caches.value_dtype(cache.kv.keys.dtype)
        queries, new = self.heads(read, rotation, dtype, before)
        seen = new if past is None else KV(*(jnp.concatenate([a[layer], b], 2) for a, b in zip(past, new)))
        mask, first_seen = sliding_window_mask(window, c.window_of(layer))
        scale = c.head_dim**-0.5 if c.query_scale is None else c.query_scale
        mixed = attend(
            queries, cache.kv, layer, cache.length, seen, mask, window.paths, scale, first_seen, self.execution
        )
        return self.join(mixed, residual), new

    def join(
        self,
        mixed: Float[Array, "B H G T K"],
        residual: Float[Array, "B T E"] | None = None,
    ) -> Float[Array, "B T E"]:
        """Projects the outputs of all heads to the width of the residual stream, and adds the stream if it is given."""
        batch, _, _, tokens, _ = mixed.shape
        mixed = jnp.moveaxis(mixed, 3, 1).reshape(batch, tokens, -1)
        return self._leave(mixed, self.out, self.out_bias, self.post_attn_norm, None, residual)

    def _leave(
        self,
        x: Float[Array, "B T J"],
        weight: nnx.Param,
        bias: nnx.Param | None,
        norm: nnx.Param | None,
        before: Gate | None,
        residual: Float[Array, "B T E"] | None,
    ) -> Float[Array, "B T E"]:
        """Applies the last linear layer of a sublayer and the norm after it, if any, and adds the residual stream."""
        if norm is None:
            return project(x, weight, bias, before, residual)
        out = self.norm(project(x, weight, bias, before), norm)
        return out if residual is None else residual + out

    def mlp(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Returns the residual stream after the MLP."""
        return self.feed(x, self.norm_of(self.mlp_norm), x)

    def feed(
        self,
        read: Float[Array, "B T E"],
        before: Norm | None = None,
        residual: Float[Array, "B T E"] | None = None,
    ) -> Float[Array, "B T E"]:
        """Returns the output of the MLP, plus the residual if it is given. `before` norms the input, if it is given."""
        both = project(read, self.gate_up, self.gate_up_bias, before)
        gate = Gate(self.config.activation, self.execution.shards)
        return self._leave(both, self.down, self.down_bias, self.post_mlp_norm, gate, residual)
