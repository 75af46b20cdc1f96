"""The drafter "model": a second, smaller language model, on any tree (Leviathan et al. 2023, arXiv:2211.17192).

`ModelDraft` reads the text itself. `BridgedDraft` is for a draft model of another vocabulary: it reads the same text in
tokens of its own, and drafts the tokens that both vocabularies have.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.drafter import DrafterInputs, Needs
from jaxspec.core.draw import Draw
from jaxspec.core.networks import LanguageModel, empty_entries, empty_feature
from jaxspec.core.records import Advance, Cache, Context, Entries, Params, Proposal, Window
from jaxspec.core.sizes import PROMPT_CHUNK, round_to_blocks
from jaxspec.core.topology import Dynamic, Topology, chain
from jaxspec.core.tree import TreeShape
from jaxspec.drafters._grow import grow
from jaxspec.drafters._level import Level, count_slots
from jaxspec.drafters._tree import TreeDrafter
from jaxspec.drafters._window import check_tree, model_reader
from jaxspec.errors import MissingDraft, VocabMismatch
from jaxspec.models.model import Model
from jaxspec.text.bridge import Bridge, Side, build_bridge
from jaxspec.text.tokenizer import same_vocab

TOKENS_PER_SLOT = 2
"""The number of slots in the cache of a draft model of another vocabulary, for each slot of the target's cache."""
SHORT_READ, LONG_READ = 2, 16
"""The number of tokens in a call that reads text: `SHORT_READ` if at most that many are unread, else `LONG_READ`."""


class ModelState(NamedTuple):
    """What the draft model has read of the text. It reads the rest before its next draft."""

    cache: Cache
    entries: Entries  # the entries of the last proposal's nodes, [L, B, H, S, K]
    slots: Int[Array, "B N"]  # the slots of these nodes in `entries`; -1: the node was not read
    feature: Float[Array, "B E"]  # the feature at the last token in the cache


@dataclasses.dataclass(frozen=True)
class ModelDraft(TreeDrafter):
    """Draws from the distribution of a second, smaller language model, of any vocabulary.

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
    def build(cls, inputs: DrafterInputs) -> "tuple[Self | BridgedDraft, Params]":
        if inputs.draft is None:
            raise MissingDraft("the drafter 'model' needs a draft model (draft=..., or --draft-model)")
        drafter, draft, target = cls(inputs.draft.lm, inputs.tree or chain(4)), inputs.draft, inputs.target
        sizes, tokenizers = (draft.lm.vocab, target.lm.vocab), (target.tokenizer, draft.tokenizer)
        if sizes[0] == sizes[1] and (None in tokenizers or same_vocab(*tokenizers)):
            return drafter, draft.params
        if None in tokenizers:
            raise VocabMismatch(
                f"the draft model has a vocabulary of {sizes[0]} tokens and the target has one of {sizes[1]}; load "
                "both with their tokenizers, or use a draft model with the target's vocabulary"
            )
        return make_bridged_draft(drafter, draft.params, build_bridge(_side(target), _side(draft)))

    @property
    def needs(self) -> Needs:
        return Needs(model=self.model, tree=self.tree)

    @property
    def calls(self) -> int:
        return self.tree.shape.depth

    def init(self, params: Params, batch: int, capacity: int) -> ModelState:
        cache = self.model.init_cache(batch, capacity)
        slots = jnp.full((batch, self.shape.nodes), -1, jnp.int32)
        entries = empty_entries(self.model, params, cache, count_slots(self.tree))
        return ModelState(cache, entries, slots, empty_feature(self.model, params, cache))

    def absorb(self, params: Params, state: ModelState, advance: Advance) -> ModelState:
        """Reads a chunk of a prompt, or commits the accepted nodes that were read while drafting."""
        end = advance.start + advance.count
        if advance.nodes is None:
            size = advance.tokens.shape[1]
            return self.read(params, state, advance.text, jnp.where(advance.count > 0, end, 0), size)
        return self.keep(state, advance.nodes, advance.count)

    def keep(self, state: ModelState, nodes: Int[Array, "B M"], count: Int[Array, "B"]) -> ModelState:
        """Commits the nodes, among the first `count` of an accepted path, that were read while drafting."""
        slots = jnp.take_along_axis(state.slots, jnp.maximum(nodes, 0), axis=1)
        # A node is read only after its parent, so the nodes that were read come first.
        slots = jnp.where(nodes > 0, slots, -1)
        # The last token must be read again, because the next proposal starts from its feature.
        known = jnp.minimum((slots >= 0).sum(-1), jnp.maximum(count - 1, 0))
        return state._replace(cache=self.model.commit(state.cache, state.entries, slots, known, count))

    def catch_up(
        self, params: Params, state: ModelState, text: Int[Array, "B S"], length: Int[Array, "B"]
    ) -> ModelState:
        """Reads the first `length` tokens of each row's text, except those that the cache holds."""
        long = min(
            LONG_READ, self.tree.shape.nodes + SHORT_READ + 1
        )  # the capacity has room for a window after the text
        for size, rest in ((long, SHORT_READ), (SHORT_READ, 0)):

            def unread(state: ModelState, rest: int = rest) -> Array:
                return jnp.any(length - state.cache.length > rest)

            def read(state: ModelState, size: int = size) -> ModelState:
                return self.read(params, state, text, length, size)

            state = lax.while_loop(unread, read, state)
        return state

    def read(self, params: Params, state: ModelState, text: Array, length: Array, size: int) -> ModelState:
        """Reads the next tokens of the text, at most `size` and only those before `length`."""
        cache, steps = state.cache, jnp.arange(size)
        positions = cache.length[:, None] + steps
        tokens = jnp.take_along_axis(text, jnp.minimum(positions, text.shape[1] - 1), axis=1)
        causal = jnp.broadcast_to(steps[:, None] >= steps, (length.shape[0], size, size))
        features, entries = self.model.apply(params, Window(tokens, positions, causal), cache)
        missing = jnp.clip(length - cache.length, 0, size)
        cache = self.model.commit(cache, entries, None, missing, features)
        last = jnp.take_along_axis(features, jnp.maximum(missing - 1, 0)[:, None, None], axis=1)[:, 0]
        return state._replace(cache=cache, feature=jnp.where((missing > 0)[:, None], last, state.feature))

    def propose(self, params: Params, state: ModelState, context: Context, draw: Draw) -> tuple[Proposal, ModelState]:
        state = self.catch_up(params, state, context.tokens, jnp.where(draw.below(0), context.length, 0))
        root = context.root
        read = model_reader(self.model, params, state.cache, state.cache.length - 1)

        def after_root() -> Float[Array, "B 1 V"]:
            return self.model.head(params, state.feature[:, None])

        grown = grow(self.tree, root, draw, read, state.entries, root_logits=after_root)
        return grown.proposal, state._replace(entries=grown.carry, slots=grown.slots)


