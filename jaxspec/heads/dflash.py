"""DFlash heads in Flax NNX: a few layers that guess all tokens of a block in one call.

DFlash (2026, arXiv:2602.06036): the taps of the target at every token of the text are fused into one state, the
context. A block consists of the last token of the text, which is the root, and masks after it. In every layer, a row of
the block attends to the rows of the block, and to keys and values that the layer computes from the context before the
root.

DSpark (2026, arXiv:2607.05147) adds two small heads. The Markov head corrects the logits of a row by a product of rank
r that depends on the token before the row, so the tokens of a block depend on each other at little cost. The confidence
head estimates the overlap of a row's distribution with the target's.

JetSpec (2026, arXiv:2606.18394) is a DFlash head in which a row of a block does not attend to later rows.

DFlash 2 (2026) has convolutions along the rows of a block. Instead of a Markov head it has a selector, which corrects
the logits of the most likely tokens of a row and excludes all others.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxspec.core import cache as caches
from jaxspec.core.laws import highest
from jaxspec.core.records import KV, Cache, Window
from jaxspec.heads.dflash_config import DFlashConfig
from jaxspec.heads.network import Frozen, HeadNetwork
from jaxspec.models.execution import Execution
from jaxspec.models.layers import look_up, matmul, project, rotation
from jaxspec.models.rows import rms_norm
from jaxspec.models.transformer_block import TransformerBlock


class Convolutions(nnx.Module):
    """The convolutions of a layer of DFlash 2: two around its attention, and two around its MLP.

    A row is mixed with the rows before it, channel by channel. The kernel is the sum of a static kernel and a dynamic
    kernel. A linear map computes the dynamic kernel from the input, and all channels of a group have the same dynamic
    kernel.
    """

    def __init__(self, config: DFlashConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        """Draws random parameters."""
        shapes, self.config = config.param_shapes(), config

        def draw(name: str, dtype: DTypeLike) -> nnx.Param:
            shape, scale = shapes[f"convs.0.{name}"], config.hidden_size**-0.5
            return nnx.Param(nnx.initializers.normal(scale)(rngs.params(), shape, jnp.float32).astype(dtype))

        self.attention_base, self.attention_mix = draw("attention_base", "float32"), draw("attention_mix", dtype)
        self.mlp_base, self.mlp_mix = draw("mlp_base", "float32"), draw("mlp_mix", dtype)

    def around(
        self, base: nnx.Param, mix: nnx.Param, read: Float[Array, "B b E"], sublayer: Callable[[Array], Array]
    ) -> Float[Array, "B b E"]:
        """Returns the output of a sublayer for a normed input, with a convolution before it and one after it."""
        rows, size = read.shape[1], self.config.conv_size
        mixed = project(read, mix, None).reshape(*read.shape[:2], 2, size, -1)
        kernels = base[...] + jnp.repeat(mixed, self.config.conv_group, axis=-1)

        def convolve(x: Float[Array, "B b E"], side: int) -> Float[Array, "B b E"]:
            parts = (jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, :rows] for back in range(size))
            return sum((kernels[:, :, side, back] * part for back, part in enumerate(parts)), jnp.zeros_like(x))

        return convolve(sublayer(convolve(read, 0)), 1)


class DFlashHead(HeadNetwork):
    """The head of a `DFlashConfig`. Activations are float32 between matmuls; norms and biases are float32."""

    def __init__(
        self,
        config: DFlashConfig,
        dtype: DTypeLike = jnp.float32,
        execution: Execution = Execution(),
        *,
        rngs: nnx.Rngs,
    ):
        """Draws random parameters."""
        c, shapes = config, config.param_shapes()

        def matrix(name: str) -> nnx.Param | None:
            if name not in shapes:
                return None
            scale = shapes[name][1 if name in ("embed", "head", "markov_out", "selector_out") else 0] ** -0.5
            scale = 1.0 if name in ("markov_in", "selector_in") else scale
            return nnx.Param(nnx.initializers.normal(scale)(rngs.params(), shapes[name], jnp.float32).astype(dtype))

        def vector(name: str, value: float = 0) -> nnx.Param | None:
            return nnx.Param(jnp.full(shapes[name], value, jnp.float32)) if name in shapes else None

        self.config, self.execution = config, execution
        self.fc, self.hidden_norm, self.norm = matrix("fc"), vector("hidden_norm", 1), vector("norm", 1)
        self.layers = nnx.List(
            TransformerBlock(c.decoder, dtype, rngs, c.decoder.layer_shapes(i), execution)
            for i in range(c.decoder.num_layers)
        )
        convs = c.decoder.num_layers if c.conv_size else 0
        self.convs = nnx.List(Convolutions(c, dtype, rngs) for _ in range(convs))
        self.embed, self.head = matrix("embed"), matrix("head")
        self.markov_in, self.markov_out = matrix("markov_in"), matrix("markov_out")
        self.markov_mix, self.markov_mix_bias = matrix("markov_mix"), vector("markov_mix_bias")
        self.confidence, self.confidence_bias = matrix("confidence"), vector("confidence_bias")
        self.selector_mix = matrix("selector_mix")
        self.selector_in, self.selector_out = matrix("selector_in"), matrix("selector_out")
        # Ids of the tokens that can be guessed, ascending; row r of `head` and `markov_out` belongs to token tokens[r].
        self.tokens = None if c.draft_vocab_size is None else Frozen(jnp.arange(c.rows, dtype=jnp.int32))

    def fuse(self, features: Float[Array, "B T F"]) -> Float[Array, "B T E"]:
        """Returns the context, which the layers read: a state for each token of the text.

        Args:
            features: the features of the target at each token, followed by the head's taps.
        """
        assert self.fc is not None
        return self._norm(project(features[..., self.config.feature_size :], self.fc, None), self.hidden_norm)

    def remember(self, context: Float[Array, "B T E"], positions: Int[Array, "B T"], dtype: DTypeLike) -> KV:
        """Returns the keys and values of all layers for the context of tokens at these positions, `[L, B, H, T, K]`.

        The context is not normed: the norm before attention is only for rows of blocks.
        """
        turned = rotation(positions, self.config.decoder.rope, self.config.decoder.head_dim)
        entries = [block.heads(context, turned, dtype)[1] for block in self.layers]
        return caches.stack_layers(entries)

    def __call__(
        self, embeddings: Float[Array, "B b E"], positions: Int[Array, "B b"], cache: Cache
    ) -> Float[Array, "B b E"]:
        """Returns the states of the rows of a block, from which `logits` computes logits. The cache is not written.

        Args:
            embeddings: the embeddings of the root and the masks, unscaled.
            positions: the positions of the rows, beginning with the position of the root.
            cache: the keys and values of the context before the root.
        """
        batch, size = positions.shape
        turned = rotation(positions, self.config.decoder.rope, self.config.decoder.head_dim)
        unread = jnp.zeros((batch, size), jnp.int32)

        def attention(layer: int, read: Array) -> Array:
            seen = jnp.tril(jnp.ones((size, size), bool)) if self.config.is_causal(layer) else jnp.ones((), bool)
            window = Window(unread, positions, jnp.broadcast_to(seen, (batch, size, size)))
            return self.layers[layer].attention(read, layer, turned, window, cache, None)[0]

        return self.run(embeddings, attention)

    def run(self, x: Float[Array, "B b E"], attention: Callable[[int, Array], Array]) -> Float[Array, "B b E"]:
        """Returns the states of rows, with attention that the caller computes.

        Args:
            x: the embeddings of the rows, unscaled.
            attention: a function from the number of a layer and its normed input to the output of its attention.
        """
        for layer, block in enumerate(self.layers):
            attend, feed = functools.partial(attention, layer), block.feed
            if self.convs:
                conv = self.convs[layer]
                attend = functools.partial(conv.around, conv.attention_base, conv.attention_mix, sublayer=attend)
                feed = functools.partial(conv.around, conv.mlp_base, conv.mlp_mix, sublayer=feed)
            x = x + attend(block.norm(x, block.attn_norm))
            x = x + feed(block.norm(x, block.mlp_norm))
        return self._norm(x, self.norm)

    def logits(self, states: Float[Array, "B n E"]) -> Float[Array, "B n R"]:
        """Returns the logits that the head's own projection computes."""
        assert self.head is not None
        return matmul(states, self.head[...], transposed=True)

    def words(self, tokens: Int[Array, "B n"]) -> Float[Array, "B n r"]:
        """Returns the Markov head's embeddings of the tokens before rows."""
        assert self.markov_in is not None
        return look_up(self.markov_in[...], tokens)

    def follow(
        self, words: Float[Array, "B n r"], states: Float[Array, "B n E"], memory: Float[Array, "B n m"]
    ) -> tuple[Float[Array, "B n r"], Float[Array, "B n m"]]:
        """Returns the input of `correction` for each row, and the new state of the Markov head.

        Args:
            words: the embeddings of the tokens before the rows, as `words` returns them.
            states: the states of the rows.
            memory: the state of the Markov head before these tokens, `DFlashConfig.memory` wide; zeros at the root.
        """
        if self.config.markov == "vanilla":
            return words, memory
        assert self.markov_mix is not None
        parts = [memory, words, states] if self.config.markov == "rnn" else [states, words]
        mixed = project(jnp.concatenate(parts, axis=-1), self.markov_mix, self.markov_mix_bias)
        if self.config.markov == "gated":
            return jax.nn.sigmoid(mixed) * words, memory
        gate, new, out = jnp.split(mixed, 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        return jnp.tanh(out), gate * memory + (1 - gate) * jnp.tanh(new)

    def correction(self, followed: Float[Array, "B n r"]) -> Float[Array, "B n R"]:
        """Returns the correction that the Markov head adds to the logits."""
        assert self.markov_out is not None
        return matmul(followed, self.markov_out[...], transposed=True)

    def select(
        self, tokens: Int[Array, "B n"], states: Float[Array, "B 1 E"], logits: Float[Array, "B 1 V"]
    ) -> Float[Array, "B n V"]:
        """Returns the logits of a row for each token that may stand before the row.

        All tokens of the vocabulary except the most likely tokens of the row have the logit minus infinity.

        Args:
            tokens: the tokens that may stand before the row.
            states: the state of the row.
            logits: the logits of the row.
        """
        assert self.selector_in is not None
        assert self.selector_out is not None
        assert self.selector_mix is not None
        best, ids = highest(logits, self.config.selector_top)
        reads = look_up(self.selector_in[...], tokens) * project(states, self.selector_mix, None)
        follows = jnp.einsum("bnr,bkr->bnk", reads, look_up(self.selector_out[...], ids[:, 0]), precision="highest")
        row, node = jnp.arange(len(tokens))[:, None, None], jnp.arange(tokens.shape[1])[None, :, None]
        none = jnp.full((*tokens.shape, logits.shape[2]), -jnp.inf)
        return none.at[row, node, ids].set(best + follows)

    def certainty(
        self, states: Float[Array, "B n E"], words: Float[Array, "B n r"] | None = None
    ) -> Float[Array, "B n"]:
        """Returns the confidence head's logits, which estimate the overlap of a row's and the target's distribution.

        `words` are required if the confidence head reads them.
        """
        assert self.confidence is not None
        reads = states
        if self.config.confidence_reads_token:
            assert words is not None
            reads = jnp.concatenate([states, words], axis=-1)
        return project(reads, self.confidence, self.confidence_bias)[..., 0]

    def _norm(self, x: Float[Array, "*b I"], scale: nnx.Param | None) -> Float[Array, "*b I"]:
        assert scale is not None
        return rms_norm(x, scale[...], self.config.decoder.norm_eps, self.execution.kernels)
