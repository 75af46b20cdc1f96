"""EAGLE heads in Flax NNX: a few layers that guess the next token from a token and the target's state before it.

EAGLE-1 (Li et al. 2024, arXiv:2401.15077, section 4.1) reads the target's last feature; EAGLE-2 (arXiv:2406.16858) is
the same head on a dynamic tree. EAGLE-3 (Li et al. 2025, arXiv:2503.01840, section 3.1) reads the residual stream
before three layers of the target. The layer for multi-token prediction (MTP) inside models such as Qwen3.5 is an
EAGLE-1 head with more norms. EAGLE-3.1 (arXiv:2605.09992) norms each of these inputs, and the state that the head
returns.

A row is a pair of a state and the token after it. The head returns a new state for the row, which predicts the token
after the row's token. Rows of committed text start from the target's states. The row of a drafted token starts from the
state of the row before it.
"""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxspec.core import cache as caches
from jaxspec.core.records import KV, Cache, Window
from jaxspec.heads.eagle_config import EagleConfig
from jaxspec.heads.network import Frozen, HeadNetwork
from jaxspec.models.execution import Execution
from jaxspec.models.layers import matmul, project, rotation
from jaxspec.models.rows import rms_norm
from jaxspec.models.transformer_block import TransformerBlock


class EagleHead(HeadNetwork):
    """The head of an `EagleConfig`. Activations are float32 between matmuls; norms and biases are float32."""

    def __init__(
        self, config: EagleConfig, dtype: DTypeLike = jnp.float32, execution: Execution = Execution(), *, rngs: nnx.Rngs
    ):
        """Draws random parameters."""
        c, shapes = config, config.param_shapes()

        def matrix(name: str) -> nnx.Param:
            scale = shapes[name][0 if name == "fc" else 1] ** -0.5
            return nnx.Param(nnx.initializers.normal(scale)(rngs.params(), shapes[name], jnp.float32).astype(dtype))

        def vector(name: str, value: float = 1) -> nnx.Param | None:
            return nnx.Param(jnp.full(shapes[name], value, jnp.float32)) if name in shapes else None

        self.config, self.execution = config, execution
        self.fc, self.fc_bias = matrix("fc"), vector("fc_bias", 0)
        self.fc_norms = nnx.List(vector(f"fc_norms.{i}") for i in range(c.num_taps * c.fc_norm))
        self.input_norm, self.hidden_norm, self.norm = vector("input_norm"), vector("hidden_norm"), vector("norm")
        self.embed_norm = vector("embed_norm")
        layers = range(c.decoder.num_layers)
        self.layers = nnx.List(TransformerBlock(c.decoder, dtype, rngs, c.layer_shapes(i), execution) for i in layers)
        self.embed = matrix("embed") if c.own_embedding else None
        self.head = matrix("head") if c.own_projection else None
        # Ids of the tokens that can be guessed, ascending; row r of `head` belongs to token tokens[r].
        self.tokens = None if c.draft_vocab_size is None else Frozen(jnp.arange(c.rows, dtype=jnp.int32))

    def fuse(self, features: Float[Array, "B T F"]) -> Float[Array, "B T E"]:
        """Returns the states with which rows of committed text start.

        Args:
            features: the features of the target at each token, followed by the head's taps, if it has any.
        """
        c, width = self.config, self.config.feature_size
        if c.version == 1:
            return features.astype(jnp.float32)
        taps = features[..., width:]
        if c.norm_before_fc:
            taps = self._norm(taps, self.input_norm)
        if c.fc_norm:
            each = jnp.split(taps, c.num_taps, axis=-1)
            taps = jnp.concatenate([self._norm(a, scale) for a, scale in zip(each, self.fc_norms)], axis=-1)
        return project(taps, self.fc, self.fc_bias)

    def __call__(
        self,
        states: Float[Array, "B T E"],
        embeddings: Float[Array, "B T E"],
        window: Window,
        cache: Cache,
        past: KV | None = None,
    ) -> tuple[Float[Array, "B T E"], KV]:
        """Reads a window of rows, without writing to the cache.

        Args:
            states: the state before each token: the result of `fuse` for the target's features, or the state of the row
                before.
            embeddings: the embeddings of the tokens, unscaled.
            window: the tokens, and the positions of their rows; the tokens themselves are not read.
            cache: the keys and values of the rows before the window.
            past: the keys and values of earlier rows of the same window.

        Returns:
            The rows' states, and their keys and values, for the caller to commit or to drop.
        """
        entries = []
        turned = rotation(window.positions, self.config.decoder.rope, self.config.decoder.head_dim)

        def attention(layer: int, read: Array) -> Array:
            mixed, new = self.layers[layer].attention(read, layer, turned, window, cache, past)
            entries.append(new)
            return mixed

        states = self.run(states, embeddings, attention)
        return states, caches.stack_layers(entries)

    def run(
        self,
        states: Float[Array, "B T E"],
        embeddings: Float[Array, "B T E"],
        attention: Callable[[int, Array], Array],
    ) -> Float[Array, "B T E"]:
        """Returns the states of the rows, with attention that the caller computes.

        Args:
            states: the state before each token.
            embeddings: the embeddings of the tokens, unscaled.
            attention: a function from the number of a layer and its normed input to the output of its attention.
        """
        first = 0
        if self.config.version == 1:
            pair = self._norm(embeddings, self.embed_norm), self._norm(states, self.hidden_norm)
            x = project(jnp.concatenate(pair, axis=-1), self.fc, self.fc_bias)
        else:
            read, kept = self.start(states, embeddings)
            x, first = self.layers[0].mlp(kept + attention(0, read)), 1
        for layer in range(first, self.config.decoder.num_layers):
            block = self.layers[layer]
            x = block.mlp(x + attention(layer, self._norm(x, block.attn_norm)))
        return self.finish(x)

    def start(
        self, states: Float[Array, "B T E"], embeddings: Float[Array, "B T E"]
    ) -> tuple[Float[Array, "B T 2*E"], Float[Array, "B T E"]]:
        """Returns the input of the attention in an EAGLE-3 head's first layer, and the residual stream before it."""
        words = self._norm(embeddings, self.layers[0].attn_norm)
        normed = self._norm(states, self.hidden_norm)
        return jnp.concatenate([words, normed], axis=-1), normed if self.config.norm_before_residual else states

    def finish(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Returns the states of rows from the residual stream after the last layer."""
        return self._norm(x, self.norm) if self.config.norm_output else x

    def projected(self, states: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Returns the input of the projection to logits for these states."""
        return states if self.config.norm_output else self._norm(states, self.norm)

    def logits(self, states: Float[Array, "B T E"]) -> Float[Array, "B T R"]:
        """Returns the logits that the head's own projection computes."""
        assert self.head is not None
        return matmul(self.projected(states), self.head[...], transposed=True)

    def _norm(self, x: Float[Array, "*b I"], scale: nnx.Param | None) -> Float[Array, "*b I"]:
        return x if scale is None else rms_norm(x, scale[...], self.config.decoder.norm_eps, self.execution.kernels)
