"""A decoder-only transformer of the Llama family in Flax NNX, and its adapter to `LanguageModel`.

RMSNorm, rotary position embeddings (Su et al. 2021), grouped-query attention (Ainslie et al. 2023), SwiGLU (Shazeer
2020), and the variations of related families; see `ModelConfig`. The module holds parameters only, as plain arrays;
caches are arguments.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxspec.backend.layout import row_major
from jaxspec.core import cache as caches
from jaxspec.core.checks import one_of
from jaxspec.core.networks import check_taps
from jaxspec.core.records import KV, Cache, Params, Window
from jaxspec.errors import InvalidConfig
from jaxspec.kernels.library import available
from jaxspec.models.attention import attend, sliding_window_mask
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import look_up, matmul, rms_norm, rotate, rotation
from jaxspec.models.packed import Matrix

ATTENTION = ("xla", "pallas")


def project(x: Float[Array, "B T I"], weight: nnx.Param, bias: nnx.Param | None) -> Float[Array, "B T O"]:
    """Applies a linear layer."""
    out = matmul(x, weight[...])
    return out if bias is None else out + bias[...]


class Block(nnx.Module):
    """A pre-norm transformer block: attention and gated MLP, each with a residual connection.

    Activations are float32 between matmuls. Matrices have the model's dtype; norms and biases are float32.
    """

    def __init__(
        self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs, shapes: Mapping[str, tuple[int, ...]] | None = None
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

        self.config = config
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
        shards: int,
        kernels: bool,
        form: str,
    ) -> tuple[Float[Array, "B T E"], KV]:
        """Returns the residual stream after this block, and this layer's keys and values `[B, H, T, K]`."""
        read = self.norm(x, self.attn_norm, kernels)
        mixed, new = self.attention(read, layer, rotation, window, cache, past, shards, kernels, form)
        return self.mlp(x + mixed, shards, kernels), new

    def norm(self, x: Float[Array, "*b E"], scale: nnx.Param | None, kernels: bool) -> Float[Array, "*b E"]:
        """Applies RMSNorm, if there is one."""
        return x if scale is None else rms_norm(x, scale[...], self.config.norm_eps, kernels)

    def heads(
        self,
        read: Float[Array, "B T I"],
        rotation: tuple[Array, Array],
        dtype: DTypeLike,
        shards: int = 1,
        kernels: bool = False,
    ) -> tuple[Float[Array, "B H G T K"], KV]:
        """Returns the rotated queries of a normed input, and its keys and values `[B, H, T, K]`."""
        c, (batch, tokens, _) = self.config, read.shape
        projected = row_major(project(read, self.qkv, self.qkv_bias))
        heads = projected.reshape(batch, tokens, shards, -1, c.head_dim)
        borders = c.num_heads // shards, (c.num_heads + c.num_kv_heads) // shards
        parts = jnp.split(heads, borders, axis=3)
        queries, keys, values = (a.reshape(batch, tokens, -1, c.head_dim) for a in parts)
        queries, keys = self.norm(queries, self.q_norm, kernels), self.norm(keys, self.k_norm, kernels)
        queries, keys = (rotate(a, rotation, kernels).astype(dtype) for a in (queries, keys))
        new = KV(keys, values.swapaxes(1, 2).astype(dtype))
        return queries.reshape(batch, c.num_kv_heads, -1, tokens, c.head_dim), new

    def attention(
        self,
        read: Float[Array, "B T I"],
        layer: int,
        rotation: tuple[Array, Array],
        window: Window,
        cache: Cache,
        past: KV | None,
        shards: int,
        kernels: bool,
        form: str = "xla",
    ) -> tuple[Float[Array, "B T E"], KV]:
        """Returns the output of attention to a normed input, and this layer's keys and values `[B, H, T, K]`."""
        c, dtype = self.config, caches.value_dtype(cache.kv.keys.dtype)
        queries, new = self.heads(read, rotation, dtype, shards, kernels)
        seen = new if past is None else KV(*(jnp.concatenate([a[layer], b], 2) for a, b in zip(past, new)))
        mask, first_seen = sliding_window_mask(window, c.window_of(layer))
        scale = c.head_dim**-0.5 if c.query_scale is None else c.query_scale
        mixed = attend(
            queries, cache.kv, layer, cache.length, seen, mask, window.paths, scale, first_seen, kernels, form
        )
        return self.join(mixed, kernels), new

    def join(self, mixed: Float[Array, "B H G T K"], kernels: bool = False) -> Float[Array, "B T E"]:
        """Projects the outputs of all heads to the width of the residual stream."""
        batch, _, _, tokens, width = mixed.shape
        mixed = mixed.reshape(batch, self.config.num_heads, tokens, width).swapaxes(1, 2)
        mixed = project(mixed.reshape(batch, tokens, -1), self.out, self.out_bias)
        return self.norm(mixed, self.post_attn_norm, kernels)

    def mlp(self, x: Float[Array, "B T E"], shards: int = 1, kernels: bool = False) -> Float[Array, "B T E"]:
        """Returns the residual stream after the MLP."""
        return x + self.feed(self.norm(x, self.mlp_norm, kernels), shards, kernels)

    def feed(self, read: Float[Array, "B T E"], shards: int = 1, kernels: bool = False) -> Float[Array, "B T E"]:
        """Returns the output of the MLP for a normed input."""
        c, (batch, tokens, _) = self.config, read.shape
        both = project(read, self.gate_up, self.gate_up_bias)
        gate, up = (a.reshape(batch, tokens, -1) for a in jnp.split(both.reshape(batch, tokens, shards, -1), 2, axis=3))
        gate = jax.nn.silu(gate) if c.activation == "silu" else jax.nn.gelu(gate, approximate=True)
        return self.norm(project(gate * up, self.down, self.down_bias), self.post_mlp_norm, kernels)


