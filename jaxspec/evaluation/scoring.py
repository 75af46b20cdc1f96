"""Log-likelihoods of given texts."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import checks, sizes
from jaxspec.core.networks import LanguageModel
from jaxspec.core.records import Params, Window
from jaxspec.errors import InvalidConfig, TokenOutOfRange
from jaxspec.generation.inputs import check_model
from jaxspec.models.model import Model
from jaxspec.models.query_chunks import join_axis, split_axis

POSITIONS_AT_ONCE = 64
"""The number of positions of a row whose logits exist at once."""


class Continuation(NamedTuple):
    """A text to score: `tokens[start:]` are scored, and the tokens before them are the context."""

    tokens: Sequence[int]
    start: int


class Score(NamedTuple):
    """The score of a continuation.

    Attributes:
        logprob: the sum of the log-probabilities of its tokens under the raw logits, added in float64.
        greedy: whether each of its tokens is the most likely one.
    """

    logprob: float
    greedy: bool


def score(target: Model, continuations: Iterable[Continuation], batch: int = 8) -> list[Score]:
    """Returns the log-likelihood of each continuation, from one pass over each text.

    Args:
        target: the model.
        continuations: the texts.
        batch: the number of texts that are read at once. Texts of similar length are read together.

    Raises:
        InvalidConfig: a text has no context, or more tokens than the model's context length.
        TokenOutOfRange: a token is not in the vocabulary.
    """
    check_model("target", target)
    batch = checks.whole("batch", batch)
    continuations = list(continuations)
    for index, continuation in enumerate(continuations):
        _check(target.lm, index, continuation)
    scores: list[Score] = [Score(0.0, True)] * len(continuations)
    for width, rows in _batches([len(each.tokens) for each in continuations], batch):
        padded = [*rows, *rows[:1] * (sizes.round_rows(len(rows)) - len(rows))]
        tokens = np.zeros((len(padded), width + 1), np.int32)
        for i, row in enumerate(padded):
            tokens[i, : len(continuations[row].tokens)] = continuations[row].tokens
        start = np.array([continuations[row].start for row in padded], np.int32)
        length = np.array([len(continuations[row].tokens) for row in padded], np.int32)
        totals = jax.device_get(_score(target.lm, target.params, tokens, start, length))
        for row, logprob, greedy in zip(rows, *totals):
            scores[row] = Score(float(logprob.sum(dtype=np.float64)), bool(greedy))
    return scores


def _check(lm: LanguageModel, index: int, continuation: Continuation) -> None:
    tokens, start = continuation
    if not 1 <= start <= len(tokens):
        raise InvalidConfig(
            f"continuation {index} starts at token {start} of {len(tokens)}; at least one token must precede it"
        )
    if len(tokens) > lm.context + 1:  # the last token is not read
        raise InvalidConfig(f"continuation {index} has {len(tokens)} tokens; the model reads {lm.context}")
    if wrong := [token for token in tokens if not 0 <= token < lm.vocab]:
        raise TokenOutOfRange(f"continuation {index} has token {wrong[0]}; ids go from 0 to {lm.vocab - 1}")


def _batches(lengths: Sequence[int], batch: int) -> Iterator[tuple[int, list[int]]]:
    """Yields the padded number of tokens that are read, and the rows, of each batch; the longest texts first."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    widths = [sizes.round_rows(max(length - 1, POSITIONS_AT_ONCE)) for length in lengths]
    rows: list[int] = []
    for row in order:
        if rows and (len(rows) == batch or widths[row] != widths[rows[0]]):
            yield widths[rows[0]], rows
            rows = []
        rows.append(row)
    if rows:
        yield widths[rows[0]], rows


@functools.partial(jax.jit, static_argnums=0)
def _score(
    lm: LanguageModel, params: Params, tokens: Int[Array, "R T"], start: Int[Array, "R"], length: Int[Array, "R"]
) -> tuple[Float[Array, "R T-1"], Bool[Array, "R"]]:
    """Returns the log-probabilities of `tokens[start:length]`, 0 for others, and whether all are the most likely.

    The caller adds them in float64: in float32, the sum over a text of some hundred tokens has errors near 1e-4.
    """
    read, following = tokens[:, :-1], tokens[:, 1:]
    rows, size = read.shape
    position = jnp.broadcast_to(jnp.arange(size), read.shape)
    window = Window(read, position, jnp.broadcast_to(jnp.tri(size, dtype=bool), (rows, size, size)))
    features, _ = lm.apply(params, window, lm.init_cache(rows, 0))

    def judge(chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        states, token = chunk
        logits = lm.head(params, states)
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        chosen = jnp.take_along_axis(logits, token[..., None], -1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, -1), logits.argmax(-1) == token

    chunks: Any = tuple(split_axis(leaf, 1, POSITIONS_AT_ONCE) for leaf in (features, following))
    logprob, greedy = (join_axis(leaf, 1, size) for leaf in lax.map(judge, chunks))
    scored = (position + 1 >= start[:, None]) & (position + 1 < length[:, None])
    return jnp.where(scored, logprob, 0), (greedy | ~scored).all(1)
