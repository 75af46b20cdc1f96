"""Medusa heads in Flax NNX: small networks that guess the tokens after the next one from a feature of the target.

Head i predicts token t + 2 + i from the target's feature at token t; the target itself predicts token t + 1 (Cai et al.
2024, arXiv:2401.10774, section 2.1). With `inputs="path"`, a head also reads the embeddings of the tokens t + 1 to
t + 1 + i, as in Hydra (Ankner et al. 2024, arXiv:2402.05109), so its guess depends on the path to the node. With
`inputs="recurrent"`, all heads are one network, as in ReDrafter (Cheng et al. 2024, arXiv:2403.09919, section 3). It
reads its previous output and the last token of the path, and the losses of all heads train it.
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

from jaxspec.amounts import size
from jaxspec.core.networks import ProjectedTarget, need_members, no_feature
from jaxspec.core.records import Params
from jaxspec.core.topology import Topology
from jaxspec.errors import InvalidConfig, ShapeMismatch, shown
from jaxspec.heads.config import INNER
from jaxspec.heads.config import HeadsConfig as HeadsConfig
from jaxspec.heads.kinds import HeadSizes
from jaxspec.models.layers import matmul
from jaxspec.models.packed import Matrix


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DraftHeads:
    """Loaded or trained heads, for the drafters "medusa", "eagle" and "dflash".

    Attributes:
        config: sizes of the heads: a `HeadsConfig` for "medusa", an `EagleConfig` for "eagle", a `DFlashConfig` for
            "dflash".
        params: nested arrays; their paths are the names of `param_shapes` of the sizes.
        tree: the topology that the heads draft best on, if it is known.
        name: the name of the heads in tables.
        notes: what users should know about the heads, one sentence each.
    """

    config: Any
    params: Params
    tree: Topology | None = None
    name: str = "heads"
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Memory of the parameters, in bytes."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.params))

    def __repr__(self) -> str:
        nodes = "" if self.tree is None else f", a tree of {self.tree.shape.nodes} nodes"
        return f"DraftHeads({self.name!r}, {self.config.summary}, {size(self.bytes)}{nodes})"


class ResBlock(nnx.Module):
    """A residual block, `residual + SiLU(x W + b)`. W and b are zero at first, so it starts as the identity."""

    def __init__(self, inputs: int, width: int, bias: bool):
        self.kernel = nnx.Param(jnp.zeros((inputs, width), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((width,), jnp.float32)) if bias else None

    def __call__(self, x: Float[Array, "B T I"], residual: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        out = matmul(x, self.kernel[...])
        return residual + jax.nn.silu(out if self.bias is None else out + self.bias[...])


class InnerBlock(nnx.Module):
    """A residual block with an inner layer, `residual + SiLU(x U + b) D`.

    D is zero at first, so it starts as the identity. U is drawn from `seed`.
    """

    def __init__(self, inputs: int, width: int, bias: bool, seed: int):
        inner = INNER * width
        self.up = nnx.Param(jax.random.normal(jax.random.key(seed), (inputs, inner)) / inputs**0.5)
        self.bias = nnx.Param(jnp.zeros((inner,), jnp.float32)) if bias else None
        self.down = nnx.Param(jnp.zeros((inner, width), jnp.float32))

    def __call__(self, x: Float[Array, "B T I"], residual: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        out = matmul(x, self.up[...])
        return residual + matmul(jax.nn.silu(out if self.bias is None else out + self.bias[...]), self.down[...])


class Frozen(nnx.Variable):
    """A variable that is not trained."""


class Heads(nnx.Module):
    """All heads of a `HeadsConfig`.

    Each head has its own blocks unless the heads are recurrent, and its own projection unless it shares one.
    """

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
        # Ids of the tokens that can be guessed, ascending; row r of a projection belongs to token tokens[r].
        self.tokens = None if c.draft_vocab_size is None else Frozen(jnp.arange(c.rows, dtype=jnp.int32))

    def features(
        self, head: int, hidden: Float[Array, "B T E"], words: Sequence[Float[Array, "B T E"]] = ()
    ) -> Float[Array, "B T E"]:
        """Returns the input of a head's projection; recurrent heads use `after`.

        `words` are the normed embeddings of the head + 1 tokens after the token of `hidden`; empty if `inputs` is
        "hidden".
        """
        x, read = hidden, jnp.concatenate([hidden, *words], axis=-1)
        for layer, block in enumerate(self.blocks[head]):
            x = block(read if layer == 0 else x, x)
        return x

    def after(self, state: Float[Array, "B T E"], word: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Returns the input of the projection of recurrent heads after one more token.

        `state` is the result for the token before, and the target's feature at first; `word` is the token's normed
        embedding.
        """
        x, read = state, jnp.concatenate([state, word], axis=-1)
        for layer, block in enumerate(self.network):
            x = block(read if layer == 0 else x, x)
        return x

    def every(
        self, hidden: Float[Array, "B T E"], words: Sequence[Float[Array, "B T E"]]
    ) -> Iterator[Float[Array, "B T E"]]:
        """Yields the input of each head's projection. `words` are those that the last head reads."""
        state = hidden
        for head in range(self.config.num_heads):
            if self.config.inputs == "recurrent":
                state = self.after(state, words[head])
            yield state if self.config.inputs == "recurrent" else self.features(head, hidden, words[: head + 1])

    def logits(self, head: int, features: Float[Array, "B T E"]) -> Float[Array, "B T R"]:
        """Returns the logits of a head by its own projection, or by the single one."""
        which = min(head, self.config.num_projections - 1)
        return matmul(features, self.projections[which][...], transposed=True)


