"""The drafter "prompt-lookup": copies tokens from earlier positions of the row's own text, or of earlier texts.

This is prompt lookup decoding (Saxena 2023), computed on the device and for several positions at once. It copies from
the positions whose preceding tokens have the longest match with the end of the text. Among equal matches it takes the
latest position, and every position is followed by a different token. What followed a longer match is likelier to be
right (`MATCH_ACCURACY`). So candidates from all positions are ranked by their estimated acceptance, and the schedule
decides how many of the best candidates are proposed.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core.checks import whole
from jaxspec.core.drafter import DrafterInputs, Needs
from jaxspec.core.draw import Draw, Noise
from jaxspec.core.records import Advance, Context, Params, Proposal
from jaxspec.core.topology import Dynamic, Topology, dynamic
from jaxspec.core.tree import TreeShape, build
from jaxspec.drafters._match import MATCH_ACCURACY, find_positions, with_history
from jaxspec.errors import InvalidConfig

PROMPT_LOOKUP_TREE = dynamic(beam=4, depth=15, nodes=16)

MAX_EARLIER = 1 << 16
"""The largest number of tokens of earlier answers; searching them takes a part of every round."""


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Copies what followed earlier occurrences of the last few tokens, one branch per occurrence.

    Attributes:
        tree: the sizes of the tree: `beam` is the largest number of positions to copy from, `depth` the number of
            tokens to copy from each, and `nodes` the number of nodes of the largest round. A chain copies from one
            position.
        min_match: the least number of matching tokens; a position with fewer is not copied from.
        max_match: the largest number of tokens that are compared.
        earlier: the number of tokens of earlier answers to copy from as well, if the rule is coupled. Earlier answers
            are finished answers of other rows of the same call. 0 for none. The parameters are `{"earlier": tokens}`,
            all -1 at first.

    Raises:
        InvalidConfig: the tree is neither a chain of at least one token nor dynamic, or the numbers are out of range.
    """

    tree: Topology | Dynamic = PROMPT_LOOKUP_TREE
    min_match: int = 1
    max_match: int = 16
    earlier: int = 0

    takes: ClassVar[frozenset[str]] = frozenset({"tree", "earlier"})
    draws = False

    def __post_init__(self):
        if not isinstance(self.tree, Dynamic) and (not self.tree.is_chain or self.tree.shape.depth < 1):
            raise InvalidConfig(
                "prompt-lookup drafts a chain of at least one token, or a dynamic tree; set a draft length, or "
                "jaxspec.dynamic(positions, depth, nodes), instead of a static tree"
            )
        if isinstance(self.tree, Dynamic) and self.tree.nodes > 1 + self.tree.beam * self.tree.depth:
            raise InvalidConfig(
                f"prompt-lookup copies {self.tree.depth} tokens from {self.tree.beam} positions; nodes must be at most "
                f"{1 + self.tree.beam * self.tree.depth}, got {self.tree.nodes}"
            )
        if not 1 <= self.min_match <= self.max_match:
            raise InvalidConfig(f"min_match must be from 1 to max_match ({self.max_match}), got {self.min_match}")
        whole("earlier", self.earlier, 0, MAX_EARLIER)

    @classmethod
    def build(cls, inputs: DrafterInputs) -> tuple[Self, Params]:
        drafter = cls(inputs.tree or PROMPT_LOOKUP_TREE, earlier=inputs.options.get("earlier", 0))
        return drafter, ({"earlier": jnp.full(drafter.earlier, -1, jnp.int32)} if drafter.earlier else None)

    def remember(self, params: Params, tokens: Sequence[int]) -> Params:
        """Returns the parameters with a finished answer in place of the oldest tokens; -1 ends each answer."""
        kept = np.concatenate([np.asarray(params["earlier"]), np.asarray(tokens, np.int32), [-1]])
        return {"earlier": jnp.asarray(kept[-self.earlier :], jnp.int32)}

    @property
    def needs(self) -> Needs:
        return Needs(node_count=True, answers=self.earlier > 0, history=True, tree=self.tree)

    @property
    def shape(self) -> TreeShape:
        """The shape with `pruned` False: copies are point masses, so every rule accepts this tree."""
        return dataclasses.replace(self.tree.shape, pruned=False)

    @property
    def calls(self) -> int:
        return 0

    def init(self, params: Params, batch: int, capacity: int) -> tuple[()]:
        return ()

    def absorb(self, params: Params, state: tuple[()], advance: Advance) -> tuple[()]:
        return state

    def propose(self, params: Params, state: tuple[()], context: Context, draw: Draw) -> tuple[Proposal, tuple[()]]:
        text, length, *_ = with_history(context)
        has_texts = context.history is not None
        if self.earlier > 0 and draw.kind is Noise.SHARED:
            before, has_texts = jnp.broadcast_to(params["earlier"], (len(text), self.earlier)), True
            text, length = jnp.concatenate([before, text], 1), length + self.earlier
        copies, match = jax.vmap(self._look_up)(text, length)
        allowed = jnp.stack([draw.below(depth) for depth in range(self.shape.depth)], 1)[:, :, None]
        if has_texts:
            allowed &= jnp.cumsum(copies < 0, 1) == 0  # up to the end of an earlier text
        log_acceptance = jnp.where(allowed, self._estimate_acceptance(match), -jnp.inf)
        return self._best(copies, log_acceptance, draw), state

    @property
    def _num_positions(self) -> int:
        return self.tree.beam if isinstance(self.tree, Dynamic) else 1

    def _look_up(self, tokens: Int[Array, "S"], length: Array) -> tuple[Int[Array, "D J"], Int[Array, " J"]]:
        """Returns the tokens from J positions of a row on, and the length of the match before each; 0 for none."""
        positions, match = find_positions(tokens, length, self._num_positions, self.min_match, self.max_match)
        # A copy that reaches the end of the text repeats itself from there: the text is periodic.
        steps = jnp.arange(self.shape.depth)[:, None] % jnp.maximum(length - positions, 1)
        return tokens[positions + steps], match

    def _estimate_acceptance(self, match: Int[Array, "B J"]) -> Float[Array, "B D J"]:
        """Returns the logarithm of the probability that each copied token is accepted.

        A position counts only where the positions before it are wrong.
        """
        trust = jnp.asarray(MATCH_ACCURACY)
        steps = jnp.arange(self.shape.depth)[:, None]
        right = jnp.where(
            (match > 0)[:, None], trust[jnp.minimum(match[:, None] + steps, len(MATCH_ACCURACY) - 1)], 0.0
        )
        others = jnp.cumprod(1 - right[:, 0], -1)
        right = right.at[:, 0, 1:].multiply(others[:, :-1])
        return jnp.cumsum(jnp.log(right), 1)

    def _best(self, copies: Int[Array, "B D J"], log_acceptance: Float[Array, "B D J"], draw: Draw) -> Proposal:
        """Proposes the best tokens in level order, as many as the schedule allows; padding follows them."""
        nodes, num_positions, batch = self.shape.nodes, self._num_positions, len(copies)
        highest, best = lax.top_k(log_acceptance.reshape(batch, -1), nodes - 1)
        last = copies[0].size
        kept = (jnp.arange(nodes - 1) < draw.count_nodes(highest)[:, None]) & (highest > -jnp.inf)
        order = jnp.sort(jnp.where(kept, best, last + best), -1)
        at = order % last
        tokens = jnp.take_along_axis(copies.reshape(batch, -1), at, -1)
        tokens = jnp.pad(jnp.where(order < last, tokens, -1), ((0, 0), (1, 0)))
        if isinstance(self.tree, Topology):
            return Proposal(tokens, self.tree.tree)
        above = (at - num_positions)[:, :, None] == at[:, None, :]
        parents = jnp.where(at < num_positions, 0, jnp.argmax(above, -1) + 1)
        parents = jnp.pad(parents, ((0, 0), (1, 0)), constant_values=-1)
        return Proposal(tokens, jax.vmap(lambda row: build(row, self.shape))(parents))
