"""Prompt lookup: copies what followed the last place where the text ended the same way.

Prompt lookup decoding (Saxena 2023), on the device: of all earlier places the one whose ending matches the
longest, among equals the latest.
"""

import dataclasses
from typing import ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.draw import Draw
from jaxspec.core.protocols import Setting
from jaxspec.core.records import Advance, Context, Params, Proposal
from jaxspec.core.tree import Dynamic, Topology, TreeShape, chain
from jaxspec.errors import InvalidConfig


class LookupState(NamedTuple):
    """What a row has learned of its drafts; in plain steps."""

    gain: Float[Array, "B"]  # running mean of the tokens accepted by a draft
    credit: Float[Array, "B"]  # what may still be lost on drafts that are not expected to pay
    drafted: Bool[Array, "B"]  # last round


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Drafts a chain from the row's own text, as long as that pays.

    A round that drafts costs `cost` plain steps more than one that does not, and saves one for every token
    accepted. A row drafts while the running mean of what its drafts saved is at least that cost. Otherwise it
    may try on credit, which grows by `refill` for every token of text and shrinks by what such a try lost: where
    nothing ever matches, speculation costs that share of the time at most. This decides when to draft, never
    what is emitted.

    Attributes:
        tree: a chain.
        min_match: tokens that must match before anything is drafted.
        max_match: tokens that are compared at most.
        cost: what a round at full width costs beyond a plain one, in plain steps.
        credit: what a row begins with, and has at most, in tries that fail.
        refill: the credit per token of text, in plain steps.
    """

    tree: Topology | Dynamic = chain(15)
    min_match: int = 3
    max_match: int = 8
    cost: float = 1.5
    credit: float = 2.0
    refill: float = 0.02

    takes: ClassVar[frozenset[str]] = frozenset({"tree"})
    draws: ClassVar[bool] = False

    def __post_init__(self):
        if not self.tree.is_chain or self.tree.shape.depth < 1:
            raise InvalidConfig("prompt-lookup drafts a chain of at least one token; give a draft length, no tree")
        if not 1 <= self.min_match <= self.max_match:
            raise InvalidConfig(f"min_match must be from 1 to max_match ({self.max_match}), got {self.min_match}")

    @classmethod
    def build(cls, setting: Setting) -> tuple[Self, Params]:
        return (cls() if setting.tree is None else cls(setting.tree)), None

    @property
    def shape(self) -> TreeShape:
        return self.tree.shape

    @property
    def calls(self) -> int:
        return 0

    def init(self, params: Params, batch: int, capacity: int) -> LookupState:
        nothing = jnp.zeros((batch,))
        return LookupState(nothing, nothing + self.credit * self.cost, nothing > 0)

    def absorb(self, params: Params, state: LookupState, advance: Advance) -> LookupState:
        if advance.nodes is None:
            return state
        saved = (advance.count - 1).astype(jnp.float32)
        drafted = state.drafted & (advance.count > 0)
        loss = jnp.where(drafted & (state.gain < self.cost), jnp.maximum(self.cost - saved, 0.0), 0.0)
        credit = jnp.minimum(state.credit - loss + self.refill * advance.count, self.credit * self.cost)
        return LookupState(jnp.where(drafted, (state.gain + saved) / 2, state.gain), credit, state.drafted)

    def propose(self, params: Params, state: LookupState, context: Context, draw: Draw) -> tuple[Proposal, LookupState]:
        drafts, match = jax.vmap(self._look_up)(context.tokens, context.length)
        worth = (state.gain >= self.cost) | (state.credit >= self.cost)
        drafted = (match >= self.min_match) & worth & draw.below(0)
        tokens = jnp.where(drafted[:, None], drafts, -1)
        return Proposal(jnp.pad(tokens, ((0, 0), (1, 0))), self.tree.tree), state._replace(drafted=drafted)

    def _look_up(self, tokens: Int[Array, "S"], length: Array) -> tuple[Int[Array, "D"], Array]:
        """The draft of one row, and how many tokens matched before it (0: no draft)."""
        places = jnp.arange(tokens.size)
        padded = jnp.concatenate([jnp.full((self.max_match,), -1, tokens.dtype), tokens])
        match = jnp.zeros_like(places)
        equal = (places > 0) & (places < length)
        for back in range(1, self.max_match + 1):
            before = padded[self.max_match - back : self.max_match - back + tokens.size]
            ending = jnp.where(length >= back, tokens[jnp.maximum(length - back, 0)], -2)
            equal = equal & (before == ending)
            match = match + equal
        best = jnp.argmax(match * tokens.size + places * (match > 0))
        # Past the end of the text the copy goes on copying itself: the text has a period there.
        period = jnp.maximum(length - best, 1)
        return tokens[best + jnp.arange(self.shape.depth) % period], match[best]
