"""A second, smaller language model as drafter, on any topology (Leviathan et al. 2023, arXiv:2211.17192)."""

import dataclasses
from typing import ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.core import cache as caches
from jaxspec.core.draw import Draw
from jaxspec.core.protocols import LanguageModel, Setting, no_feature
from jaxspec.core.records import KV, Advance, Cache, Context, Params, Proposal, Window
from jaxspec.core.tree import Topology, TreeShape, chain
from jaxspec.drafters.grow import buffer, grow
from jaxspec.errors import InvalidConfig, MissingDraft, VocabMismatch


class ModelState(NamedTuple):
    """The draft model has read all committed text, the root included."""

    cache: Cache
    entries: KV  # of the last proposal's inner nodes, [L, B, H, N + 1, K]
    feature: Float[Array, "B E"]  # at the root


@dataclasses.dataclass(frozen=True)
class ModelDraft:
    """Draws each node's children from the model's law.

    Attributes:
        model: the draft model, of the target's vocabulary.
        tree: the topology.
    """

    model: LanguageModel
    tree: Topology = chain(4)

    takes: ClassVar[frozenset[str]] = frozenset({"tree", "draft"})

    def __post_init__(self):
        if self.tree.shape.depth < 1:
            raise InvalidConfig("a draft model needs a draft length of at least 1")

    @classmethod
    def build(cls, setting: Setting) -> tuple[Self, Params]:
        if setting.draft is None:
            raise MissingDraft("the drafter 'model' needs a draft model (draft=..., or --draft-model)")
        draft, target = setting.draft.lm, setting.target.lm
        if draft.vocab != target.vocab:
            raise VocabMismatch(
                f"the draft model has a vocabulary of {draft.vocab} tokens, the target of {target.vocab}; "
                "they must share one"
            )
        return cls(draft, setting.tree or chain(4)), setting.draft.params

    @property
    def shape(self) -> TreeShape:
        return self.tree.shape

    @property
    def calls(self) -> int:
        return self.tree.shape.depth

    def init(self, params: Params, batch: int, capacity: int) -> ModelState:
        cache = self.model.init_cache(batch, capacity)
        return ModelState(cache, buffer(self.model, batch, self.tree), no_feature(self.model, params, cache))

    def absorb(self, params: Params, state: ModelState, advance: Advance) -> ModelState:
        """Commits what the proposal already read, and reads the rest: the last token, and a leaf before it."""
        cache, count = state.cache, advance.count
        size = advance.tokens.shape[1]
        known = jnp.zeros_like(count)
        if advance.nodes is not None:
            inner = jnp.asarray(self.tree.tree.children[:, 0] >= 0)
            read = inner[advance.nodes] & (advance.nodes > 0)
            # The last token is always read here: its feature is where the next proposal starts.
            known = jnp.minimum(read.sum(-1), jnp.maximum(count - 1, 0))
            cache = caches.commit(cache, caches.take(state.entries, advance.nodes), known, count)
            size = min(size, 2)
        steps = jnp.arange(size)
        at = jnp.minimum(known[:, None] + steps, advance.tokens.shape[1] - 1)
        causal = jnp.broadcast_to(steps[:, None] >= steps, (count.shape[0], size, size))
        tokens = jnp.take_along_axis(advance.tokens, at, axis=1)
        features, entries = self.model.apply(params, Window(tokens, cache.length[:, None] + steps, causal), cache)
        missing = count - known
        cache = caches.commit(cache, entries, missing, jnp.isnan(features[:, 0, 0]).astype(jnp.int32))
        last = jnp.take_along_axis(features, jnp.maximum(missing - 1, 0)[:, None, None], axis=1)[:, 0]
        return state._replace(cache=cache, feature=jnp.where((count > 0)[:, None], last, state.feature))

    def propose(self, params: Params, state: ModelState, context: Context, draw: Draw) -> tuple[Proposal, ModelState]:
        root: Array = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)[:, 0]
        proposal, entries = grow(self.model, params, self.tree, state.cache, state.entries, root, draw, state.feature)
        return proposal, state._replace(entries=entries)
