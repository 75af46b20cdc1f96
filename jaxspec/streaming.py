"""A generation under way: a session stepped, and what has come so far taken from the device."""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import numpy as np

from jaxspec.core.records import Status
from jaxspec.decode.stats import Stats, from_draft
from jaxspec.models.model import Model
from jaxspec.output import Chunk, Generation, Output
from jaxspec.text.stops import StopStrings
from jaxspec.text.stream import IncrementalDecoder

_REASONS = {Status.STOP: "stop", Status.LENGTH: "length", Status.ERROR: "error"}


class Stream(Iterator[Chunk]):
    """A generation under way; `output` is what has come so far, and all of it at the end."""

    def __init__(self, target, session, ids, samples, stops, on_token, rounds):
        self._session, self._rounds, self._looked = session, rounds, 0
        self._rows = [
            _Row(
                Generation(i, s, prompt, [], None if target.tokenizer is None else ""),
                target,
                stops,
                on_token,
            )
            for i, prompt in enumerate(ids)
            for s in range(samples)
        ]
        self._ready: list[Chunk] = []

    def __next__(self) -> Chunk:
        while not self._ready:
            if all(row.out.finish_reason for row in self._rows):
                raise StopIteration
            self._session.run(self._rounds)
            self._look()
        return self._ready.pop(0)

    def _look(self) -> None:
        """Fetches what the device has written, and ends the rows that the host must end."""
        state = self._session.state
        tokens, length, start, status = map(np.asarray, (state.tokens, state.length, state.start, state.status))
        rounds = self._log_since_last()
        new_status, new_length = status.copy(), length.copy()
        for b, row in enumerate(self._rows):
            if row.out.finish_reason:
                continue
            seen = len(row.out.tokens)
            fresh = tokens[b, start[b] + seen : length[b]].tolist()
            reason = _REASONS.get(Status(status[b]))
            chunk = row.push(b, fresh, from_draft(rounds[:, b]).tolist(), reason)
            if row.out.finish_reason and (reason is None or len(chunk.tokens) < len(fresh)):
                new_status[b], new_length[b] = Status.STOP, start[b] + len(row.out.tokens)
            if chunk.tokens or chunk.finish_reason:
                self._ready.append(chunk)
        if (new_status != status).any() or (new_length != length).any():
            self._session.cut(new_length, new_status)

    def _log_since_last(self) -> np.ndarray:
        """`[rounds, B, columns]`: the log of the rounds since the last look, which alone are fetched."""
        log, begin, end = self._session.state.log, self._looked, int(self._session.state.round)
        self._looked = end
        size = min(self._rounds, log.shape[0])  # static, so that a look does not compile anew
        first = min(begin, log.shape[0] - size)
        return np.asarray(jax.lax.dynamic_slice_in_dim(log, first, size))[begin - first : end - first]

    @property
    def output(self) -> Output:
        state = self._session.state
        log, start = np.asarray(state.log[: max(int(state.round), 1)]), np.asarray(state.start)
        logprobs = None if state.logprobs is None else np.asarray(state.logprobs)
        calls = self._session.decoder.drafter.calls
        for b, row in enumerate(self._rows):
            emitted = len(row.out.tokens)
            row.out.stats = Stats.from_log(log[:, b], calls, emitted)
            if logprobs is not None:
                row.out.logprobs = logprobs[b, start[b] : start[b] + emitted].tolist()
        timing = dataclasses.replace(self._session.timing)
        return Output([row.out for row in self._rows], timing, self._session)


class _Row:
    """One row's way from tokens to text, and the stops only the host can see."""

    def __init__(self, out: Generation, target: Model, stops: StopStrings, on_token: Callable | None):
        self.out, self._on_token = out, on_token
        self._decoder = None if target.tokenizer is None else IncrementalDecoder(target.tokenizer)
        self._stops = StopStrings(stops.strings)

    def push(self, b: int, tokens: list[int], drafted: list[bool], reason: str | None) -> Chunk:
        """Takes new tokens up to the first that ends the row; `reason` is why the device ended it, if it did."""
        text, taken = "", []
        for token in tokens:
            piece, matched = self._stops.push(self._decoder.push([token])) if self._decoder else ("", False)
            text += piece
            taken.append(token)
            if matched:
                self.out.finish_reason = "stop"
            if self._on_token is not None and self._on_token(b, token, piece) is False:
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
        return Chunk(b, text, taken, self.out.finish_reason, drafted[: len(taken)])
