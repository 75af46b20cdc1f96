"""A decoding job: the checked arguments of `generate` and `stream`, and their division into batches."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.core import sizes
from jaxspec.core.checks import whole
from jaxspec.core.drafter import AnswerReader, PromptReader
from jaxspec.core.draw import Noise
from jaxspec.core.mesh import count_groups, replicate, to_host
from jaxspec.core.processor import map_rows
from jaxspec.core.sampling import Sampling
from jaxspec.decode.loop import Decoder
from jaxspec.decode.notice import Notice
from jaxspec.decode.session import Session
from jaxspec.decode.state import DraftPrompts, Request, Weights
from jaxspec.errors import CapacityError, InvalidConfig
from jaxspec.generation import inputs, memory
from jaxspec.generation.history import check_history
from jaxspec.generation.options import CompileOptions
from jaxspec.generation.turns import RowRecord, Turn
from jaxspec.models.model import Model
from jaxspec.models.sharding import shard
from jaxspec.models.transformer import TransformerLM

_REPORTED: set[str] = set()
"""The summaries of bridges that were printed."""


class RowBatch(NamedTuple):
    """Rows that are decoded with one cache, `batch_size` at a time (continuous batching)."""

    rows: list[int]  # in the order in which they start
    batch_size: int
    capacity: int  # slots per row

    @property
    def initial_rows(self) -> list[int | None]:
        """The rows that start first; None for an empty position of the batch."""
        return [*self.rows, *[None] * self.batch_size][: self.batch_size]

    @property
    def queue(self) -> list[int]:
        """The rows that start when another row has finished."""
        return self.rows[self.batch_size :]


@dataclasses.dataclass(frozen=True, repr=False)
class Job:
    """A decoding job with checked arguments. A row is one sample of one prompt; the rows of a prompt are adjacent.

    Attributes:
        target: the target model.
        decoder: the decoder.
        weights: the parameters of the target and the drafter.
        prompts: the prompts, as passed by the user.
        turns: what each row's prompt appends to its text, `[rows]`.
        keys: random key of each row, `[rows]`.
        sampling: sampling settings, for all rows or per row.
        max_new_tokens: maximum number of new tokens of each row.
        samples: rows per prompt.
        stop_ids: stop ids of all rows, `[1, M]`.
        logprobs: number of alternatives for each token besides its log-probabilities; None for no log-probabilities.
        mesh: the devices; None for the default device.
        spelled: every prompt in the drafter's own tokens, see `PromptReader`; None if the drafter reads the target's
            tokens.
        history: earlier texts of every prompt, `[prompts, H]`; None if none were given.
    """

    target: Model
    decoder: Decoder
    weights: Weights
    prompts: list[Any]
    turns: list[Turn]
    keys: jax.Array
    sampling: Sampling
    max_new_tokens: int
    samples: int
    stop_ids: jax.Array
    logprobs: int | None = None
    mesh: Mesh | None = None
    spelled: list[list[int]] | None = None
    history: np.ndarray | None = None

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.turns)

    @property
    def ids(self) -> list[list[int]]:
        """The token ids of every prompt; in a session, of the first row of every prompt."""
        return [turn.ids for turn in self.turns[:: self.samples]]

    def prompt(self, row: int) -> list[int]:
        """Returns the token ids of a row's prompt."""
        return self.turns[row].ids

    def remember(self, weights: Weights, tokens: Sequence[int]) -> Weights:
        """Returns the weights after an answer has ended, if the drafter may draft from it; see `AnswerReader`."""
        drafter = self.decoder.drafter
        if self.decoder.rule.noise is not Noise.SHARED or not drafter.needs.answers:
            return weights
        draft = cast(AnswerReader, drafter).remember(weights.draft, tokens)
        return weights._replace(draft=draft if self.mesh is None else replicate(draft, self.mesh))

    def request(self, rows: Sequence[int | None], size: int) -> Request:
        """Makes a request of these rows, with prompts padded to `size`; None is an empty row, which does not run."""
        at = np.asarray([0 if row is None else row for row in rows], int)

        def select(name: str) -> Any:
            value = getattr(self.sampling, name)
            return np.asarray(value)[at] if np.ndim(value) == 1 else value

        names = [field.name for field in dataclasses.fields(Sampling) if field.name != "processors"]
        settings = {name: select(name) for name in names}
        processors = [one.rows(len(self.turns), self.target.lm.vocab) for one in self.sampling.processors]
        sampling = Sampling(**settings, processors=map_rows(lambda leaf: leaf[at], processors))
        request = inputs.make_request(
            [self.prompt(0)[:1] if row is None else self.prompt(row) for row in rows],
            self._keys(at),
            inputs.mask_padding(self.target, sampling, len(at)),
            [0 if row is None else self.max_new_tokens for row in rows],
            jnp.broadcast_to(self.stop_ids, (len(at), self.stop_ids.shape[1])),
            size,
            self.logprobs is not None,
        )
        if self.history is not None:
            request = request._replace(history=jnp.asarray(self.history[at // self.samples]))
        if self.spelled is None:
            return request
        size *= self.decoder.drafter.needs.prompts
        padded = inputs.pad_prompts([self.spelled[row // self.samples] for row in at], size)
        return request._replace(draft_prompts=DraftPrompts(*padded))

    def _keys(self, rows: np.ndarray) -> jax.Array:
        """Returns the keys of these rows. NumPy selects them, since JAX would compile for each number of rows."""
        data = np.asarray(jax.random.key_data(self.keys))[rows]
        return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(self.keys))

    def batches(self, batch: int | None, capacity: int | None, rows: Sequence[int]) -> list[RowBatch]:
        """Divides rows into batches: all rows at once, or up to `batch` rows at a time with caches of one size.

        Batch sizes are rounded up by `sizes.round_rows` in each group of devices, but never above `batch`. Empty
        positions of a batch do not run.

        With a queue, the longest prompts come first. A row that needs too much memory therefore fails early. Adjacent
        rows also have similar lengths, which matters because the longest text determines the cost of a step.

        Args:
            batch: maximum number of rows decoded at once; None for all.
            capacity: cache slots of each row; None for as many as needed.
            rows: the rows to decode.

        Raises:
            InvalidConfig: `batch` is not a whole number from 1.
            CapacityError: a row does not fit into the model's context or the capacity.
        """
        if batch is not None:
            whole("batch", batch)

        def slots(rows: Sequence[int], size: int) -> int:
            longest = max(len(self.prompt(row)) for row in rows) + self.max_new_tokens
            return memory.fit_capacity(self.decoder, self.weights, longest, size, capacity)

        def round_size(count: int) -> int:
            groups = count_groups(self.mesh)  # of equal size
            each = sizes.round_rows(-(-count // groups))
            return groups * (each if batch is None else min(each, -(-batch // groups)))

        if batch is None:
            return [RowBatch(list(rows), round_size(len(rows)), slots(rows, len(rows)))] if rows else []
        by_slots: dict[int, list[int]] = {}
        for row in sorted(rows, key=lambda row: -len(self.prompt(row))):
            by_slots.setdefault(slots([row], batch), []).append(row)
        batches = [RowBatch(group, round_size(min(batch, len(group))), count) for count, group in by_slots.items()]
        return [part if part.queue else part._replace(rows=sorted(part.rows)) for part in batches]

    def memory(self, batch: RowBatch) -> int:
        """Returns the memory of a batch's caches in bytes; a queue needs one more row in every group of devices."""
        rows = batch.batch_size + count_groups(self.mesh) * (bool(batch.queue))
        return memory.cache_bytes(self.decoder, self.weights, rows, batch.capacity)


def make_job(target: Model, prompts: Any, options: CompileOptions, session: Session | None = None) -> Job:
    """Makes a job from the arguments of `jaxspec.generate`.

    Raises:
        JaxspecError: an argument is invalid. All checks that need no device memory are made here.
    """
    drafting, mesh, sampling = options.resolve_drafting(), options.mesh, options.sampling
    max_new_tokens = whole("max_new_tokens", options.max_new_tokens)
    samples = whole("samples", options.samples, 1, sizes.MAX_SAMPLES)
    inputs.check_model("target", target)
    if mesh is not None:
        target = shard(target, mesh)
    elif isinstance(target.lm, TransformerLM) and (parts := target.lm.execution.shards) > 1:
        raise InvalidConfig(f"{target.name} is split over {parts} devices; pass the mesh (mesh=...)")
    prompts = inputs.as_prompts(prompts)
    count = len(prompts) * samples
    records = None if session is None else _records(session, count)
    turns = inputs.read_turns(target, prompts, options.chat, options.tools, options.template_variables, records)
    if records is None:
        turns = [turn for turn in turns for _ in range(samples)]
    stopping = inputs.stop_array(target, options.stop_ids, options.ignore_eos, 1)
    sampling = inputs.with_grammar(target, sampling, options.grammar, options.grammar_after, stopping, samples, count)
    inputs.check_sampling(sampling, count, target.lm.vocab)
    sampling = inputs.with_defaults(target, sampling)
    keys = inputs.row_keys(options.key, len(prompts), samples, sampling)
    alternatives = inputs.check_logprobs(options.logprobs)
    if alternatives is not None and alternatives > target.lm.vocab:
        raise InvalidConfig(f"logprobs={alternatives} is too many: {target.name} has only {target.lm.vocab} tokens")
    recorded_alternatives = sizes.round_top_logprobs(alternatives or 0, target.lm.vocab)
    width_matched = options.width_matched
    at_once = count if options.batch is None else min(whole("batch", options.batch), count)
    drafting = drafting.resolve(target, sampling, at_once, mesh, Notice(options.verbose).say)
    decoder, weights = drafting.build(target, width_matched=width_matched, top_logprobs=recorded_alternatives)
    if mesh is not None:
        weights = weights._replace(draft=replicate(weights.draft, mesh))
    spelled = None
    # The conversation of a session continues from the answers, which differ between the samples of a prompt.
    if decoder.drafter.needs.prompts and (records is None or not any(turn.messages for turn in turns)):
        reader = cast(PromptReader, decoder.drafter)
        spelled = [
            reader.spell(turn.messages or prompt, turn.ids, {"tools": turn.tools or None, **turn.variables})
            for prompt, turn in zip(prompts, turns[::samples])
        ]
    history = check_history(options.history, len(prompts), decoder.drafter)
    return Job(
        target, decoder, weights, prompts, turns, keys, sampling, max_new_tokens, samples, stopping, alternatives, mesh,
        spelled, None if history is None else np.asarray(history),
    )  # fmt: skip


def _records(session: Session, rows: int) -> list[RowRecord]:
    """Returns what a session knows about its rows.

    Raises:
        InvalidConfig: the session has another number of rows, or was not made by `generate`.
    """
    if not session.records:
        raise InvalidConfig(
            "session must be the session of an earlier output of generate; this session has no such output"
        )
    if len(session.records) != rows:
        raise InvalidConfig("a session must be continued with the settings and the number of rows it was started with")
    return list(session.records)


def extend_session(session: Session, job: Job, notice: Notice) -> RowBatch:
    """Appends a job's prompts to the rows of a session, which are first cut to the tokens that stay.

    Raises:
        InvalidConfig: the session has other settings or another number of rows.
        CapacityError: the session has too few slots.
    """
    if session.decoder != job.decoder or session.rows != job.rows or session.mesh != job.mesh:
        raise InvalidConfig("a session must be continued with the settings and the number of rows it was started with")
    longest = max(len(turn.prefix) + len(turn.ids) for turn in job.turns) + job.max_new_tokens
    if job.decoder.slots(longest) > session.capacity or longest > job.decoder.target.context:
        raise CapacityError(
            f"the session has {session.capacity} slots, but this turn needs {job.decoder.slots(longest)}; "
            "start the session with a larger capacity=..."
        )
    length = to_host(session.state.length).copy()
    kept = np.asarray([len(turn.prefix) for turn in job.turns])
    if any(len(turn.prefix) < len(record.tokens) for turn, record in zip(job.turns, session.records)):
        notice.say("the chat template now renders earlier messages differently; reading the conversation again")
    length[: len(kept)] = np.minimum(length[: len(kept)], kept)
    session.cut(length, to_host(session.state.status))
    batch = RowBatch(list(range(job.rows)), len(session.state.length), session.capacity)
    session.extend(job.request(batch.initial_rows, session.capacity))
    return batch


def report_bridge(notice: Notice, job: Job) -> None:
    """Prints what a draft model of another vocabulary has in common with the target, once for each pair."""
    if job.decoder.drafter.needs.prompts:
        summary = cast(PromptReader, job.decoder.drafter).summary()
        if summary not in _REPORTED:
            _REPORTED.add(summary)
            notice.say(summary)


def report_rounding(notice: Notice, capacity: int | None, batches: Sequence[RowBatch]) -> None:
    """Prints a notice if the requested capacity is rounded up."""
    if capacity is not None and batches and batches[0].capacity != capacity:
        notice.say(
            f"capacity {capacity} is rounded up to {batches[0].capacity} slots, a multiple of {sizes.BLOCK_SLOTS}"
        )
