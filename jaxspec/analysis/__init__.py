"""How much of a draft each rule keeps, and how much any rule could: pure functions of the two laws.

Laws are probabilities `[*b, V]` that sum to 1. Nothing here decodes; what a decode kept is in its `Stats`. Everything
may be jitted (`children`, `draws` and `head` static), and is computed in the laws' precision.

A position with K distinct candidates is *kept* if the token that is emitted is among them. Results `[*b, K]` are for
the first 1, 2, ..., K candidates; their differences are the acceptance by rank that `jaxspec.best_tree` takes.
"""

from jaxspec.analysis.length import ChainLengths, chain_lengths, expected_length
from jaxspec.analysis.optimum import HEAD, optimal_acceptance
from jaxspec.analysis.position import (
    DRAWS,
    Kept,
    coupled_acceptance,
    deterministic_acceptance,
    match,
    one_step,
    rejection_acceptance,
)

__all__ = [
    "DRAWS",
    "HEAD",
    "ChainLengths",
    "Kept",
    "chain_lengths",
    "coupled_acceptance",
    "deterministic_acceptance",
    "expected_length",
    "match",
    "one_step",
    "optimal_acceptance",
    "rejection_acceptance",
]
