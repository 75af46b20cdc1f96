"""Acceptance of each rule, and the optimum over all rules, as pure functions of the target's and the draft's law.

Laws are probabilities `[*b, V]` that sum to 1. Nothing here decodes; the acceptance of a decode is in its `Stats`. All
functions but `expected_length` may be jitted (`children`, `draws`, `head` and `replacement` static) and compute in the
precision of the laws.

Acceptance with K distinct candidates is the probability that the emitted token is among them. Results `[*b, K]` are
for the first 1, 2, ..., K candidates; their differences are the acceptance by rank that `jaxspec.best_tree` takes.
"""

from jaxspec.analysis.length import ChainLengths, chain_lengths, expected_length
from jaxspec.analysis.optimum import HEAD, optimal_acceptance
from jaxspec.analysis.position import (
    DRAWS,
    RuleAcceptance,
    acceptance_by_rule,
    coupled_acceptance,
    deterministic_acceptance,
    match_probability,
    rejection_acceptance,
)

__all__ = [
    "DRAWS",
    "HEAD",
    "ChainLengths",
    "RuleAcceptance",
    "acceptance_by_rule",
    "chain_lengths",
    "coupled_acceptance",
    "deterministic_acceptance",
    "expected_length",
    "match_probability",
    "optimal_acceptance",
    "rejection_acceptance",
]
