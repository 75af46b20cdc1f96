"""A decoder-only transformer of the Llama family in Flax NNX, and its adapter to `LanguageModel`.

RMSNorm, rotary positions (Su et al. 2021), grouped-query attention (Ainslie et al. 2023), SwiGLU (Shazeer
2020), and what its relatives add: see `ModelConfig`. The module holds parameters only; caches are arguments, and
it is split once into plain arrays.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.backend.layout import row_major
from jaxspec.core import cache as caches
from jaxspec.core.records import KV, Cache, Params, Window
from jaxspec.errors import InvalidConfig
from jaxspec.models.attention import attend
from jaxspec.models.config import ModelConfig
from jaxspec.models.out_major import ByOutput
from jaxspec.models.rope import Rope


def matmul(x: Float[Array, "B T I"], weight: Array | ByOutput, transposed: bool = False) -> Float[Array, "B T O"]:
    """`x @ weight` in the weight's dtype with float32 sums; of an array that is `transposed`, and of a `ByOutput`,
    with its transpose.

    XLA:CPU multiplies one row of bfloat16 in a naive loop that costs eight times as much as two rows.
    """
    batch, tokens, width = x.shape
    if transposed and not isinstance(weight, ByOutput):
        weight = ByOutput(weight)
    if isinstance(weight, ByOutput):
        return weight.product(x.reshape(batch * tokens, width)).reshape(batch, tokens, -1)
    rows = x.astype(weight.dtype).reshape(batch * tokens, width)
    count = rows.shape[0]
    if count == 1 and weight.dtype == jnp.bfloat16:
        rows = jnp.pad(rows, ((0, 1), (0, 0)))
    out = lax.dot_general(
        rows,
        weight,
        (((1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return out[:count].reshape(batch, tokens, -1)


def look_up(table: Float[Array, "V E"] | ByOutput, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
    """Rows of an embedding, in float32.

    XLA:CPU converts a bfloat16 table before it gathers, and would hoist that out of the decode loop, a copy of
    the table at every call. Behind the barrier the table depends on the tokens, and only rows are converted.
    """
    table, tokens = lax.optimization_barrier((table, tokens))
    return table[tokens].astype(jnp.float32)  # of a ByOutput, too


def rotate(x: Float[Array, "B H T K"], positions: Int[Array, "B T"], rope: Rope) -> Float[Array, "B H T K"]:
    """Rotary positions in the half-split form of the Hugging Face checkpoints."""
    frequencies = rope.frequencies(x.shape[-1])
    half = frequencies.size
    angles = positions[:, None, :, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles) * rope.scale, jnp.sin(angles) * rope.scale
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)


def rms_norm(x: Float[Array, "*b E"], scale: Float[Array, "E"], epsilon: float) -> Float[Array, "*b E"]:
    variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * lax.rsqrt(variance + epsilon) * scale.astype(jnp.float32)


def project(x: Float[Array, "B T I"], weight: nnx.Param, bias: nnx.Param | None) -> Float[Array, "B T O"]:
    out = matmul(x, weight[...])
    return out if bias is None else out + bias[...]


class Block(nnx.Module):
    """Attention and gated unit, each behind a norm and a residual. Activations are float32 between matmuls.

    Matrices have the model's dtype; norms and biases, small as they are, are float32.
    """

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        shapes = config.param_shapes()

        def matrix(name: str) -> nnx.Param:
            rows, columns = shapes[f"layers.0.{name}"]
            init = nnx.initializers.normal(rows**-0.5)
            return nnx.Param(init(rngs.params(), (rows, columns), jnp.float32).astype(dtype))

        def vector(name: str, value: float) -> nnx.Param | None:
            shape = shapes.get(f"layers.0.{name}")
            return None if shape is None else nnx.Param(jnp.full(shape, value, jnp.float32))

        self.config = config
        self.attn_norm, self.mlp_norm = vector("attn_norm", 1), vector("mlp_norm", 1)
        self.qkv, self.out = matrix("qkv"), matrix("out")
        self.gate_up, self.down = matrix("gate_up"), matrix("down")
        self.qkv_bias, self.out_bias = vector("qkv_bias", 0), vector("out_bias", 0)
        self.gate_up_bias, self.down_bias = vector("gate_up_bias", 0), vector("down_bias", 0)
        self.q_norm, self.k_norm = vector("q_norm", 1), vector("k_norm", 1)
        self.post_attn_norm, self.post_mlp_norm = vector("post_attn_norm", 1), vector("post_mlp_norm", 1)

    def _norm(self, x: Array, scale: nnx.Param | None) -> Array:
        return x if scale is None else rms_norm(x, scale[...], self.config.norm_eps)

    def __call__(
        self, x: Float[Array, "B T E"], layer: int, window: Window, cache: Cache, past: KV | None, shards: int
    ) -> tuple[Float[Array, "B T E"], KV]:
        """The residual stream after this block, and this layer's keys and values `[B, H, T, K]`."""
        c = self.config
        batch, tokens, _ = x.shape
        projected = row_major(project(self._norm(x, self.attn_norm), self.qkv, self.qkv_bias))
        heads = projected.reshape(batch, tokens, shards, -1, c.head_dim)
        borders = c.num_heads // shards, (c.num_heads + c.num_kv_heads) // shards
        parts = jnp.split(heads, borders, axis=3)
        queries, keys, values = (a.reshape(batch, tokens, -1, c.head_dim).swapaxes(1, 2) for a in parts)
        queries, keys = self._norm(queries, self.q_norm), self._norm(keys, self.k_norm)
        dtype, rope = caches.held(cache.kv.keys.dtype), c.rope_of(layer)
        queries = rotate(queries, window.positions, rope).astype(dtype)
        new = KV(rotate(keys, window.positions, rope).astype(dtype), values.astype(dtype))
        seen = new if past is None else KV(*(jnp.concatenate([a[layer], b], 2) for a, b in zip(past, new)))
        queries = queries.reshape(batch, c.num_kv_heads, -1, tokens, c.head_dim)
        mask, first_seen = within_reach(window, c.window_of(layer))
        scale = c.head_dim**-0.5 if c.query_scale is None else c.query_scale
        mixed = attend(queries, cache.kv, layer, cache.length, seen, mask, window.paths, scale, first_seen)
        mixed = mixed.reshape(batch, c.num_heads, tokens, c.head_dim).swapaxes(1, 2)
        mixed = project(mixed.reshape(batch, tokens, -1), self.out, self.out_bias)
        x = x + self._norm(mixed, self.post_attn_norm)
        both = project(self._norm(x, self.mlp_norm), self.gate_up, self.gate_up_bias)
        gate, up = (a.reshape(batch, tokens, -1) for a in jnp.split(both.reshape(batch, tokens, shards, -1), 2, axis=3))
        gate = jax.nn.silu(gate) if c.activation == "silu" else jax.nn.gelu(gate, approximate=True)
        return x + self._norm(project(gate * up, self.down, self.down_bias), self.post_mlp_norm), new