def normed(embeddings: Float[Array, "*b E"]) -> Float[Array, "*b E"]:
    """Scales embeddings to a mean square of 1, because their scale differs between models."""
    embeddings = embeddings.astype(jnp.float32)
    return embeddings * jax.lax.rsqrt(jnp.mean(jnp.square(embeddings), axis=-1, keepdims=True) + 1e-12)


@functools.lru_cache
def _graph(config: HeadsConfig) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: Heads(config)))[0]


def module(config: HeadsConfig, params: Params) -> Heads:
    """Returns the module with these parameters, which are the pure dict of its state."""
    return nnx.merge(_graph(config), nnx.State(params))


def init_params(
    config: HeadsConfig,
    projection: Float[Array | np.ndarray, "V E"] | Matrix | None = None,
    tokens: Int[Array | np.ndarray, "R"] | None = None,
) -> Params:
    """Returns parameters before training, a pure dict of float32 arrays: heads that predict what the target predicts.

    Args:
        config: sizes of the heads.
        projection: the target's projection, with which those of the heads start; required unless they share it.
        tokens: the ids of a reduced vocabulary, ascending; required if there is one.

    Raises:
        InvalidConfig: the projection or the tokens are missing, or do not fit the sizes.
    """
    params = nnx.to_pure_dict(nnx.state(Heads(config)))
    if (tokens := as_ids(config, tokens)) is not None:
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


def as_ids(config: HeadSizes, tokens: Int[Array | np.ndarray, "R"] | None) -> Int[Array, "R"] | None:
    """Returns the ids of a reduced vocabulary as they are among the parameters; None if it is not reduced.

    Raises:
        InvalidConfig: the ids are missing, or do not fit the sizes.
    """
    if (tokens is None) != (config.draft_vocab_size is None):
        raise InvalidConfig("tokens must be given if the draft vocabulary is reduced, and only then")
    if tokens is None:
        return None
    tokens = jnp.asarray(tokens, jnp.int32)
    if tokens.shape != (config.rows,) or bool((jnp.diff(tokens) <= 0).any()):
        raise InvalidConfig(f"expected {config.rows} ascending token ids, got shape {tokens.shape}")
    if int(tokens[0]) < 0 or int(tokens[-1]) >= config.vocab_size:
        raise InvalidConfig(f"token ids must be from 0 to {config.vocab_size - 1}")
    return tokens


def start_from(
    config: HeadSizes,
    params: Params,
    projection: Float[Array | np.ndarray, "V E"] | Matrix | None,
    tokens: Int[Array | np.ndarray, "R"] | None,
) -> Params:
    """Returns parameters with the ids of a reduced vocabulary, and with the target's projection if there is an own one.

    Raises:
        InvalidConfig: the ids are missing, or projection or ids do not fit the sizes.
    """
    if (ids := as_ids(config, tokens)) is not None:
        params["tokens"] = ids
    if projection is not None and "head" in params:
        expected = config.vocab_size, config.hidden_size
        if projection.shape != expected:
            raise InvalidConfig(f"the projection starts from the target's {list(expected)}; got {projection.shape}")
        rows = projection if tokens is None else projection[tokens]
        params["head"] = jnp.asarray(rows.astype(jnp.float32))
    return jax.tree.map(jnp.asarray, params)


def check_heads(heads: Any) -> None:
    """Refuses anything but `DraftHeads`.

    Raises:
        InvalidConfig: `heads` is something else; the message says how to load heads.
    """
    if not isinstance(heads, DraftHeads):
        raise InvalidConfig(f"heads must be DraftHeads, as jaxspec.load_heads returns them; got {shown(heads)}")


def check_kind(heads: DraftHeads, kind: type, drafter: str) -> None:
    """Refuses heads that are for another drafter.

    Raises:
        InvalidConfig: their sizes are not of this kind.
    """
    if not isinstance(heads.config, kind):
        raise InvalidConfig(
            f"the drafter {drafter!r} cannot use {heads.name!r}, {heads.config.summary}; these are for the drafter "
            f"{heads.config.drafter!r}"
        )


def check_target(config: HeadSizes, target: Any) -> None:
    """Refuses a target (`jaxspec.models.model.Model`) that heads of these sizes cannot draft for.

    Raises:
        ShapeMismatch: its features or its vocabulary have another size.
        InvalidConfig: the target lacks an embedding or a projection that the heads read.
    """
    lm = target.lm
    need_members(lm, config.tables, "these heads read the target's")
    width = no_feature(lm, target.params, lm.init_cache(1, 1)).shape[-1]
    sizes = (("features", config.feature_size, width), ("a vocabulary", config.vocab_size, vocabulary(target)))
    for name, own, other in sizes:
        if own != other:
            raise ShapeMismatch(
                f"the heads are for {name} of {own}, {target.name} has {other}; they belong to another target"
            )


def vocabulary(target: Any) -> int:
    """Returns V for heads of this target, the number of rows of its projection with padding."""
    lm = target.lm
    return lm.unembedding(target.params).shape[0] if isinstance(lm, ProjectedTarget) else lm.vocab


def flatten(params: Params) -> dict[str, Any]:
    """Returns the parameters by the names of `HeadsConfig.param_shapes`."""
    return {".".join(map(str, path)): leaf for path, leaf in nnx.traversals.flatten_mapping(params).items()}


def unflatten(named: dict[str, Any]) -> Params:
    """Returns nested parameters from `flatten`'s dict."""
    paths = {tuple(int(part) if part.isdigit() else part for part in name.split(".")): a for name, a in named.items()}
    return dict(nnx.traversals.unflatten_mapping(paths))
