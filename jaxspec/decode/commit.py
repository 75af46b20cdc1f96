"""The end of a round: cuts its tokens, and updates text, drafter, schedule and log."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.drafter import Drafter
from jaxspec.core.processor import absorb_all
from jaxspec.core.records import Advance, Cache, Proposal, RoundResult, Seen, Status
from jaxspec.core.schedule import Schedule
from jaxspec.decode.state import Logprobs, RoundLog, State, Weights

MAX_COMPARISONS = 16
"""The largest number of stop ids that are compared one by one."""


class Outcome(NamedTuple):
    """The result of verification, per row. Its shapes do not depend on the width of the target call."""

    path: Int[Array, "B D1"]  # accepted nodes, the root first; -1 after the last
    tokens: Int[Array, "B D1"]  # the token after each node of the path; after the last node, its token repeated
    count: Int[Array, "B"]  # the number of tokens that are committed  # pyright: ignore
    status: Int[Array, "B"]  # the row's status after the round
    cache: Cache  # the cache with the committed nodes of the path
    features: Float[Array, "B D1 E"]  # the target's features at the nodes of the path
    logprobs: Logprobs | None  # log-probabilities of `tokens`; None if the state does not record them
    seen: Seen | None  # likely tokens after all nodes; None unless the drafter needs them


def cut(
    state: State, path: Int[Array, "B D1"], tokens: Int[Array, "B D1"], healthy: Bool[Array, "B D1"]
) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """Returns how many of a round's tokens are committed, and each row's status after the round.

    The tokens are cut after the first stop token, at the budget, and before the first token drawn from logits that are
    not finite. A finished row commits no tokens.

    Args:
        state: the state before the round.
        path: accepted nodes, the root first; -1 after the last.
        tokens: the token after each node.
        healthy: whether the target's logits after each node are finite.
    """
    steps = jnp.arange(path.shape[1])
    reached = (path >= 0).sum(-1) - 1

    def first(marks: Array) -> Array:
        return jnp.where(marks.any(-1), marks.argmax(-1), steps.size)

    sound = jnp.minimum(reached + 1, first(~healthy))
    stop = first(_is_any(tokens, state.stop_ids) & (steps < sound[:, None]))
    budget = state.limit - state.length
    running = state.status == Status.RUNNING
    count = jnp.where(running, jnp.minimum(jnp.minimum(sound, stop + 1), budget), 0)
    # A running row that commits no tokens would never end.
    status = jnp.where((sound <= reached) | (sound < 1), Status.ERROR, Status.RUNNING)
    status = jnp.where(count >= budget, Status.LENGTH, status)
    status = jnp.where(stop < count, Status.STOP, status)
    status = jnp.where(running, status, state.status).astype(jnp.int32)
    # With the barrier, XLA:GPU computes both numbers once, in one kernel.
    return lax.optimization_barrier((count, status))


def commit(
    drafter: Drafter,
    schedule: Schedule,
    weights: Weights,
    state: State,
    proposal: Proposal,
    outcome: Outcome,
    drafted: Bool[Array, "B N"],
    together: bool,
) -> State:
    """Returns the state after a round.

    Args:
        drafter: absorbs the committed tokens.
        schedule: is updated with the round's result.
        weights: the parameters of target and drafter.
        state: the state before the round.
        proposal: the proposal, with one tree per row.
        outcome: the outcome of verifying the proposal.
        drafted: whether each node holds a drafted token.
        together: whether drafts cannot change a text; see `RoundResult`.
    """
    tree = proposal.tree
    steps = jnp.arange(drafter.shape.depth + 1)
    path, tokens, count = outcome.path, outcome.tokens, outcome.count
    reached, running = (path >= 0).sum(-1) - 1, state.status == Status.RUNNING
    emitted = steps < count[:, None]
    children = jnp.take_along_axis(proposal.tokens[:, None, :], jnp.maximum(tree.children, 0), axis=2)
    tested = ((tree.children >= 0) & (children >= 0)).sum(-1)
    tested = jnp.where(emitted, jnp.take_along_axis(tested, jnp.maximum(path, 0), axis=1), 0)
    record = RoundLog.of(count, jnp.minimum(reached, count), drafted.sum(-1), tested[:, :-1])

    nodes = jnp.pad(path[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    text = _write(state.tokens, tokens, state.length)
    advance = Advance(tokens, outcome.features, count, nodes, text, state.length, weights.target, outcome.seen)
    result = RoundResult(
        drafted=jnp.where(drafted, tree.depths, 0).max(-1),
        accepted=reached,
        nodes=jnp.where(drafted, jnp.arange(drafted.shape[1]), 0).max(-1) + 1,
        emitted=count,
        together=together,
    )
    learned = jax.tree.map(
        lambda new, old: jnp.where(running.reshape(-1, *[1] * (old.ndim - 1)), new, old),
        schedule.update(state.schedule, result),
        state.schedule,
    )
    return state._replace(
        tokens=text,
        length=state.length + count,
        status=outcome.status,
        cache=outcome.cache,
        absorbed=state.absorbed + count,
        draft=drafter.absorb(weights.draft, state.draft, advance),
        schedule=learned,
        log=RoundLog(_write(state.log.counts, record.counts[:, None], state.round)),
        round=state.round + running,
        logprobs=jax.tree.map(lambda rows, new: _write(rows, new, state.length), state.logprobs, outcome.logprobs),
        processed=absorb_all(
            state.sampling.processors, state.processed, tokens, count, jnp.minimum(state.start - state.length, 0)
        ),
    )


def _is_any(tokens: Int[Array, "B D1"], ids: Int[Array, "B M"]) -> Bool[Array, "B D1"]:
    """Returns whether each token is one of its row's ids."""
    if ids.shape[1] > MAX_COMPARISONS:
        return (tokens[:, :, None] == ids[:, None, :]).any(-1)
    # XLA:GPU computes comparisons in the kernel that reads the result, and a reduction in a kernel of its own.
    equal = (tokens == ids[:, i : i + 1] for i in range(ids.shape[1]))
    return functools.reduce(jnp.logical_or, equal, jnp.zeros(tokens.shape, bool))


def _write(rows: Array, new: Array, start: Array) -> Array:
    """Writes `new` into each row, from the row's own start on."""
    if len(rows) == 1:  # XLA:GPU computes for other updates in kernels of their own whether they are inside the array
        return lax.dynamic_update_slice(rows, new.astype(rows.dtype), (0, start[0], *[0] * (rows.ndim - 2)))
    put = jax.vmap(lambda row, new, at: lax.dynamic_update_slice_in_dim(row, new.astype(row.dtype), at, 0))
    return put(rows, new, start)
