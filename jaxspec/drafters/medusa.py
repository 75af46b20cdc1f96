"""The drafter "medusa": draft heads, on any tree (Cai et al. 2024, arXiv:2401.10774, sections 2.1 and 2.3).

All heads read the target's feature at the token before the root, which is the last feature computed. Heads that read no
tokens are independent of each other: one pass computes the logits of all levels, and all nodes of a level have the same
children, as in Medusa's Cartesian trees. Heads that read the tokens of the path (Hydra, arXiv:2402.05109; ReDrafter,
arXiv:2403.09919) run level by level.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core.drafter import DrafterInputs
from jaxspec.core.draw import Draw
from jaxspec.core.networks import LanguageModel, TypedTarget
from jaxspec.core.records import Advance, Context, Params, Proposal
from jaxspec.core.topology import Dynamic, Topology, chain
from jaxspec.drafters._grow import ReadLevel, grow
from jaxspec.drafters._level import Level, count_slots
from jaxspec.drafters._tree import TreeDrafter
from jaxspec.errors import InvalidConfig
from jaxspec.heads.medusa import normalize_embeddings
from jaxspec.heads.medusa_config import HeadsConfig
from jaxspec.heads.network import check_target, make_network, require_heads
from jaxspec.models.layers import look_up, matmul
from jaxspec.models.packed import Packed, pack_param, take_rows
from jaxspec.models.transformer import TransformerLM


class MedusaState(NamedTuple):
    """The input of the heads."""

    feature: Float[Array, "B E"]  # the target's feature at the token before the root


@dataclasses.dataclass(frozen=True)
class Medusa(TreeDrafter):
    """Draws from the distributions of Medusa, Hydra or ReDrafter heads on the target's last feature.

    Attributes:
        config: the sizes of the heads.
        target: the model whose features the heads read, and whose projection and embedding they share.
        tree: the topology, or the sizes of a dynamic tree; at most `HeadsConfig.max_depth` deep.

    Raises:
        InvalidConfig: the tree is deeper than the heads can draft, has only its root, or has nodes with more children
            than the heads have tokens.
    """

    config: HeadsConfig
    target: LanguageModel
    tree: Topology | Dynamic

    takes: ClassVar[frozenset[str]] = frozenset({"tree", "heads"})
    draws = True

    def __post_init__(self):
        depth = self.tree.shape.depth
        width = self.tree.beam if isinstance(self.tree, Dynamic) else self.tree.shape.width
        most = self.config.max_depth
        if not 1 <= depth <= most:
            raise InvalidConfig(
                f"{self.config.num_heads} heads draft trees of depth 1 to {most}, got a tree of depth {depth}"
            )
        if width > self.config.rows:
            raise InvalidConfig(
                f"the tree has nodes with {width} children, but the heads have a vocabulary of only {self.config.rows}"
            )

    @classmethod
    def build(cls, inputs: DrafterInputs) -> tuple[Self, Params]:
        heads, lm = require_heads(inputs.heads, "medusa"), inputs.target.lm
        config: HeadsConfig = heads.config
        check_target(config, inputs.target)
        target: Any = inputs.target.lm
        dtype = target.dtype if isinstance(target, TypedTarget) else None  # the dtype of the target's products
        params = {"heads": jax.tree.map(lambda a: a.astype(dtype) if dtype and a.ndim == 2 else a, heads.params)}
        if config.draft_vocab_size is not None and config.projection == "shared":
            # With a copy of these rows, a round reads far fewer bytes than from the whole matrix.
            params["rows"] = take_rows(lm.unembedding(inputs.target.params), heads.params["tokens"])
        if isinstance(target, TransformerLM) and target.execution.kernels:
            params["heads"] = jax.tree_util.tree_map_with_path(_pack_matrix, params["heads"])
            params |= {"rows": pack_param("head", params["rows"])} if "rows" in params else {}
        tree: Any = inputs.tree or heads.tree or chain(config.num_heads)
        return cls(config, lm, tree), params

    @property
    def calls(self) -> int:
        """Zero calls of a draft model; the cost of heads is measured as a part of the round."""
        return 0

    def init(self, params: Params, batch: int, capacity: int) -> MedusaState:
        return MedusaState(jnp.zeros((batch, self.config.hidden_size), jnp.float32))

    def absorb(self, params: Params, state: MedusaState, advance: Advance) -> MedusaState:
        last = jnp.maximum(advance.count - 1, 0)[:, None, None]
        feature = jnp.take_along_axis(advance.features, last, axis=1)[:, 0]
        return MedusaState(jnp.where((advance.count > 0)[:, None], feature, state.feature))

    def propose(self, params: Params, state: MedusaState, context: Context, draw: Draw) -> tuple[Proposal, MedusaState]:
        root = context.root
        if self.config.reads_words:
            read, carry = self._path_reader(params, state, context)
        else:
            read, carry = self._independent_reader(params, state, context, draw), ()
        ids = params["heads"].get("tokens")
        return grow(self.tree, root, draw, read, carry, ids=ids, unroll=True).proposal, state

    def _independent_reader(self, params: Params, state: MedusaState, context: Context, draw: Draw) -> ReadLevel:
        """Returns the `read` of heads that read no tokens: one pass computes the logits of all levels."""
        config, depth = self.config, self.shape.depth

        def compute() -> Float[Array, "B D R"]:
            heads, hidden = make_network(config, params["heads"]), state.feature[:, None]
            features = [heads.features(head, hidden) for head in range(depth)]
            if config.projection == "own":
                return jnp.concatenate([self._project(params, context, i, a) for i, a in enumerate(features)], axis=1)
            return self._project(params, context, 0, jnp.concatenate(features, axis=1))

        shape = (draw.roots.shape[0], depth, self._width)
        logits = lax.cond(draw.below(0).any(), compute, lambda: jnp.zeros(shape, jnp.float32))

        def read(level: Level, carry: tuple[()]) -> tuple[Float[Array, "B 1 R"], tuple[()]]:
            return logits[:, level.depth : level.depth + 1], carry

        return read

    def _path_reader(self, params: Params, state: MedusaState, context: Context) -> tuple[ReadLevel, Array]:
        """Returns the `read` of heads that read the tokens of the path, and its carry `[B, S, *]`.

        The carry holds the tokens of each node's path, or the hidden state after it if the heads are recurrent.
        """
        batch, slots = state.feature.shape[0], count_slots(self.tree)
        heads, table = make_network(self.config, params["heads"]), self.target.embedding(context.params)  # pyright: ignore

        def embed(tokens: Int[Array, "B n"]) -> Float[Array, "B n E"]:
            return normalize_embeddings(look_up(table, tokens))

        def read_path(level: Level, paths: Int[Array, "B S D"]) -> tuple[Array, Array]:
            depth, tokens = int(level.depth), level.tokens
            path = level.of_parents(paths).at[:, :, depth].set(tokens)
            hidden = jnp.broadcast_to(state.feature[:, None], (*tokens.shape, state.feature.shape[-1]))
            features = heads.features(depth, hidden, [embed(path[:, :, i]) for i in range(depth + 1)])
            return self._project(params, context, depth, features), level.put(paths, path)

        def read_hidden(level: Level, states: Float[Array, "B S E"]) -> tuple[Array, Array]:
            hidden = heads.next_feature(level.of_parents(states), embed(level.tokens))
            return self._project(params, context, int(level.depth), hidden), level.put(states, hidden)

        if self.config.inputs == "recurrent":
            return read_hidden, jnp.broadcast_to(state.feature[:, None], (batch, slots, state.feature.shape[1]))
        return read_path, jnp.zeros((batch, slots, self.shape.depth), jnp.int32)

    def _project(self, params: Params, context: Context, head: int, features: Float[Array, "B n E"]) -> Array:
        """Returns the logits of a head, `[B, n, R]`."""
        if self.config.num_projections:
            return make_network(self.config, params["heads"]).logits(head, features)[..., : self._width]
        if "rows" in params:
            return matmul(features, params["rows"], transposed=True)
        return self.target.head(context.params, features)

    @property
    def _width(self) -> int:
        """R, the number of logits; a padded vocabulary is cut as the target's head cuts it."""
        return self.target.vocab if self.config.draft_vocab_size is None else self.config.rows


def _pack_matrix(path: tuple, leaf: Array) -> Any:
    """Packs a matrix of the heads; projections are `[O, I]`, other matrices `[I, O]`."""
    if leaf.ndim < 2:
        return leaf
    return Packed.pack(leaf if path[0].key == "projections" else leaf.T)
