"""Processors that forbid tokens: bad words, and repeated n-grams."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.core.checks import index
from jaxspec.core.processor import Beginning, append_text, forbid, keep_last, last_tokens, place
from jaxspec.core.row_settings import check_setting, spread_setting
from jaxspec.errors import InvalidConfig, TokenOutOfRange, shown


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class BadWords:
    """Forbids sequences of tokens: the last token of a sequence, after a text that ends with the tokens before it.

    Attributes:
        words: lists of token ids, at least one. `rows` makes them an array `[B, W, L]`, padded with -1 on the left.
    """

    words: Any

    def rows(self, batch: int, vocab: int) -> Self:
        if hasattr(self.words, "ndim"):
            return self  # as made by this method
        words = [_token_ids(word, vocab) for word in _listed(self.words)]
        if not words:
            raise InvalidConfig("BadWords needs at least one list of token ids, got none")
        table = np.full((len(words), max(map(len, words))), -1, np.int32)
        for row, word in zip(table, words):
            row[-len(word) :] = word
        return dataclasses.replace(self, words=jnp.broadcast_to(jnp.asarray(table), (batch, *table.shape)))

    def init(self, beginning: Beginning) -> Int[Array, "B L"]:
        return jnp.full((len(self.words), self.words.shape[2] - 1), -1, jnp.int32)

    def absorb(
        self, state: Int[Array, "B L"], tokens: Int[Array, "B M"], count: Int[Array, "B"], start: Int[Array, "B"]
    ) -> Int[Array, "B L"]:
        return keep_last(state, tokens, count)

    def apply(
        self, state: Int[Array, "B L"], path: Int[Array, "B N D"], logits: Float[Array, "B N V"]
    ) -> Float[Array, "B N V"]:
        return place(logits, self._forbidden(state, path), -jnp.inf)

    def apply_to(
        self,
        state: Int[Array, "B L"],
        path: Int[Array, "B N D"],
        tokens: Int[Array, "B N R"],
        logits: Float[Array, "B N R"],
    ) -> Float[Array, "B N R"]:
        return forbid(logits, tokens, self._forbidden(state, path))

    def _forbidden(self, state: Int[Array, "B L"], path: Int[Array, "B N D"]) -> Int[Array, "B N W"]:
        before, words = last_tokens(state, path)[:, :, None], self.words[:, None]
        follows = ((words[..., :-1] < 0) | (words[..., :-1] == before)).all(-1)
        return jnp.where(follows, words[..., -1], -1)

    def tree_flatten_with_keys(self) -> tuple[tuple, None]:
        return ((jax.tree_util.GetAttrKey("words"), self.words),), None

    @classmethod
    def tree_unflatten(cls, _: None, fields: Any) -> "BadWords":
        made = object.__new__(cls)
        object.__setattr__(made, "words", fields[0])
        return made


NAME = "the size of NoRepeatNgram"


class TextState(NamedTuple):
    """The text of each row, and its length."""

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class NoRepeatNgram:
    """Forbids tokens that would repeat n tokens in a row of prompt and text, as in Hugging Face's transformers.

    Attributes:
        size: n, the number of tokens, one number or one for each row; 0 changes nothing.
        longest: the largest size of any row of a job, of which all batches are one program; `rows` finds it.
    """

    size: Any
    longest: int = 0

    def rows(self, batch: int, vocab: int) -> Self:
        limits = np.int32, lambda v: (v >= 0) & (v <= _LONGEST), f"a whole number from 0 (off) to {_LONGEST}"
        longest = self.longest
        if not isinstance(self.size, jax.core.Tracer):
            longest = max(int(np.max(check_setting(NAME, self.size, limits), initial=0)), longest, 1)
        elif not longest:
            raise InvalidConfig(f"{NAME} must not be traced, because programs depend on it")
        return dataclasses.replace(self, size=spread_setting(NAME, self.size, limits, batch), longest=longest)

    def init(self, beginning: Beginning) -> TextState:
        batch = len(beginning.stop_ids)
        return TextState(jnp.zeros((batch, beginning.slots), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def absorb(
        self, state: TextState, tokens: Int[Array, "B M"], count: Int[Array, "B"], start: Int[Array, "B"]
    ) -> TextState:
        return TextState(append_text(state.tokens, state.length, tokens, count), state.length + count)

    def apply(
        self, state: TextState, path: Int[Array, "B N D"], logits: Float[Array, "B N V"]
    ) -> Float[Array, "B N V"]:
        for repeats in self._forbidden(state, path):
            logits = place(logits, repeats, -jnp.inf)
        return logits

    def apply_to(
        self, state: TextState, path: Int[Array, "B N D"], tokens: Int[Array, "B N R"], logits: Float[Array, "B N R"]
    ) -> Float[Array, "B N R"]:
        for repeats in self._forbidden(state, path):
            logits = forbid(logits, tokens, repeats)
        return logits

    def _forbidden(self, state: TextState, path: Int[Array, "B N D"]) -> tuple[Int[Array, "B N M"], ...]:
        """Returns the tokens that would repeat those of the absorbed text, and of the path if there is one; else -1."""
        before = self.longest - 1
        text = jnp.where(jnp.arange(state.tokens.shape[1]) < state.length[:, None], state.tokens, -1)
        last = keep_last(jnp.full((len(text), before), -1, jnp.int32), text, state.length)
        ending = last_tokens(last, path)
        # Tokens of the text and of the path, each after `before` others; positions before the beginning are -1.
        for_all = jnp.pad(text, ((0, 0), (before, 0)), constant_values=-1)[:, None]
        repeats = self._repeats(for_all, ending)
        if not path.shape[2]:
            return (repeats,)  # XLA fails where an empty slice of joined arrays is taken (JAX 0.10 to 0.12)
        own = jnp.concatenate([jnp.broadcast_to(last[:, None], (*path.shape[:2], before)), path], -1)
        return repeats, self._repeats(own, ending)

    def _repeats(self, text: Int[Array, "B #N S"], ending: Int[Array, "B N L"]) -> Int[Array, "B N M"]:
        """Returns the tokens of a text that follow the same tokens as the next token will, else -1."""
        before = self.longest - 1
        size = text.shape[-1] - before
        alike = jnp.broadcast_to(self.size[:, None, None] > 0, (*ending.shape[:2], size))
        for i in range(before):
            compared = i >= self.longest - self.size[:, None, None]
            same = (text[..., i : i + size] == ending[..., i : i + 1]) & (ending[..., i : i + 1] >= 0)
            alike &= same | ~compared
        return jnp.where(alike, text[..., before:], -1)

    def tree_flatten_with_keys(self) -> tuple[tuple, int]:
        return ((jax.tree_util.GetAttrKey("size"), self.size),), self.longest

    @classmethod
    def tree_unflatten(cls, longest: int, fields: Any) -> "NoRepeatNgram":
        made = object.__new__(cls)
        object.__setattr__(made, "size", fields[0])
        object.__setattr__(made, "longest", longest)
        return made


_LONGEST = 64


def _listed(words: Any) -> list[Any]:
    if isinstance(words, (str, bytes, Mapping)) or not isinstance(words, Iterable):
        raise InvalidConfig(f"the words of BadWords must be lists of token ids, got {shown(words)}")
    return list(words)


def _token_ids(word: Any, vocab: int) -> list[int]:
    ids = [index(token) for token in _listed(word)]
    if not ids:
        raise InvalidConfig("a word of BadWords has no tokens; pass at least one token id")
    for token, number in zip(word, ids):
        if number is None or not 0 <= number < vocab:
            raise TokenOutOfRange(f"BadWords has a token id {shown(token)}; ids go from 0 to {vocab - 1}")
    return ids  # pyright: ignore[reportReturnType]
