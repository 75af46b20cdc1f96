"""Streams: step a session and collect the emitted tokens, row by row."""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.core.mesh import count_groups, to_host
from jaxspec.core.records import Status
from jaxspec.decode.notice import Notice
from jaxspec.decode.session import Session, Timing
from jaxspec.decode.state import RoundLog
from jaxspec.decode.stats import Stats, mark_drafted
from jaxspec.generation.job import Job, RowBatch
from jaxspec.generation.output import Chunk, Generation, Output
from jaxspec.generation.turns import RowRecord
from jaxspec.models.model import Model
from jaxspec.text.incremental import IncrementalDecoder
from jaxspec.text.stops import StopStrings

_REASONS = {Status.STOP: "stop", Status.LENGTH: "length", Status.ERROR: "error"}


class Stream(Iterator[Chunk]):
    """An iterator over the chunks of a running generation; `output` has the results so far.

    Attributes:
        memory: memory of the largest batch's caches, in bytes; with the states of recurrent layers, and what a window
            leaves behind in these layers.
    """

    def __init__(
        self,
        job: Job,
        batches: Sequence[RowBatch],
        stops: StopStrings,
        *,
        rounds: int,
        on_token: Callable | None = None,
        on_end: Callable[[int, Generation], Any] | None = None,
        session: Session | None = None,
        done: Mapping[int, Generation] | None = None,
        notice: Notice | None = None,
    ):
        self._notice = notice or Notice(False)
        self._job, self._stops, self._on_token, self._on_end = job, stops, on_token, on_end
        self._batches, self._rounds, self._timing = collections.deque(batches), rounds, Timing()
        self._generations = dict(done or {})
        self._ready: list[Chunk] = []
        self._single_batch = len(batches) == 1 and not batches[0].queue and not done
        self.memory = max(map(job.memory, batches), default=0)
        # The current batch:
        self._session: Session | None = None
        self._queue: collections.deque[int] = collections.deque()
        self._rows: list[_Row | None] = []  # by position in the batch
        self._rounds_read = np.zeros(0, np.int32)  # rounds of each position whose log has been read
        self._start_batch(session)

    def __next__(self) -> Chunk:
        while not self._ready:
            active = [sum(row is not None for row in group) for group in self._by_group()]
            if not any(active):
                if not self._batches:
                    raise StopIteration
                self._start_batch()
                continue
            assert self._session is not None
            self._session.run(self._rounds, active if self._queue else None)
            self._collect(self._session)
        return self._ready.pop(0)

    def __repr__(self) -> str:
        ended = sum(row.finish_reason is not None for row in self._generations.values())
        tokens = sum(len(row.tokens) for row in self._generations.values())
        return f"Stream({ended} of {self._job.rows} rows finished, {tokens} tokens so far)"

    def _start_batch(self, session: Session | None = None) -> None:
        """Starts the next batch, in `session` if it is not None."""
        if not self._batches:
            return
        batch = self._batches.popleft()
        self._timing = self.timing
        rows, self._queue = batch.initial_rows, collections.deque(batch.queue)
        if session is None:
            job = self._job
            weights = job.weights if self._session is None else self._session.weights
            self._session = None  # frees its memory before the next session is allocated
            request = job.request(rows, batch.capacity)
            session = Session(job.decoder, weights, request, batch.capacity, job.mesh, len(batch.rows), self._notice)
        session.notice = self._notice
        self._session = session
        self._rows = [None if row is None else self._start_row(row) for row in rows]
        self._rounds_read = to_host(session.state.round)
        if self._single_batch:
            session.records = [RowRecord(self._job.turns[row], self._generations[row]) for row in batch.rows]

    def _start_row(self, row: int) -> "_Row":
        job = self._job
        turn = job.turns[row]
        text = None if job.target.tokenizer is None else ""
        out = Generation(row // job.samples, row % job.samples, turn.ids, [], text)
        self._generations[row] = out
        return _Row(row, out, job.target, [*turn.prefix, *turn.ids], self._stops, self._on_token)

    def _collect(self, session: Session) -> None:
        """Reads the new tokens, ends the rows that end on the host, and replaces finished rows by queued rows."""
        state = session.state
        tokens, length, start, status = map(to_host, (state.tokens, state.length, state.start, state.status))
        rounds = self._read_log(session)
        new_status, new_length, ended = status.copy(), length.copy(), []
        for b, row in enumerate(self._rows):
            if row is None:
                continue
            seen = len(row.out.tokens)
            new = tokens[b, start[b] + seen : length[b]].tolist()
            reason = _REASONS.get(Status(status[b]))
            chunk = row.push(new, mark_drafted(rounds[b]).tolist(), reason)
            if row.out.finish_reason and (reason is None or len(chunk.tokens) < len(new)):
                new_status[b], new_length[b] = Status.STOP, start[b] + len(row.out.tokens)
            if chunk.tokens or chunk.finish_reason:
                self._ready.append(chunk)
            if row.out.finish_reason:
                ended.append(b)
        if (new_status != status).any() or (new_length != length).any():
            session.cut(new_length, new_status)
        if ended:
            self._update_stats(session, ended)
        for b in ended:
            row = self._rows[b]
            assert row is not None
            session.weights = self._job.remember(session.weights, row.out.tokens)
            if self._on_end is not None:
                self._on_end(row.index, row.out)
            self._rows[b] = None
        free = [[i for i, row in enumerate(group) if row is None] for group in self._by_group()]
        while self._queue and any(free):
            rows = [self._queue.popleft() if positions and self._queue else None for positions in free]
            positions = [-1 if row is None else positions.pop(0) for row, positions in zip(rows, free)]
            session.replace(positions, self._job.request(rows, session.capacity))
            for group, (position, row) in enumerate(zip(positions, rows)):
                if row is not None:
                    b = group * len(self._rows) // len(positions) + position
                    self._rows[b], self._rounds_read[b] = self._start_row(row), 0

    def _by_group(self) -> list[list["_Row | None"]]:
        """Returns the rows of each group of devices."""
        count = count_groups(self._job.mesh)
        size = len(self._rows) // count
        return [self._rows[i * size : (i + 1) * size] for i in range(count)]

    def _read_log(self, session: Session) -> list[RoundLog]:
        """Reads the log of each row's new rounds."""
        log, begin, end = session.state.log, self._rounds_read, to_host(session.state.round)
        self._rounds_read = end.copy()
        rounds = log.counts.shape[1]
        size = min(self._rounds, rounds)  # static, to compile once
        first = np.minimum(begin, rounds - size)
        part = RoundLog(to_host(_slices(log.counts, first, size)))
        return [part.part(np.s_[b, i - at : j - at]) for b, (i, j, at) in enumerate(zip(begin, end, first))]

    def _update_stats(self, session: Session, positions: Iterable[int]) -> None:
        """Updates statistics and log-probabilities of the rows at these positions of the batch."""
        state = session.state
        counts, start, rounds = map(to_host, (state.log.counts, state.start, state.round))
        log = RoundLog(counts)
        alternatives, logprobs = self._job.logprobs, state.logprobs
        if alternatives is not None:
            assert logprobs is not None
            logprobs = jax.tree.map(to_host, logprobs if alternatives else logprobs._replace(top=None, top_tokens=None))
        for b in positions:
            row = self._rows[b]
            assert row is not None
            emitted = len(row.out.tokens)
            row.out.stats = Stats.from_log(log.part(np.s_[b, : rounds[b]]), session.decoder.drafter.calls, emitted)
            if alternatives is not None:
                cut = np.s_[b, start[b] : start[b] + emitted]
                emitted_logprobs = jax.tree.map(lambda values, cut=cut: values[cut].tolist(), logprobs)
                row.out.logprobs, row.out.sampled_logprobs = emitted_logprobs.raw, emitted_logprobs.sampled
                if alternatives:
                    pairs = zip(emitted_logprobs.top_tokens, emitted_logprobs.top)
                    row.out.top_logprobs = [list(zip(ids[:alternatives], values)) for ids, values in pairs]

    @property
    def timing(self) -> Timing:
        """Seconds of compilation, prefill and decoding, of all batches so far."""
        return self._timing + (Timing() if self._session is None else self._session.timing)

    @property
    def output(self) -> Output:
        """The results so far; complete when the iterator is exhausted."""
        if self._session is not None:
            self._update_stats(self._session, [b for b, row in enumerate(self._rows) if row is not None])
        rows = [self._generations[row] for row in sorted(self._generations)]
        return Output(rows, self.timing, self._session if self._single_batch else None)


@functools.partial(jax.jit, static_argnums=2)
def _slices(rows: jax.Array, starts: jax.Array, size: int) -> jax.Array:
    return jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, size))(rows, starts)


