"""Figures of a run, by Spec-Bench's definitions (Xia et al. 2024, arXiv:2401.07851) with its accounting corrected.

Both sides are counted in emitted token ids, up to and including the stop token. The time of a prompt is the median
of its repeats, of decoding alone unless said otherwise.
"""

import dataclasses
import statistics
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

from jaxspec.bench.records import PLAIN, Row, Run
from jaxspec.decode.stats import Stats


@dataclasses.dataclass(frozen=True)
class Spread:
    """The quartiles of some values."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        return cls(*np.percentile(list(values), (25, 50, 75)).tolist())


RESAMPLES = 5000


def interval(pairs: ArrayLike, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of a ratio of sums, by bootstrap over prompts, each of which gave a (sum, count): `[N, 2]`."""
    low, high = np.quantile(_ratios(pairs, seed), (0.025, 0.975)).tolist()
    return low, high


def difference(pairs: ArrayLike, others: ArrayLike, seed: int = 0) -> tuple[float, float, float]:
    """A ratio of sums less another over the same prompts, `[N, 2]` each, and the 95 % interval of that, both ends.

    Both are drawn from the same prompts at once, so what makes a prompt hard for both does not count.
    """
    (a, m), (b, n) = np.sum(pairs, 0), np.sum(others, 0)
    low, high = np.quantile(_ratios(pairs, seed) - _ratios(others, seed), (0.025, 0.975)).tolist()
    return float(a / m - b / n), low, high


def _ratios(pairs: ArrayLike, seed: int) -> np.ndarray:
    """Of the prompts drawn anew, `[RESAMPLES]`; a seed draws the same ones of as many."""
    given = np.asarray(pairs)
    drawn = np.random.default_rng(seed).integers(0, len(given), (RESAMPLES, len(given)))
    sums, counts = given[drawn].sum(1).T
    return sums / counts


@dataclasses.dataclass(frozen=True)
class Summary:
    """One method on some of the prompts.

    Attributes:
        method: label.
        task, category: of the prompts; None for all.
        prompts: how many.
        tokens: emitted.
        prefill_s, decode_s: of all prompts together.
        tokens_per_s: all tokens by all time.
        speedup: that, by the same of plain decoding.
        speedup_with_prefill: the same with reading the prompts counted as time.
        ratios: over the prompts, of tokens per second by those of plain decoding in the same repeat.
        rates: over the prompts, of tokens per second.
        stats: of all prompts together; its tokens per round are Spec-Bench's mean accepted tokens.
        cost_ratio: measured time of a draft call by that of a target call at width 1; None where not measured.
        predicted_speedup: what rounds and draft calls alone let expect (`Stats.predicted_speedup`); None without
            a cost ratio.
        same: texts equal to plain decoding, token for token, in every repeat.
        certified: texts that differ, for a certified reason.
        differing: texts that differ otherwise: errors, unless the rule is lossy.
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
    ratios: Spread
    rates: Spread
    stats: Stats
    cost_ratio: float | None
    predicted_speedup: float | None
    same: int
    certified: int
    differing: int

    @property
    def mean_accepted_tokens(self) -> float:
        """Spec-Bench's #MAT: emitted tokens per target call, the target's own token included."""
        return self.stats.tokens_per_round

    def as_dict(self) -> dict:
        """All of it, for JSON."""
        stats = self.stats.as_dict() | {"predicted_speedup": self.predicted_speedup}
        mean = {"mean_accepted_tokens": self.mean_accepted_tokens}
        return dataclasses.asdict(self) | mean | {"stats": stats}


def summarise(run: Run, method: str, task: str | None = None, category: str | None = None) -> Summary:
    """The figures of one method, on all prompts, on a task's, or on a category's of it."""

    def of(label: str) -> list[Row]:
        chosen = (row for row in run.rows if row.method == label)
        return [row for row in chosen if task in (None, row.task) and category in (None, row.category)]

    rows, plain = of(method), of(PLAIN)
    tokens, decode, prefill = _totals(rows)
    plain_tokens, plain_decode, plain_prefill = _totals(plain)
    stats = Stats.total(row.stats for row in rows)
    cost = run.call_s[method] / run.call_s[PLAIN] if method != PLAIN and method in run.call_s else None
    free = not stats.draft_calls  # nothing to be weighed
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
        ratios=Spread.of(_ratio(row, base) for row, base in zip(rows, plain)),
        rates=Spread.of(len(row.tokens) / statistics.median(row.decode_s) for row in rows),
        stats=stats,
        cost_ratio=cost,
        predicted_speedup=stats.predicted_speedup(cost or 0.0) if stats.rounds and (free or cost is not None) else None,
        same=len(rows) - len(reasons),
        certified=sum(reason is not None for reason in reasons),
        differing=sum(reason is None for reason in reasons),
    )


def paired(run: Run, method: str, other: str) -> Spread:
    """Over the prompts, tokens per second of one method by those of another in the same repeat."""
    rows, base = ([row for row in run.rows if row.method == label] for label in (method, other))
    return Spread.of(_ratio(row, one) for row, one in zip(rows, base))


def groups(run: Run) -> list[tuple[str, str | None]]:
    """Every task, and its categories where it has more than one."""
    found: dict[str, list[str]] = {}
    for row in run.rows:
        categories = found.setdefault(row.task, [])
        if row.category not in categories:
            categories.append(row.category)
    return [
        (task, category)
        for task, categories in found.items()
        for category in (None, *(categories if len(categories) > 1 else ()))
    ]


def _totals(rows: list[Row]) -> tuple[int, float, float]:
    """Tokens, seconds of decoding, seconds of prefill."""
    return (
        sum(len(row.tokens) for row in rows),
        sum(statistics.median(row.decode_s) for row in rows),
        sum(statistics.median(row.prefill_s) for row in rows),
    )


def _ratio(row: Row, plain: Row) -> float:
    """Tokens per second by the plain ones, of runs that were taken one after the other."""
    times = statistics.median(b / a for a, b in zip(row.decode_s, plain.decode_s))
    return times * len(row.tokens) / len(plain.tokens)
