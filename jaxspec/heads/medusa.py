"""Medusa heads in Flax NNX: small networks that guess the tokens after the next one from a feature of the target.

Head i predicts token t + 2 + i from the target's feature at token t; the target itself predicts token t + 1 (Cai et al.
2024, arXiv:2401.10774, section 2.1). With `inputs="path"`, a head also reads the embeddings of the tokens t + 1 to
t + 1 + i, as in Hydra (Ankner et al. 2024, arXiv:2402.05109), so its guess depends on the path to the node. With
`inputs="recurrent"`, all heads are one network, as in ReDrafter (Cheng et al. 2024, arXiv:2403.09919, section 3). It
reads its previous output and the last token of the path, and the losses of all heads train it.
"""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.heads.medusa_config import INNER_FACTOR, HeadsConfig
from jaxspec.heads.network import Frozen, HeadNetwork
from jaxspec.models.execution import Execution
from jaxspec.models.layers import matmul


class ResBlock(nnx.Module):
    """A residual block, `residual + SiLU(x W + b)`. W and b are zero at first, so the block starts as the identity."""

    def __init__(self, inputs: int, width: int, bias: bool):
        self.kernel = nnx.Param(jnp.zeros((inputs, width), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((width,), jnp.float32)) if bias else None

    def __call__(self, x: Float[Array, "B T I"], residual: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        out = matmul(x, self.kernel[...])
        return residual + jax.nn.silu(out if self.bias is None else out + self.bias[...])


class InnerBlock(nnx.Module):
    """A residual block with an inner layer, `residual + SiLU(x U + b) D`.

    D is zero at first, so the block starts as the identity. U is drawn from `seed`.
    """

    def __init__(self, inputs: int, width: int, bias: bool, seed: int):
        inner = INNER_FACTOR * width
        self.up = nnx.Param(jax.random.normal(jax.random.key(seed), (inputs, inner)) / inputs**0.5)
        self.bias = nnx.Param(jnp.zeros((inner,), jnp.float32)) if bias else None
        self.down = nnx.Param(jnp.zeros((inner, width), jnp.float32))

    def __call__(self, x: Float[Array, "B T I"], residual: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        out = matmul(x, self.up[...])
        return residual + matmul(jax.nn.silu(out if self.bias is None else out + self.bias[...]), self.down[...])


class Heads(HeadNetwork):
    """All heads of a `HeadsConfig`.

    Each head has its own blocks unless the heads are recurrent, and its own projection unless it shares one.
    """

    starts_from_target = True

    def __init__(self, config: HeadsConfig, *, execution: Execution = Execution(), rngs: nnx.Rngs | None = None):
        """Makes heads that predict what the target predicts; `execution` and `rngs` are not used."""
        c = config
        self.config = config
        recurrent = c.inputs == "recurrent"
        self.network = nnx.List(
            InnerBlock(c.block_inputs(0, j), c.hidden_size, c.bias, seed=j) for j in range(c.num_layers * recurrent)
        )
        self.blocks = nnx.List(
            nnx.List(ResBlock(c.block_inputs(i, j), c.hidden_size, c.bias) for j in range(c.num_layers))
            for i in range(c.num_heads * (not recurrent))
        )
        own = range(c.num_projections)
        self.projections = nnx.List(nnx.Param(jnp.zeros((c.rows, c.hidden_size), jnp.float32)) for _ in own)
        # Ids of the tokens that can be guessed, ascending; row r of a projection belongs to token tokens[r].
        self.tokens = None if c.draft_vocab_size is None else Frozen(jnp.arange(c.rows, dtype=jnp.int32))

    def features(
        self, head: int, hidden: Float[Array, "B T E"], words: Sequence[Float[Array, "B T E"]] = ()
    ) -> Float[Array, "B T E"]:
        """Returns the input of a head's projection; recurrent heads use `next_feature`.

        `words` are the normed embeddings of the head + 1 tokens after the token of `hidden`; empty if `inputs` is
        "hidden".
        """
        x, read = hidden, jnp.concatenate([hidden, *words], axis=-1)
        for layer, block in enumerate(self.blocks[head]):
            x = block(read if layer == 0 else x, x)
        return x

    def next_feature(self, state: Float[Array, "B T E"], word: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Returns the input of the projection of recurrent heads after one more token.

        `state` is the result for the token before, or the target's feature if there is none. `word` is the token's
        normed embedding.
        """
        x, read = state, jnp.concatenate([state, word], axis=-1)
        for layer, block in enumerate(self.network):
            x = block(read if layer == 0 else x, x)
        return x

    def each_feature(
        self, hidden: Float[Array, "B T E"], words: Sequence[Float[Array, "B T E"]]
    ) -> Iterator[Float[Array, "B T E"]]:
        """Yields the input of each head's projection. `words` are the embeddings that the last head reads."""
        state = hidden
        for head in range(self.config.num_heads):
            if self.config.inputs == "recurrent":
                state = self.next_feature(state, words[head])
            yield state if self.config.inputs == "recurrent" else self.features(head, hidden, words[: head + 1])

    def logits(self, head: int, features: Float[Array, "B T E"]) -> Float[Array, "B T R"]:
        """Returns the logits of a head, computed by its own projection or by the single projection of all heads."""
        which = min(head, self.config.num_projections - 1)
        return matmul(features, self.projections[which][...], transposed=True)


def normalize_embeddings(embeddings: Float[Array, "*b E"]) -> Float[Array, "*b E"]:
    """Scales embeddings to a mean square of 1, because their scale differs between models."""
    embeddings = embeddings.astype(jnp.float32)
    return embeddings * jax.lax.rsqrt(jnp.mean(jnp.square(embeddings), axis=-1, keepdims=True) + 1e-12)