class _Row:
    """A running row: decodes its tokens to text, and ends it at stop strings and at the callback's request."""

    def __init__(
        self,
        index: int,
        out: Generation,
        target: Model,
        before: Sequence[int],
        stops: StopStrings,
        on_token: Callable | None,
    ):
        self.index, self.out, self._on_token = index, out, on_token
        self._decoder = None if target.tokenizer is None else IncrementalDecoder(target.tokenizer, before=before)
        self._stops = StopStrings(stops.strings)

    def push(self, tokens: list[int], drafted: list[bool], reason: str | None) -> Chunk:
        """Adds new tokens, up to the first token that ends the row.

        Args:
            tokens: the new tokens.
            drafted: for each token, whether the drafter proposed it.
            reason: the finish reason if the device ended the row; None otherwise.
        """
        text, taken = "", []
        for token in tokens:
            piece, matched = self._stops.push(self._decoder.push([token])) if self._decoder else ("", False)
            text += piece
            taken.append(token)
            if matched:
                self.out.finish_reason = "stop"
            if self._on_token is not None and self._on_token(self.index, token, piece) is False:
                self.out.finish_reason = self.out.finish_reason or "callback"
            if self.out.finish_reason:
                break
        else:
            self.out.finish_reason = reason
        if self.out.finish_reason and self._decoder:
            piece, _ = self._stops.push(self._decoder.finish())
            text += piece + self._stops.finish()
        self.out.tokens += taken
        if self.out.text is not None:
            self.out.text += text
        return Chunk(self.index, text, taken, self.out.finish_reason, drafted[: len(taken)])
