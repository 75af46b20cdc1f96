"""Medusa heads as drafter, on any tree (Cai et al. 2024, arXiv:2401.10774, sections 2.1 and 2.3).

All heads read the target's last known feature, which is that of the token before the root. Without a path the heads
know nothing of one another: one pass gives every level's law, and every node of a level has the same children (the
Cartesian tree, or what was pruned from it). Heads that read tokens of the path (Hydra, arXiv:2402.05109; ReDrafter,
arXiv:2403.09919) go level by level.
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core.draw import Draw
from jaxspec.core.networks import LanguageModel, TypedTarget
from jaxspec.core.protocols import DrafterInputs
from jaxspec.core.records import Advance, Context, Params, Proposal
from jaxspec.core.tree import Dynamic, Topology, TreeShape, chain
from jaxspec.drafters._beam import Beam, Found, expand, harvest, padded, root_alone, tokens_of
from jaxspec.errors import InvalidConfig, MissingDraft
from jaxspec.heads.network import HeadsConfig, check_target, module, normed
from jaxspec.models.transformer import look_up, matmul


class MedusaState(NamedTuple):
    """All that the heads look at."""

    feature: Float[Array, "B E"]  # the target's, at the token before the root


@dataclasses.dataclass(frozen=True)
class Medusa:
    """Draws from the distributions of Medusa, Hydra or ReDrafter heads on the target's last feature.

    Attributes:
        config: the heads' sizes.
        target: whose features they read, and whose projection and embedding they share.
        tree: the topology, or how to choose one every round; no deeper than there are heads, unless they are one
            network that may be run on (`HeadsConfig.max_depth`).
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
            raise InvalidConfig(f"{self.config.num_heads} heads draft trees 1 to {most} deep, this one is {depth}")
        if width > self.config.rows:
            raise InvalidConfig(f"the tree has nodes of {width} children, the heads a vocabulary of {self.config.rows}")

    @classmethod
    def build(cls, inputs: DrafterInputs) -> tuple[Self, Params]:
        heads, lm = inputs.heads, inputs.target.lm
        if heads is None:
            raise MissingDraft("the drafter 'medusa' needs heads (heads=..., or --heads)")
        config: HeadsConfig = heads.config
        check_target(config, inputs.target)
        target: Any = inputs.target.lm
        dtype = target.dtype if isinstance(target, TypedTarget) else None  # that the target multiplies in
        params = {"heads": jax.tree.map(lambda a: a.astype(dtype) if dtype and a.ndim == 2 else a, heads.params)}
        if config.draft_vocab_size is not None and config.projection == "shared":
            # A copy of the rows that are guessed from: far fewer bytes a round than all of them.
            params["rows"] = lm.unembedding(inputs.target.params)[heads.params["tokens"]]
        tree: Any = inputs.tree or heads.tree or chain(config.num_heads)
        return cls(config, lm, tree), params

    @property
    def shape(self) -> TreeShape:
        return self.tree.shape

    @property
    def calls(self) -> int:
        """None of a draft model; what heads cost is measured with the round they are part of."""
        return 0

    def init(self, params: Params, batch: int, capacity: int) -> MedusaState:
        return MedusaState(jnp.zeros((batch, self.config.hidden_size), jnp.float32))

    def absorb(self, params: Params, state: MedusaState, advance: Advance) -> MedusaState:
        last = jnp.maximum(advance.count - 1, 0)[:, None, None]
        feature = jnp.take_along_axis(advance.features, last, axis=1)[:, 0]
        return MedusaState(jnp.where((advance.count > 0)[:, None], feature, state.feature))

    def propose(self, params: Params, state: MedusaState, context: Context, draw: Draw) -> tuple[Proposal, MedusaState]:
        apart = self._apart(params, state, context, draw) if not self.config.reads_words else None
        root = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
        if isinstance(self.tree, Dynamic):
            return self._dynamic(self.tree, params, state, context, draw, root, apart), state
        tree, spare = self.tree.tree, self.shape.nodes  # what a node has too many children of is written to `spare`
        children = np.where(tree.children >= 0, tree.children, spare)
        tokens = jnp.full((root.shape[0], spare + 1), -1, jnp.int32).at[:, :1].set(root)
        law = draw.empty_law(spare + 1)
        first = self._nothing_read(state)
        read = jnp.zeros((root.shape[0], spare, first.shape[-1]), first.dtype)  # of its path, by every node

        def level(
            depth: int, nodes: np.ndarray, tokens: Array, law: Array | None, read: Array
        ) -> tuple[Array, Array | None, Array]:
            width = int((tree.children[nodes] >= 0).sum(-1).max())
            if apart is None:
                before = first if depth == 0 else read[:, tree.parents[nodes]]
                logits, after = self._after(params, state, context, depth, before, tokens[:, nodes])
                read = read.at[:, nodes].set(after)
            else:
                logits = apart[:, depth : depth + 1]
                if law is not None:  # each node draws its own
                    logits = jnp.broadcast_to(logits, (logits.shape[0], len(nodes), logits.shape[2]))
            which = jnp.asarray(nodes[: logits.shape[1]])
            below, own = draw(logits, which, depth, width, params["heads"].get("tokens"))
            tokens = tokens.at[:, children[nodes, :width]].set(below)
            return tokens, None if law is None or own is None else law.at[:, nodes].set(own), read

        for depth, nodes in enumerate(self.tree.parents_by_level):
            # For no one nothing is computed or drawn.
            filled = functools.partial(level, depth, nodes)
            there = (draw.below(depth)[:, None] & (tokens[:, nodes] >= 0)).any()
            tokens, law, read = lax.cond(there, filled, lambda *drawn: drawn, tokens, law, read)
        return Proposal(tokens[:, :-1], tree, None if law is None else law[:, :-1]), state

    def _dynamic(
        self,
        topology: Dynamic,
        params: Params,
        state: MedusaState,
        context: Context,
        draw: Draw,
        root: Int[Array, "B 1"],
        apart: Float[Array, "B D R"] | None,
    ) -> Proposal:
        """The best of the nodes that are found level by level."""
        width, ids = topology.beam, params["heads"].get("tokens")

        first = self._nothing_read(state)

        def level(depth: int, found: Found, at: Beam, read: Array) -> tuple[Found, Beam, Array]:
            nodes = at.nodes[:, : 1 if depth == 0 else width]
            if apart is None:
                before, words = (first, root) if depth == 0 else (read, tokens_of(found, at))
                logits, read = self._after(params, state, context, depth, before, words)
            else:
                logits = apart[:, depth : depth + 1]
            below = draw.ranked(logits, depth, width, ids)
            tokens, worth = (jnp.broadcast_to(a, (*nodes.shape, width)) for a in below)
            found, at = expand(topology, found, nodes, tokens, worth, depth)
            return found, at, read if apart is not None else jnp.take_along_axis(read, at.parents[:, :, None], 1)

        found, at = root_alone(topology, root[:, 0])
        read = jnp.zeros((root.shape[0], width, first.shape[-1]), first.dtype)  # of its path, by every slot's parent
        for depth in range(topology.depth):
            found, at, read = lax.cond(
                draw.below(depth).any(),
                functools.partial(level, depth),
                lambda found, at, read: (found, padded(found, topology), read),
                *(found, at, read),
            )
        return harvest(topology, found)[0]

    def _apart(self, params: Params, state: MedusaState, context: Context, draw: Draw) -> Float[Array, "B D R"]:
        """The logits of every level, by heads that know nothing of one another."""

        def read() -> Array:
            heads, hidden = module(self.config, params["heads"]), state.feature[:, None]
            each = [heads.features(i, hidden) for i in range(self.shape.depth)]
            if self.config.projection == "single":
                return self._own(params, 0, jnp.concatenate(each, axis=1))
            if self.config.projection == "own":
                return jnp.concatenate([self._own(params, i, features) for i, features in enumerate(each)], axis=1)
            return self._shared(params, context, jnp.concatenate(each, axis=1))

        shape = (draw.roots.shape[0], self.shape.depth, self._width)
        return lax.cond(draw.below(0).any(), read, lambda: jnp.zeros(shape, jnp.float32))

    def _nothing_read(self, state: MedusaState) -> Array:
        """Of a path before its root `[B, 1, *]`: no token, or the feature that recurrent heads go on from."""
        if self.config.inputs == "recurrent":
            return state.feature[:, None]
        return jnp.zeros((state.feature.shape[0], 1, self.shape.depth), jnp.int32)

    def _after(
        self, params: Params, state: MedusaState, context: Context, depth: int, read: Array, tokens: Int[Array, "B n"]
    ) -> tuple[Float[Array, "B n R"], Array]:
        """The logits after nodes of a depth, of whose paths all before them was read; and what then is."""
        heads = module(self.config, params["heads"])
        table = self.target.embedding(context.params)  # pyright: ignore

        def words(tokens: Int[Array, "B n"]) -> Float[Array, "B n E"]:
            return normed(look_up(table, jnp.maximum(tokens, 0)))

        if self.config.inputs == "recurrent":
            read = features = heads.after(read, words(tokens))
        else:
            read = read.at[:, :, depth].set(tokens)
            hidden = jnp.broadcast_to(state.feature[:, None], (*tokens.shape, state.feature.shape[-1]))
            features = heads.features(depth, hidden, [words(read[:, :, j]) for j in range(depth + 1)])
        if self.config.num_projections:
            return self._own(params, depth, features), read
        return self._shared(params, context, features), read

    def _own(self, params: Params, head: int, features: Array) -> Array:
        return module(self.config, params["heads"]).logits(head, features)[..., : self._width]

    def _shared(self, params: Params, context: Context, features: Array) -> Array:
        if "rows" in params:
            return matmul(features, params["rows"], transposed=True)
        return self.target.head(context.params, features)

    @property
    def _width(self) -> int:
        """R, of the logits: a padded vocabulary is cut, as the target cuts it."""
        return self.target.vocab if self.config.draft_vocab_size is None else self.config.rows
