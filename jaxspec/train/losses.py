"""The losses of one head at one position, in float32, and what a batch of rows is worth under them.

Cross-entropy on the token (Medusa, Cai et al. 2024, arXiv:2401.10774, section 2.2.1); Kullback-Leibler divergence from
the target's law; total variation, 1 - acceptance; and the LK losses, -log acceptance ("lk-alpha") or KL and total
variation mixed by acceptance ("lk-lambda", arXiv:2602.23881). Where heads draft from fewer tokens than the target has,
KL takes the target's law renormalised on them, acceptance takes it as it is.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.records import Params
from jaxspec.heads.network import HeadsConfig, module, normed
from jaxspec.models.transformer import matmul
from jaxspec.train.settings import Settings

LEAST, MIX = 1e-5, 3.0
"""Of the LK losses: the least acceptance whose logarithm is taken, and eta."""


class Frozen(NamedTuple):
    """Of the target, what heads are trained against; no gradient goes there."""

    rows: Float[Array, "R E"]  # of its projection, those that are drafted from
    everything: Float[Array, "V E"] | None  # all rows, where some are not drafted from and acceptance is wanted
    embed: Float[Array, "V E"] | None  # for heads that read tokens
    # A token's row, -1: it is not drafted; None where rows are tokens.
    index: Int[Array, "V"] | None  # pyright: ignore[reportIncompatibleMethodOverride]


def freeze(
    config: HeadsConfig, lm: Any, params: Params, ids: Any = None, laws: bool = False, dtype: str = "float32"
) -> Frozen:
    """What heads of these sizes are measured against.

    Args:
        config: the sizes.
        lm: the target, which gives access to its tables.
        params: its parameters.
        ids: the drafted tokens, where not all are.
        laws: the target's law is wanted as it is, not renormalised on the drafted tokens.
        dtype: of the projection.
    """
    table, index = lm.unembedding(params), None
    if ids is not None:
        index = jnp.full(config.vocab_size, -1, jnp.int32).at[ids].set(jnp.arange(len(ids)))
    return Frozen(
        rows=(table if ids is None else table[ids]).astype(dtype),
        everything=table.astype(dtype) if laws and ids is not None else None,
        embed=lm.embedding(params) if config.reads_words else None,
        index=index,
    )


class Batch(NamedTuple):
    """Packed rows and the target's features after every token."""

    tokens: Int[Array, "B T"]
    segments: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    features: Float[Array, "B T E"]


class Sums(NamedTuple):
    """Over the counted positions, so that parts of a batch can be added."""

    loss: Float[Array, "n"]  # of each head
    counted: Float[Array, "n"]  # positions a loss was taken at
    seen: Float[Array, "n"]  # positions with a token to guess, drafted from or not
    top1: Float[Array, "n"]
    top5: Float[Array, "n"]
    reached: Float[Array, "n"]  # positions where this head and all before it guess right


def of_law(
    kind: str, logits: Float[Array, "*b R"], label: Int[Array, "*b"], target: Float[Array, "*b R"] | None
) -> Float[Array, "*b"]:
    """One of the losses.

    Args:
        kind: see `jaxspec.train.settings.LOSSES`.
        logits: the head's.
        label: the token's row; read by "ce" alone.
        target: the target's log-probabilities of these rows, of mass 1 at most; read by all but "ce".
    """
    draft = jax.nn.log_softmax(logits, -1)
    if kind == "ce":
        return -jnp.take_along_axis(draft, label[..., None], -1)[..., 0]
    assert target is not None
    known = jax.nn.log_softmax(target, -1)
    divergence = jnp.where(known > -jnp.inf, jnp.exp(known) * (known - draft), 0.0).sum(-1)
    if kind == "kl":
        return divergence
    acceptance = jnp.minimum(jnp.exp(target), jnp.exp(draft)).sum(-1)
    if kind == "tv":
        return 1 - acceptance
    if kind == "lk-alpha":
        return -jnp.log(jnp.maximum(acceptance, LEAST))
    mix = jnp.exp(-MIX * lax.stop_gradient(acceptance))
    return mix * divergence + (1 - mix) * (1 - acceptance)


def ahead(values: Array, steps: int) -> Array:
    """What stands `steps` tokens later in each row `[B, T, ...]`; zeros past its end."""
    return jnp.pad(values[:, steps:], ((0, 0), (0, steps), *[(0, 0)] * (values.ndim - 2)))


