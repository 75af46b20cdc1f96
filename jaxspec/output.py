"""What a generation gives back, whole or in pieces."""

import dataclasses
from collections.abc import Sequence

from jaxspec.core import noise
from jaxspec.decode.session import Session, Timing
from jaxspec.decode.stats import Stats


@dataclasses.dataclass
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
        logprobs: of the emitted tokens under the target's raw logits; None unless asked for.
    """

    prompt: int
    sample: int
    prompt_tokens: list[int]
    tokens: list[int]
    text: str | None
    finish_reason: str | None = None
    stats: Stats = dataclasses.field(default_factory=Stats)
    logprobs: list[float] | None = None


@dataclasses.dataclass
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

    @property
    def text(self) -> list[str | None]:
        return [row.text for row in self.rows]

    @property
    def stats(self) -> Stats:
        """Of all rows together."""
        return Stats.total(row.stats for row in self.rows)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What arrived since the last look: some tokens of one row, and their text.

    `drafted` says of each token whether the drafter had proposed it; the others are the target's own.
    """

    row: int
    text: str
    tokens: list[int]
    finish_reason: str | None
    drafted: list[bool] = dataclasses.field(default_factory=list)
