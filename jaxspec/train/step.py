"""An optimiser step as a pure function: loss, gradients and AdamW. Steps with non-finite results are skipped."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core.networks import LanguageModel
from jaxspec.core.records import Params, Window
from jaxspec.train.batch import draw_anchors, positions_of
from jaxspec.train.losses import (
    Batch,
    FrozenTarget,
    LossSums,
    counted_positions,
    freeze,
    head_weights,
    product_dtype,
    sum_target_loss,
    weigh_losses,
)
from jaxspec.train.placement import Placement, differentiate
from jaxspec.train.settings import TrainSettings
from jaxspec.train.trainee import Joint, Trainee

ACCURACY_DECAY = 0.98
"""Decay of the running accuracies."""


class Trainable(NamedTuple):
    """The parameters that receive gradients.

    Attributes:
        heads: parameters of the heads, without the ids of the drafted tokens, or of the draft model.
        target: parameters of the target if it is trained as well (`Trainee.joint`); else None.
    """

    heads: Params
    target: Params = None


class TrainState(NamedTuple):
    """Everything that a step changes, and that a checkpoint holds.

    Attributes:
        params: the parameters.
        opt: the optimiser's state.
        step: number of steps taken.
        running: running average of the top-1 accuracy of each drafted token.
        window: sums since the last line of the log.
        skipped: steps whose loss or gradient was not finite.
        bad: number of consecutive steps, up to the last one, whose loss or gradient was not finite.
    """

    params: Trainable
    opt: Any
    step: Int[Array, ""]
    running: Float[Array, "n"]
    window: LossSums
    skipped: Int[Array, ""]
    bad: Int[Array, ""]


class Report(NamedTuple):
    """The loss of a step, and the norm of its gradient before clipping."""

    loss: Float[Array, ""]
    gradient: Float[Array, ""]


def learning_rate(settings: TrainSettings) -> optax.Schedule:
    """Returns the learning rate by step: linear warm-up, then a cosine decay to 0 at the last step."""
    warmup = min(settings.warmup, settings.steps - 1)
    return optax.warmup_cosine_decay_schedule(0.0 if warmup else settings.learning_rate, settings.learning_rate, warmup,
                                              settings.steps)  # fmt: skip


def optimizer(settings: TrainSettings, joint: Joint | None) -> optax.GradientTransformation:
    """Returns AdamW with clipping, a factor for matrices, and a learning rate for a target that is trained."""
    rate = learning_rate(settings)

    def of_target(step: Array) -> Array:
        if joint is None:  # no parameter has this rate, but its step count is part of every checkpoint
            return jnp.zeros(())
        return jnp.where(step < joint.warmup, 0.0, joint.rate * rate(step))

    def is_matrix(params: Trainable) -> Trainable:
        return Trainable(
            jax.tree.map(lambda leaf: leaf.ndim > 1, params.heads), jax.tree.map(lambda _: False, params.target)
        )

    schedules: dict[Any, Any] = {"heads": rate, "target": of_target}
    groups = {name: optax.adamw(schedule, weight_decay=settings.weight_decay) for name, schedule in schedules.items()}
    labels = Trainable("heads", "target")

    def label(params: Trainable) -> Trainable:
        return Trainable(*(jax.tree.map(lambda _, name=name: name, tree) for name, tree in zip(labels, params)))

    return optax.chain(
        optax.clip_by_global_norm(settings.clip) if settings.clip else optax.identity(),
        optax.multi_transform(groups, label),
        optax.masked(optax.scale(settings.matrix_rate), is_matrix),
    )


def init_state(settings: TrainSettings, trainee: Trainee, params: Trainable) -> TrainState:
    """Returns the state before the first step."""
    count = [jnp.zeros((), jnp.int32) for _ in range(3)]  # separate buffers, since a step donates them
    zeros, running = LossSums.zeros(settings, trainee), jnp.zeros(trainee.drafted)
    opt = optimizer(settings, trainee.joint).init(params)
    return TrainState(params, opt, count[0], running, zeros, *count[1:])


def compute_features(
    lm: LanguageModel, params: Params, tokens: Array, segments: Array, placement: Placement | None = None
) -> Float[Array, "B T E"]:
    """Computes the target's features after every token of packed rows; texts of a row do not attend to each other.

    Args:
        lm: the network.
        params: its parameters.
        tokens, segments: the rows.
        placement: the places of rows and parameters on several devices; None for one device.
    """
    if placement is not None:
        params = placement.collect_target(lm, params)
    steps = jnp.arange(tokens.shape[1])
    mask = (segments[:, :, None] == segments[:, None, :]) & (steps[:, None] >= steps)
    window = Window(tokens, positions_of(segments), mask)
    features = lm.apply(params, window, lm.init_cache(len(tokens), 0))[0]
    return features if placement is None else placement.keep_rows(features)


def train_step(
    settings: TrainSettings,
    trainee: Trainee,
    lm: LanguageModel,
    frozen: FrozenTarget,
    state: TrainState,
    batch: Batch,
    placement: Placement | None = None,
) -> tuple[TrainState, Report]:
    """Takes an optimiser step on the A parts of a batch, whose arrays are `[A, B, ...]`.

    If the loss or the gradient is not finite, only the counts of the state change.

    Args:
        settings: the settings.
        trainee: the heads.
        lm: the network that computes the features in this step if the target is trained as well.
        frozen: the frozen parts of the target.
        state: the state before the step.
        batch: the batch.
        placement: the places of all arrays on several devices; None for one device.
    """
    joint, blocks = trainee.joint, trainee.blocks
    weights = head_weights(settings, state.running, None if blocks is None else blocks.gamma)
    dtype = jnp.dtype(product_dtype(settings))

    own = settings if placement is None else placement.settings_of_a_device(settings, state.params)

    def loss(params: Trainable, part: Batch, constants: tuple[FrozenTarget, Array, Array]) -> tuple[Array, LossSums]:
        tables, scale, positions = constants
        if joint is None:
            return weigh_losses(own, trainee, params.heads, tables, part, scale)
        features = compute_features(lm, params.target, part.tokens, part.segments)
        tables = freeze(trainee, lm, params.target)
        of_target = sum_target_loss(tables, part, features)
        part = part._replace(features=features)
        value, sums = weigh_losses(own, trainee, params.heads, tables, part, scale)
        return joint.heads_weight * value + of_target / positions[0], sums

    dtypes = Trainable(
        jax.tree.map(lambda _: dtype, state.params.heads), jax.tree.map(lambda leaf: leaf.dtype, state.params.target)
    )
    keys = jax.random.split(jax.random.fold_in(jax.random.key(settings.seed), state.step), batch.tokens.shape[:2])
    batch = batch._replace(key=keys)
    if blocks is not None:
        batch = batch._replace(anchors=jax.vmap(lambda part: draw_anchors(part, blocks.anchors))(batch))

    # The loss is a mean over all parts together, however many positions each part has.
    def count(part: Batch) -> Array:
        every = (counted_positions(settings, trainee, frozen, part, i) for i in range(trainee.drafted))
        return jnp.stack([each.sum(dtype=jnp.float32) for each in every])

    positions = jnp.maximum(jax.vmap(count)(batch).sum(0), 1)
    if blocks is not None:  # one mean over all tokens of blocks, not one mean for each index in a block
        weights = weights * positions / (weights * positions).sum()

    def add(total: tuple, part: Batch) -> tuple[tuple, None]:
        constants = frozen, weights / positions, positions
        compute = differentiate if placement is None else placement.differentiate
        (value, sums), gradients = compute(loss, state.params, dtypes, part, constants)
        total = jax.tree.map(jnp.add, total, (value, sums, gradients))
        return total if placement is None else placement.keep(total), None

    zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, state.window), jax.tree.map(jnp.zeros_like, state.params))
    (value, sums, gradients), _ = lax.scan(add, zeros, batch)
    norm = optax.global_norm(gradients)
    is_finite = jnp.isfinite(value) & jnp.isfinite(norm)
    updates, opt = optimizer(settings, joint).update(gradients, state.opt, state.params)
    params = optax.apply_updates(state.params, updates)
    accuracy = sums.top1 / jnp.maximum(sums.seen, 1)
    running = jnp.where(state.step == 0, accuracy, ACCURACY_DECAY * state.running + (1 - ACCURACY_DECAY) * accuracy)
    window = jax.tree.map(jnp.add, state.window, sums)
    params, opt, running, window = jax.tree.map(
        lambda new, old: jnp.where(is_finite, new, old),
        (params, opt, running, window),
        (state.params, state.opt, state.running, state.window),
    )
    bad = jnp.where(is_finite, 0, state.bad + 1)
    skipped = state.skipped + jnp.where(is_finite, 0, 1)
    state = TrainState(params, opt, state.step + 1, running, window, skipped, bad)
    return state if placement is None else placement.keep(state), Report(value, norm)
