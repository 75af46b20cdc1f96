"""What a benchmark measures, and what it writes down. All times are wall-clock seconds."""

import dataclasses

import jax

from jaxspec.core.sampling import Sampling
from jaxspec.decode.stats import Stats
from jaxspec.generation.drafting import Drafting

PLAIN = "none"
"""The drafter, and the method, that the others are compared with."""


@dataclasses.dataclass(frozen=True, eq=False)
class Method:
    """What is measured, under the name that it has in tables.

    Attributes:
        label: its name.
        drafting: what is drafted; its rule is that of the `Run`.
    """

    label: str
    drafting: Drafting


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """One text to be continued, with the row's key."""

    task: str
    category: str
    id: str
    turn: int
    tokens: list[int]
    key: jax.Array


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a text leaves that of plain decoding.

    Attributes:
        repeat: the first in which it does.
        place: of the first emitted token that differs.
        plain, other: the tokens there; None where a text has ended.
        gap: how far apart their perturbed scores are (`jaxspec.testing.tie_gap`); None where there is no
            pair, or one of it could never be drawn.
        certificate: why it is rounding and no error: "tie" (float32: the gap is below `jaxspec.testing.TIE_GAP`),
            "width" (lower precision: with target calls of one width the two texts are equal), "peer" (it is another
            system's text), or None.
    """

    repeat: int
    place: int
    plain: int | None
    other: int | None
    gap: float | None = None
    certificate: str | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """One prompt decoded by one method, as often as there were repeats.

    Attributes:
        task, category, id, turn: of the prompt.
        method: label.
        prompt_tokens: how many the prompt has.
        tokens: the emitted ids up to and including the stop token, nothing past it.
        text: of those; None without a tokenizer.
        finish_reason: "stop" or "length".
        prefill_s: of each repeat.
        decode_s: of each repeat; all emitted tokens are decoded in it.
        stats: of the first repeat.
        difference: from plain decoding; None where every repeat is equal.
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
    """Plain decoding and the methods on all prompts, under one setting of the sampling.

    Attributes:
        sampling: the setting.
        rule: its name.
        lossless: the rule claims that texts are those of plain decoding, so that a difference is an error.
        methods: labels, plain decoding first.
        rows: prompt by prompt, the methods in their order.
        capacity: cache slots, of all methods alike.
        compile_s: of each method; 0 where an earlier run had compiled it.
        call_s: of one call at width 1: under `PLAIN` of the target, under a method of its draft model.
        peers: of the methods, those of other systems, with the versions of their packages.
        left_out: a line for each prompt that is too long for the target's context.
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
        """Rows whose text is not that of plain decoding."""
        return [row for row in self.rows if row.difference]

    @property
    def wrong(self) -> list[Row]:
        """Those that a lossless rule must not have: no certificate says that it is rounding."""
        return [row for row in self.differing if self.lossless and not row.difference.certificate]  # type: ignore
