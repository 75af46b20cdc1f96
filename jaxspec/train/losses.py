"""The loss of each drafted token at each position, in float32, and its sums over a batch of rows.

The losses are:

- "ce": cross-entropy on the token (Medusa, Cai et al. 2024, arXiv:2401.10774, section 2.2.1).
- "kl": Kullback-Leibler divergence from the target's law.
- "tv": total variation, which is 1 - acceptance.
- "lk-alpha" and "lk-lambda": the LK losses (arXiv:2602.23881). "lk-alpha" is -log acceptance, and "lk-lambda"
  mixes KL and total variation by acceptance.
- "ce-l1": cross-entropy mixed with the sum of absolute differences of the laws, which is twice the total variation
  (DSpark, arXiv:2607.05147).

With a reduced vocabulary, KL renormalises the target's law on the drafted tokens, and acceptance does not.
"""

import dataclasses
import itertools
import math
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.backend.layout import default_platform
from jaxspec.core.records import Params
from jaxspec.models.layers import matmul
from jaxspec.train import calibration, chunks
from jaxspec.train.batch import Batch as Batch
from jaxspec.train.batch import FrozenTarget as FrozenTarget
from jaxspec.train.batch import Guess, limit_anchors, take_anchors
from jaxspec.train.batch import find_supervised as find_supervised
from jaxspec.train.batch import shift_left as shift_left
from jaxspec.train.settings import TrainSettings
from jaxspec.train.trainee import Trainee

MIN_ACCEPTANCE, MIX_RATE = 1e-5, 3.0
"""Constants of the LK losses: the smallest acceptance whose logarithm is taken, and eta."""


def freeze(
    trainee: Trainee, lm: Any, params: Params, ids: Any = None, laws: bool = False, dtype: str = "float32"
) -> FrozenTarget:
    """Returns the parts of a target that heads are trained against.

    Args:
        trainee: the heads.
        lm: the target's network, which gives its tables.
        params: the target's parameters.
        ids: the drafted tokens; None for the whole vocabulary.
        laws: whether the loss needs the target's law without renormalising it on the drafted tokens.
        dtype: dtype of the projection.
    """
    table, index = lm.unembedding(params), None
    if ids is None and trainee.vocab_size < table.shape[0]:
        table = table[: trainee.vocab_size]
    if ids is not None:
        ids = jnp.asarray(ids)
        index = jnp.full(trainee.vocab_size, -1, jnp.int32).at[ids].set(jnp.arange(len(ids)))
    return FrozenTarget(
        rows=(table if ids is None else table[ids]).astype(dtype),
        everything=table.astype(dtype) if laws and ids is not None else None,
        embed=lm.embedding(params) if trainee.reads_tokens else None,
        index=index,
        ids=ids,
    )


class LossSums(NamedTuple):
    """Sums over positions, by drafted token, so that the sums of the parts of a batch can be added.

    Attributes:
        loss: the loss.
        counted: positions with a loss.
        seen: positions with a token to predict, whether it can be drafted or not.
        top1: positions where the token is the most likely one.
        top5: positions where the token is among the five most likely ones.
        reached: positions where this token and all tokens before it are the most likely ones.
        blocks: sums over blocks, for heads that guess blocks if the target's law is computed; else None.
    """

    loss: Float[Array, "n"]
    counted: Float[Array, "n"]
    seen: Float[Array, "n"]
    top1: Float[Array, "n"]
    top5: Float[Array, "n"]
    reached: Float[Array, "n"]
    blocks: calibration.BlockSums | None = None

    @classmethod
    def zeros(cls, settings: TrainSettings, trainee: Trainee) -> Self:
        """Returns sums of zero, over no positions."""
        has_blocks = trainee.blocks is not None and has_law(settings, trainee)
        blocks = calibration.BlockSums.zeros(trainee.drafted) if has_blocks else None
        return cls(*(jnp.zeros(trainee.drafted) for _ in range(6)), blocks=blocks)


def has_law(settings: TrainSettings, trainee: Trainee) -> bool:
    """Returns whether the target's law is computed: for the loss, or for the acceptance of heads that guess blocks."""
    return settings.loss != "ce" or (trainee.blocks is not None and trainee.reads_features)


def needs_features(settings: TrainSettings, trainee: Trainee) -> bool:
    """Returns whether the target's features are read at all."""
    return trainee.reads_features or has_law(settings, trainee)


def product_dtype(settings: TrainSettings, platform: str | None = None) -> str:
    """Returns the dtype of the matrix products; "auto" depends on the platform, by default of JAX's default device."""
    if settings.precision != "auto":
        return settings.precision
    return "float32" if (platform or default_platform()) == "cpu" else "bfloat16"


