"""One optimizer step, as a pure function: loss, gradients of the heads alone, AdamW, and the skipping of bad steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core.networks import LanguageModel
from jaxspec.core.records import Params, Window
from jaxspec.heads.network import HeadsConfig
from jaxspec.train.losses import Batch, Frozen, Sums, counted, freeze, head_weights, own_loss, sums
from jaxspec.train.settings import Settings

SMOOTH = 0.98
"""Of the running accuracies."""


class Trainable(NamedTuple):
    """What gradients go to."""

    heads: Params  # without the drafted tokens' ids
    target: Params = None  # of Medusa-2 alone


class TrainState(NamedTuple):
    """All that a step changes: what a checkpoint holds."""

    params: Trainable
    opt: Any
    step: Int[Array, ""]
    running: Float[Array, "n"]  # top-1 accuracy of each head, smoothed
    window: Sums  # since the last line of the log
    skipped: Int[Array, ""]  # steps whose loss or gradient was not finite
    bad: Int[Array, ""]  # of those, how many in a row just now


class Report(NamedTuple):
    """Of one step."""

    loss: Float[Array, ""]
    gradient: Float[Array, ""]  # norm, before clipping


def learning_rate(settings: Settings) -> optax.Schedule:
    """Linear warm-up, then a cosine down to 0 at the last step."""
    warmup = min(settings.warmup, settings.steps - 1)
    return optax.warmup_cosine_decay_schedule(0.0 if warmup else settings.learning_rate, settings.learning_rate, warmup,
                                              settings.steps)  # fmt: skip


def optimizer(settings: Settings) -> optax.GradientTransformation:
    """AdamW with clipping; larger steps for matrices; in Medusa-2 the target joins after the heads' warm-up."""
    rate = learning_rate(settings)

    def of_target(step: Array) -> Array:
        return jnp.where(step < settings.medusa2_warmup, 0.0, settings.medusa2_rate * rate(step))

    def is_matrix(params: Trainable) -> Trainable:
        return Trainable(
            jax.tree.map(lambda leaf: leaf.ndim > 1, params.heads), jax.tree.map(lambda _: False, params.target)
        )

    schedules: dict[Any, Any] = {"heads": rate, "target": of_target}
    groups = {name: optax.adamw(one, weight_decay=settings.weight_decay) for name, one in schedules.items()}
    labels = Trainable("heads", "target")

    def label(params: Trainable) -> Trainable:
        return Trainable(*(jax.tree.map(lambda _, name=name: name, tree) for name, tree in zip(labels, params)))

    return optax.chain(
        optax.clip_by_global_norm(settings.clip) if settings.clip else optax.identity(),
        optax.multi_transform(groups, label),
        optax.masked(optax.scale(settings.matrix_rate), is_matrix),
    )


def start(settings: Settings, config: HeadsConfig, params: Trainable) -> TrainState:
    """Before the first step."""
    count = [jnp.zeros((), jnp.int32) for _ in range(3)]  # each its own: a step gives them back in place
    nothing = Sums(*(jnp.zeros(config.num_heads) for _ in Sums._fields))
    running = jnp.zeros(config.num_heads)
    return TrainState(params, optimizer(settings).init(params), count[0], running, nothing, *count[1:])


def read(lm: LanguageModel, params: Params, tokens: Array, segments: Array) -> Float[Array, "B T E"]:
    """The target's features after every token of packed rows; texts of one row do not see one another."""
    batch, size = tokens.shape
    steps = jnp.arange(size)
    begins = jnp.concatenate([jnp.ones((batch, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    positions = steps - lax.cummax(jnp.where(begins, steps, 0), axis=1)
    mask = (segments[:, :, None] == segments[:, None, :]) & (steps[:, None] >= steps)
    return lm.apply(params, Window(tokens, positions, mask), lm.init_cache(batch, 0))[0]


def train_step(
    settings: Settings,
    config: HeadsConfig,
    lm: LanguageModel,
    ids: Int[Array, "R"] | None,
    frozen: Frozen,
    state: TrainState,
    batch: Batch,
) -> tuple[TrainState, Report]:
    """A step on rows in parts, `[A, B, ...]`. One whose loss or gradient is not finite changes nothing but counts."""
    weights = head_weights(settings, state.running)
    dtype = jnp.dtype(settings.precision)

    def loss(params: Trainable, part: Batch) -> tuple[Array, Sums]:
        cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params.heads)
        heads = cast if ids is None else cast | {"tokens": ids}
        if params.target is None:
            found = sums(settings, config, heads, frozen, part)
            return (weights * found.loss / positions).sum(), found
        features = read(lm, params.target, part.tokens, part.segments)
        tables = freeze(config, lm, params.target)
        own = own_loss(tables, part, features)
        found = sums(settings, config, heads, tables, part._replace(features=features))
        return settings.medusa2_heads * (weights * found.loss / positions).sum() + own / positions[0], found

    # All parts together count as one batch, whatever their shares.
    def count(part: Batch) -> Array:
        return jnp.stack([counted(settings, frozen, part, i).sum(dtype=jnp.float32) for i in range(config.num_heads)])

    positions = jnp.maximum(jax.vmap(count)(batch).sum(0), 1)

    def add(total: tuple, part: Batch) -> tuple[tuple, None]:
        (value, found), gradients = jax.value_and_grad(loss, has_aux=True)(state.params, part)
        return jax.tree.map(jnp.add, total, (value, found, gradients)), None

    zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, state.window), jax.tree.map(jnp.zeros_like, state.params))
    (value, found, gradients), _ = lax.scan(add, zeros, batch)
    norm = optax.global_norm(gradients)
    sound = jnp.isfinite(value) & jnp.isfinite(norm)
    updates, opt = optimizer(settings).update(gradients, state.opt, state.params)
    params = optax.apply_updates(state.params, updates)
    accuracy = found.top1 / jnp.maximum(found.seen, 1)
    running = jnp.where(state.step == 0, accuracy, SMOOTH * state.running + (1 - SMOOTH) * accuracy)
    window = jax.tree.map(jnp.add, state.window, found)
    params, opt, running, window = jax.tree.map(
        lambda new, old: jnp.where(sound, new, old),
        (params, opt, running, window),
        (state.params, state.opt, state.running, state.window),
    )
    bad = jnp.where(sound, 0, state.bad + 1)
    skipped = state.skipped + jnp.where(sound, 0, 1)
    return TrainState(params, opt, state.step + 1, running, window, skipped, bad), Report(value, norm)
