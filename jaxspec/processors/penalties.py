"""Penalties for tokens that the text already has: repetition, presence and frequency."""

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core.processor import Beginning, count_tokens, gather_rows, place
from jaxspec.core.row_settings import Limits, spread_setting

_MAX = float(np.finfo(np.float32).max)


class _Penalty:
    """A penalty that depends on how often a token occurs. Its state is the number of occurrences of every token."""

    of_prompt: ClassVar[bool] = False  # whether occurrences in the prompt count
    limits: ClassVar[Limits] = np.float32, lambda strength: np.abs(strength) <= _MAX, "finite"
    strength: Any

    def rows(self, batch: int, vocab: int) -> Self:
        name = f"the strength of {type(self).__name__}"
        return dataclasses.replace(self, strength=spread_setting(name, self.strength, self.limits, batch))  # pyright: ignore

    def _change(self, logits: Array, counts: Array) -> Array:
        """Returns the changed logits of tokens, by their numbers of occurrences."""
        raise NotImplementedError

    def init(self, beginning: Beginning) -> Int[Array, "B V"]:
        return jnp.zeros((len(beginning.stop_ids), beginning.vocab), jnp.int32)

    def absorb(
        self, state: Int[Array, "B V"], tokens: Int[Array, "B M"], count: Int[Array, "B"], start: Int[Array, "B"]
    ) -> Int[Array, "B V"]:
        index = jnp.arange(tokens.shape[1])
        counted = index < count[:, None]
        return count_tokens(state, tokens, counted if self.of_prompt else counted & (index >= start[:, None]))

    def apply(
        self, state: Int[Array, "B V"], path: Int[Array, "B N D"], logits: Float[Array, "B N V"]
    ) -> Float[Array, "B N V"]:
        out = self._change(logits, state[:, None])
        if not path.shape[2]:
            return out
        again = (path[..., :, None] == path[..., None, :]).sum(-1)  # occurrences of each token of a path in the path
        own = jnp.take_along_axis(logits, jnp.maximum(path, 0), 2)
        return place(out, path, self._change(own, gather_rows(state, path) + again))

    def apply_to(
        self,
        state: Int[Array, "B V"],
        path: Int[Array, "B N D"],
        tokens: Int[Array, "B N R"],
        logits: Float[Array, "B N R"],
    ) -> Float[Array, "B N R"]:
        again = (tokens[..., :, None] == path[..., None, :]).sum(-1)
        return jnp.where(tokens < 0, logits, self._change(logits, gather_rows(state, tokens) + again))

    def _column(self) -> Float[Array, "B 1 1"]:
        return self.strength[:, None, None]


def _member(cls: type) -> Any:
    """Makes a class an immutable pytree whose strength is data."""
    made = dataclasses.dataclass(frozen=True)(cls)
    return jax.tree_util.register_dataclass(made, data_fields=["strength"], meta_fields=[])


@_member
class RepetitionPenalty(_Penalty):
    """Divides the positive logits of tokens of prompt and text by the strength, and multiplies the negative ones.

    This is the penalty of CTRL (arXiv:1909.05858, section 4.1) in the form of Hugging Face's transformers.

    Attributes:
        strength: one number, or one for each row; 1 changes nothing, and greater numbers make repetitions less likely.
    """

    of_prompt = True
    limits = np.float32, lambda strength: (strength > 0) & (strength <= _MAX), "finite and above 0"
    strength: Any

    def _change(self, logits: Array, counts: Array) -> Array:
        strength = self._column()
        penalised = jnp.where(logits > 0, logits / strength, logits * strength)
        return jnp.where((counts > 0) & (strength != 1), penalised, logits)


@_member
class PresencePenalty(_Penalty):
    """Subtracts the strength from the logits of tokens of the new text, as OpenAI's API and vLLM do.

    Attributes:
        strength: one number, or one for each row; 0 changes nothing, and negative numbers favour repetitions.
    """

    strength: Any

    def _change(self, logits: Array, counts: Array) -> Array:
        return jnp.where(counts > 0, logits - self._column(), logits)


@_member
class FrequencyPenalty(_Penalty):
    """Subtracts the strength times the number of occurrences in the new text, as OpenAI's API and vLLM do.

    Attributes:
        strength: one number, or one for each row; 0 changes nothing, and negative numbers favour repetitions.
    """

    strength: Any

    def _change(self, logits: Array, counts: Array) -> Array:
        # Without the barrier, a compiler may compute product and difference as one operation that rounds once, in some
        # programs and not in others.
        return logits - lax.optimization_barrier(self._column() * counts)