class BridgedState(NamedTuple):
    """The text in the draft model's tokens, and what the draft model has read of it."""

    model: ModelState
    text: Int[Array, "B S"]
    length: Int[Array, "B"]  # more than S if the text did not fit; nothing is drafted then
    covered: Int[Array, "B"]  # the number of tokens of the target's text that `text` already spells


@dataclasses.dataclass(frozen=True)
class BridgedDraft:
    """Draws from the distribution of a draft model of another vocabulary, restricted to the tokens that both have.

    Rules weigh the restricted distribution, so every rule keeps its guarantees. The tokens that the target commits are
    appended to the draft model's text token by token, in the draft model's own spelling. A text that no longer fits
    into the draft model's room is decoded without drafts.

    Attributes:
        inner: the drafter of the draft model alone.
        begin: the draft token that a text without a prompt of its own begins with.
        widest: the largest number of draft tokens that spell one token of the target.
        bridge: the tables of both vocabularies, which only the host reads; the parameters hold a copy for the device.
    """

    inner: ModelDraft
    begin: int
    widest: int
    bridge: Bridge = dataclasses.field(compare=False, repr=False)

    draws = True

    @property
    def needs(self) -> Needs:
        return Needs(prompts=TOKENS_PER_SLOT, tree=self.inner.tree)

    @property
    def shape(self) -> TreeShape:
        return self.inner.shape

    @property
    def calls(self) -> int:
        return self.inner.calls

    def spell(self, prompt: Any, ids: Sequence[int], variables: Mapping[str, Any]) -> list[int]:
        """Returns a prompt in the draft model's tokens; see `Bridge.prompt`."""
        return self.bridge.prompt(prompt, ids, variables)

    def summary(self) -> str:
        return str(self.bridge)

    def init(self, params: Params, batch: int, capacity: int) -> BridgedState:
        state = self.inner.init(params["model"], batch, TOKENS_PER_SLOT * capacity)
        text = jnp.zeros((batch, round_to_blocks(TOKENS_PER_SLOT * capacity)), jnp.int32).at[:, 0].set(self.begin)
        return BridgedState(state, text, jnp.ones((batch,), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def read_prompt(
        self, state: BridgedState, tokens: Int[Array, "B P"], count: Int[Array, "B"], covered: Int[Array, "B"]
    ) -> BridgedState:
        start, given, size = jnp.where(state.covered > 0, state.length, 0), covered > 0, tokens.shape[1]
        steps = jnp.arange(size)
        text = _write(state.text, tokens, start[:, None] + steps, given[:, None] & (steps < count[:, None]))
        count = jnp.where(count > size, state.text.shape[1], count)  # fills the room: missing tokens are not read
        length = jnp.where(given, start + count, state.length)
        return state._replace(text=text, length=length, covered=jnp.maximum(state.covered, covered))

    def absorb(self, params: Params, state: BridgedState, advance: Advance) -> BridgedState:
        """Appends the draft model's spelling of committed tokens, and then continues as `ModelDraft.absorb` does."""
        steps, piece_steps = jnp.arange(advance.tokens.shape[1]), jnp.arange(self.widest)
        unspelled = (steps < advance.count[:, None]) & (advance.start[:, None] + steps >= state.covered[:, None])
        first = params["starts"][advance.tokens]
        sizes = jnp.where(unspelled, params["starts"][advance.tokens + 1] - first, 0)
        pieces = jnp.take(params["spelling"], first[:, :, None] + piece_steps, mode="clip")
        at = (state.length[:, None] + jnp.cumsum(sizes, 1) - sizes)[:, :, None] + piece_steps
        text = _write(state.text, pieces, at, piece_steps < sizes[:, :, None])
        added = sizes.sum(1)
        length = state.length + added
        covered = jnp.maximum(state.covered, jnp.where(advance.count > 0, advance.start + advance.count, 0))
        if advance.nodes is None:
            goal, size = (
                jnp.where((advance.count > 0) & self._fits(text, length), length, 0),
                min(steps.size, PROMPT_CHUNK),
            )
            model = lax.while_loop(
                lambda model: jnp.any(goal > model.cache.length),
                lambda model: self.inner.read(params["model"], model, text, goal, size),
                state.model,
            )
        else:
            # Drafted nodes are common tokens, each of which is one piece.
            model = self.inner.keep(state.model, advance.nodes, added)
        return BridgedState(model, text, length, covered)

    def propose(
        self, params: Params, state: BridgedState, context: Context, draw: Draw
    ) -> tuple[Proposal, BridgedState]:
        limit = self.shape.depth if draw.limit is None else draw.limit
        draw = dataclasses.replace(draw, limit=jnp.where(self._fits(state.text, state.length), limit, 0))
        network, draft_params, common = self.inner.model, params["model"], params["common"]
        length = jnp.where(draw.below(0), state.length, 0)
        model = self.inner.catch_up(draft_params, state.model, state.text, length)
        read_draft = model_reader(network, draft_params, model.cache, model.cache.length - 1)

        def after_root() -> Float[Array, "B 1 R"]:
            return network.head(draft_params, model.feature[:, None])[..., common]

        def read(level: Level, entries: Entries) -> tuple[Float[Array, "B n R"], Entries]:
            tokens = jnp.take(params["spelling"], params["starts"][level.tokens], mode="clip")
            logits, entries = read_draft(level._replace(tokens=tokens), entries)
            return logits[..., common], entries

        root = context.root
        grown = grow(self.inner.tree, root, draw, read, model.entries, root_logits=after_root, ids=params["as_target"])
        return grown.proposal, state._replace(model=model._replace(entries=grown.carry, slots=grown.slots))

    def _fits(self, text: Int[Array, "B S"], length: Int[Array, "B"]) -> Bool[Array, "B"]:
        """Returns the rows with room for a draft, and for what is still written to scratch when they stop drafting."""
        depth = self.shape.depth
        most = min(text.shape[1] - max(PROMPT_CHUNK, 2 * (depth + 1)), self.inner.model.context - depth)
        return length <= most


def make_bridged_draft(inner: ModelDraft, params: Params, bridge: Bridge) -> tuple[BridgedDraft, Params]:
    """Returns the drafter of a draft model across a bridge, and its parameters.

    Raises:
        InvalidConfig: the tree has nodes with more children than there are common tokens.
    """
    check_tree(inner.tree, len(bridge.common))
    names = "common", "as_target", "starts", "spelling"
    tables = {name: jnp.asarray(getattr(bridge, name)) for name in names}
    return BridgedDraft(inner, bridge.begin, bridge.widest, bridge), {"model": params, **tables}


def _write(text: Int[Array, "B S"], tokens: Array, at: Array, which: Array) -> Int[Array, "B S"]:
    """Writes the marked tokens at their positions; tokens that do not fit are dropped."""
    batch, size = text.shape
    tokens, at = (a.reshape(batch, -1) for a in (tokens, jnp.where(which, at, size)))
    return text.at[jnp.arange(batch)[:, None], at].set(tokens, mode="drop")


def _side(model: Model) -> Side:
    assert model.tokenizer is not None
    return Side(model.tokenizer, model.chat_template, tuple(model.stop_ids), model.lm.vocab, model.name)
