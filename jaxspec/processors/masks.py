"""Processors that allow the same tokens everywhere: allowed tokens, and suppressed tokens."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.checks import index
from jaxspec.core.processor import Beginning, gather_rows
from jaxspec.errors import InvalidConfig, TokenOutOfRange, shown


class _Mask:
    """A mask over the vocabulary that does not depend on the text. It has no state."""

    allows: ClassVar[bool]  # whether the listed tokens are the allowed ones
    tokens: Any

    def rows(self, batch: int, vocab: int) -> Self:
        if getattr(self.tokens, "ndim", 0) == 2:
            return self  # as made by this method
        listed = _listed(self.tokens, type(self).__name__)
        by_row = [one for one in listed if one is None or index(one) is None]
        if by_row and len(listed) != batch:
            raise InvalidConfig(
                f"{type(self).__name__} needs a list of token ids, or one for each of the {batch} rows; got "
                f"{len(listed)} lists"
            )
        masks = np.stack([self._mask(one, vocab) for one in listed]) if by_row else self._mask(listed, vocab)
        # All rows of a view share its memory, so that a job of many rows does not have a copy for each of them.
        return dataclasses.replace(self, tokens=np.broadcast_to(masks, (batch, vocab)))  # pyright: ignore

    def _mask(self, tokens: Any, vocab: int) -> Bool[np.ndarray, "V"]:
        """Returns the tokens that are allowed; all tokens for None."""
        name = type(self).__name__
        if tokens is None:
            return np.ones(vocab, bool)
        mask = np.full(vocab, not self.allows)
        for token in _listed(tokens, name):
            number = index(token)
            if number is None or not 0 <= number < vocab:
                raise TokenOutOfRange(f"{name} has a token id {shown(token)}; ids go from 0 to {vocab - 1}")
            mask[number] = self.allows
        if not mask.any():
            raise InvalidConfig(f"{name} forbids every token; leave at least one token")
        return mask

    def init(self, beginning: Beginning) -> tuple[()]:
        return ()

    def absorb(
        self, state: tuple[()], tokens: Int[Array, "B M"], count: Int[Array, "B"], start: Int[Array, "B"]
    ) -> tuple[()]:
        return state

    def apply(
        self, state: tuple[()], path: Int[Array, "B N D"], logits: Float[Array, "B N V"]
    ) -> Float[Array, "B N V"]:
        return jnp.where(self.tokens[:, None], logits, -jnp.inf)

    def apply_to(
        self, state: tuple[()], path: Int[Array, "B N D"], tokens: Int[Array, "B N R"], logits: Float[Array, "B N R"]
    ) -> Float[Array, "B N R"]:
        return jnp.where((tokens < 0) | gather_rows(self.tokens, tokens), logits, -jnp.inf)

    def tree_flatten_with_keys(self) -> tuple[tuple, None]:
        return ((jax.tree_util.GetAttrKey("tokens"), self.tokens),), None

    @classmethod
    def tree_unflatten(cls, _: None, fields: Any) -> Self:
        made = object.__new__(cls)
        object.__setattr__(made, "tokens", fields[0])
        return made


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class AllowedTokens(_Mask):
    """Forbids all tokens but those of a list; stop tokens are forbidden too unless they are in the list.

    Attributes:
        tokens: token ids, or a list of them for each row, with None for a row without a limit. `rows` makes a mask
            `[B, V]` of them.
    """

    allows = True
    tokens: Any


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class SuppressTokens(_Mask):
    """Forbids the tokens of a list everywhere, as `suppress_tokens` in Hugging Face's transformers.

    Attributes:
        tokens: token ids, or a list of them for each row, with None for a row without a limit. `rows` makes a mask
            `[B, V]` of them.
    """

    allows = False
    tokens: Any


def _listed(tokens: Any, name: str) -> list[Any]:
    try:
        listed = None if isinstance(tokens, (str, bytes, Mapping)) else list(tokens)
    except TypeError:
        listed = None
    if listed is None:
        raise InvalidConfig(f"the tokens of {name} must be a list of token ids, got {shown(tokens)}")
    return listed
