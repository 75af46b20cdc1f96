"""The cost of drafted tokens that tests assume: drafters that choose how much they draft choose the same everywhere."""

from jaxspec.core.theory import TokenCost

COST = TokenCost(0.025, 14.0)
