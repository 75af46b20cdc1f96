"""Creates and edits the state between rounds: new prompts, further turns, replaced rows, shortened texts."""

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxspec.core.drafter import Drafter, PromptReader
from jaxspec.core.networks import LanguageModel
from jaxspec.core.processor import Beginning, map_rows, read_text
from jaxspec.core.records import Status
from jaxspec.core.schedule import Schedule
from jaxspec.core.sizes import round_to_blocks
from jaxspec.decode import logprobs
from jaxspec.decode.state import Request, RoundLog, State, Weights
from jaxspec.errors import InvalidConfig


def init(
    target: LanguageModel,
    drafter: Drafter,
    schedule: Schedule,
    weights: Weights,
    request: Request,
    capacity: int,
    top_logprobs: int,
) -> State:
    """Returns the state of a batch of prompts before any of them is read.

    Args:
        target: the target model.
        drafter: the drafter.
        schedule: the schedule.
        weights: parameters of target and drafter.
        request: prompts and settings of all rows.
        capacity: the number of cache slots per row, rounded up to whole blocks. A row's text must fit into them.
        top_logprobs: K, the number of alternatives recorded per token in rows for which the request asks for
            log-probabilities.
    """
    batch, size = request.tokens.shape
    slots = round_to_blocks(capacity)
    tokens = jnp.zeros((batch, slots), jnp.int32).at[:, :size].set(request.tokens)
    zeros = jnp.zeros((batch,), jnp.int32)
    state = State(
        tokens=tokens,
        length=request.count,
        start=request.count,
        limit=request.count + request.new_tokens,
        status=_status(request),
        key=request.key,
        stop_ids=request.stop_ids,
        sampling=request.sampling,
        cache=target.init_cache(batch, slots),
        absorbed=zeros,
        draft=drafter.init(weights.draft, batch, slots),
        schedule=schedule.init(batch, drafter.shape),
        log=RoundLog.empty(batch, slots, drafter.shape.depth),
        round=zeros,
        recorded=request.logprobs,
        logprobs=None if request.logprobs is None else logprobs.empty_logprobs(batch, slots, top_logprobs),
        processed=_processed(target.vocab, request, tokens, request.count),
        history=request.history,
    )
    return _with_prompts(drafter, state, request, request.count)


def extend(vocab: int, drafter: Drafter, state: State, request: Request) -> State:
    """Appends text to every row, such as the next turn of a chat, and sets a new budget.

    The text appended to a row may be empty. Only new tokens are read by the next prefill. For processors, the whole
    text is the prompt of the new answer. `request.key` is ignored: noise is a function of a row's key and the position,
    and each row keeps its key.

    Raises:
        InvalidConfig: the request asks for log-probabilities, but the state has no arrays for them; or it has a
            history of another size than the first request's.
    """
    if state.recorded is None and request.logprobs is not None:
        raise InvalidConfig(
            "the request asks for log-probabilities, but the state has no arrays for them: its first request had "
            "logprobs=None"
        )
    if request.history is not None:
        before = None if state.history is None else state.history.shape
        if request.history.shape != before:
            raise InvalidConfig(
                f"the request has a history {request.history.shape}, but the first request had {before or 'none'}"
            )
    rows = jnp.arange(state.length.shape[0])[:, None]
    positions = state.length[:, None] + jnp.arange(request.tokens.shape[1])  # padding may exceed the capacity
    tokens = state.tokens.at[rows, positions].set(request.tokens, mode="drop")
    length = state.length + request.count
    # A drafter that must read the whole text again, as after `truncate`, spells all of it from the target's tokens.
    state = _with_prompts(drafter, state, request, jnp.where(state.absorbed == state.length, length, 0))
    return state._replace(
        tokens=tokens,
        length=length,
        start=length,
        limit=length + request.new_tokens,
        status=_status(request),
        stop_ids=request.stop_ids,
        sampling=request.sampling,
        log=jax.tree.map(jnp.zeros_like, state.log),
        round=jnp.zeros_like(state.round),
        recorded=state.recorded if request.logprobs is None else request.logprobs,
        processed=_processed(vocab, request, tokens, length),
        history=state.history if request.history is None else request.history,
    )


def truncate(drafter: Drafter, weights: Weights, state: State, length: Int[Array, "B"]) -> State:
    """Shortens each row's text to `length` tokens.

    A drafter's state cannot be rolled back, so the next prefill reads the whole text again.
    """
    batch, slots = state.tokens.shape
    return state._replace(
        length=length,
        cache=state.cache._replace(length=jnp.zeros_like(length)),
        absorbed=jnp.zeros_like(length),
        draft=drafter.init(weights.draft, batch, slots),
    )


def row_axes(init: Callable[[Weights, Request], State], weights: Weights, request: Request) -> State:
    """Returns, for each leaf of a state, the axis that enumerates rows; -1 for a leaf without such an axis.

    `init` is traced with one row and with two, and nothing is computed: `weights` and `request` may hold
    `jax.ShapeDtypeStruct` in place of arrays.
    """

    def shapes(batch: int) -> State:
        rows = map_rows(lambda a: jax.ShapeDtypeStruct((batch, *a.shape[1:]), a.dtype), request)
        return jax.eval_shape(init, weights, rows)

    def axis(one: jax.ShapeDtypeStruct, two: jax.ShapeDtypeStruct) -> int:
        return next((i for i, (m, n) in enumerate(zip(one.shape, two.shape)) if m != n), -1)

    return jax.tree.map(axis, shapes(1), shapes(2))


def replace(axes: tuple[int, ...], state: State, new: State, index: Int[Array, "1"]) -> State:
    """Replaces the row at `index` with the only row of `new`; index -1 leaves all rows unchanged.

    Args:
        axes: the leaves of the pytree that `row_axes` returns.
        state: the state of all rows.
        new: a state with one row and the same capacity.
        index: the index of the row to replace.
    """
    at = jnp.maximum(index[0], 0)

    def put(old: Array, new: Array, axis: int) -> Array:
        if axis < 0:
            return old
        new = jnp.where(index[0] < 0, lax.dynamic_slice_in_dim(old, at, 1, axis), new)
        return lax.dynamic_update_slice_in_dim(old, new, at, axis)

    return jax.tree.map(put, state, new, jax.tree.unflatten(jax.tree.structure(state), axes))


def _processed(vocab: int, request: Request, tokens: Int[Array, "B S"], length: Int[Array, "B"]) -> tuple:
    """Returns the states of a request's processors after prompts."""
    beginning = Beginning(vocab, tokens.shape[1], request.stop_ids)
    return read_text(request.sampling.processors, beginning, tokens, length, length)


def _with_prompts(drafter: Drafter, state: State, request: Request, covered: Int[Array, "B"]) -> State:
    """Gives the drafter the prompts in its own tokens, if the request has them; see `PromptReader`."""
    if request.draft_prompts is None or not drafter.needs.prompts:
        return state
    reader = cast(PromptReader, drafter)
    return state._replace(draft=reader.read_prompt(state.draft, *request.draft_prompts, covered))


def _status(request: Request) -> Int[Array, "B"]:
    """Returns the status of rows before their first round; a row without a budget has reached its limit."""
    return jnp.where(request.new_tokens > 0, Status.RUNNING, Status.LENGTH).astype(jnp.int32)
