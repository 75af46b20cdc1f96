"""Medusa heads in Flax NNX: small networks that read a target's last feature and guess the tokens after the next.

Head i predicts token t + 2 + i from the target's feature at token t, whose own head predicts t + 1 (Cai et al. 2024,
arXiv:2401.10774, section 2.1). With `inputs="path"` a head also reads the embeddings of the tokens t + 1 to t + 1 + i,
as Hydra does (Ankner et al. 2024, arXiv:2402.05109): its guess then depends on the path to the node it stands at. With
`inputs="recurrent"` all heads are one network that reads what it made of the path so far and the path's last token, as
ReDrafter's (Cheng et al. 2024, arXiv:2403.09919, section 3): so every head learns from the guesses of all.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.core.networks import ProjectedTarget, need_members, no_feature
from jaxspec.core.records import Params
from jaxspec.core.tree import Topology
from jaxspec.errors import InvalidConfig, ShapeMismatch, shown
from jaxspec.heads.config import INNER
from jaxspec.heads.config import HeadsConfig as HeadsConfig
from jaxspec.models.transformer import matmul


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DraftHeads:
    """Loaded or trained heads: what the drafter "medusa" takes.

    Attributes:
        config: their sizes.
        params: arrays, named as `HeadsConfig.param_shapes` names them, nested.
        tree: the topology they draft best on, if it is known.
        name: for tables.
        notes: what the files they come from say that one should know.
    """

    config: HeadsConfig
    params: Params
    tree: Topology | None = None
    name: str = "heads"
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Memory of the parameters."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.params))

    def __repr__(self) -> str:
        c, nodes = self.config, "" if self.tree is None else f", a tree of {self.tree.shape.nodes} nodes"
        return f"DraftHeads({self.name!r}, {c.num_heads} heads, inputs={c.inputs!r}, {self.bytes / 1e6:.1f} MB{nodes})"


class ResBlock(nnx.Module):
    """`residual + SiLU(x W + b)`, at first the identity."""

    def __init__(self, inputs: int, width: int, bias: bool):
        self.kernel = nnx.Param(jnp.zeros((inputs, width), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((width,), jnp.float32)) if bias else None

    def __call__(self, x: Float[Array, "B T I"], residual: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        out = matmul(x, self.kernel[...])
        return residual + jax.nn.silu(out if self.bias is None else out + self.bias[...])


class InnerBlock(nnx.Module):
    """`residual + SiLU(x U + b) D`, at first the identity, for D is zero; U is random, the same every time."""

    def __init__(self, inputs: int, width: int, bias: bool, seed: int):
        inner = INNER * width
        self.up = nnx.Param(jax.random.normal(jax.random.key(seed), (inputs, inner)) / inputs**0.5)
        self.bias = nnx.Param(jnp.zeros((inner,), jnp.float32)) if bias else None
        self.down = nnx.Param(jnp.zeros((inner, width), jnp.float32))

    def __call__(self, x: Float[Array, "B T I"], residual: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        out = matmul(x, self.up[...])
        return residual + matmul(jax.nn.silu(out if self.bias is None else out + self.bias[...]), self.down[...])


class Frozen(nnx.Variable):
    """What no training touches."""


class Heads(nnx.Module):
    """All heads. A head's blocks are its own, unless all are one network, and so is its projection unless shared."""

    def __init__(self, config: HeadsConfig):
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
        # Ids of the tokens that are guessed from, ascending; row r of a projection is of token tokens[r].
        self.tokens = None if c.draft_vocab_size is None else Frozen(jnp.arange(c.rows, dtype=jnp.int32))

    def features(
        self, head: int, hidden: Float[Array, "B T E"], words: Sequence[Float[Array, "B T E"]] = ()
    ) -> Float[Array, "B T E"]:
        """What a head's projection reads, unless all are one network (`after`).

        `words`: normed embeddings of the head + 1 tokens after the feature's, for heads that read them.
        """
        x, read = hidden, jnp.concatenate([hidden, *words], axis=-1)
        for layer, block in enumerate(self.blocks[head]):
            x = block(read if layer == 0 else x, x)
        return x

    def after(self, state: Float[Array, "B T E"], word: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """What is projected after one more word by recurrent heads, which go on from it; at first from `hidden`."""
        x, read = state, jnp.concatenate([state, word], axis=-1)
        for layer, block in enumerate(self.network):
            x = block(read if layer == 0 else x, x)
        return x

    def every(
        self, hidden: Float[Array, "B T E"], words: Sequence[Float[Array, "B T E"]]
    ) -> Iterator[Float[Array, "B T E"]]:
        """The features of head after head. `words`: as many as the last head reads; none where none are read."""
        state = hidden
        for head in range(self.config.num_heads):
            if self.config.inputs == "recurrent":
                state = self.after(state, words[head])
            yield state if self.config.inputs == "recurrent" else self.features(head, hidden, words[: head + 1])

    def logits(self, head: int, features: Float[Array, "B T E"]) -> Float[Array, "B T R"]:
        """By an own projection, or the single one."""
        which = min(head, self.config.num_projections - 1)
        return matmul(features, self.projections[which][...], transposed=True)


def normed(embeddings: Float[Array, "*b E"]) -> Float[Array, "*b E"]:
    """Embeddings as heads read them: of unit mean square, since models differ in their scale."""
    embeddings = embeddings.astype(jnp.float32)
    return embeddings * jax.lax.rsqrt(jnp.mean(jnp.square(embeddings), axis=-1, keepdims=True) + 1e-12)


@functools.lru_cache
def _graph(config: HeadsConfig) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: Heads(config)))[0]


