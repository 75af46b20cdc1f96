"""The drafter "model": a second, smaller language model, on any tree (Leviathan et al. 2023, arXiv:2211.17192)."""

import dataclasses
from typing import ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core import cache as caches
from jaxspec.core.draw import Draw
from jaxspec.core.networks import LanguageModel, no_feature
from jaxspec.core.protocols import DrafterInputs
from jaxspec.core.records import KV, Advance, Cache, Context, Params, Proposal, Window
from jaxspec.core.tree import Dynamic, Topology, TreeShape, chain
from jaxspec.drafters._grow import grow
from jaxspec.drafters._window import check_tree, empty_entries, model_reader
from jaxspec.errors import MissingDraft, VocabMismatch

NEAR, FAR = 2, 16
"""Number of tokens in a call that reads text: `NEAR` if at most that many are left to read, else `FAR`."""


class ModelState(NamedTuple):
    """What the draft model has read of the text. It reads the rest before its next draft."""

    cache: Cache
    entries: KV  # keys and values of the last proposal's nodes, [L, B, H, S, K]
    slots: Int[Array, "B N"]  # the slots of its nodes in `entries`; -1: the node was not read
    feature: Float[Array, "B E"]  # at the last token in the cache


@dataclasses.dataclass(frozen=True)
class ModelDraft:
    """Draws from the distribution of a second, smaller language model with the same vocabulary.

    Attributes:
        model: the draft model.
        tree: the topology, or the sizes of a dynamic tree.
    """

    model: LanguageModel
    tree: Topology | Dynamic = chain(4)

    takes: ClassVar[frozenset[str]] = frozenset({"tree", "draft"})
    draws = True

    def __post_init__(self):
        check_tree(self.tree, self.model.vocab)

    @classmethod
    def build(cls, inputs: DrafterInputs) -> tuple[Self, Params]:
        if inputs.draft is None:
            raise MissingDraft("the drafter 'model' needs a draft model (draft=..., or --draft-model)")
        draft, target = inputs.draft.lm, inputs.target.lm
        if draft.vocab != target.vocab:
            raise VocabMismatch(
                f"the draft model has a vocabulary of {draft.vocab} tokens, the target of {target.vocab}; "
                "they must share one"
            )
        return cls(draft, inputs.tree or chain(4)), inputs.draft.params

    @property
    def shape(self) -> TreeShape:
        return self.tree.shape

    @property
    def calls(self) -> int:
        return self.tree.shape.depth

    def init(self, params: Params, batch: int, capacity: int) -> ModelState:
        cache = self.model.init_cache(batch, capacity)
        slots = jnp.full((batch, self.shape.nodes), -1, jnp.int32)
        entries = empty_entries(cache, self.tree)
        return ModelState(cache, entries, slots, no_feature(self.model, params, cache))

    def absorb(self, params: Params, state: ModelState, advance: Advance) -> ModelState:
        """Reads a chunk of a prompt, or commits the accepted nodes that were read while drafting."""
        end = advance.start + advance.count
        if advance.nodes is None:
            size = advance.tokens.shape[1]
            return self._read(params, state, advance.text, jnp.where(advance.count > 0, end, 0), size)
        slots = jnp.take_along_axis(state.slots, jnp.maximum(advance.nodes, 0), axis=1)
        # A node is read only after its parent, so the nodes that were read come first.
        slots = jnp.where(advance.nodes > 0, slots, -1)
        # The last token must be read again, because the next proposal starts from its feature.
        known = jnp.minimum((slots >= 0).sum(-1), jnp.maximum(advance.count - 1, 0))
        entries = caches.take(state.entries, slots)
        return state._replace(cache=caches.commit(state.cache, entries, known, advance.count))

    def catch_up(
        self, params: Params, state: ModelState, text: Int[Array, "B S"], length: Int[Array, "B"]
    ) -> ModelState:
        """Reads the first `length` tokens of each row's text, except those that the cache holds."""
        far = min(FAR, self.tree.shape.nodes + NEAR + 1)  # the capacity has room for a window behind the text
        for size, near in ((far, NEAR), (NEAR, 0)):

            def behind(state: ModelState, near: int = near) -> Array:
                return jnp.any(length - state.cache.length > near)

            def read(state: ModelState, size: int = size) -> ModelState:
                return self._read(params, state, text, length, size)

            state = lax.while_loop(behind, read, state)
        return state

    def _read(self, params: Params, state: ModelState, text: Array, length: Array, size: int) -> ModelState:
        """Reads the next tokens of the text: at most `size`, and none from `length` on."""
        cache, steps = state.cache, jnp.arange(size)
        places = cache.length[:, None] + steps
        tokens = jnp.take_along_axis(text, jnp.minimum(places, text.shape[1] - 1), axis=1)
        causal = jnp.broadcast_to(steps[:, None] >= steps, (length.shape[0], size, size))
        features, entries = self.model.apply(params, Window(tokens, places, causal), cache)
        missing = jnp.clip(length - cache.length, 0, size)
        cache = caches.commit(cache, entries, missing, jnp.isnan(features[:, 0, 0]).astype(jnp.int32))
        last = jnp.take_along_axis(features, jnp.maximum(missing - 1, 0)[:, None, None], axis=1)[:, 0]
        return state._replace(cache=cache, feature=jnp.where((missing > 0)[:, None], last, state.feature))

    def propose(self, params: Params, state: ModelState, context: Context, draw: Draw) -> tuple[Proposal, ModelState]:
        state = self.catch_up(params, state, context.tokens, jnp.where(draw.below(0), context.length, 0))
        root: Array = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)[:, 0]
        read = model_reader(self.model, params, state.cache, state.cache.length - 1)

        def after_root() -> Float[Array, "B 1 V"]:
            return self.model.head(params, state.feature[:, None])

        grown = grow(self.tree, root, draw, read, state.entries, root_logits=after_root)
        return grown.proposal, state._replace(entries=grown.carry, slots=grown.slots)
