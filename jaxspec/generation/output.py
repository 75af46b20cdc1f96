"""The results of a generation: the whole output, its rows, and the chunks of a stream."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxspec.amounts import plural
from jaxspec.core import noise
from jaxspec.decode.session import Session, Timing
from jaxspec.decode.stats import Stats
from jaxspec.errors import shown
from jaxspec.generation.history import LEAD, Texts

MAX_SHOWN_ROWS = 3
"""Number of rows that the `repr` of an output shows."""


@dataclasses.dataclass(repr=False)
class Generation:
    """The generated text of one row.

    Attributes:
        prompt: index of the prompt.
        sample: index among the prompt's samples.
        prompt_tokens: token ids of the prompt.
        tokens: ids of the emitted tokens, including the stop token.
        text: text that the emitted tokens add to the text of the prompt, without special tokens, cut before a stop
            string. A space at its beginning is kept. None without a tokenizer.
        finish_reason: "stop" (stop token or stop string), "length" (`max_new_tokens` reached), "callback" (ended by
            `on_token`) or "error" (non-finite logits of the target, from which nothing is emitted); None while the row
            is running.
        stats: statistics of the emitted tokens.
        logprobs: log-probability of each emitted token under the target's raw logits; None unless requested.
        sampled_logprobs: log-probability of each emitted token under the law that it was sampled from: after logit
            bias, temperature, top-k, top-p and min-p. 0.0 for greedy rows; -inf if a lossy rule emitted a token that
            the law excludes. None unless requested.
        top_logprobs: for each emitted token, the most likely tokens at its position under the target's raw logits, in
            descending order, each with its log-probability; None unless requested.
    """

    prompt: int
    sample: int
    prompt_tokens: list[int]
    tokens: list[int]
    text: str | None
    finish_reason: str | None = None
    stats: Stats = dataclasses.field(default_factory=Stats)
    logprobs: list[float] | None = None
    sampled_logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None

    def __repr__(self) -> str:
        return (
            f"Generation({_shown(self.text, self.tokens)}, finish_reason={self.finish_reason!r}, "
            f"{plural(len(self.tokens), 'token')}, {self.stats.tokens_per_round:.2f} tokens per round, "
            f"prompt={self.prompt}, sample={self.sample})"
        )


@dataclasses.dataclass(repr=False)
class Output(Sequence):
    """The generations of all rows: a sequence in the order of the prompts, with the samples of a prompt together.

    Attributes:
        rows: the generations.
        timing: seconds of compilation, prefill and decoding.
        session: pass it to `generate` to continue every row without reading its text again; None if the rows did not
            fit into one batch or were read from a file.
        noise_version: version of the random numbers; the same key gives the same text within a version.
    """

    rows: list[Generation]
    timing: Timing
    session: Session | None
    noise_version: int = noise.NOISE_VERSION

    def __getitem__(self, index):
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        count = len(self.rows)
        lines = [f"  {row!r}," for row in self.rows[:MAX_SHOWN_ROWS]]
        if count > MAX_SHOWN_ROWS:
            lines.append(f"  and {count - MAX_SHOWN_ROWS} more,")
        summary = f"{plural(count, 'row')}, {self.stats.tokens_per_round:.2f} tokens per round"
        return "\n".join([f"Output({summary},", *lines, f"  {self.timing!r})"])

    def as_texts(self) -> Texts:
        """Returns the end of each prompt with its new text, for `History.add`."""
        ids = [[*row.prompt_tokens[-LEAD:], *row.tokens] for row in self.rows]
        tokens = np.zeros((len(ids), max(map(len, ids), default=1)), np.int32)
        for row, text in zip(tokens, ids):
            row[: len(text)] = text
        start = [min(LEAD, len(row.prompt_tokens)) for row in self.rows]
        valid = [row.finish_reason != "error" for row in self.rows]
        return Texts(tokens, np.asarray(start), np.asarray([len(text) for text in ids]), np.asarray(valid))

    @property
    def text(self) -> list[str | None]:
        """The text of each row; None without a tokenizer."""
        return [row.text for row in self.rows]

    @property
    def stats(self) -> Stats:
        """The statistics of all rows together."""
        return Stats.total(row.stats for row in self.rows)


@dataclasses.dataclass(frozen=True, repr=False)
class Chunk:
    """Newly emitted tokens of one row.

    Attributes:
        row: index of the row.
        text: the text that the tokens complete; empty without a tokenizer.
        tokens: ids of the tokens.
        finish_reason: see `Generation`; None while the row is running.
        drafted: for each token, whether the drafter proposed it; the other tokens were drawn from the target.
    """

    row: int
    text: str
    tokens: list[int]
    finish_reason: str | None
    drafted: list[bool] = dataclasses.field(default_factory=list)

    def __repr__(self) -> str:
        return (
            f"Chunk({_shown(self.text or None, self.tokens)}, finish_reason={self.finish_reason!r}, {len(self.tokens)} "
            f"tokens, {sum(self.drafted)} drafted, row={self.row})"
        )


def _shown(text: str | None, tokens: list[int]) -> str:
    """Returns the text, or without a text the token ids, cut to a part of a line."""
    return f"tokens={shown(tokens, 60)}" if text is None else shown(text, 60)
