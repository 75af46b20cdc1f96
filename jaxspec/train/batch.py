"""Arrays of a training step: a batch of packed rows, the frozen parts of the target, and what heads guess."""

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, Shaped


class Batch(NamedTuple):
    """Packed rows and the target's features of every token.

    Attributes:
        tokens, segments, mask: see `jaxspec.train.packing.Rows`.
        features: the features that the trainee's network computes. The target's projection reads the first E entries.
        key: random key of each row, for the noise and the draws of a training step; None in evaluation. A device draws
            for its own rows what one device would draw.
        anchors: the positions that blocks are guessed from (`jaxspec.train.trainee.BlockTraining`); None for all
            positions. Some drafted tokens may be guessed from only the first of these positions; see `limit_anchors`.
    """

    tokens: Int[Array, "B T"]
    segments: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    features: Float[Array, "B T F"]
    key: Key[Array, "B"] | None = None
    anchors: Int[Array, "B A"] | None = None


class Guess(NamedTuple):
    """What heads guess in one step at every position, or at `Batch.anchors`.

    Attributes:
        states: what `jaxspec.train.trainee.Trainee.logits` computes the logits from, of the token that is 2 + step
            positions ahead: an array `[B, A, ...]`, or a tuple of such arrays.
        penalty: an additional loss at each position; None for no additional loss.
        certainty: logits of the estimated acceptance, which is the probability mass that the laws of the draft and the
            target share; None for no estimate.
    """

    states: Any
    penalty: Float[Array, "B A"] | None = None
    certainty: Float[Array, "B A"] | None = None


class FrozenTarget(NamedTuple):
    """The parts of the target that heads are trained against. They receive no gradient, and are empty if unused.

    Attributes:
        rows: the rows of the target's projection for the drafted tokens.
        everything: all rows of the projection, if the vocabulary is reduced and the loss needs acceptance; else None.
        embed: the embeddings, for heads that read tokens; else None.
        index: the row of each token, -1 for tokens that are not drafted; None if the vocabulary is not reduced.
        ids: the drafted tokens, ascending; None if the vocabulary is not reduced.
    """

    rows: Float[Array, "R E"]
    everything: Float[Array, "V E"] | None
    embed: Float[Array, "V E"] | None
    index: Int[Array, "V"] | None  # pyright: ignore[reportIncompatibleMethodOverride]
    ids: Int[Array | np.ndarray, "R"] | None = None

    @classmethod
    def empty(cls) -> Self:
        """Returns empty parts, for a trainee that uses none."""
        return cls(jnp.zeros((0, 0)), None, None, None)


def positions_of(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the position of each token in its text."""
    steps = jnp.arange(segments.shape[1])
    begins = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    return steps - lax.cummax(jnp.where(begins, steps, 0), axis=1)


def shift_left(values: Array, steps: int) -> Array:
    """Shifts each row `[B, T, ...]` by `steps` tokens to the left, and fills its end with zeros."""
    return jnp.pad(values[:, steps:], ((0, 0), (0, steps), *[(0, 0)] * (values.ndim - 2)))


def find_supervised(batch: Batch, step: int, blocks: bool = False) -> Bool[Array, "B T"]:
    """Returns a mask of the positions t for which token t + 2 + step is in the same text and written by the assistant.

    With `blocks`, this must hold for all tokens from t + 2 to t + 2 + step.
    """
    steps = 2 + step
    same = (batch.segments > 0) & (shift_left(batch.segments, steps) == batch.segments)
    supervised = same & shift_left(batch.mask, steps)
    return supervised & find_supervised(batch, step - 1, True) if blocks and step else supervised


def take_anchors(batch: Batch, values: Shaped[Array, "B T *v"]) -> Shaped[Array, "B A *v"]:
    """Returns the values at `batch.anchors`, or all values if `batch.anchors` is None."""
    if batch.anchors is None:
        return values
    index = batch.anchors.reshape(*batch.anchors.shape, *[1] * (values.ndim - 2))
    return jnp.take_along_axis(values, index, axis=1)


def draw_anchors(batch: Batch, count: int | None) -> Int[Array, "B A"]:
    """Draws `count` positions t of each row, without repetition, for which the assistant wrote token t + 2.

    The key of a row decides its draws. Rows with fewer such positions are padded with positions that no loss counts. If
    `count` is None, all positions are drawn.
    """
    assert batch.key is not None
    size = batch.tokens.shape[1]
    drawn = jax.vmap(lambda key: jax.random.uniform(key, (size,)))(batch.key)
    return lax.top_k(jnp.where(find_supervised(batch, 0), drawn, -1), size if count is None else min(count, size))[1]


def limit_anchors(batch: Batch, shares: tuple[float, ...], step: int) -> Batch:
    """Returns the batch with the leading fraction `shares[step]` of its anchors; all anchors if `shares` is empty."""
    if batch.anchors is None or not shares:
        return batch
    return batch._replace(anchors=batch.anchors[:, : max(1, int(shares[step] * batch.anchors.shape[1]))])
