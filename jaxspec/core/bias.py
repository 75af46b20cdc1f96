"""The processor that adds a bias to the logits. Sampling settings make it of their argument `logit_bias`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.core.checks import index
from jaxspec.core.processor import Beginning, gather_rows
from jaxspec.core.row_settings import FLOATS, as_array, is_abstract
from jaxspec.errors import InvalidConfig, TokenOutOfRange, shown

_LOWEST, _MAX = float(np.finfo(np.float32).min), float(np.finfo(np.float32).max)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, repr=False)
class LogitBias:
    """Adds a number to the logit of each token, whatever the text is; -inf forbids a token.

    Attributes:
        bias: a mapping from token id to number, an array `[V]`, or an array `[B, V]`.

    Raises:
        InvalidConfig, TokenOutOfRange: a number is NaN or +inf, or an id is not valid.
    """

    bias: Any

    def __post_init__(self):
        if isinstance(self.bias, Mapping):
            for token, value in self.bias.items():
                _check_entry(token, value)
        elif not is_abstract(self.bias) and as_array(self.bias).dtype.kind not in FLOATS:
            raise InvalidConfig(f"logit_bias must be a mapping or an array of numbers, got {shown(self.bias)}")

    def __repr__(self) -> str:
        size = f"{len(self.bias)} tokens" if isinstance(self.bias, Mapping) else str(list(np.shape(self.bias)))
        return f"LogitBias({size})"

    def rows(self, batch: int, vocab: int) -> Self:
        if isinstance(self.bias, Mapping):
            bias = np.zeros(vocab, np.float32)
            for token, value in self.bias.items():
                number = _check_entry(token, value)
                if number >= vocab:
                    raise TokenOutOfRange(f"logit_bias has a token id {shown(token)}; ids go from 0 to {vocab - 1}")
                bias[number] = max(float(value), -np.inf if value == -np.inf else _LOWEST)
        elif isinstance(self.bias, jax.core.Tracer):
            bias = jnp.asarray(self.bias, np.float32)
        else:
            with np.errstate(over="ignore"):  # values that overflow are refused below
                bias = as_array(self.bias).astype(np.float32)
        if bias.shape not in ((vocab,), (batch, vocab)):
            raise InvalidConfig(f"logit_bias must have shape [{vocab}], got {list(bias.shape)}")
        if isinstance(bias, jax.core.Tracer):
            return dataclasses.replace(self, bias=jnp.broadcast_to(bias, (batch, vocab)))
        if np.isnan(bias).any() or np.isposinf(bias).any():
            raise InvalidConfig("logit_bias must not be NaN or +inf (use -inf to ban a token)")
        if np.isneginf(bias).all(-1).any():
            raise InvalidConfig("logit_bias bans every token; leave at least one token without -inf")
        # All rows of a view share its memory, so that a job of many rows does not have a copy for each of them.
        return dataclasses.replace(self, bias=np.broadcast_to(bias, (batch, vocab)))

    def init(self, beginning: Beginning) -> tuple[()]:
        return ()

    def absorb(
        self, state: tuple[()], tokens: Int[Array, "B M"], count: Int[Array, "B"], start: Int[Array, "B"]
    ) -> tuple[()]:
        return state

    def apply(
        self, state: tuple[()], path: Int[Array, "B N D"], logits: Float[Array, "B N V"]
    ) -> Float[Array, "B N V"]:
        return logits + self.bias[:, None]

    def apply_to(
        self, state: tuple[()], path: Int[Array, "B N D"], tokens: Int[Array, "B N R"], logits: Float[Array, "B N R"]
    ) -> Float[Array, "B N R"]:
        return logits + jnp.where(tokens >= 0, gather_rows(self.bias, tokens), 0.0)

    def tree_flatten_with_keys(self) -> tuple[tuple, None]:
        return ((jax.tree_util.GetAttrKey("bias"), self.bias),), None

    @classmethod
    def tree_unflatten(cls, _: None, fields: Any) -> "LogitBias":
        made = object.__new__(cls)
        object.__setattr__(made, "bias", fields[0])
        return made


def _check_entry(token: Any, value: Any) -> int:
    """Returns the id of a biased token, checked as far as possible without the vocabulary."""
    number = index(token)
    if number is None or number < 0:
        raise TokenOutOfRange(f"logit_bias has a token id {shown(token)}; ids are whole numbers from 0")
    array = as_array(value)
    if array.ndim or array.dtype.kind not in FLOATS or not array < _MAX:  # NaN included
        raise InvalidConfig(f"logit_bias of token {number} must not be NaN or +inf (-inf bans it), got {shown(value)}")
    return number
