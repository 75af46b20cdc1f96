"""The processor that forbids stop tokens until a text has a minimum length."""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.core.processor import Beginning, forbid, place
from jaxspec.core.row_settings import spread_setting


class Produced(NamedTuple):
    """The number of new tokens of each row, and its stop tokens, padded with -1."""

    number: Int[Array, "B"]
    stop_ids: Int[Array, "B M"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MinNewTokens:
    """Forbids the stop tokens of a row until it has so many new tokens.

    Attributes:
        number: the least number of new tokens before a stop token, one number or one for each row.
    """

    number: Any

    def rows(self, batch: int, vocab: int) -> Self:
        limits = np.int32, lambda v: (v >= 0) & (v < 2**31), "a whole number from 0"
        return dataclasses.replace(
            self, number=spread_setting("the number of MinNewTokens", self.number, limits, batch)
        )

    def init(self, beginning: Beginning) -> Produced:
        return Produced(jnp.zeros((len(beginning.stop_ids),), jnp.int32), beginning.stop_ids)

    def absorb(
        self, state: Produced, tokens: Int[Array, "B M"], count: Int[Array, "B"], start: Int[Array, "B"]
    ) -> Produced:
        return state._replace(number=state.number + jnp.maximum(count - jnp.maximum(start, 0), 0))

    def apply(self, state: Produced, path: Int[Array, "B N D"], logits: Float[Array, "B N V"]) -> Float[Array, "B N V"]:
        return place(logits, self._forbidden(state, path), -jnp.inf)

    def apply_to(
        self, state: Produced, path: Int[Array, "B N D"], tokens: Int[Array, "B N R"], logits: Float[Array, "B N R"]
    ) -> Float[Array, "B N R"]:
        return forbid(logits, tokens, self._forbidden(state, path))

    def _forbidden(self, state: Produced, path: Int[Array, "B N D"]) -> Int[Array, "B N M"]:
        produced = state.number[:, None] + (path >= 0).sum(-1)
        early = (produced < self.number[:, None])[..., None]
        return jnp.where(early, state.stop_ids[:, None], -1)
