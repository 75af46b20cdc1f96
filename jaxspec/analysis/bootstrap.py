"""95 % confidence intervals of ratios of sums, by bootstrap over prompts."""

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 5000


def ratio_interval(pairs: ArrayLike, seed: int = 0) -> tuple[float, float]:
    """Returns the 95 % interval of a ratio of sums.

    Args:
        pairs: the numerator and the denominator of each prompt, `[N, 2]`, such as its tokens and its rounds.
        seed: seed of the resampling.
    """
    low, high = np.quantile(_resample(pairs, seed), (0.025, 0.975)).tolist()
    return low, high


def ratio_difference(pairs: ArrayLike, others: ArrayLike, seed: int = 0) -> tuple[float, float, float]:
    """Returns the difference of two ratios of sums over the same prompts, `[N, 2]` each, and its 95 % interval.

    Both ratios use the same resampled prompts, so differences between prompts cancel.
    """
    (a, m), (b, n) = np.asarray(pairs, float).sum(0), np.asarray(others, float).sum(0)
    low, high = np.quantile(_resample(pairs, seed) - _resample(others, seed), (0.025, 0.975)).tolist()
    return float(a / m - b / n), low, high


def _resample(pairs: ArrayLike, seed: int) -> np.ndarray:
    """Returns the ratio of sums for resampled prompts, `[RESAMPLES]`; equal seeds draw equal indices."""
    pairs = np.asarray(pairs)
    drawn = np.random.default_rng(seed).integers(0, len(pairs), (RESAMPLES, len(pairs)))
    sums, counts = pairs[drawn].sum(1).T
    return sums / counts
