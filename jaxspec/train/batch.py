"""Arrays of a training step: a batch of packed rows, the frozen parts of the target, and what heads guess."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


class Batch(NamedTuple):
    """Packed rows and the target's feature of every token.

    Attributes:
        tokens, segments, mask: see `jaxspec.train.packing.Rows`.
        features: what the trainee's network gives; the first E are those of the target's projection.
        key: of the noise of a step in training; None in evaluation.
    """

    tokens: Int[Array, "B T"]
    segments: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    features: Float[Array, "B T F"]
    key: Array | None = None


class Guess(NamedTuple):
    """What heads guess in one step at every position.

    Attributes:
        logits: of the token 2 + step ahead.
        penalty: a further loss of each position; None for none.
    """

    logits: Float[Array, "B T R"]
    penalty: Float[Array, "B T"] | None = None


class Frozen(NamedTuple):
    """The parts of the target that heads are trained against; they receive no gradient.

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


def ahead(values: Array, steps: int) -> Array:
    """Shifts each row `[B, T, ...]` by `steps` tokens to the left, and fills its end with zeros."""
    return jnp.pad(values[:, steps:], ((0, 0), (0, steps), *[(0, 0)] * (values.ndim - 2)))


def wanted(batch: Batch, step: int) -> Bool[Array, "B T"]:
    """Returns the positions t whose token t + 2 + step is in the same text and written by the assistant."""
    steps = 2 + step
    same = (batch.segments > 0) & (ahead(batch.segments, steps) == batch.segments)
    return same & ahead(batch.mask, steps)
