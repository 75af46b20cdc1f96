"""A generation under way: a session stepped, and what has come so far taken from the device."""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.core.mesh import fetch, groups
from jaxspec.core.records import Status
from jaxspec.decode.notice import Notice
from jaxspec.decode.session import Session, Timing
from jaxspec.decode.stats import Stats, from_draft
from jaxspec.generation.job import Batch, Job
from jaxspec.generation.output import Chunk, Generation, Output
from jaxspec.models.model import Model
from jaxspec.text.incremental import IncrementalDecoder
from jaxspec.text.stops import StopStrings

_REASONS = {Status.STOP: "stop", Status.LENGTH: "length", Status.ERROR: "error"}


class Stream(Iterator[Chunk]):
    """A generation under way; `output` is what has come so far, and all of it at the end.

    Attributes:
        memory: bytes of the caches of the batch that takes most.
    """

    def __init__(
        self,
        job: Job,
        batches: Sequence[Batch],
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
        self._whole = len(batches) == 1 and not batches[0].waiting and not done
        self.memory = max(map(job.memory, batches), default=0)
        # Of the batch that is being decoded:
        self._session: Session | None = None
        self._waiting: collections.deque[int] = collections.deque()
        self._places: list[_Row | None] = []
        self._looked = np.zeros(0, np.int32)  # rounds of each place that were looked at
        self._begin(session)

    def __next__(self) -> Chunk:
        while not self._ready:
            active = [sum(row is not None for row in some) for some in self._by_group()]
            if not any(active):
                if not self._batches:
                    raise StopIteration
                self._begin()
                continue
            assert self._session is not None
            self._session.run(self._rounds, active if self._waiting else None)
            self._look(self._session)
        return self._ready.pop(0)

    def __repr__(self) -> str:
        ended = sum(row.finish_reason is not None for row in self._generations.values())
        tokens = sum(len(row.tokens) for row in self._generations.values())
        return f"Stream({ended} of {self._job.rows} rows ended, {tokens} tokens so far)"

    def _begin(self, session: Session | None = None) -> None:
        """The next batch."""
        if not self._batches:
            return
        batch = self._batches.popleft()
        self._timing = self.timing
        first, self._waiting = batch.first, collections.deque(batch.waiting)
        if session is None:
            self._session = None  # its memory goes before the next one's comes
            job = self._job
            request = job.request(first, batch.capacity)
            session = Session(
                job.decoder, job.weights, request, batch.capacity, job.mesh, len(batch.rows), self._notice
            )
        session.notice = self._notice
        self._session = session
        self._places = [None if row is None else self._row(row) for row in first]
        self._looked = fetch(session.state.round)

    def _row(self, row: int) -> "_Row":
        job = self._job
        text = None if job.target.tokenizer is None else ""
        out = Generation(row // job.samples, row % job.samples, job.prompt(row), [], text)
        self._generations[row] = out
        return _Row(row, out, job.target, self._stops, self._on_token)

    def _look(self, session: Session) -> None:
        """Fetches what the device has written, ends the rows that the host must end, and gives their places away."""
        state = session.state
        tokens, length, start, status = map(fetch, (state.tokens, state.length, state.start, state.status))
        rounds = self._log_since_last(session)
        new_status, new_length, ended = status.copy(), length.copy(), []
        for b, row in enumerate(self._places):
            if row is None:
                continue
            seen = len(row.out.tokens)
            fresh = tokens[b, start[b] + seen : length[b]].tolist()
            reason = _REASONS.get(Status(status[b]))
            chunk = row.push(fresh, from_draft(rounds[b]).tolist(), reason)
            if row.out.finish_reason and (reason is None or len(chunk.tokens) < len(fresh)):
                new_status[b], new_length[b] = Status.STOP, start[b] + len(row.out.tokens)
            if chunk.tokens or chunk.finish_reason:
                self._ready.append(chunk)
            if row.out.finish_reason:
                ended.append(b)
        if (new_status != status).any() or (new_length != length).any():
            session.cut(new_length, new_status)
        if ended:
            self._count(session, ended)
        for b in ended:
            row = self._places[b]
            assert row is not None
            if self._on_end is not None:
                self._on_end(row.index, row.out)
            self._places[b] = None
        free = [[i for i, row in enumerate(some) if row is None] for some in self._by_group()]
        while self._waiting and any(free):
            rows = [self._waiting.popleft() if some and self._waiting else None for some in free]
            places = [-1 if row is None else some.pop(0) for row, some in zip(rows, free)]
            session.replace(places, self._job.request(rows, session.capacity))
            for group, (place, row) in enumerate(zip(places, rows)):
                if row is not None:
                    b = group * len(self._places) // len(places) + place
                    self._places[b], self._looked[b] = self._row(row), 0

    def _by_group(self) -> list[list["_Row | None"]]:
        """The places of each group of devices."""
        count = groups(self._job.mesh)
        size = len(self._places) // count
        return [self._places[i * size : (i + 1) * size] for i in range(count)]

    def _log_since_last(self, session: Session) -> list[np.ndarray]:
        """`[rounds, columns]` of each place: the log of the rounds since the last look, which alone are fetched."""
        log, begin, end = session.state.log, self._looked, fetch(session.state.round)
        self._looked = end.copy()
        size = min(self._rounds, log.shape[1])  # static, so that a look does not compile anew
        first = np.minimum(begin, log.shape[1] - size)
        some = fetch(_slices(log, first, size))
        return [row[i - at : j - at] for row, i, j, at in zip(some, begin, end, first)]

    def _count(self, session: Session, places: Iterable[int]) -> None:
        """The statistics of the rows at these places, as they are now."""
        state = session.state
        log, start, rounds = map(fetch, (state.log, state.start, state.round))
        alternatives, logprobs = self._job.logprobs, state.logprobs
        if alternatives is not None:
            logprobs = jax.tree.map(fetch, logprobs if alternatives else logprobs._replace(top=None, top_tokens=None))
        for b in places:
            row = self._places[b]
            assert row is not None
            emitted = len(row.out.tokens)
            row.out.stats = Stats.from_log(log[b, : rounds[b]], session.decoder.drafter.calls, emitted)
            if alternatives is not None:
                cut = np.s_[b, start[b] : start[b] + emitted]
                own = jax.tree.map(lambda some, cut=cut: some[cut].tolist(), logprobs)
                row.out.logprobs, row.out.sampled_logprobs = own.raw, own.sampled
                if alternatives:
                    pairs = zip(own.top_tokens, own.top)
                    row.out.top_logprobs = [list(zip(ids[:alternatives], values)) for ids, values in pairs]

    @property
    def timing(self) -> Timing:
        """Of all batches so far."""
        return self._timing + (Timing() if self._session is None else self._session.timing)

    @property
    def output(self) -> Output:
        if self._session is not None:
            self._count(self._session, [b for b, row in enumerate(self._places) if row is not None])
        rows = [self._generations[row] for row in sorted(self._generations)]
        return Output(rows, self.timing, self._session if self._whole else None)


@functools.partial(jax.jit, static_argnums=2)
def _slices(rows: jax.Array, starts: jax.Array, size: int) -> jax.Array:
    return jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, size))(rows, starts)


class _Row:
    """One row's way from tokens to text, and the stops only the host can see."""

    def __init__(self, index: int, out: Generation, target: Model, stops: StopStrings, on_token: Callable | None):
        self.index, self.out, self._on_token = index, out, on_token
        self._decoder = None if target.tokenizer is None else IncrementalDecoder(target.tokenizer)
        self._stops = StopStrings(stops.strings)

    def push(self, tokens: list[int], drafted: list[bool], reason: str | None) -> Chunk:
        """Takes new tokens up to the first that ends the row; `reason` is why the device ended it, if it did."""
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
