"""Types of a benchmark: methods, prompts, rows and runs. All times are wall-clock seconds."""

import dataclasses

import jax

from jaxspec.core.sampling import Sampling
from jaxspec.decode.stats import Stats
from jaxspec.generation.drafting import Drafting

PLAIN_METHOD = "none"
"""The name of the drafter and the method that all others are compared with: decoding without a draft."""


@dataclasses.dataclass(frozen=True, eq=False)
class Method:
    """A way of drafting that is measured.

    Attributes:
        label: the name in tables.
        drafting: the drafter and its settings; its rule is replaced by the rule of the `Run`.
    """

    label: str
    drafting: Drafting


@dataclasses.dataclass(frozen=True, eq=False)
class BenchPrompt:
    """A prompt of a task, with the key of its row."""

    task: str
    category: str
    id: str
    turn: int
    tokens: list[int]
    key: jax.Array


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference between a text and the text of plain decoding.

    Attributes:
        repeat: the first repeat with a difference.
        place: the index of the first emitted token that differs.
        plain, other: the tokens at this index; None if a text has ended.
        gap: the difference of their perturbed scores (`jaxspec.testing.tie_gap`); None if a text has ended or one of
            the tokens has probability 0.
        certificate: why the difference is not an error: "tie" (float32: the gap is below `jaxspec.testing.TIE_GAP`),
            "width" (lower precision: the texts are equal if all target calls have the same width), "peer" (the text is
            another system's), or None.
    """

    repeat: int
    place: int
    plain: int | None
    other: int | None
    gap: float | None = None
    certificate: str | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """One prompt, decoded by one method in every repeat.

    Attributes:
        task, category, id, turn: identify the prompt.
        method: the method's label.
        prompt_tokens: the number of the prompt's tokens.
        tokens: the emitted ids up to and including the stop token.
        text: the decoded text; None without a tokenizer.
        finish_reason: "stop" or "length".
        prefill_s: the time to read the prompt in each repeat.
        decode_s: the time to decode all emitted tokens in each repeat.
        stats: the statistics of the first repeat.
        difference: the difference from plain decoding; None if the texts of all repeats are equal to its text.
    """

    task: str
    category: str
    id: str
    turn: int
    method: str
    prompt_tokens: int
    tokens: list[int]
    text: str | None
    finish_reason: str
    prefill_s: list[float]
    decode_s: list[float]
    stats: Stats
    difference: Difference | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """Plain decoding and all methods on all prompts, with one setting of sampling.

    Attributes:
        sampling: the setting.
        rule: the rule's name.
        lossless: whether a text that differs from the text of plain decoding is an error.
        methods: the labels of the methods, plain decoding first.
        rows: the rows, ordered by prompt, then by method.
        capacity: the number of cache slots, the same for all methods.
        compile_s: compile time by method; 0 if an earlier run has compiled it.
        call_s: time of a call at width 1: of the target for `PLAIN`, of the draft model for other methods.
        peers: the methods of other systems, with the versions of their packages.
        left_out: a message for each prompt that is too long for the target's context.
    """

    sampling: Sampling
    rule: str
    lossless: bool
    methods: tuple[str, ...]
    rows: tuple[Row, ...]
    capacity: int
    compile_s: dict[str, float]
    call_s: dict[str, float]
    peers: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def differing(self) -> list[Row]:
        """Rows whose text differs from the text of plain decoding."""
        return [row for row in self.rows if row.difference]

    @property
    def wrong(self) -> list[Row]:
        """Rows that differ without a certificate although the rule is lossless."""
        return [row for row in self.differing if self.lossless and not row.difference.certificate]  # type: ignore