def guesses(config: HeadsConfig, params: Params, frozen: Frozen, batch: Batch) -> Iterator[Float[Array, "B T R"]]:
    """Each head's logits after every token t of every row, for token t + 2 + head: with the real tokens on its path."""
    heads, words = module(config, params), []
    if config.reads_words:
        assert frozen.embed is not None
        words = [normed(frozen.embed[ahead(batch.tokens, 1 + j)]) for j in range(config.num_heads)]
    for head, features in enumerate(heads.every(batch.features.astype(jnp.float32), words)):
        if config.num_projections:
            yield heads.logits(head, features)
        else:
            yield matmul(features, frozen.rows, transposed=True)


def wanted(batch: Batch, head: int) -> Bool[Array, "B T"]:
    """The positions t where token t + 2 + head is of the same text, and the assistant's."""
    steps = 2 + head
    same = (batch.segments > 0) & (ahead(batch.segments, steps) == batch.segments)
    return same & ahead(batch.mask, steps)


def counted(settings: Settings, frozen: Frozen, batch: Batch, head: int) -> Bool[Array, "B T"]:
    """The positions a head's loss is taken at: cross-entropy needs a token that it can draft."""
    there = wanted(batch, head)
    if settings.loss != "ce" or frozen.index is None:
        return there
    return there & (frozen.index[ahead(batch.tokens, 2 + head)] >= 0)


def target_law(frozen: Frozen, features: Float[Array, "B T E"]) -> Float[Array, "B T R"]:
    """The target's log-probabilities of the drafted tokens, after every token of the rows."""
    logits = matmul(features.astype(jnp.float32), frozen.rows, transposed=True)
    if frozen.everything is None:
        return jax.nn.log_softmax(logits, -1)
    whole = matmul(features.astype(jnp.float32), frozen.everything, transposed=True)
    return logits - jax.nn.logsumexp(whole, -1, keepdims=True)


def sums(settings: Settings, config: HeadsConfig, params: Params, frozen: Frozen, batch: Batch) -> Sums:
    """Loss and accuracy of every head on some rows."""
    # Of padding a feature may be anything, and NaN times zero is NaN in a gradient.
    features = jnp.where((batch.segments > 0)[..., None], batch.features, 0)
    batch = batch._replace(features=features)
    law = None if settings.loss == "ce" else lax.stop_gradient(target_law(frozen, batch.features))
    found: list[tuple] = []
    reached: Any = True
    for head, logits in enumerate(guesses(config, params, frozen, batch)):
        there = wanted(batch, head)
        token = ahead(batch.tokens, 2 + head)
        row = token if frozen.index is None else frozen.index[token]
        label = jnp.maximum(row, 0)
        ahead_law = None if law is None else ahead(law, 1 + head)
        loss = of_law(settings.loss, logits, label, ahead_law)
        own = jnp.take_along_axis(logits, label[..., None], -1)
        rank = lax.stop_gradient((logits > own).sum(-1))
        first = there & (row >= 0) & (rank < 1)
        reached = reached & first
        # What is not counted may be anything, NaN included.
        taken = counted(settings, frozen, batch, head)
        total = jnp.where(taken, loss, 0.0).sum()
        five = there & (row >= 0) & (rank < 5)
        found.append((total, *(a.sum(dtype=jnp.float32) for a in (taken, there, first, five, reached))))
    return Sums(*(jnp.stack(column) for column in zip(*found)))


def own_loss(frozen: Frozen, batch: Batch, features: Float[Array, "B T E"]) -> Float[Array, ""]:
    """Summed cross-entropy of the target's own guesses of the next token: the other half of Medusa-2's loss."""
    there = (batch.segments > 0) & (ahead(batch.segments, 1) == batch.segments) & ahead(batch.mask, 1)
    law = jax.nn.log_softmax(matmul(features, frozen.rows, transposed=True), -1)
    each = jnp.take_along_axis(law, ahead(batch.tokens, 1)[..., None], -1)[..., 0]
    return -jnp.where(there, each, 0.0).sum()


def accepted_length(found: Sums) -> Array:
    """Expected tokens of a greedy round on a chain, the target's own included, if each position began one."""
    return 1 + (found.reached / jnp.maximum(found.seen, 1)).sum()


def head_weights(settings: Settings, running: Float[Array, "n"]) -> Float[Array, "n"]:
    """The weight of each head in the loss. `running` are the heads' top-1 accuracies so far."""
    if settings.head_weights == "decay":
        return settings.decay ** jnp.arange(running.size, dtype=jnp.float32)
    return jnp.concatenate([jnp.ones(1), jnp.cumprod(jnp.clip(running, 0.05, 1.0))[:-1]])
