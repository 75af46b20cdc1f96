"""Acceptance of each rule, and the optimum over all rules, as pure functions of the target's and the draft's law.

Laws are probabilities `[*b, V]` that sum to 1. Nothing here decodes; the acceptance of a decode is in its `Stats`. All
functions but `expected_length` and those of texts may be jitted (`children`, `draws`, `head` and `replacement` static),
and compute in the precision of the laws.

`text_laws` computes the laws of a loaded model along a text. At one position the rules "block" and "traversal" accept
as "rejection" does; they differ over a whole draft, whose expected length is that of `chain_lengths`,
`text_chain_lengths` and `expected_length`.

Acceptance with K distinct candidates is the probability that the emitted token is among them. Results `[*b, K]` are
for the first 1, 2, ..., K candidates; their differences are the acceptance by rank that `jaxspec.best_tree` takes.
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
