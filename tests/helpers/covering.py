"""Covering arrays: few cases in which any two values of any two factors meet."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

WHOLE = 1500
"""The largest number of cases of which all are considered; of more, some are drawn."""
DRAWN = 300


def pairwise(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[dict[str, Any]], bool] = lambda _: True, seed: int = 0
) -> list[dict[str, Any]]:
    """Returns cases in which every pair of values meets that an allowed case has.

    Each case is the one among those considered that has the most pairs which no earlier case has; the first among
    equals. Another seed gives other cases, if there are too many to consider all.

    Args:
        factors: the values of each factor.
        allowed: tells whether a case, a value for every factor, is possible.
        seed: of the cases that are drawn.
    """
    names, sizes = list(factors), [range(len(values)) for values in factors.values()]
    rng = random.Random(seed)

    def named(chosen: Sequence[int]) -> dict[str, Any]:
        return {name: factors[name][place] for name, place in zip(names, chosen)}

    def drawn(fixed: Mapping[int, int], count: int) -> Iterator[tuple[int, ...]]:
        for _ in range(count):
            case = tuple(fixed.get(factor, rng.choice(size)) for factor, size in enumerate(sizes))
            if allowed(named(case)):
                yield case

    def pairs(case: Sequence[int]) -> frozenset:
        return frozenset(itertools.combinations(enumerate(case), 2))

    whole = math.prod(map(len, sizes)) <= WHOLE
    considered = (case for case in itertools.product(*sizes) if allowed(named(case))) if whole else drawn({}, DRAWN)
    candidates = {case: pairs(case) for case in considered}
    left = set().union(*candidates.values())
    if not whole:  # pairs that no drawn case has
        every = itertools.combinations([(factor, value) for factor, size in enumerate(sizes) for value in size], 2)
        for one, other in every:
            if one[0] != other[0] and (one, other) not in left:
                more = {case: pairs(case) for case in itertools.islice(drawn(dict((one, other)), DRAWN), 1)}
                candidates |= more
                left = left.union(*more.values())
    found = []
    while left:
        best = max(candidates, key=lambda case: len(candidates[case] & left))
        left -= candidates[best]
        found.append(named(best))
    return found
