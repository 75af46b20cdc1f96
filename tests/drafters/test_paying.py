"""Tests how many nodes drafters that choose propose."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.draw import Draw, Noise
from jaxspec.core.noise import RoundNoise
from jaxspec.core.sampling import Sampling
from jaxspec.core.theory import TokenCost, assumed_cost
from jaxspec.drafters import _paying
from jaxspec.drafters._paying import ALLOWANCE, Budget, count_paying, new_budget, settle, spend
from jaxspec.kernels.library import TOKEN_COSTS, XLA_TOKEN_COST

SURE, HOPELESS = np.zeros(15), np.full(15, -np.inf)
WIDTHS = 1, 4, 8
RICH = 100.0
SLOW = TokenCost(0.1, 3.7)


def draw_of(rows, kind, limit=None):
    noise = RoundNoise(jax.random.split(jax.random.key(0), rows), jnp.ones(rows, int), jnp.asarray(False), 9)
    limit = None if limit is None else jnp.asarray(limit)
    return Draw(kind, noise, Sampling().rows(rows, 9), limit)


def counted(worth, kind, limit=None, left: Any = RICH):
    rows = len(worth)
    budget = new_budget(rows)._replace(left=jnp.broadcast_to(jnp.float32(left), (rows,)))
    draw = draw_of(rows, kind, limit)
    return count_paying(jnp.asarray(np.array(worth), jnp.float32), WIDTHS, draw, {}, budget).tolist()


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


def test_where_tokens_cost_more_fewer_are_drafted(monkeypatch):
    likely = np.log(0.9) * np.arange(1, 16)
    assert counted([likely], Noise.NONE) == [15]
    monkeypatch.setattr(_paying, "token_cost", lambda _: SLOW)
    assert counted([likely], Noise.NONE) == [3]
    doubtful = np.log(0.2) * np.arange(1, 16)  # 1.25 tokens of four nodes
    assert counted([doubtful], Noise.NONE) == [0]
    monkeypatch.setattr(_paying, "token_cost", lambda _: TOKEN_COSTS["AVX2"]["float32"])
    assert counted([doubtful], Noise.NONE) == [3]


@pytest.mark.parametrize(
    "cpu", [*(cost for own in TOKEN_COSTS.values() for cost in own.values()), XLA_TOKEN_COST, None]
)
@pytest.mark.parametrize("rows", [1, 8, 256])
def test_costs_grow_with_width_and_never_faster_than_the_tokens(cpu, rows):
    costs = [assumed_cost(width, cpu, rows) for width in range(1, 65)]
    assert costs[0] == 1
    assert all(np.diff(costs) >= 0)
    assert all(cost <= width + 1e-9 for width, cost in enumerate(costs, 1))
    if rows == 256:
        assert costs[63] == pytest.approx(64)


def test_a_row_drafts_what_it_can_afford(monkeypatch):
    """Width 4 costs 0.3 rounds more and 8 1.16; nothing is accepted with a probability of 0.4."""
    monkeypatch.setattr(_paying, "token_cost", lambda _: SLOW)
    likely = np.log(0.6) + np.log(0.95) * np.arange(15)
    for left, nodes in ((-1.0, 0), (0.11, 0), (0.13, 3), (0.45, 3), (0.47, 7)):
        assert counted([likely], Noise.NONE, left=left) == [nodes], left
    assert counted([SURE], Noise.NONE, left=0.0) == [7]  # what is sure may cost more
    assert counted(2 * [likely], Noise.SHARED, left=[0.0, 0.24]) == [0, 0]
    assert counted(2 * [likely], Noise.SHARED, left=[0.0, 2.0]) != [0, 0]
    assert counted(2 * [likely], Noise.SHARED, left=[0.0, 2.0], limit=[15, 0]) == [0, 0]


def test_without_a_width_of_one_the_smallest_is_never_refused(monkeypatch):
    monkeypatch.setattr(_paying, "token_cost", lambda _: SLOW)
    worth, draw = jnp.log(0.6) * jnp.arange(1, 16)[None], draw_of(1, Noise.NONE)
    poor = Budget(jnp.full(1, -5.0), jnp.zeros(1))
    assert count_paying(worth, (4, 8), draw, {}, poor).tolist() == [3]
    assert count_paying(worth, (), draw, {}, poor).tolist() == [15]


@pytest.mark.parametrize("kind", [Noise.NONE, Noise.SHARED])
def test_a_budget_is_what_rounds_saved(kind, monkeypatch):
    """The cost is that of the width at which the round runs; rows that share it pay the widest."""
    own = SLOW
    monkeypatch.setattr(_paying, "token_cost", lambda _: own)
    drafted = jnp.full((3, 16), -1).at[:, 0].set(7).at[0, 5].set(1).at[2, 5].set(1)
    draw = draw_of(3, kind, [15, 15, 0])
    budget = spend(new_budget(3), drafted, WIDTHS, draw, {})
    rows = 3 if kind is Noise.SHARED else 1
    wide = assumed_cost(8, own, rows)
    costs = [wide, wide if kind is Noise.SHARED else 1.0, 0.0]
    np.testing.assert_allclose(budget.cost, costs, rtol=1e-6)
    after = settle(budget, jnp.array([4, 1, 1]))
    saved = np.array([4, 1, 1]) * (1 + ALLOWANCE) - costs
    np.testing.assert_allclose(after.left, ALLOWANCE + np.array([*saved[:2], 0.0]), rtol=1e-5)
    assert after.cost.tolist() == [0, 0, 0]
    prompt = settle(after, jnp.array([50, 50, 50]))
    assert prompt.left.tolist() == after.left.tolist()


@pytest.mark.parametrize("chance", [0.5, 0.96])
def test_hopeless_drafts_cost_no_more_than_allowed(chance, monkeypatch):
    """A row whose drafts are never accepted, though they should be, loses the allowance and one draft."""
    own = SLOW
    monkeypatch.setattr(_paying, "token_cost", lambda _: own)
    worth, draw = jnp.log(chance) * jnp.arange(1, 16)[None], draw_of(1, Noise.NONE)

    @jax.jit
    def play(budget):
        nodes = count_paying(worth, WIDTHS, draw, {}, budget)
        tokens = jnp.where(jnp.arange(16) <= nodes[:, None], 1, -1)
        budget = spend(budget, tokens, WIDTHS, draw, {})
        return settle(budget, jnp.array([1])), budget.cost[0]

    budget, lost = new_budget(1), 0.0
    for _ in range(200):
        budget, cost = play(budget)
        lost += float(cost) - 1
    assert 2 < lost < 200 * ALLOWANCE + assumed_cost(16, own) - 1