def within_reach(window: Window, reach: int | None) -> tuple[Bool[Array, "B T PT"], Int[Array, "B T"] | None]:
    """The mask of the window under sliding attention, and the first position each of its tokens sees.

    Raises:
        InvalidConfig: the window of earlier and new tokens may be longer than the attention reaches.
    """
    if reach is None:
        return window.mask, None
    tokens, width = window.mask.shape[1:]
    first = window.positions - reach + 1
    if width <= reach:  # no two tokens of the window can be too far apart
        return window.mask, first
    if width > tokens:
        raise InvalidConfig(
            f"a draft tree that is read in windows of {width} tokens needs sliding attention of at least as many, "
            f"the model's is {reach}; take a smaller tree"
        )
    return window.mask & (window.positions[:, None, :] >= first[:, :, None]), first


class Transformer(nnx.Module):
    """The whole model: embedding, blocks, norm, and a head that may be the embedding."""

    def __init__(self, config: ModelConfig, dtype: Any = jnp.float32, *, rngs: nnx.Rngs):
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
        self, window: Window, cache: Cache, past: KV | None = None, layers: int | None = None, shards: int = 1
    ) -> tuple[Float[Array, "B T E"], KV]:
        """Final normed features, and keys and values of the window in the first `layers` layers."""
        x = look_up(self.embed[...], window.tokens) * self.config.embed_scale
        entries = []
        for i, block in enumerate(self.layers[:layers]):
            x, new = block(x, i, window, cache, past, shards)
            entries.append(new)
        return rms_norm(x, self.norm[...], self.config.norm_eps), KV(*(jnp.stack(a) for a in zip(*entries)))

    def logits(self, features: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        table = self.embed if self.head is None else self.head
        return matmul(features, table[...], transposed=True)


def joined(name: str, leaf: Any, config: ModelConfig, shards: int) -> Any:
    """The columns of a joined matrix (or bias) in `shards` parts, each with its share of what is joined.

    So every device that shares a layer has heads of its own, and both halves of its gated units. A numpy array
    stays one.
    """
    own = np if isinstance(leaf, np.ndarray) else jnp
    sizes = {"qkv": (config.num_heads, config.num_kv_heads, config.num_kv_heads), "gate_up": (1, 1)}
    share = sizes[name.removesuffix("_bias")]
    unit = leaf.shape[-1] // sum(share)
    parts = own.split(leaf, [unit * sum(share[:i]) for i in range(1, len(share))], axis=-1)
    return own.concatenate([a.reshape(*leaf.shape[:-1], shards, -1) for a in parts], axis=-1).reshape(leaf.shape)


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
        known: how many of the vocabulary's ids have a meaning, the first ones; the rest are padding. None for all.
        shards: parts that the columns of joined matrices stand in, see `joined`: devices that share a layer.
    """

    config: ModelConfig
    dtype: str = "float32"
    layers: int | None = None
    known: int | None = None
    shards: int = 1

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
        """Random parameters, for tests and training."""
        model = Transformer(self.config, self.dtype, rngs=nnx.Rngs(params=key))
        return nnx.to_pure_dict(nnx.state(model))

    def init_cache(self, batch: int, capacity: int) -> Cache:
        c = self.config
        return caches.empty_cache(self.depth, batch, c.num_kv_heads, capacity, c.head_dim, self.dtype)

    def _module(self, params: Params) -> Transformer:
        return nnx.merge(graph(self.config), nnx.State(params))

    def apply(
        self, params: Params, window: Window, cache: Cache, past: KV | None = None
    ) -> tuple[Float[Array, "B T E"], KV]:
        return self._module(params)(window, cache, past, self.layers, self.shards)

    def head(self, params: Params, features: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        logits = self._module(params).logits(features)
        if self.shards > 1:  # what comes after looks at whole laws
            logits = lax.with_sharding_constraint(logits, jax.P())
        return logits[..., : self.vocab]

    def embedding(self, params: Params) -> Float[Array, "V E"] | ByOutput:
        """The table of the tokens' embeddings, unscaled."""
        return params["embed"]

    def unembedding(self, params: Params) -> Float[Array, "V E"] | ByOutput:
        """The table whose rows `head` multiplies features with; padded tokens included."""
        return params["embed"] if self.config.tie_embeddings else params["head"]