def module(config: HeadsConfig, params: Params) -> Heads:
    """The module with these parameters, the pure dict of its state."""
    return nnx.merge(_graph(config), nnx.State(params))


def init_params(
    config: HeadsConfig,
    projection: Float[Array | np.ndarray, "V E"] | None = None,
    tokens: Int[Array | np.ndarray, "R"] | None = None,
) -> Params:
    """Heads that all predict what the target's own head does, before training: a pure dict of float32 arrays.

    Args:
        config: the sizes.
        projection: the target's, which own projections start from.
        tokens: of a reduced vocabulary, the ids that are guessed from, ascending.

    Raises:
        InvalidConfig: a projection or tokens are missing, or do not fit the sizes.
    """
    params = nnx.to_pure_dict(nnx.state(Heads(config)))
    if (tokens is None) != (config.draft_vocab_size is None):
        raise InvalidConfig("tokens are given with a reduced draft vocabulary, and only then")
    if tokens is not None:
        tokens = jnp.asarray(tokens, jnp.int32)
        if tokens.shape != (config.rows,) or bool((jnp.diff(tokens) <= 0).any()):
            raise InvalidConfig(f"expected {config.rows} token ids, ascending, got shape {tokens.shape}")
        if int(tokens[0]) < 0 or int(tokens[-1]) >= config.vocab_size:
            raise InvalidConfig(f"token ids go from 0 to {config.vocab_size - 1}")
        params["tokens"] = tokens
    if config.num_projections:
        if projection is None or projection.shape != (config.vocab_size, config.hidden_size):
            got = None if projection is None else projection.shape
            raise InvalidConfig(
                f"own projections start from the target's [{config.vocab_size}, {config.hidden_size}]; got {got}"
            )
        rows = jnp.asarray((projection if tokens is None else projection[tokens]).astype(jnp.float32))
        params["projections"] = dict.fromkeys(range(config.num_projections), rows)
    return params


def check_heads(heads: Any) -> None:
    """Refuses what is no `DraftHeads`.

    Raises:
        InvalidConfig: saying how to load some.
    """
    if not isinstance(heads, DraftHeads):
        raise InvalidConfig(f"heads must be DraftHeads, as jaxspec.load_heads returns them; got {shown(heads)}")


def check_target(config: HeadsConfig, target: Any) -> None:
    """Refuses a target (`jaxspec.models.model.Model`) that heads of these sizes cannot draft for.

    Raises:
        ShapeMismatch: its features or its vocabulary have another size.
        InvalidConfig: it does not give what the heads read.
    """
    lm = target.lm
    tables = ["embedding"] * config.reads_words
    tables += ["unembedding"] * (config.draft_vocab_size is not None and config.projection == "shared")
    need_members(lm, tables, "these heads read the target's")
    width = no_feature(lm, target.params, lm.init_cache(1, 1)).shape[-1]
    sizes = (("features", config.hidden_size, width), ("a vocabulary", config.vocab_size, vocabulary(target)))
    for name, own, other in sizes:
        if own != other:
            raise ShapeMismatch(
                f"the heads are for {name} of {own}, {target.name} has {other}; they are another target's"
            )


def vocabulary(target: Any) -> int:
    """Rows of the target's projection, those of padding included: the V of heads for it."""
    lm = target.lm
    return lm.unembedding(target.params).shape[0] if isinstance(lm, ProjectedTarget) else lm.vocab


def flatten(params: Params) -> dict[str, Any]:
    """The parameters by name, as `HeadsConfig.param_shapes` names them."""
    return {".".join(map(str, path)): leaf for path, leaf in nnx.traversals.flatten_mapping(params).items()}


def unflatten(named: dict[str, Any]) -> Params:
    """The inverse of `flatten`."""
    paths = {tuple(int(part) if part.isdigit() else part for part in name.split(".")): a for name, a in named.items()}
    return dict(nnx.traversals.unflatten_mapping(paths))
