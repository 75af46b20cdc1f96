"""The processor that draws tokens with a secret, so that whoever knows the secret can recognise a text.

A token is drawn by Gumbel-max with noise that is a function of the secret and of the last tokens (Aaronson 2022, "My AI
safety lecture for UT Effective Altruism"; Fernandez et al. 2023, arXiv:2308.00113, section 2). For whoever does not
know the secret, every token is a sample of the model's law. `jaxspec.detect_watermark` computes a p-value from a text.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.core import threefry
from jaxspec.core.checks import whole
from jaxspec.core.laws import log_law, scores
from jaxspec.core.processor import Beginning, append_text, keep_last, last_tokens
from jaxspec.core.sampling import MIN_TEMPERATURE, Sampling
from jaxspec.core.secret import noise_keys, secret_words
from jaxspec.core.sizes import MAX_WATERMARK_CONTEXT
from jaxspec.errors import InvalidConfig

_LAW = ("temperature", "top_k", "top_p", "min_p")


class Written(NamedTuple):
    """The text of each row, its length, and the position of the first token after the prompt."""

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]
    begin: Int[Array, "B"]


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Watermark:
    """Draws tokens with noise that follows from a secret and the last tokens, so that the text can be recognised.

    It must be the last processor, and `Sampling`'s own temperature must be 0, because the token is drawn here. Where
    the same tokens stand before a new token again, the number of times is a part of the noise, so that a text does not
    repeat itself. The same secret and prompt always give the same text.

    Attributes:
        secret: a whole number from 0 to 2^64 - 1, one for all rows or a list with one for each row.
        temperature: the temperature of the tokens, one number or one for each row; a row with 0 has no watermark.
        top_k, top_p, min_p: as in `jaxspec.Sampling`.
        context: the number of tokens before a token that decide its noise, from 1 to 16. With more tokens, the noise
            repeats less often in different texts; with fewer, more of the watermark remains in an edited text.
    """

    secret: Any
    temperature: Any = 1.0
    top_k: Any = 0
    top_p: Any = 1.0
    min_p: Any = 0.0
    context: int = 4

    draws: ClassVar[bool] = True

    def rows(self, batch: int, vocab: int) -> Self:
        whole("the context of Watermark", self.context, 1, MAX_WATERMARK_CONTEXT)
        law = Sampling(**{name: getattr(self, name) for name in _LAW}).rows(batch, vocab)
        settings = {name: getattr(law, name) for name in _LAW}
        if hasattr(self.secret, "ndim") and self.secret.ndim == 2:
            return dataclasses.replace(self, **settings)  # as made by this method
        given = self.secret.tolist() if isinstance(self.secret, np.ndarray) else self.secret
        listed = given if isinstance(given, (list, tuple)) else [given] * batch
        if len(listed) != batch:
            raise InvalidConfig(f"Watermark needs one secret, or one for each of the {batch} rows; got {len(listed)}")
        words = np.asarray([secret_words(secret) for secret in listed], np.uint32).reshape(batch, 2)
        return dataclasses.replace(self, secret=jnp.asarray(words), **settings)

    def init(self, beginning: Beginning) -> Written:
        batch = len(beginning.stop_ids)
        zeros = jnp.zeros((batch,), jnp.int32)
        return Written(jnp.full((batch, beginning.slots), -1, jnp.int32), zeros, zeros + beginning.slots)

    def absorb(
        self, state: Written, tokens: Int[Array, "B M"], count: Int[Array, "B"], start: Int[Array, "B"]
    ) -> Written:
        text = append_text(state.tokens, state.length, tokens, count)
        return Written(text, state.length + count, jnp.minimum(state.begin, state.length + jnp.maximum(start, 0)))

    def apply(self, state: Written, path: Int[Array, "B N D"], logits: Float[Array, "B N V"]) -> Float[Array, "B N V"]:
        law = Sampling(**{name: getattr(self, name) for name in _LAW})
        noise = threefry.gumbel(self._keys(state, path), logits.shape[-1])
        drawn = (self.temperature >= MIN_TEMPERATURE)[:, None, None]
        return jnp.where(drawn, log_law(scores(logits, law), law) + noise, logits)

    def _keys(self, state: Written, path: Int[Array, "B N D"]) -> UInt32[Array, "B N 2"]:
        """Returns the data of the key of the noise after each text."""
        before = keep_last(jnp.full((len(path), self.context), -1, jnp.int32), state.tokens, state.length)
        last = last_tokens(before, path)
        # The tokens after which the absorbed text and the path went on, as windows of `context` tokens.
        text = jnp.pad(state.tokens, ((0, 0), (self.context, 0)), constant_values=-1)[:, None]
        at = jnp.arange(state.tokens.shape[1])
        written = (at >= state.begin[:, None]) & (at < state.length[:, None])
        times = _count_repeats(text, last, written[:, None])
        if path.shape[2]:  # XLA fails where an empty slice of joined arrays is taken (JAX 0.10 to 0.12)
            own = jnp.concatenate([jnp.broadcast_to(before[:, None], (*path.shape[:2], self.context)), path], -1)
            beyond = state.length[:, None] + jnp.arange(path.shape[2]) >= state.begin[:, None]
            times += _count_repeats(own, last, beyond[:, None] & (path >= 0))
        secret = jnp.broadcast_to(self.secret[:, None], (*path.shape[:2], 2))
        return noise_keys(secret, last, times)

    def tree_flatten_with_keys(self) -> tuple[tuple, int]:
        names = "secret", *_LAW
        return tuple((jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names), self.context

    @classmethod
    def tree_unflatten(cls, context: int, fields: Any) -> "Watermark":
        made = object.__new__(cls)
        for name, value in zip(("secret", *_LAW, "context"), (*fields, context), strict=True):
            object.__setattr__(made, name, value)
        return made


def _count_repeats(
    text: Int[Array, "B #N S"], last: Int[Array, "B N L"], counted: Bool[Array, "B #N M"]
) -> Int[Array, "B N"]:
    """Returns how many of the counted tokens of a text stand after the same tokens as the next token will."""
    size = text.shape[-1] - last.shape[-1]
    alike = counted
    for i in range(last.shape[-1]):
        alike = alike & (text[..., i : i + size] == last[..., i : i + 1])
    return alike.sum(-1, dtype=jnp.int32)
