"""Tests how many nodes drafters that choose propose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.draw import Draw, Noise
from jaxspec.core.noise import RoundNoise
from jaxspec.core.sampling import Sampling
from jaxspec.core.theory import assumed_cost
from jaxspec.drafters import _paying
from jaxspec.drafters._paying import count_paying
from jaxspec.kernels.library import COST_WITHOUT, TOKEN_COSTS

SURE, HOPELESS = np.zeros(15), np.full(15, -np.inf)


def counted(worth, kind, limit=None):
    rows = len(worth)
    noise = RoundNoise(jax.random.split(jax.random.key(0), rows), jnp.ones(rows, int), jnp.asarray(False), 9)
    limit = None if limit is None else jnp.asarray(limit)
    draw = Draw(kind, noise, Sampling().rows(rows, 9), limit)
    return count_paying(jnp.asarray(np.array(worth), jnp.float32), (1, 4, 8), draw, {}).tolist()


def test_a_row_by_itself_has_no_neighbours():
    assert counted([SURE, *7 * [HOPELESS]], Noise.NONE) == [15, *7 * [0]]
    assert counted([SURE], Noise.SHARED) == counted([SURE], Noise.NONE) == [15]


def test_rows_that_decide_together_draft_what_pays_for_all():
    assert counted([SURE, *7 * [HOPELESS]], Noise.SHARED) == 8 * [0]
    assert counted(2 * [SURE], Noise.SHARED) == [15, 15]
    assert min(counted(8 * [SURE], Noise.SHARED)) > 0
    assert counted([SURE, HOPELESS], Noise.SHARED) == [15, 15]


def test_rows_that_do_not_draft_are_not_asked():
    assert min(counted([SURE, *7 * [HOPELESS]], Noise.SHARED, limit=[15, *7 * [0]])) > 0


def test_a_processor_without_avx512_drafts_less(monkeypatch):
    likely = np.log(0.9) * np.arange(1, 16)
    assert counted([likely], Noise.NONE) == [15]
    monkeypatch.setattr(_paying, "token_cost", lambda _: TOKEN_COSTS["AVX2"]["int8"])
    assert counted([likely], Noise.NONE) == [3]
    doubtful = np.log(0.2) * np.arange(1, 16)  # 1.25 tokens of four nodes
    assert counted([doubtful], Noise.NONE) == [0]
    monkeypatch.setattr(_paying, "token_cost", lambda _: TOKEN_COSTS["AVX2"]["bfloat16"])
    assert counted([doubtful], Noise.NONE) == [3]


@pytest.mark.parametrize("cpu", [*(cost for own in TOKEN_COSTS.values() for cost in own.values()), COST_WITHOUT, None])
@pytest.mark.parametrize("rows", [1, 8, 256])
def test_costs_grow_with_width_and_never_faster_than_the_tokens(cpu, rows):
    costs = [assumed_cost(width, cpu, rows) for width in range(1, 65)]
    assert costs[0] == 1
    assert all(np.diff(costs) >= 0)
    assert all(cost <= width + 1e-9 for width, cost in enumerate(costs, 1))
    if rows == 256:
        assert costs[63] == pytest.approx(64)