def needs_laws(settings: TrainSettings, trainee: Trainee) -> bool:
    """Returns whether a loss needs the target's law without renormalising it on the drafted tokens."""
    return trainee.blocks is not None or settings.loss not in ("ce", "kl")


def compute_acceptance(logits: Float[Array, "*b R"], target: Float[Array, "*b R"]) -> Float[Array, "*b"]:
    """Computes the probability mass that both laws share, 1 - total variation; `target` is as in `compute_loss`."""
    return jnp.minimum(jnp.exp(target), jax.nn.softmax(logits, -1)).sum(-1)


def compute_loss(
    kind: str,
    logits: Float[Array, "*b R"],
    label: Int[Array, "*b"],
    target: Float[Array, "*b R"] | None,
    ce_share: float = 0.1,
) -> Float[Array, "*b"]:
    """Computes a loss.

    Args:
        kind: name of the loss, one of `jaxspec.train.settings.LOSSES`.
        logits: logits of the draft.
        label: the row of the correct token, which only "ce" and "ce-l1" read. The cross-entropy of "ce-l1" is 0 for a
            negative row.
        target: the target's log-probabilities of these rows, whose probabilities sum to at most 1; not read by "ce".
        ce_share: the share of the cross-entropy in "ce-l1".
    """
    draft = jax.nn.log_softmax(logits, -1)
    if kind == "ce":
        return -jnp.take_along_axis(draft, label[..., None], -1)[..., 0]
    assert target is not None
    if kind == "ce-l1":
        entropy = jnp.where(label < 0, 0.0, compute_loss("ce", logits, jnp.maximum(label, 0), None))
        return ce_share * entropy + (1 - ce_share) * 2 * (1 - compute_acceptance(logits, target))
    renormalised = jax.nn.log_softmax(target, -1)
    divergence = jnp.where(renormalised > -jnp.inf, jnp.exp(renormalised) * (renormalised - draft), 0.0).sum(-1)
    if kind == "kl":
        return divergence
    acceptance = jnp.minimum(jnp.exp(target), jnp.exp(draft)).sum(-1)
    if kind == "tv":
        return 1 - acceptance
    if kind == "lk-alpha":
        return -jnp.log(jnp.maximum(acceptance, MIN_ACCEPTANCE))
    mix = jnp.exp(-MIX_RATE * lax.stop_gradient(acceptance))
    return mix * divergence + (1 - mix) * (1 - acceptance)


def counted_positions(
    settings: TrainSettings, trainee: Trainee, frozen: FrozenTarget, batch: Batch, step: int
) -> Bool[Array, "B A"]:
    """Returns a mask of the positions with a loss. Only the loss "ce" needs a token that can be drafted."""
    batch = batch if trainee.blocks is None else limit_anchors(batch, trainee.blocks.shares, step)
    there = take_anchors(batch, find_supervised(batch, step, trainee.blocks is not None))
    if settings.loss != "ce" or frozen.index is None:
        return there
    return there & (frozen.index[take_anchors(batch, shift_left(batch.tokens, 2 + step))] >= 0)


def target_law(frozen: FrozenTarget, features: Float[Array, "B T F"]) -> Float[Array, "B T R"]:
    """Computes the target's log-probabilities of the drafted tokens after every token of the rows."""
    features = features[..., : frozen.rows.shape[-1]].astype(jnp.float32)
    logits = matmul(features, frozen.rows, transposed=True)
    if frozen.everything is None:
        return jax.nn.log_softmax(logits, -1)
    whole = matmul(features, frozen.everything, transposed=True)
    return logits - jax.nn.logsumexp(whole, -1, keepdims=True)


class _Labels(NamedTuple):
    """What the loss of a step compares the guesses with.

    Attributes:
        row: the row of the correct token, -1 for a token that is not drafted.
        counted: whether the position has a loss.
        there: whether the position has a token to predict.
        anchor: the position of the text.
    """

    row: Int[Array, "B A"]
    counted: Bool[Array, "B A"]
    there: Bool[Array, "B A"]
    anchor: Int[Array, "B A"]

    @classmethod
    def of(cls, settings: TrainSettings, trainee: Trainee, frozen: FrozenTarget, whole: Batch, step: int) -> Self:
        """Returns the labels of a step."""
        blocks = trainee.blocks
        batch = whole if blocks is None else limit_anchors(whole, blocks.shares, step)
        token = take_anchors(batch, shift_left(batch.tokens, 2 + step))
        places = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1]), batch.tokens.shape)
        return cls(
            token if frozen.index is None else frozen.index[token],
            counted_positions(settings, trainee, frozen, whole, step),
            take_anchors(batch, find_supervised(batch, step, blocks is not None)),
            take_anchors(batch, places),
        )


