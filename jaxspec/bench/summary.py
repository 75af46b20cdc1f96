"""Computes the figures of a run, defined as in Spec-Bench (Xia et al. 2024, arXiv:2401.07851).

Unlike in Spec-Bench, both sides count emitted token ids, up to and including the stop token. The time of a prompt is
the median of its repeats. It excludes compilation and, unless a name says otherwise, prefill.
"""

import dataclasses
import statistics
from collections.abc import Iterable

import numpy as np

from jaxspec.bench.records import PLAIN_METHOD, Row, Run
from jaxspec.decode.stats import Stats


@dataclasses.dataclass(frozen=True)
class Quartiles:
    """The first quartile, the median and the third quartile of some values."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Quartiles":
        return cls(*np.percentile(list(values), (25, 50, 75)).tolist())


@dataclasses.dataclass(frozen=True)
class Summary:
    """The figures of one method on some of the prompts.

    Attributes:
        method: the method's label.
        task, category: the task and the category of the prompts; None for all.
        prompts: the number of prompts.
        tokens: the number of emitted tokens.
        prefill_s, decode_s: the times of prefill and of decoding, summed over the prompts.
        tokens_per_s: all emitted tokens divided by the sum of decoding times.
        speedup: `tokens_per_s` divided by the `tokens_per_s` of plain decoding.
        speedup_with_prefill: the same with prefill included in both times.
        ratios: the quartiles, over the prompts, of tokens per second relative to plain decoding in the same repeat.
        least: the smallest of these ratios.
        rates: the quartiles, over the prompts, of tokens per second.
        stats: statistics of all prompts; its tokens per round are Spec-Bench's mean accepted tokens.
        cost_ratio: the time of a draft call divided by the time of a target call at width 1; None if not measured.
        predicted_speedup: the speedup expected from the numbers of rounds and draft calls
            (`Stats.predicted_speedup`); None without a cost ratio.
        same: the number of texts equal to the text of plain decoding, token for token, in every repeat.
        certified: the number of texts that differ with a certificate.
        differing: the number of texts that differ without a certificate. These are errors, unless the rule is lossy.
    """

    method: str
    task: str | None
    category: str | None
    prompts: int
    tokens: int
    prefill_s: float
    decode_s: float
    tokens_per_s: float
    speedup: float
    speedup_with_prefill: float
    ratios: Quartiles
    least: float
    rates: Quartiles
    stats: Stats
    cost_ratio: float | None
    predicted_speedup: float | None
    same: int
    certified: int
    differing: int

    @property
    def mean_accepted_tokens(self) -> float:
        """Returns the tokens per round, Spec-Bench's mean accepted tokens (#MAT).

        These are the emitted tokens per target call, including the target's own token.
        """
        return self.stats.tokens_per_round

    def as_dict(self) -> dict:
        """Returns all figures for JSON."""
        stats = self.stats.as_dict() | {"predicted_speedup": self.predicted_speedup}
        mean = {"mean_accepted_tokens": self.mean_accepted_tokens}
        return dataclasses.asdict(self) | mean | {"stats": stats}


def summarise(run: Run, method: str, task: str | None = None, category: str | None = None) -> Summary:
    """Returns the figures of one method on all prompts, or on the prompts of a task or of one of its categories."""

    def of(label: str) -> list[Row]:
        chosen = (row for row in run.rows if row.method == label)
        return [row for row in chosen if task in (None, row.task) and category in (None, row.category)]

    rows, plain = of(method), of(PLAIN_METHOD)
    tokens, decode, prefill = _totals(rows)
    plain_tokens, plain_decode, plain_prefill = _totals(plain)
    stats = Stats.total(row.stats for row in rows)
    cost = run.call_s[method] / run.call_s[PLAIN_METHOD] if method != PLAIN_METHOD and method in run.call_s else None
    ratios = [_ratio(row, base) for row, base in zip(rows, plain)]
    free = not stats.draft_calls  # no cost ratio is needed
    reasons = [row.difference.certificate for row in rows if row.difference]
    return Summary(
        method=method,
        task=task,
        category=category,
        prompts=len(rows),
        tokens=tokens,
        prefill_s=prefill,
        decode_s=decode,
        tokens_per_s=tokens / decode,
        speedup=(tokens / decode) / (plain_tokens / plain_decode),
        speedup_with_prefill=(tokens / (decode + prefill)) / (plain_tokens / (plain_decode + plain_prefill)),
        ratios=Quartiles.of(ratios),
        least=min(ratios),
        rates=Quartiles.of(len(row.tokens) / statistics.median(row.decode_s) for row in rows),
        stats=stats,
        cost_ratio=cost,
        predicted_speedup=stats.predicted_speedup(cost or 0.0) if stats.rounds and (free or cost is not None) else None,
        same=len(rows) - len(reasons),
        certified=sum(reason is not None for reason in reasons),
        differing=sum(reason is None for reason in reasons),
    )


def compare_methods(run: Run, method: str, other: str) -> Quartiles:
    """Returns the quartiles over the prompts of the tokens per second of one method relative to another."""
    rows, base = ([row for row in run.rows if row.method == label] for label in (method, other))
    return Quartiles.of(_ratio(row, one) for row, one in zip(rows, base))


def list_groups(run: Run) -> list[tuple[str, str | None]]:
    """Returns every task with None, followed by its categories if it has several."""
    by_task: dict[str, list[str]] = {}
    for row in run.rows:
        categories = by_task.setdefault(row.task, [])
        if row.category not in categories:
            categories.append(row.category)
    return [
        (task, category)
        for task, categories in by_task.items()
        for category in (None, *(categories if len(categories) > 1 else ()))
    ]


def _totals(rows: list[Row]) -> tuple[int, float, float]:
    """Returns the sums of tokens, seconds of decoding and seconds of prefill."""
    return (
        sum(len(row.tokens) for row in rows),
        sum(statistics.median(row.decode_s) for row in rows),
        sum(statistics.median(row.prefill_s) for row in rows),
    )


def _ratio(row: Row, plain: Row) -> float:
    """Returns the median over the repeats of tokens per second relative to plain decoding."""
    times = statistics.median(b / a for a, b in zip(row.decode_s, plain.decode_s))
    return times * len(row.tokens) / len(plain.tokens)
