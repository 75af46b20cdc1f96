"""Tests confidence intervals by bootstrap over prompts."""

import numpy as np
import pytest

from jaxspec.analysis.bootstrap import ratio_difference, ratio_interval

pytestmark = pytest.mark.quick


def test_a_difference_is_taken_prompt_by_prompt():
    """What makes prompts unlike each other does not widen it; where they part by chance alone it has its ends."""
    rng = np.random.default_rng(0)
    counts = rng.integers(5, 30, 40)
    base = np.stack([counts * rng.uniform(1, 4, 40), counts], 1)
    better = base + np.stack([0.25 * counts, 0 * counts], 1)
    assert ratio_difference(better, base) == pytest.approx((0.25,) * 3)
    assert ratio_difference(base, better)[0] == pytest.approx(-0.25)
    low, high = ratio_interval(base)
    assert high - low > 0.4
    noisy = base + np.stack([counts * rng.normal(0, 0.3, 40), 0 * counts], 1)
    gap, low, high = ratio_difference(noisy, base)
    assert low < gap < high
    assert 0.1 < high - low < 0.3  # 4 standard errors of 0.3 over 40 prompts, of unlike weight
