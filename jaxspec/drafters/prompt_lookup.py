"""The drafter "prompt-lookup": copies tokens from an earlier place of the row's own text.

This is prompt lookup decoding (Saxena 2023), computed on the device. It chooses the earlier place whose preceding
tokens match the end of the text for longest, the latest of equal ones.
"""

import dataclasses
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.core.draw import Draw
from jaxspec.core.protocols import DrafterInputs
from jaxspec.core.records import Advance, Context, Params, Proposal
from jaxspec.core.tree import Dynamic, Topology, TreeShape, chain
from jaxspec.errors import InvalidConfig


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Copies what followed the last place where the text ended in the same tokens: a chain.

    Attributes:
        tree: a chain.
        min_match: least number of matching tokens; with fewer, nothing is drafted.
        max_match: number of tokens that are compared.

    Raises:
        InvalidConfig: the tree is not a chain of at least one token, or the numbers are out of range.
    """

    tree: Topology | Dynamic = chain(15)
    min_match: int = 3
    max_match: int = 8

    takes: ClassVar[frozenset[str]] = frozenset({"tree"})
    draws = False

    def __post_init__(self):
        if not self.tree.is_chain or self.tree.shape.depth < 1:
            raise InvalidConfig(
                "prompt-lookup drafts a chain of at least one token; set a draft length instead of a tree"
            )
        if not 1 <= self.min_match <= self.max_match:
            raise InvalidConfig(f"min_match must be from 1 to max_match ({self.max_match}), got {self.min_match}")

    @classmethod
    def build(cls, inputs: DrafterInputs) -> tuple[Self, Params]:
        return (cls() if inputs.tree is None else cls(inputs.tree)), None

    @property
    def shape(self) -> TreeShape:
        return self.tree.shape

    @property
    def calls(self) -> int:
        return 0

    def init(self, params: Params, batch: int, capacity: int) -> None:
        return None

    def absorb(self, params: Params, state: None, advance: Advance) -> None:
        return None

    def propose(self, params: Params, state: None, context: Context, draw: Draw) -> tuple[Proposal, None]:
        drafts, match = jax.vmap(self._look_up)(context.tokens, context.length)
        drafted = (match >= self.min_match) & draw.below(0)
        tokens = jnp.where(drafted[:, None], drafts, -1)
        return Proposal(jnp.pad(tokens, ((0, 0), (1, 0))), self.tree.tree), None

    def _look_up(self, tokens: Int[Array, "S"], length: Array) -> tuple[Int[Array, "D"], Array]:
        """Returns the draft of one row, and the number of tokens that match before it."""
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
        # A copy that reaches the end of the text repeats itself from there: the text is periodic.
        period = jnp.maximum(length - best, 1)
        return tokens[best + jnp.arange(self.shape.depth) % period], match[best]
