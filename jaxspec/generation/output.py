"""What a generation gives back, whole or in pieces."""

import dataclasses
from collections.abc import Sequence

from jaxspec.core import noise
from jaxspec.decode.session import Session, Timing
from jaxspec.decode.stats import Stats
from jaxspec.errors import shown

SHOWN = 3
"""Rows of an output that its `repr` shows."""


@dataclasses.dataclass(repr=False)
class Generation:
    """One row's text.

    Attributes:
        prompt: index of the prompt.
        sample: index among the prompt's samples.
        prompt_tokens: the ids it continues.
        tokens: the emitted ids, the stop token included.
        text: of the emitted ids, special tokens left out, cut before a stop string; None without a tokenizer.
        finish_reason: "stop" (stop token or string), "length" (budget), "callback" (ended by `on_token`),
            "error" (the target's logits were not finite; nothing was emitted from them).
        stats: counted over what was emitted.
        logprobs: the log-probability of each emitted token under the target's raw logits; None unless asked for.
        sampled_logprobs: the same under the law that tokens are sampled from: after logit bias, temperature, top-k,
            top-p and min-p. 0.0 where the row is greedy; -inf where a lossy rule emitted what the law excludes. None
            unless asked for.
        top_logprobs: for each emitted token, the likeliest tokens at its place by the target's raw logits, likeliest
            first, each with its log-probability; None unless a number of them was asked for.
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
        text = "" if self.text is None else f", {shown(self.text, 60)}"
        return (
            f"Generation(prompt={self.prompt}, sample={self.sample}, {len(self.tokens)} tokens{text}, "
            f"finish_reason={self.finish_reason!r}, {self.stats.tokens_per_round:.2f} tokens/round)"
        )


@dataclasses.dataclass(repr=False)
class Output(Sequence):
    """All rows, in the order of the prompts, samples of one prompt together.

    Attributes:
        rows: the generations.
        timing: compile, prefill and decode apart.
        session: hand it to `generate` to continue every row without reading its text again; None where rows took
            turns, or came out of a file.
        noise_version: which noise the keys stood for; the same key gives the same text within a version.
    """

    rows: list[Generation]
    timing: Timing
    session: Session | None
    noise_version: int = noise.VERSION

    def __getitem__(self, index):
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        lines = [f"  {row!r}," for row in self.rows[:SHOWN]]
        if len(self.rows) > SHOWN:
            lines.append(f"  and {len(self.rows) - SHOWN} more,")
        return "\n".join([f"Output({len(self.rows)} rows,", *lines, f"  {self.timing!r})"])

    @property
    def text(self) -> list[str | None]:
        return [row.text for row in self.rows]

    @property
    def stats(self) -> Stats:
        """Of all rows together."""
        return Stats.total(row.stats for row in self.rows)


@dataclasses.dataclass(frozen=True, repr=False)
class Chunk:
    """What arrived since the last look: some tokens of one row, and their text.

    `drafted` says of each token whether the drafter had proposed it; the others are the target's own.
    """

    row: int
    text: str
    tokens: list[int]
    finish_reason: str | None
    drafted: list[bool] = dataclasses.field(default_factory=list)

    def __repr__(self) -> str:
        return (
            f"Chunk(row={self.row}, {len(self.tokens)} tokens, {sum(self.drafted)} drafted, {shown(self.text, 60)}, "
            f"finish_reason={self.finish_reason!r})"
        )
