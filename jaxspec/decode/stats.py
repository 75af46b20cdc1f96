"""Statistics of a decode, computed from the log of its rounds after the final cut: only emitted tokens count."""

import dataclasses
import functools
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxspec.amounts import plural
from jaxspec.decode.state import RoundLog
from jaxspec.errors import InvalidConfig

COST_RATIO = 0.125
"""Default cost of one draft-model call, in target calls."""


def mark_drafted(log: RoundLog) -> np.ndarray:
    """Returns whether each emitted token was proposed by the drafter, `[tokens]`, in the order of the text.

    Args:
        log: the log of one row, `[rounds, 3 + D]`.
    """
    emitted, accepted = np.asarray(log.emitted), np.asarray(log.accepted)
    index = np.arange(emitted.sum()) - np.repeat(np.cumsum(emitted) - emitted, emitted)  # within the round
    return index < np.repeat(accepted, emitted)


@dataclasses.dataclass(frozen=True, repr=False)
class Stats:
    """Counts of one row, or sums over several rows.

    Attributes:
        rounds: rounds that the row ran, each with one target call.
        drafted: drafted tokens.
        tested: drafted tokens that the target's choice was compared with: the children of the nodes on the path.
        accepted: drafted tokens that were emitted.
        committed: all emitted tokens.
        draft_calls: calls of a draft model in rounds that drafted.
        drafted_rounds: rounds that drafted.
        tested_at: rounds that tested tokens at depth 1, 2, ...
        accepted_at: rounds that accepted a token at depth 1, 2, ...
    """

    rounds: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    committed: int = 0
    draft_calls: int = 0
    drafted_rounds: int = 0
    tested_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return (
            f"Stats({plural(self.committed, 'token')} in {plural(self.rounds, 'round')}, "
            f"{self.tokens_per_round:.2f} tokens per round, {self.accepted} of "
            f"{plural(self.drafted, 'drafted token')} accepted, {plural(self.draft_calls, 'draft call')})"
        )

    @classmethod
    def from_log(cls, log: RoundLog, calls: int, committed: int | None = None) -> "Stats":
        """Computes the statistics of one row.

        Args:
            log: the log of the row, `[rounds, 3 + D]`.
            calls: the number of draft-model calls of a round that drafts the whole tree; a round that drafts less takes
                one call per level, counted as at most one call per drafted token.
            committed: the number of tokens that a cut after decoding (at a stop string) has kept; None for all tokens.
        """
        emitted, accepted, drafted, tested = (
            np.asarray(counts, np.int64) for counts in (log.emitted, log.accepted, log.drafted, log.tested)
        )
        depths = np.arange(tested.shape[1])
        if committed is not None:
            before = np.cumsum(emitted) - emitted
            emitted = np.clip(committed - before, 0, emitted)
            accepted = np.minimum(accepted, emitted)
            tested = np.where(depths < emitted[:, None], tested, 0)
        ran = emitted > 0
        accepted, drafted, tested = accepted[ran], drafted[ran], tested[ran]
        return cls(
            rounds=int(ran.sum()),
            drafted=int(drafted.sum()),
            tested=int(tested.sum()),
            accepted=int(accepted.sum()),
            committed=int(emitted.sum()),
            draft_calls=int(np.minimum(calls, drafted).sum()),
            drafted_rounds=int((drafted > 0).sum()),
            tested_at=tuple((tested > 0).sum(0).tolist()),
            accepted_at=tuple((accepted[:, None] > depths).sum(0).tolist()),
        )

    def __add__(self, other: "Stats") -> "Stats":
        def add(a: Any, b: Any) -> Any:
            if not isinstance(a, tuple):
                return a + b
            size = max(len(a), len(b))
            return tuple(x + y for x, y in zip(*(v + (0,) * (size - len(v)) for v in (a, b))))

        return Stats(*(add(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self)))

    @staticmethod
    def total(rows: Iterable["Stats"]) -> "Stats":
        return functools.reduce(operator.add, rows, Stats())

    @property
    def target_calls(self) -> int:
        """Target calls of these rounds if each row were decoded alone."""
        return self.rounds

    @property
    def tokens_per_round(self) -> float:
        return self.committed / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """The share of accepted comparisons; the children of one node are one comparison."""
        tested = sum(self.tested_at)
        return self.accepted / tested if tested else 0.0

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """The share of drafting rounds that accepted a token at depth 1, 2, ..."""
        return tuple(a / self.drafted_rounds if self.drafted_rounds else 0.0 for a in self.accepted_at)

    @property
    def conditional_acceptance(self) -> tuple[float, ...]:
        """The share of comparisons at depth 1, 2, ... that were accepted; shallower tokens were all accepted."""
        return tuple(a / t if t else 0.0 for a, t in zip(self.accepted_at, self.tested_at))

    def predicted_speedup(self, cost_ratio: float = COST_RATIO) -> float:
        """Predicts the speedup over plain decoding: `committed / sum(1 + k c)`, summed over rounds.

        k is the number of draft-model calls of a round, and c is `cost_ratio`, the cost of one such call in target
        calls. A target call is assumed to cost the same at any width (Leviathan et al. 2023, arXiv:2211.17192, section
        3.3).

        Raises:
            InvalidConfig: the ratio is negative or not finite.
        """
        if not (np.isfinite(cost_ratio) and cost_ratio >= 0):
            raise InvalidConfig(f"cost_ratio must be finite and at least 0, got {cost_ratio!r}")
        cost = self.rounds + self.draft_calls * cost_ratio
        return self.committed / cost if cost else 1.0

    def as_dict(self) -> dict:
        """Returns all counts and rates, for JSON."""
        return dataclasses.asdict(self) | {
            "target_calls": self.target_calls,
            "tokens_per_round": self.tokens_per_round,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_by_position": self.acceptance_by_position,
            "conditional_acceptance": self.conditional_acceptance,
            "predicted_speedup": self.predicted_speedup(),
        }