class _Judged(NamedTuple):
    """What is known of the guesses of a step once their logits are gone.

    Attributes:
        loss: the loss of each position, 0 where it is not counted.
        rank: the rank of the correct token, from 0.
        acceptance: the probability mass that the laws of the draft and the target share; None if it is not needed.
    """

    loss: Float[Array, "B A"]
    rank: Int[Array, "B A"]
    acceptance: Float[Array, "B A"] | None


class _Constants(NamedTuple):
    """The arrays that the losses of all positions share."""

    weights: Float[Array, "n"]
    frozen: FrozenTarget
    features: Float[Array, "B T F"]


@dataclasses.dataclass(frozen=True)
class _Judge:
    """The loss of some positions in consecutive steps that guess from the same positions.

    Attributes:
        settings: the settings.
        trainee: the heads.
        first: the first of the steps.
        consecutive: whether the positions are consecutive, and not drawn.
    """

    settings: TrainSettings
    trainee: Trainee
    first: int
    consecutive: bool

    def prepare(self, data: list[_Labels], constants: _Constants) -> list[Array | None]:
        """Returns, for each step, the target's law of the token that it guesses, which consecutive positions share.

        For other positions, it returns the features that the law is computed from; None if the loss needs no law.
        """
        steps = range(self.first, self.first + len(data))
        if not has_law(self.settings, self.trainee):
            return [None for _ in steps]
        anchor, features, frozen = data[0].anchor, constants.features, constants.frozen
        count = anchor.shape[1]
        if self.consecutive:  # one law of each position for all steps
            near = lax.dynamic_slice_in_dim(features, anchor[0, 0] + 1 + self.first, count + len(steps) - 1, axis=1)
            law = lax.stop_gradient(target_law(frozen, near))
            return [law[:, i : i + count] for i in range(len(steps))]
        return [jnp.take_along_axis(features, (anchor + 1 + step)[..., None], axis=1) for step in steps]

    def judge(
        self,
        i: int,
        learned: tuple[Any, Any],
        states: Any,
        data: _Labels,
        prepared: Array | None,
        constants: _Constants,
    ) -> tuple[Float[Array, ""], _Judged]:
        """Returns the weighted sum of the losses of a step, and what is known of its guesses."""
        settings, trainee, law, step = self.settings, self.trainee, prepared, self.first + i
        projection, rows = learned
        rows = constants.frozen.rows if rows is None else rows
        if law is not None and not self.consecutive:
            law = lax.stop_gradient(target_law(constants.frozen, law))
        logits, row = trainee.logits(projection, rows, step, states), jnp.maximum(data.row, 0)
        loss = compute_loss(
            settings.loss, logits, data.row if settings.loss == "ce-l1" else row, law, settings.ce_share
        )
        # Losses that are not counted may be NaN.
        loss = jnp.where(data.counted, loss, 0.0)
        same = None
        if trainee.blocks is not None and law is not None:
            same = lax.stop_gradient(compute_acceptance(logits, law))
        own = jnp.take_along_axis(logits, row[..., None], -1)
        judged = _Judged(lax.stop_gradient(loss), (logits > own).sum(-1), same)
        return constants.weights[step] * loss.sum(), judged


def weigh_losses(
    settings: TrainSettings,
    trainee: Trainee,
    params: Params,
    frozen: FrozenTarget,
    batch: Batch,
    weights: Float[Array, "n"],
) -> tuple[Float[Array, ""], LossSums]:
    """Computes the sums of loss and accuracy of every drafted token on some rows.

    The logits exist for a few positions at a time; see `jaxspec.train.chunks`.

    Args:
        settings: the settings.
        trainee: the heads.
        params: the parameters of the heads.
        frozen: the target's tables, which receive a gradient if the target is trained as well.
        batch: the rows.
        weights: the weight of each drafted token, without a gradient.

    Returns:
        The sum of all weighted losses, and the sums by drafted token, which have no gradient.
    """
    # Features of padding may be NaN, and NaN times zero is NaN in a gradient.
    features = jnp.where((batch.segments > 0)[..., None], batch.features, 0)
    whole, blocks = batch._replace(features=features), trainee.blocks
    guesses = list(trainee.unroll(params, frozen, whole))
    steps = range(len(guesses))
    labels = [_Labels.of(settings, trainee, frozen, whole, step) for step in steps]
    total, judged = _judge_all(settings, trainee, params, frozen, whole, weights, guesses, labels)
    columns: list[tuple] = []
    shared = LossSums.zeros(settings, trainee).blocks
    reached = jnp.ones((len(features), 1), bool)
    running = jnp.ones((len(features), 1))
    for step, guess, label, one in zip(steps, guesses, labels, judged):
        there, extra = label.there, guess.penalty
        if blocks is not None and shared is not None:
            same = one.acceptance
            assert same is not None
            if guess.certainty is not None:
                entropy = blocks.confidence * optax.sigmoid_binary_cross_entropy(guess.certainty, same)
                extra = entropy if extra is None else extra + entropy
            running = running[:, : there.shape[1]] * jnp.where(there, same, 0.0)
            shared = shared.add(step, there, same, running, guess.certainty)
        first = there & (label.row >= 0) & (one.rank < 1)
        reached = reached[:, : first.shape[1]] & first
        loss = one.loss.sum()
        if extra is not None:
            added = jnp.where(label.counted, extra, 0.0).sum()
            total, loss = total + weights[step] * added, loss + lax.stop_gradient(added)
        five = there & (label.row >= 0) & (one.rank < 5)
        columns.append((loss, *(a.sum(dtype=jnp.float32) for a in (label.counted, there, first, five, reached))))
    return total, LossSums(*(jnp.stack(column) for column in zip(*columns)), blocks=shared)


