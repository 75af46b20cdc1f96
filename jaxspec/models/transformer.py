"""A decoder-only transformer of the Llama family in Flax NNX, and its adapter to `LanguageModel`.

The transformer has RMSNorm, rotary position embeddings (Su et al. 2021), grouped-query attention (Ainslie et al. 2023),
SwiGLU (Shazeer 2020), and the variations of related families; see `ModelConfig`. The module holds parameters only, as
plain arrays; caches are arguments.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxspec.backend import exact_products
from jaxspec.core import cache as caches
from jaxspec.core.networks import check_taps
from jaxspec.core.records import KV, Cache, Entries, Params, Window
from jaxspec.errors import InvalidConfig
from jaxspec.models import delta, shared_layers
from jaxspec.models.attention import NO_SINKS
from jaxspec.models.config import ModelConfig
from jaxspec.models.delta import DeltaStore
from jaxspec.models.execution import PALLAS_PLATFORMS, Execution
from jaxspec.models.experts import NO_EXPERTS
from jaxspec.models.layer_calls import calls_of
from jaxspec.models.layers import rotation
from jaxspec.models.packed import Matrix
from jaxspec.models.rows import Norm
from jaxspec.models.transformer_block import TransformerBlock


class Transformer(nnx.Module):
    """A decoder-only transformer: embedding, blocks, final norm, and an output head that may be the embedding."""

    def __init__(
        self, config: ModelConfig, dtype: DTypeLike = jnp.float32, execution: Execution = Execution(), *, rngs: nnx.Rngs
    ):
        def table() -> nnx.Param:
            shape = (config.vocab_size, config.hidden_size)
            scale = config.hidden_size**-0.5
            return nnx.Param(nnx.initializers.normal(scale)(rngs.params(), shape, jnp.float32).astype(dtype))

        self.embed = table()
        self.layers = nnx.List(
            [TransformerBlock(config, dtype, rngs, config.layer_shapes(i), execution) for i in range(config.num_layers)]
        )
        self.norm = nnx.Param(jnp.ones((config.hidden_size,), jnp.float32))
        self.head = None if config.tie_embeddings else table()
        self.config, self.execution = config, execution

    def __call__(
        self,
        window: Window,
        cache: Cache,
        past: Entries | None = None,
        layers: int | None = None,
        taps: tuple[int, ...] = (),
        added: Float[Array, "B T E"] | None = None,
    ) -> tuple[Float[Array, "B T F"], Entries]:
        """Returns the features, and the window's entries in the first `layers` layers; see `TransformerLM`."""
        entries, c, calls = [], self.config, calls_of(self.execution)
        x = calls.embed(self.embed[...], window.tokens) * c.embed_scale
        x = x if added is None else x + added
        rotations = {rope: rotation(window.positions, rope, c.head_dim) for rope in {c.rope, c.window_rope or c.rope}}
        blocks = list(self.layers[:layers])
        norms = [block.norm_of(block.attn_norm) for block in blocks]
        streams = [read := calls.begin(x, norms[0])]
        for i, (block, following) in enumerate(zip(blocks, [*norms[1:], None])):
            text, before = _of_kind(c, i, cache), None if past is None else _entries_of_kind(c, i, past)
            read, new = block(read, i, rotations[c.rope_of(i)], window, text, before, following)
            entries.append(new)
            streams.append(read)
        features = calls.finish(read, Norm(self.norm[...], c.norm_eps, self.execution.kernels))
        if taps:
            features = jnp.concatenate([features, *(calls.residual(streams[tap]) for tap in taps)], axis=-1)
        return features, _by_kind(c, entries)

    def logits(self, features: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        """Applies the output head."""
        table = self.embed if self.head is None else self.head
        return calls_of(self.execution).logits(features, table[...])


class HybridStores(NamedTuple):
    """The stores, or the entries, of a network with layers of two kinds.

    Attributes:
        full: the keys and values of the layers with attention, `[L, B, H, S, K]`.
        recurrent: a `DeltaStore` or `DeltaEntries` for each layer with Gated DeltaNet. They are not stacked, because
            XLA:CPU would copy the whole stack in every round.
    """

    full: KV
    recurrent: tuple[Any, ...]


def _of_kind(config: ModelConfig, layer: int, cache: Cache) -> Cache:
    """Returns the cache with the stores of this layer's kind."""
    return cache if config.delta is None else cache._replace(stores=_entries_of_kind(config, layer, cache.stores))


def _entries_of_kind(config: ModelConfig, layer: int, entries: Any) -> Any:
    if config.delta is None:
        return entries
    return entries.recurrent if config.is_recurrent(layer) else entries.full


def _by_kind(config: ModelConfig, entries: Sequence[Any]) -> Entries:
    """Returns the entries of all layers, given those of each layer."""
    if config.delta is None:
        return caches.stack_layers(entries)
    full = [new for i, new in enumerate(entries) if not config.is_recurrent(i)]
    if not full:  # the first layers of a network, which early exit runs, may all be recurrent
        batch, tokens = entries[0].keys.shape[1], entries[0].keys.shape[3]
        shape = (0, batch, config.num_kv_heads, tokens, config.head_dim)
        return HybridStores(KV(jnp.zeros(shape), jnp.zeros(shape)), tuple(entries))
    return HybridStores(
        caches.stack_layers(full), tuple(new for i, new in enumerate(entries) if config.is_recurrent(i))
    )


EXACT_PATH = 32
"""The longest path of a tree that attention in Pallas sums token by token: `GROUP_TOKENS` of
`jaxspec.models.attention_pallas`, which takes a third of a second to import."""


def _twice(window: Window) -> Window:
    """Returns a window of two copies of a window's only token; each sees itself and not the other copy."""
    tokens, positions = (jnp.repeat(leaf, 2, 1) for leaf in (window.tokens, window.positions))
    earlier = jnp.repeat(window.mask[:, :, :-1], 2, 1)
    mask = jnp.concatenate([earlier, jnp.broadcast_to(jnp.eye(2, dtype=bool), (len(tokens), 2, 2))], 2)
    paths = None if window.paths is None else jnp.repeat(window.paths, 2, 1).at[:, 1, 0].set(1)
    return Window(tokens, positions, mask, paths)


@functools.lru_cache
def graph(config: ModelConfig, execution: Execution) -> nnx.GraphDef:
    """Returns the structure of the module without its parameters, for `nnx.merge`."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, execution=execution, rngs=nnx.Rngs(0))))[0]


@dataclasses.dataclass(frozen=True)
class TransformerLM:
    """A `LanguageModel` of the Llama family, whose parameters are the pure dict of the module's state.

    Attributes:
        config: the sizes and constants of the model.
        dtype: the dtype of the cache.
        layers: the number of layers before the final norm and the head, for early exit; None for all.
        known: the number of ids at the start of the vocabulary that stand for tokens, while the other ids are padding;
            None for all.
        taps: the numbers of the layers after which the residual stream is part of the features; see
            `jaxspec.core.networks.TappedTarget`.
        execution: how the operations of the network run.

    Raises:
        InvalidConfig: a tap is not the number of a layer, or there is no kernel for a layer.
    """

    config: ModelConfig
    dtype: str = "float32"
    layers: int | None = None
    known: int | None = None
    taps: tuple[int, ...] = ()
    execution: Execution = Execution()

    def __post_init__(self):
        check_taps(self.taps, self.depth)
        if self.execution.products == "pallas" and (self.config.recurrent or self.config.out_gate):
            raise InvalidConfig("products='pallas' has no recurrent layers and no gates after attention; use 'xla'")
        if self.execution.products == "pallas" and self.config.experts is not None:
            raise InvalidConfig(NO_EXPERTS)
        if self.execution.attention == "pallas" and self.config.sinks:
            raise InvalidConfig(NO_SINKS)

    @property
    def vocab(self) -> int:
        return self.config.vocab_size if self.known is None else self.known

    @property
    def context(self) -> int:
        return self.config.max_position

    @property
    def depth(self) -> int:
        return self.config.num_layers if self.layers is None else self.layers

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        """XLA's options for programs that call the network; see `jaxspec.core.networks.CompiledTarget`."""
        return exact_products.options(self.execution.products) if self._exact_in_pallas else {}

    @property
    def max_exact_depth(self) -> int | None:
        """The depth of the deepest tree whose bits are exact; see `jaxspec.core.networks.CompiledTarget`."""
        return EXACT_PATH - 1 if self._exact_in_pallas else None

    @property
    def kernels_write_entries(self) -> bool:
        """Whether kernels write the entries of a window, so that no operation of XLA around them changes their bits."""
        execution = self.execution.resolve()
        return execution.products == "pallas" and execution.platform == "gpu" and execution.shards == 1

    @property
    def _exact_in_pallas(self) -> bool:
        return self.execution.exact and self.execution.resolve().platform in PALLAS_PLATFORMS

    @property
    def _shares_layers(self) -> bool:
        """Whether each device runs a program on its part of a layer; see `jaxspec.models.shared_layers`."""
        return self.execution.shards > 1 and self._exact_in_pallas

    def with_execution(self, **changes: Any) -> "TransformerLM":
        """Returns the network with some fields of its `Execution` changed, such as `attention="pallas"`."""
        return dataclasses.replace(self, execution=dataclasses.replace(self.execution, **changes))

    def init_params(self, key: Array) -> Params:
        """Draws random parameters."""
        model = Transformer(self.config, self.dtype, rngs=nnx.Rngs(params=key))
        return nnx.to_pure_dict(nnx.state(model))

    def init_cache(self, batch: int, capacity: int) -> Cache:
        c = self.config
        recurrent = sum(map(c.is_recurrent, range(self.depth)))
        cache = caches.empty_cache(
            self.depth - recurrent,
            batch,
            c.num_kv_heads,
            capacity,
            c.head_dim,
            self.dtype,
            platform=self.execution.platform,
        )
        if c.delta is None:
            return cache
        states = tuple(DeltaStore.empty(c.delta, batch) for _ in range(recurrent))
        return cache._replace(stores=HybridStores(cache.stores, states))

    def _module(self, params: Params) -> Transformer:
        return nnx.merge(graph(self.config, self.execution.resolve()), nnx.State(params))

    def apply(
        self,
        params: Params,
        window: Window,
        cache: Cache,
        past: Entries | None = None,
        added: Float[Array, "B T E"] | None = None,
    ) -> tuple[Float[Array, "B T F"], Entries]:
        """Reads a window; see `LanguageModel`. `added` is added to the embeddings of the window's tokens."""

        def read(params: Params, window: Window, cache: Cache, past: Entries | None, added: Array | None) -> Any:
            return self._module(params)(window, cache, past, self.layers, self.taps, added)

        if self._shares_layers:
            return shared_layers.read_window(read, self.execution.shards, params, window, cache, past, added)
        twice = self._exact_in_pallas and self.execution.products == "xla" and window.tokens.size == 1
        if not twice:
            return read(params, window, cache, past, added)
        # XLA:GPU has other kernels for the norms of one row than for the norms of several rows.
        added = None if added is None else jnp.repeat(added, 2, 1)
        features, entries = read(params, _twice(window), cache, past, added)
        return features[:, :1], jax.tree.map(lambda leaf: leaf[:, :, :, :1], entries)

    def commit(
        self,
        cache: Cache,
        entries: Entries,
        nodes: Int[Array, "B M"] | None,
        count: Int[Array, "B"],
        after: Array | int = 0,
    ) -> Cache:
        """Commits some tokens of a window; see `LanguageModel`."""
        delta_sizes = self.config.delta
        if delta_sizes is None:
            return caches.append_to_cache(cache, entries, nodes, count, after)
        full, states = cache.stores
        text = caches.append_to_cache(Cache(full, cache.length), entries.full, nodes, count, after)
        states = tuple(
            delta.commit(state, new, nodes, count, cache.length, delta_sizes.tiled, self.execution.resolve())
            for state, new in zip(states, entries.recurrent)
        )
        return text._replace(stores=HybridStores(text.stores, states))

    def head(self, params: Params, features: Float[Array, "B T F"]) -> Float[Array, "B T V"]:
        features = features[..., : self.config.hidden_size] if self.taps else features

        def project(params: Params, features: Array) -> Array:
            return self._module(params).logits(features)

        if self._shares_layers:
            return shared_layers.project(project, self.execution.shards, params, features)[..., : self.vocab]
        logits = project(params, features)
        if self.execution.shards > 1:  # sampling needs every row's whole distribution
            logits = lax.with_sharding_constraint(logits, jax.P())
        return logits[..., : self.vocab]

    def embedding(self, params: Params) -> Float[Array, "V E"] | Matrix:
        """Returns the table of token embeddings, unscaled."""
        return params["embed"]

    def unembedding(self, params: Params) -> Float[Array, "V E"] | Matrix:
        """Returns the output head's table; it includes padded ids."""
        return params["embed"] if self.config.tie_embeddings else params["head"]
