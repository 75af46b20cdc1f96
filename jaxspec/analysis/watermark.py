"""Recognises texts that `jaxspec.Watermark` drew, and says how likely another text would look the same.

A token that was drawn with the noise of the secret has a large number u in [0, 1) at its place of the noise. For texts
without the watermark, u is uniform, so that the sum of -log(1 - u) over T tokens has a gamma distribution of shape T
(Fernandez et al. 2023, arXiv:2308.00113, section 3). The p-value is exact, not asymptotic.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from jaxspec.core import threefry
from jaxspec.core.checks import check_arguments, index, whole
from jaxspec.core.secret import noise_keys, secret_words
from jaxspec.core.sizes import MAX_WATERMARK_CONTEXT
from jaxspec.errors import InvalidConfig, shown


@dataclasses.dataclass(frozen=True)
class Detection:
    """What a text says about a watermark.

    Attributes:
        tokens: T, the number of tokens that were tested: those with enough tokens before them.
        score: the sum of -log(1 - u) over these tokens; about T without the watermark.
        p_value: the probability that a text without the watermark has such a score or a higher one.
    """

    tokens: int
    score: float
    p_value: float


@check_arguments
def detect_watermark(tokens: Sequence[int], secret: int, vocab: int, context: int = 4) -> Detection:
    """Tests whether a text was drawn by `jaxspec.Watermark` with a secret.

    Args:
        tokens: the token ids of the text without its prompt, as the model's tokenizer gives them.
        secret: the secret.
        vocab: V, the size of the model's vocabulary (`Model.lm.vocab`).
        context: the `context` of the watermark.

    Raises:
        InvalidConfig: an argument is out of range, or a token does not exist.
    """
    vocab, context = whole("vocab", vocab), whole("context", context, 1, MAX_WATERMARK_CONTEXT)
    ids = _token_ids(tokens, vocab)
    first, second = secret_words(secret)
    count = len(ids) - context
    if count <= 0:
        return Detection(0, 0.0, 1.0)
    last = np.lib.stride_tricks.sliding_window_view(ids, context)[:count]
    seen: dict[bytes, int] = {}
    times = np.zeros(count, np.int32)
    for i, window in enumerate(last):
        times[i] = seen.get(window.tobytes(), 0)
        seen[window.tobytes()] = int(times[i]) + 1
    # Texts of like lengths share a program.
    rest = (1 << (count - 1).bit_length()) - count
    padded = (np.pad(a, ((0, rest), *((0, 0),) * (a.ndim - 1))) for a in (last, times, ids[context:]))
    noise = np.asarray(_noise(np.asarray([first, second], np.uint32), *padded, vocab))[:count]
    # Of Gumbel noise g = -log(-log(u)), -log(1 - u) is -log(1 - exp(-exp(-g))).
    score = float(-np.log(-np.expm1(-np.exp(-noise.astype(np.float64)))).sum())
    from scipy.special import gammaincc  # scipy takes a while to import

    return Detection(count, score, float(gammaincc(count, score)))


@jax.jit
def _noise(
    secret: UInt32[Array, "2"], last: Int[Array, "N L"], times: Int[Array, "N"], tokens: Int[Array, "N"], vocab: Array
) -> Float[Array, "N"]:
    """Returns the noise of one token after each context."""
    keys = noise_keys(jnp.broadcast_to(secret, (len(last), 2)), last, times)
    return threefry.gumbel_at(keys, tokens[:, None], vocab)[:, 0]


def _token_ids(tokens: Any, vocab: int) -> np.ndarray:
    if isinstance(tokens, str) or not isinstance(tokens, (Sequence, np.ndarray, jax.Array)):
        raise InvalidConfig(f"tokens must be a list of token ids, got {shown(tokens)}")
    ids = [index(token) for token in tokens]
    for token, number in zip(tokens, ids):
        if number is None or not 0 <= number < vocab:
            raise InvalidConfig(f"a token id is {shown(token)}; ids go from 0 to {vocab - 1}")
    return np.asarray(ids, np.int32)
