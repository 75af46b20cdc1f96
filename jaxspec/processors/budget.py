"""The processor that ends a model's thinking after a number of tokens."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.checks import index
from jaxspec.core.processor import Beginning, spread_states, walk
from jaxspec.core.row_settings import spread_setting
from jaxspec.core.sizes import MAX_INT32
from jaxspec.errors import InvalidConfig, TokenOutOfRange, shown


class Thinking(NamedTuple):
    """The number of tokens of each row's thinking, -1 outside of thinking, and the last tokens of the text."""

    number: Int[Array, "*B"]
    last: Int[Array, "*B L"]


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class ThinkingBudget:
    """Forces a sequence of tokens, such as the ids of `</think>`, after so many tokens of thinking.

    Thinking ends with the sequence `end`, whether the model writes it or it is forced.

    Attributes:
        number: the number of tokens of thinking before `end` is forced, one number or one for each row; -1 for a row
            without a budget.
        end: the token ids that end thinking.
        begin: the token ids after which thinking begins, in the prompt or in the text; None if it begins with the
            first new token.
    """

    number: Any
    end: Any
    begin: Any = None

    def rows(self, batch: int, vocab: int) -> Self:
        limits = np.int32, lambda v: (v >= -1) & (v < MAX_INT32), "a whole number from 0, or -1 for no budget"
        number = spread_setting("the number of ThinkingBudget", self.number, limits, batch)
        if hasattr(self.end, "ndim"):
            return dataclasses.replace(self, number=number)  # as made by this method
        end = _sequence("end", self.end, vocab)
        begin = [] if self.begin is None else _sequence("begin", self.begin, vocab)
        ids = (np.broadcast_to(np.asarray(one, np.int32), (batch, len(one))) for one in (end, begin))
        return dataclasses.replace(self, number=number, **dict(zip(("end", "begin"), map(jnp.asarray, ids))))

    def init(self, beginning: Beginning) -> Thinking:
        batch, longest = len(beginning.stop_ids), max(self.end.shape[1], self.begin.shape[1])
        outside = -1 if self.begin.shape[1] else 0
        return Thinking(jnp.full((batch,), outside, jnp.int32), jnp.full((batch, longest), -1, jnp.int32))

    def absorb(
        self, state: Thinking, tokens: Int[Array, "B M"], count: Int[Array, "B"], start: Int[Array, "B"]
    ) -> Thinking:
        size = tokens.shape[1]
        read = jnp.arange(size) < count[:, None]
        if not self.begin.shape[1]:
            read &= jnp.arange(size) >= start[:, None]

        return walk(self.step, state, jnp.where(read, tokens, -1))

    def apply(self, state: Thinking, path: Int[Array, "B N D"], logits: Float[Array, "B N V"]) -> Float[Array, "B N V"]:
        forced = self._after(state, path)[..., None]
        return jnp.where((forced < 0) | (jnp.arange(logits.shape[2]) == forced), logits, -jnp.inf)

    def apply_to(
        self, state: Thinking, path: Int[Array, "B N D"], tokens: Int[Array, "B N R"], logits: Float[Array, "B N R"]
    ) -> Float[Array, "B N R"]:
        forced = self._after(state, path)[..., None]
        return jnp.where((forced < 0) | (tokens < 0) | (tokens == forced), logits, -jnp.inf)

    def forced(self, states: Thinking) -> Int[Array, "B N"]:
        budget = self.number[:, None]
        at = jnp.clip(states.number - budget, 0, self.end.shape[1] - 1)
        return jnp.where((budget >= 0) & (states.number >= budget), jnp.take_along_axis(self.end, at, 1), -1)

    def step(self, states: Thinking, tokens: Int[Array, "*B"]) -> Thinking:
        """Returns the states after one more token each; a token below 0 changes nothing."""
        on, last = tokens >= 0, jnp.concatenate([states.last[..., 1:], tokens[..., None]], -1)
        thinking = states.number >= 0
        number = jnp.where(thinking, states.number + 1, -1)
        number = jnp.where(thinking & self._ends_with(last, self.end), -1, number)
        if self.begin.shape[1]:
            number = jnp.where(~thinking & self._ends_with(last, self.begin), 0, number)
        return Thinking(jnp.where(on, number, states.number), jnp.where(on[..., None], last, states.last))

    def _after(self, state: Thinking, path: Int[Array, "B N D"]) -> Int[Array, "B N"]:
        """Returns the only token that is allowed after each path, or -1."""
        return self.forced(walk(self.step, spread_states(state, path.shape[1]), path))

    @staticmethod
    def _ends_with(last: Int[Array, "*B L"], ids: Int[Array, "B K"]) -> Bool[Array, "*B"]:
        size = ids.shape[1]
        return (last[..., last.shape[-1] - size :] == ids.reshape(len(ids), *[1] * (last.ndim - 2), size)).all(-1)

    def tree_flatten_with_keys(self) -> tuple[tuple, None]:
        names = "number", "end", "begin"
        return tuple((jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names), None

    @classmethod
    def tree_unflatten(cls, _: None, fields: Any) -> "ThinkingBudget":
        made = object.__new__(cls)
        for name, value in zip(("number", "end", "begin"), fields, strict=True):
            object.__setattr__(made, name, value)
        return made


def _sequence(name: str, tokens: Any, vocab: int) -> list[int]:
    try:
        listed = [] if isinstance(tokens, (str, bytes, Mapping)) else list(tokens)
    except TypeError:
        listed = []
    if not listed:
        raise InvalidConfig(f"{name} of ThinkingBudget must be a list of token ids, at least one; got {shown(tokens)}")
    ids = [index(token) for token in listed]
    for token, number in zip(listed, ids):
        if number is None or not 0 <= number < vocab:
            raise TokenOutOfRange(
                f"{name} of ThinkingBudget has a token id {shown(token)}; ids go from 0 to {vocab - 1}"
            )
    return ids  # pyright: ignore[reportReturnType]
