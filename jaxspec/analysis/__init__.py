"""Acceptance of each rule, and the optimum over all rules, as pure functions of the target's and the draft's laws.

Laws are probabilities `[*b, V]` that sum to 1. These functions do not decode; the acceptance of a decode is in its
`Stats`. All functions except `expected_length`, `text_laws` and `text_chain_lengths` can be jitted (with `children`,
`draws`, `head` and `replacement` static), and compute in the precision of the laws.

`text_laws` computes the laws of a loaded model along a text. At a single position, the rules "block" and "traversal"
accept with the same probability as "rejection". They differ over a whole draft; `chain_lengths`, `text_chain_lengths`
and `expected_length` compute its expected length.

Acceptance with K distinct candidates is the probability that the emitted token is among them. Results `[*b, K]` refer
to the first 1, 2, ..., K candidates; their differences are the acceptance by rank that `jaxspec.best_tree` takes.
"""

from jaxspec.analysis.along import text_chain_lengths, text_laws
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
    "text_chain_lengths",
    "text_laws",
]