class Transformer(nnx.Module):
    """A decoder-only transformer: embedding, blocks, final norm, and an output head that may be the embedding."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike = jnp.float32, *, rngs: nnx.Rngs):
        def table() -> nnx.Param:
            shape = (config.vocab_size, config.hidden_size)
            scale = config.hidden_size**-0.5
            return nnx.Param(nnx.initializers.normal(scale)(rngs.params(), shape, jnp.float32).astype(dtype))

        self.embed = table()
        self.layers = nnx.List([Block(config, dtype, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.Param(jnp.ones((config.hidden_size,), jnp.float32))
        self.head = None if config.tie_embeddings else table()
        self.config = config

    def __call__(
        self,
        window: Window,
        cache: Cache,
        past: KV | None = None,
        layers: int | None = None,
        shards: int = 1,
        kernels: bool = False,
        taps: tuple[int, ...] = (),
        form: str = "xla",
    ) -> tuple[Float[Array, "B T F"], KV]:
        """Returns the features, and the window's keys and values in the first `layers` layers; see `TransformerLM`."""
        x = look_up(self.embed[...], window.tokens) * self.config.embed_scale
        x = x if window.added is None else x + window.added
        entries, streams, c = [], [x], self.config
        rotations = {rope: rotation(window.positions, rope, c.head_dim) for rope in {c.rope, c.window_rope or c.rope}}
        for i, block in enumerate(self.layers[:layers]):
            x, new = block(x, i, rotations[c.rope_of(i)], window, cache, past, shards, kernels, form)
            entries.append(new)
            streams.append(x)
        features = rms_norm(x, self.norm[...], self.config.norm_eps, kernels)
        if taps:
            features = jnp.concatenate([features, *(streams[tap] for tap in taps)], axis=-1)
        return features, KV(*(jnp.stack(a) for a in zip(*entries)))

    def logits(self, features: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        """Applies the output head."""
        table = self.embed if self.head is None else self.head
        return matmul(features, table[...], transposed=True)


@functools.lru_cache
def graph(config: ModelConfig) -> nnx.GraphDef:
    """Returns the structure of the module without its parameters, for `nnx.merge`."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))[0]


@dataclasses.dataclass(frozen=True)
class TransformerLM:
    """A `LanguageModel` of the Llama family, whose parameters are the pure dict of the module's state.

    Attributes:
        config: sizes and constants.
        dtype: dtype of the cache.
        layers: number of layers before the final norm and the head, for early exit; None for all.
        known: number of ids at the start of the vocabulary that stand for tokens, the rest being padding; None for all.
        shards: number of devices that share a layer, by which the columns of fused matrices are grouped; see
            `jaxspec.models.sharding.group_by_shard`.
        kernels: use the CPU kernels for attention and norms; packed matrices (`jaxspec.models.packed`) always do.
        taps: numbers of layers after which the residual stream is part of the features; see
            `jaxspec.core.networks.TappedTarget`.
        attention: "xla", or "pallas" for a kernel on a TPU or GPU, see `jaxspec.models.attention_pallas`.

    Raises:
        InvalidConfig: there is no such layer to tap, no such attention, or several devices would share its kernel.
    """

    config: ModelConfig
    dtype: str = "float32"
    layers: int | None = None
    known: int | None = None
    shards: int = 1
    kernels: bool = False
    taps: tuple[int, ...] = ()
    attention: str = "xla"

    def __post_init__(self):
        check_taps(self.taps, self.depth)
        one_of("attention", self.attention, ATTENTION)
        if self.attention == "pallas" and self.shards > 1:
            raise InvalidConfig(f"attention='pallas' is for layers on one device, got {self.shards}; use 'xla'")

    @property
    def vocab(self) -> int:
        return self.config.vocab_size if self.known is None else self.known

    @property
    def context(self) -> int:
        return self.config.max_position

    @property
    def depth(self) -> int:
        return self.config.num_layers if self.layers is None else self.layers

    def init_params(self, key: Array) -> Params:
        """Draws random parameters."""
        model = Transformer(self.config, self.dtype, rngs=nnx.Rngs(params=key))
        return nnx.to_pure_dict(nnx.state(model))

    def init_cache(self, batch: int, capacity: int) -> Cache:
        c = self.config
        return caches.empty_cache(self.depth, batch, c.num_kv_heads, capacity, c.head_dim, self.dtype)

    def _module(self, params: Params) -> Transformer:
        return nnx.merge(graph(self.config), nnx.State(params))

    def apply(
        self, params: Params, window: Window, cache: Cache, past: KV | None = None
    ) -> tuple[Float[Array, "B T F"], KV]:
        kernels = self.kernels and available()
        module = self._module(params)
        return module(window, cache, past, self.layers, self.shards, kernels, self.taps, self.attention)

    def head(self, params: Params, features: Float[Array, "B T F"]) -> Float[Array, "B T V"]:
        logits = self._module(params).logits(features[..., : self.config.hidden_size] if self.taps else features)
        if self.shards > 1:  # sampling needs every row's whole law
            logits = lax.with_sharding_constraint(logits, jax.P())
        return logits[..., : self.vocab]

    def embedding(self, params: Params) -> Float[Array, "V E"] | Matrix:
        """Returns the table of token embeddings, unscaled."""
        return params["embed"]

    def unembedding(self, params: Params) -> Float[Array, "V E"] | Matrix:
        """Returns the output head's table; it includes padded ids."""
        return params["embed"] if self.config.tie_embeddings else params["head"]
