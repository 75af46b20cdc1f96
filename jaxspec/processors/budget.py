"""The processor that ends a model's thinking after a number of tokens."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.checks import index
from jaxspec.core.processor import Beginning
from jaxspec.core.row_settings import spread_setting
from jaxspec.core.sizes import MAX_INT32
from jaxspec.errors import InvalidConfig, TokenOutOfRange, shown

_UNROLLED = 64  # the largest number of tokens that are absorbed without a loop


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

        def step(i: Array | int, state: Thinking) -> Thinking:
            token, on = (lax.dynamic_slice_in_dim(a, i, 1, 1)[:, 0] for a in (tokens, read))
            return self._step(state, token, on)

        if size > _UNROLLED:
            return lax.fori_loop(0, size, step, state)
        for i in range(size):
            state = step(i, state)
        return state

    def apply(self, state: Thinking, path: Int[Array, "B N D"], logits: Float[Array, "B N V"]) -> Float[Array, "B N V"]:
        forced = self.forced(state, path)[..., None]
        return jnp.where((forced < 0) | (jnp.arange(logits.shape[2]) == forced), logits, -jnp.inf)

    def apply_to(
        self, state: Thinking, path: Int[Array, "B N D"], tokens: Int[Array, "B N R"], logits: Float[Array, "B N R"]
    ) -> Float[Array, "B N R"]:
        forced = self.forced(state, path)[..., None]
        return jnp.where((forced < 0) | (tokens < 0) | (tokens == forced), logits, -jnp.inf)

    def forced(self, state: Thinking, path: Int[Array, "B N D"]) -> Int[Array, "B N"]:
        """Returns the only token that is allowed after each text; -1 if several tokens are allowed.

        Args:
            state: the state of the absorbed text.
            path: the tokens after the absorbed text; -1 after the end of a path.
        """
        shape = path.shape[:2]
        state = jax.tree.map(lambda a: jnp.broadcast_to(a[:, None], (*shape, *a.shape[1:])), state)
        for depth in range(path.shape[2]):
            state = self._step(state, path[..., depth], path[..., depth] >= 0)
        budget = self.number[:, None]
        at = jnp.clip(state.number - budget, 0, self.end.shape[1] - 1)
        token = jnp.take_along_axis(jnp.broadcast_to(self.end[:, None], (*shape, self.end.shape[1])), at[..., None], 2)
        return jnp.where((budget >= 0) & (state.number >= budget), token[..., 0], -1)

    def _step(self, state: Thinking, token: Int[Array, "*B"], on: Bool[Array, "*B"]) -> Thinking:
        """Returns the state after one more token, where `on`."""
        last = jnp.concatenate([state.last[..., 1:], token[..., None]], -1)
        thinking = state.number >= 0
        number = jnp.where(thinking, state.number + 1, -1)
        number = jnp.where(thinking & self._ends_with(last, self.end), -1, number)
        if self.begin.shape[1]:
            number = jnp.where(~thinking & self._ends_with(last, self.begin), 0, number)
        return Thinking(jnp.where(on, number, state.number), jnp.where(on[..., None], last, state.last))

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
