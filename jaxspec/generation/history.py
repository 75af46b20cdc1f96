"""Earlier texts of the same prompts, which the drafters that copy can draft from; see `History`."""

from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxspec.core.checks import whole
from jaxspec.core.drafter import Drafter
from jaxspec.errors import InvalidConfig, shown

LEAD = 8
"""Number of tokens of the prompt that are kept before each text, so that its beginning is found as well."""

MAX_HISTORY = 1 << 20
"""The largest number of tokens of a prompt's history."""


class Texts(NamedTuple):
    """Rows of text with a prompt at the beginning of each."""

    tokens: Int[Array | np.ndarray, "R T"]  # the end of the prompt and the new text, then any ids
    start: Int[Array | np.ndarray, "R"]  # where the new text begins
    length: Int[Array | np.ndarray, "R"]
    valid: Bool[Array | np.ndarray, "R"]  # False for a text that ended with an error


@runtime_checkable
class HasTexts(Protocol):
    """What new texts are read from: a `jaxspec.Rollout` or a `jaxspec.Output`."""

    def as_texts(self) -> Texts: ...


class History(NamedTuple):
    """The latest texts of each of P prompts, at most H tokens of each, on the device.

    A history is a pytree of one array, and all of its methods can be traced. The drafters "prompt-lookup" and
    "recycling" copy from it (`jaxspec.rollout(..., history=...)`, `jaxspec.generate(..., history=...)`). With the
    default rule a history changes no text. Under other rules the texts follow the same distribution, but a key gives
    other texts with another history.

    Attributes:
        tokens: the texts of each prompt, the latest last; -1 after each text, and in front of the first.
    """

    tokens: Int[Array, "P H"]

    @classmethod
    def empty(cls, prompts: int, size: int) -> Self:
        """Returns a history without texts.

        Args:
            prompts: P, the number of prompts.
            size: H, the number of tokens kept for each prompt. Searching them takes a part of every round.

        Raises:
            InvalidConfig: a number is out of range.
        """
        prompts, size = whole("prompts", prompts), whole("size of a history", size, 1, MAX_HISTORY)
        return cls(jnp.full((prompts, size), -1, jnp.int32))

    def of(self, index: Int[Array | np.ndarray, "B"]) -> "History":
        """Returns the history of some prompts, by their indices."""
        return History(self.tokens[jnp.asarray(index)])

    def replace(self, index: Int[Array | np.ndarray, "B"], new: "History") -> "History":
        """Returns the history with that of some prompts replaced; the indices differ from one another."""
        return History(self.tokens.at[jnp.asarray(index)].set(new.tokens))

    def add(self, texts: HasTexts) -> "History":
        """Returns the history with new texts of its prompts, in place of the oldest tokens.

        Texts that ended with an error are left out.

        Args:
            texts: the `Rollout` or the `Output` of the prompts of this history, in their order, with any number of
                samples.

        Raises:
            InvalidConfig: the texts are of another number of prompts, or of another type.
        """
        if not isinstance(texts, HasTexts):
            raise InvalidConfig(f"texts must be a jaxspec.Rollout or a jaxspec.Output, got {shown(texts)}")
        tokens, start, length, valid = map(jnp.asarray, texts.as_texts())
        rows, (prompts, size) = len(tokens), self.tokens.shape
        if rows % prompts:
            raise InvalidConfig(f"the texts have {rows} rows, which are not samples of the history's {prompts} prompts")
        # A new text can be as long as a row, but no more than H tokens of it can be kept.
        first, end = jnp.maximum(jnp.maximum(start - LEAD, 0), length - size), length[:, None]
        at = first[:, None] + jnp.arange(min(tokens.shape[1], size) + 1)
        kept = (at <= end) & valid[:, None]
        read = jnp.take_along_axis(tokens, jnp.minimum(at, tokens.shape[1] - 1), 1)
        new = jnp.where(at < end, read, -1)
        every = jnp.concatenate([self.tokens, new.reshape(prompts, -1)], 1)
        kept = jnp.concatenate([jnp.ones_like(self.tokens, bool), kept.reshape(prompts, -1)], 1)
        after = jnp.cumsum(kept[:, ::-1], 1)[:, ::-1] - kept  # the number of tokens that are kept after each one
        slot = jnp.where(kept & (after < size), size - 1 - after, size)
        empty = jnp.full_like(self.tokens, -1)
        return History(empty.at[jnp.arange(prompts)[:, None], slot].set(every, mode="drop"))

    def __repr__(self) -> str:
        prompts, size = self.tokens.shape
        return f"History({prompts} prompts, {size} tokens each)"


def check_history(history: Any, prompts: int, drafter: Drafter) -> Int[Array, "P H"] | None:
    """Returns the tokens of a history; None for no history.

    Args:
        history: what a user passed.
        prompts: the number of prompts of the call.
        drafter: the drafter.

    Raises:
        InvalidConfig: it is not a history of as many prompts, or the drafter does not copy.
    """
    if history is None:
        return None
    if not isinstance(history, History) or getattr(history.tokens, "ndim", None) != 2:
        raise InvalidConfig(f"history must be a jaxspec.History, as from History.empty; got {shown(history)}")
    if not jnp.issubdtype(history.tokens.dtype, jnp.integer):
        raise InvalidConfig(f"the tokens of a history must be integers, got {history.tokens.dtype}")
    if len(history.tokens) != prompts:
        raise InvalidConfig(
            f"the history is of {len(history.tokens)} prompts, but the call has {prompts}; select them by history.of"
        )
    if not drafter.needs.history:
        raise InvalidConfig(
            f"the drafter {type(drafter).__name__} does not copy from a history; use prompt-lookup or recycling, or "
            "leave history out"
        )
    return jnp.asarray(history.tokens, jnp.int32)