def _judge_all(
    settings: TrainSettings,
    trainee: Trainee,
    params: Params,
    frozen: FrozenTarget,
    batch: Batch,
    weights: Float[Array, "n"],
    guesses: list[Guess],
    labels: list[_Labels],
) -> tuple[Float[Array, ""], list[_Judged]]:
    """Computes the losses of all steps; steps that guess from equally many positions share the target's law."""
    learned = trainee.projection(params), None if trainee.joint is None else frozen.rows
    size = max(1, chunks.POSITIONS_AT_ONCE * settings.groups // len(batch.tokens))
    features = batch.features[..., :0]
    if has_law(settings, trainee):  # padded, because tokens after the last one of a row have laws as well
        features = batch.features[..., : frozen.rows.shape[-1]]
        features = jnp.pad(features, ((0, 0), (0, size + len(guesses)), (0, 0)))
    constants = lax.stop_gradient(_Constants(weights, frozen, features))
    total, judged = jnp.float32(0), []
    for _, group in itertools.groupby(range(len(guesses)), lambda step: labels[step].row.shape[1]):
        steps = list(group)
        judge = _Judge(settings, trainee, steps[0], batch.anchors is None)
        states = [guesses[step].states for step in steps]
        data = [labels[step] for step in steps]
        result: Any = chunks.sum_in_chunks(judge, size, learned, states, data, constants)
        total, judged = total + result[0], judged + result[1]
    return total, judged


def sum_losses(
    settings: TrainSettings, trainee: Trainee, params: Params, frozen: FrozenTarget, batch: Batch
) -> LossSums:
    """Computes the sums of loss and accuracy of every drafted token on some rows, without gradients."""
    return weigh_losses(settings, trainee, params, frozen, batch, jnp.ones(trainee.drafted))[1]


def sum_target_loss(frozen: FrozenTarget, batch: Batch, features: Float[Array, "B T E"]) -> Float[Array, ""]:
    """Sums the cross-entropy of the target's own predictions of the next token, which Medusa-2 adds to the loss."""
    there = (batch.segments > 0) & (shift_left(batch.segments, 1) == batch.segments) & shift_left(batch.mask, 1)
    law = jax.nn.log_softmax(matmul(features, frozen.rows, transposed=True), -1)
    each = jnp.take_along_axis(law, shift_left(batch.tokens, 1)[..., None], -1)[..., 0]
    return -jnp.where(there, each, 0.0).sum()


def estimate_accepted_shares(sums: LossSums) -> Float[Array, "n"]:
    """Returns the share of greedy rounds on a chain that accept each token, estimated from rounds at every position."""
    return sums.reached / jnp.maximum(sums.seen, 1)


def estimate_accepted_length(sums: LossSums) -> Array:
    """Estimates the tokens of a greedy round on a chain, including the target's own, from rounds at every position."""
    return 1 + estimate_accepted_shares(sums).sum()


def head_weights(settings: TrainSettings, running: Float[Array, "n"], gamma: float | None = None) -> Float[Array, "n"]:
    """Returns the weight of each drafted token in the loss; `running` are the running top-1 accuracies.

    `gamma` is the setting of blocks that replaces `decay`.
    """
    if settings.head_weights == "decay":
        base = settings.decay if gamma is None else math.exp(-1 / gamma)
        return base ** jnp.arange(running.size, dtype=jnp.float32)
    return jnp.concatenate([jnp.ones(1), jnp.cumprod(jnp.clip(running, 0.05, 1.0))[:-1]])
