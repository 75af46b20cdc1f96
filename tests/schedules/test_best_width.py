"""Tests how many nodes the schedule "best-width" lets drafters propose, and what a round costs a row."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers import costs, moe
from helpers.narrow import instance, not_none
from jaxspec.core.draw import Draw, Noise
from jaxspec.core.noise import RoundNoise
from jaxspec.core.records import RoundResult
from jaxspec.core.sampling import Sampling
from jaxspec.core.schedule import Constant
from jaxspec.core.theory import XLA_TOKEN_COST, ExpertReads, TokenCost, assumed_cost
from jaxspec.core.topology import chain
from jaxspec.errors import InvalidConfig
from jaxspec.generation.drafting import Drafting
from jaxspec.kernels.library import TOKEN_COSTS
from jaxspec.models.experts import count_reads
from jaxspec.schedules.adaptive import Adaptive
from jaxspec.schedules.best_width import BestWidth, WidthState

SURE, HOPELESS = np.zeros(15), np.full(15, -np.inf)
SHAPE = chain(15).shape
SLOW = BestWidth(cpu=TokenCost(0.1, 3.7))
RICH = 100.0


def counted(log_acceptance, kind, limit: Any = None, balance: Any = RICH, schedule=costs.DEFAULT):
    rows = len(log_acceptance)
    noise = RoundNoise(jax.random.split(jax.random.key(0), rows), jnp.ones(rows, int), jnp.asarray(False), 9)
    limit = None if limit is None else jnp.asarray(limit)
    count = costs.counting(rows, SHAPE, balance, schedule)
    draw = Draw(kind, noise, Sampling().rows(rows, 9), limit, count=count)
    return draw.count_nodes(jnp.asarray(np.array(log_acceptance), jnp.float32)).tolist()


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


def test_where_tokens_cost_more_fewer_are_drafted():
    likely = np.log(0.9) * np.arange(1, 16)
    assert counted([likely], Noise.NONE) == [15]
    assert counted([likely], Noise.NONE, schedule=SLOW) == [3]
    doubtful = np.log(0.2) * np.arange(1, 16)  # 1.25 tokens of four nodes
    assert counted([doubtful], Noise.NONE, schedule=SLOW) == [0]
    assert counted([doubtful], Noise.NONE, schedule=BestWidth(cpu=TOKEN_COSTS["AVX2"]["float32"])) == [3]


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


def test_a_row_drafts_what_it_can_afford():
    """Width 4 costs 0.3 rounds more and 8 1.16; nothing is accepted with a probability of 0.4."""
    likely = np.log(0.6) + np.log(0.95) * np.arange(15)
    for balance, nodes in ((-1.0, 0), (0.11, 0), (0.13, 3), (0.45, 3), (0.47, 7)):
        assert counted([likely], Noise.NONE, balance=balance, schedule=SLOW) == [nodes], balance
    assert counted([SURE], Noise.NONE, balance=0.0, schedule=SLOW) == [7]  # what is sure may cost more
    assert counted(2 * [likely], Noise.SHARED, balance=[0.0, 0.24], schedule=SLOW) == [0, 0]
    assert counted(2 * [likely], Noise.SHARED, balance=[0.0, 2.0], schedule=SLOW) != [0, 0]
    assert counted(2 * [likely], Noise.SHARED, [15, 0], [0.0, 2.0], SLOW) == [0, 0]


def test_only_the_widths_of_the_schedule_are_chosen():
    likely = np.log(0.6) * np.arange(1, 16)
    for widths, nodes in (((4, 8), 3), ((6,), 5), ((), 0), ((6, 99), 5)):
        assert counted([likely], Noise.NONE, schedule=dataclasses.replace(SLOW, widths=widths)) == [nodes], widths


def test_other_schedules_take_all_nodes():
    noise = RoundNoise(jax.random.split(jax.random.key(0), 2), jnp.ones(2, int), jnp.asarray(False), 9)
    schedule, nodes = Constant(), jnp.full((2, 15), -jnp.inf)
    draw = Draw(Noise.NONE, noise, Sampling().rows(2, 9))
    assert draw.count_nodes(nodes).tolist() == [15, 15]
    draw = dataclasses.replace(draw, count=lambda *given: schedule.count_nodes(jnp.zeros(2, int), *given))
    assert draw.count_nodes(nodes).tolist() == [15, 15]


@pytest.mark.parametrize("together", [False, True])
def test_a_round_costs_its_width(together):
    """The width is the smallest that holds the drafted nodes; rows that share a call pay for the widest draft."""
    nodes, emitted = jnp.array([6, 1, 1]), jnp.array([4, 1, 2])
    before = WidthState(jnp.array([0.5, 0.0, -0.25]), SHAPE)
    after = SLOW.update(before, RoundResult(nodes - 1, emitted - 1, nodes, emitted, together=together))
    wide = assumed_cost(8, SLOW.cpu, 3 if together else 1)
    paid = np.array([wide, wide, wide] if together else [wide, 1.0, 1.0])
    expected = np.array([0.5, 0.0, -0.25]) + 1.03 * np.array([4, 1, 2]) - paid
    np.testing.assert_allclose(after.balance, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"widths": (0,)},
        {"widths": [4]},
        {"cpu": 1.5},
        {"cpu": (0.1, 0.5)},
        {"cpu": (-0.1, 2.0)},
        {"cpu": (0.1, 2.0, 3.0)},
        {"loss_budget": -1.0},
        {"loss_per_token": float("nan")},
    ],
)
def test_wrong_settings_are_refused(settings):
    with pytest.raises(InvalidConfig, match=next(iter(settings))):
        BestWidth(**settings)


def test_a_file_of_drafting_keeps_it(tmp_path):
    """A file holds the cost as a pair of numbers."""
    made = Drafting("prompt-lookup", tree=chain(4), schedule=dataclasses.replace(SLOW, widths=(1, 3)))
    made.save(tmp_path / "drafting.json")
    found = Drafting.load(tmp_path / "drafting.json")
    assert found == made
    assert isinstance(found.schedule, BestWidth)
    assert isinstance(found.schedule.cpu, TokenCost)


def test_experts_make_width_dear():
    """The expected distinct experts of n tokens, at the shapes of layers of Qwen3-30B-A3B and Qwen3.5-35B-A3B."""
    attention, expert = 2048 * (4096 + 2 * 512) + 4096 * 2048, 3 * 2048 * 768
    reads = ExpertReads(128, 8, 8 * expert / (attention + 8 * expert))
    widths = (1, 2, 4, 8, 16, 32, 64)
    assert [round(reads.expected(n), 1) for n in widths] == [8, 15.5, 29.1, 51.6, 82.4, 111.8, 125.9]
    costs = [reads.cost(n) for n in widths]
    np.testing.assert_allclose(costs, [1, 1.62, 2.76, 4.6, 7.2, 9.6, 10.8], rtol=0.02)
    for cpu in (TokenCost(0.015, 11.0), None):
        with_experts = [assumed_cost(n, cpu, 1, reads) for n in widths]
        assert with_experts[0] == 1
        assert all(np.diff(with_experts) > 0)
        np.testing.assert_allclose(with_experts, costs, rtol=0.12)
        # In a large batch, every expert is read anyway.
        assert assumed_cost(4, cpu, 64, reads) < assumed_cost(4, cpu, 1, reads) / (1 if cpu else 2)
    assert assumed_cost(8, TokenCost(0.015, 11.0), 1, ExpertReads(1, 1, 0.5)) == assumed_cost(8, TokenCost(0.015, 11.0))


def test_the_schedule_of_a_target_with_experts_knows_them():
    reads = count_reads(moe.LM, moe.PARAMS)
    sizes = not_none(moe.CONFIG.experts)
    assert reads is not None
    layers, own = sum(moe.CONFIG.sparse), 3 * 48 * sizes.width * sizes.per_token
    whole = sum(a.size for a in jax.tree.leaves(moe.PARAMS)) - moe.PARAMS["embed"].size
    expected = layers * own / (whole - layers * 3 * 48 * sizes.width * (sizes.count - sizes.per_token))
    assert reads.share == pytest.approx(expected)
    decoder, _ = Drafting("prompt-lookup").build(jaxspec.Model(moe.LM, moe.PARAMS))
    assert instance(BestWidth, decoder.schedule).experts == reads
    draft = jaxspec.Model(moe.LM, moe.DRAFT)
    decoder, _ = Drafting("model", draft=draft, tree=jaxspec.chain(4)).build(jaxspec.Model(moe.LM, moe.PARAMS))
    costs = instance(Adaptive, decoder.schedule).costs
    assert costs[4] > assumed_cost(5, TokenCost(0.015, 11.0)) + 0.3
    for wrong in ((8, 9, 0.5), (8, 2), (8, 2, 1.5), "experts"):
        with pytest.raises(InvalidConfig, match="experts"):
            BestWidth(experts=wrong)  # pyright: ignore[reportArgumentType]
