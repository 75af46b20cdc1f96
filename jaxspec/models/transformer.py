"""A decoder-only transformer of the Llama family in Flax NNX, and its adapter to `LanguageModel`.

RMSNorm, rotary positions (Su et al. 2021), grouped-query attention (Ainslie et al. 2023), SwiGLU (Shazeer
2020). The module holds parameters only; caches are arguments, and it is split once into plain arrays.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core import cache as caches
from jaxspec.core.records import KV, Cache, Params, Window
from jaxspec.models.attention import attend
from jaxspec.models.config import ModelConfig


def matmul(x: Float[Array, "B T I"], weight: Array, transposed: bool = False) -> Float[Array, "B T O"]:
    """`x @ weight` (or its transpose) in the weight's dtype with float32 sums.

    On CPU, XLA multiplies one row of bfloat16 in a naive loop that costs eight times as much as two rows.
    """
    batch, tokens, width = x.shape
    rows = x.astype(weight.dtype).reshape(batch * tokens, width)
    pad = rows.shape[0] == 1 and weight.dtype == jnp.bfloat16
    if pad:
        rows = jnp.concatenate([rows, rows])
    out = lax.dot_general(
        rows,
        weight,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return (out[:1] if pad else out).reshape(batch, tokens, -1)


def look_up(table: Float[Array, "V E"], tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
    """Rows of an embedding, in float32.

    XLA:CPU converts a bfloat16 table before it gathers, and would hoist that out of the decode loop, a copy of
    the table at every call. Behind the barrier the table depends on the tokens, and only rows are converted.
    """
    table, tokens = lax.optimization_barrier((table, tokens))
    return table[tokens].astype(jnp.float32)


def rotate(x: Float[Array, "B H T K"], positions: Array, theta: float) -> Float[Array, "B H T K"]:
    """Rotary positions in the half-split form of the Hugging Face checkpoints."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, None, :, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    low, high = x[..., :half], x[..., half:]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def rms_norm(x: Float[Array, "*b E"], scale: Float[Array, "E"], epsilon: float) -> Float[Array, "*b E"]:
    variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * lax.rsqrt(variance + epsilon) * scale.astype(jnp.float32)


class Block(nnx.Module):
    """Attention and SwiGLU, each behind a norm and a residual. Activations are float32 between matmuls."""

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        def matrix(rows: int, columns: int) -> nnx.Param:
            init = nnx.initializers.normal(rows**-0.5)
            return nnx.Param(init(rngs.params(), (rows, columns), jnp.float32).astype(dtype))

        self.config = config
        width, heads, kv = config.head_dim, config.num_heads, config.num_kv_heads
        self.attn_norm = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        self.qkv = matrix(config.hidden_size, (heads + 2 * kv) * width)
        self.out = matrix(heads * width, config.hidden_size)
        self.mlp_norm = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        self.gate_up = matrix(config.hidden_size, 2 * config.intermediate_size)
        self.down = matrix(config.intermediate_size, config.hidden_size)

    def __call__(
        self, x: Float[Array, "B T E"], layer: int, window: Window, cache: Cache, past: KV | None
    ) -> tuple[Float[Array, "B T E"], KV]:
        """The residual stream after this block, and this layer's keys and values `[B, H, T, K]`."""
        c = self.config
        batch, tokens, _ = x.shape
        projected = matmul(rms_norm(x, self.attn_norm[...], c.norm_eps), self.qkv[...])
        heads = projected.reshape(batch, tokens, -1, c.head_dim).swapaxes(1, 2)
        queries, keys, values = jnp.split(heads, (c.num_heads, c.num_heads + c.num_kv_heads), axis=1)
        dtype = caches.held(cache.kv.keys.dtype)
        queries = rotate(queries, window.positions, c.rope_theta).astype(dtype)
        new = KV(rotate(keys, window.positions, c.rope_theta).astype(dtype), values.astype(dtype))
        seen = new if past is None else KV(*(jnp.concatenate([a[layer], b], 2) for a, b in zip(past, new)))
        queries = queries.reshape(batch, c.num_kv_heads, -1, tokens, c.head_dim)
        mixed = attend(queries, cache.kv, layer, cache.length, seen, window.mask, window.paths)
        mixed = mixed.reshape(batch, c.num_heads, tokens, c.head_dim).swapaxes(1, 2)
        x = x + matmul(mixed.reshape(batch, tokens, -1), self.out[...])
        gate, up = jnp.split(matmul(rms_norm(x, self.mlp_norm[...], c.norm_eps), self.gate_up[...]), 2, axis=-1)
        return x + matmul(jax.nn.silu(gate) * up, self.down[...]), new


class Transformer(nnx.Module):
    """The whole model: embedding, blocks, norm, and a head that may be the embedding."""

    def __init__(self, config: ModelConfig, dtype: Any = jnp.float32, *, rngs: nnx.Rngs):
        def table() -> nnx.Param:
            shape = (config.vocab_size, config.hidden_size)
            scale = config.hidden_size**-0.5
            return nnx.Param(nnx.initializers.normal(scale)(rngs.params(), shape, jnp.float32).astype(dtype))

        self.embed = table()
        self.layers = nnx.List([Block(config, dtype, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        self.head = None if config.tie_embeddings else table()
        self.epsilon = config.norm_eps

    def __call__(
        self, window: Window, cache: Cache, past: KV | None = None, layers: int | None = None
    ) -> tuple[Float[Array, "B T E"], KV]:
        """Final normed features, and keys and values of the window in the first `layers` layers."""
        x = look_up(self.embed[...], window.tokens)
        entries = []
        for i, block in enumerate(self.layers[:layers]):
            x, new = block(x, i, window, cache, past)
            entries.append(new)
        return rms_norm(x, self.norm[...], self.epsilon), KV(*(jnp.stack(a) for a in zip(*entries)))

    def logits(self, features: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        table = self.embed if self.head is None else self.head
        return matmul(features, table[...], transposed=True)


@functools.lru_cache
def graph(config: ModelConfig) -> nnx.GraphDef:
    """The structure of the module without its parameters, for `nnx.merge`."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))[0]


@dataclasses.dataclass(frozen=True)
class TransformerLM:
    """A `LanguageModel` of this family; parameters are the pure dict of the module's state.

    Attributes:
        config: sizes and constants.
        dtype: of the cache.
        layers: how many layers to run before the norm and the head; None for all (fewer: early exit).
    """

    config: ModelConfig
    dtype: str = "float32"
    layers: int | None = None

    @property
    def vocab(self) -> int:
        return self.config.vocab_size

    @property
    def context(self) -> int:
        return self.config.max_position

    @property
    def depth(self) -> int:
        return self.config.num_layers if self.layers is None else self.layers

    def init_params(self, key: Array) -> Params:
        """Random parameters, for tests and training."""
        model = Transformer(self.config, self.dtype, rngs=nnx.Rngs(params=key))
        return nnx.to_pure_dict(nnx.state(model))

    def init_cache(self, batch: int, capacity: int) -> Cache:
        c = self.config
        return caches.empty(self.depth, batch, c.num_kv_heads, capacity, c.head_dim, self.dtype)

    def _module(self, params: Params) -> Transformer:
        return nnx.merge(graph(self.config), nnx.State(params))

    def apply(
        self, params: Params, window: Window, cache: Cache, past: KV | None = None
    ) -> tuple[Float[Array, "B T E"], KV]:
        return self._module(params)(window, cache, past, self.layers)

    def head(self, params: Params, features: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        return self._module(params).logits(features)
