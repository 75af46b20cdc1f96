"""Tests schedules: their decisions, that limits are obeyed and save computation, and that no law changes."""

import dataclasses
import functools
import itertools
from typing import Any, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from helpers.tiers import with_slow
from helpers.toys import (
    RAGGED,
    decoder,
    generate,
    noisy,
    random_request,
    request,
    start,
    step,
    texts,
    whole,
)
from jaxspec.analysis.enumeration import enumerate_proposals, joint_law, total_variation
from jaxspec.core.records import RoundResult
from jaxspec.core.schedule import Constant
from jaxspec.core.theory import best_length
from jaxspec.core.topology import branching, chain, dynamic
from jaxspec.core.tree import TreeShape
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Weights
from jaxspec.drafters.model import ModelDraft
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.errors import InvalidConfig
from jaxspec.generation.drafting import default_schedule
from jaxspec.models.functional import FunctionLM
from jaxspec.registry import find
from jaxspec.rules.rejection import Rejection
from jaxspec.schedules.adaptive import Adaptive
from jaxspec.schedules.best_width import BestWidth
from jaxspec.schedules.confidence import Confidence
from jaxspec.schedules.plus_minus import PlusMinus
from jaxspec.testing import ScriptedDrafter, TableLM, bias, g_test, random_laws, round_law

V, B = 8, 24
LM = TableLM(V)
PARAMS = LM.init_params(jax.random.key(0))
NEAR = noisy(PARAMS, 1, 0.5)
ALL = [schedule for several in cases.SCHEDULES.values() for schedule in several]


@dataclasses.dataclass(frozen=True)
class Cycle:
    """Limits that anyone can tell: row and round decide. Also such as no tree has."""

    limits: tuple[int, ...]
    widths: tuple[int, ...] = ()

    def init(self, batch, shape):
        return jnp.zeros((batch,), jnp.int32)

    def limit(self, state):
        return jnp.asarray(self.limits)[state % len(self.limits)]

    def update(self, state, played):
        return state + 1

    def count_nodes(self, state, log_acceptance, drafting, together):
        return None

    def stop_after(self, law, estimate=None):
        return None


def of_a_chain(drafted, accepted):
    """The result of a round with a chain of so many tokens, of which so many are accepted."""
    return RoundResult(drafted, accepted, 1 + drafted, 1 + accepted)


def asked(seed=0, **changes):
    return random_request(seed, B, V)._replace(**changes)


@pytest.fixture(scope="module")
def plain():
    return texts(whole(decoder(LM, NoDraft()), Weights(PARAMS), asked(), 128))


# With the coupled rule: the text of plain decoding, bit for bit.


@pytest.mark.parametrize(
    "schedule",
    with_slow(ALL, [s for s in ALL if not isinstance(s, Adaptive)]),
    ids=lambda s: type(s).__name__,
)
def test_text_is_that_of_plain_decoding(schedule, plain):
    """A draft model on a tree: 24 configurations of prompt, budget, stops and sampling in one batch."""
    tree = dynamic(2, 3, 6) if isinstance(schedule, BestWidth) else RAGGED  # it chooses among ranked nodes alone
    config = decoder(LM, ModelDraft(LM, tree), schedule=schedule)
    result = generate(config, Weights(PARAMS, NEAR), asked(), 128)
    assert texts(result) == plain
    log = jax.device_get(result.log)
    sizes = set(log.drafted[log.emitted > 0].tolist())
    assert max(sizes) > 0
    assert min(sizes) < tree.shape.nodes - 1, "it has limited something"


def test_text_is_that_of_plain_decoding_with_prompt_lookup(plain):
    """A drafter that does not draw: what is too deep is taken from its proposal."""
    limits = (0, 3, 1, 2, -5, 99)
    config = decoder(LM, PromptLookup(chain(3), min_match=1), schedule=Cycle(limits, (2,)))
    result = generate(config, Weights(PARAMS), asked(), 128)
    assert texts(result) == plain
    log = jax.device_get(result.log.part(np.s_[:, : len(limits) * 4]))
    for i in range(len(limits) * 4):
        ran = log.emitted[:, i] > 0
        assert set(log.drafted[ran, i].tolist()) <= {0, min(max(limits[i % len(limits)], 0), 3)}
    assert log.accepted.sum() > 10


# Limits.


def test_limits_are_obeyed_and_depend_on_no_neighbour():
    """Another limit in every round: drafted are just the nodes that deep; a row alone drafts and writes the same."""
    limits = (3, 0, 1, 4, 0, 0, 2)
    config = decoder(LM, ModelDraft(LM, chain(4)), schedule=Cycle(limits, (3,)))
    weights, asking = Weights(PARAMS, NEAR), asked(1, stop_ids=jnp.full((B, 2), -1))
    batch = whole(config, weights, asking, 128)
    log = jax.device_get(batch.log)
    seen = set()
    for i in range(int(batch.round.max())):
        drafted = log.drafted[log.emitted[:, i] > 0, i]
        assert (drafted <= limits[i % len(limits)]).all()
        seen |= {(limits[i % len(limits)], int(n)) for n in drafted}
    assert {(n, n) for n in limits} <= seen, "fewer only where top-k leaves no more"
    for row in (0, 5, 11):
        alone = whole(config, weights, jax.tree.map(lambda a, row=row: a[row : row + 1], asking), 128)
        assert texts(alone) == [texts(batch)[row]]
        np.testing.assert_array_equal(alone.log.counts[0], log.counts[row])


def counted(calls):
    """A draft model that notes how many texts each of its calls reads."""

    def logits(params, tokens, lengths):
        jax.debug.callback(lambda size=tokens.shape[0]: calls.append(size))
        return params[jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]]

    return FunctionLM(logits, V)


@pytest.mark.parametrize(
    "tree", with_slow([chain(4), branching(2, 2, 1)], (branching(2, 2, 1),)), ids=["chain", "tree"]
)
def test_a_short_draft_costs_short_time(tree):
    """A limit of g takes g calls of the draft model, 0 none; and one compilation serves all limits.

    A row that did not draft for long catches up in wide steps first; its cache is that of a fresh prefill.
    """
    calls = []
    drafter = ModelDraft(counted(calls), tree)
    config = decoder(LM, drafter, schedule=Constant())
    weights = Weights(PARAMS, 3 * jax.random.normal(jax.random.key(3), (V, V)))
    asking = request([[1, 2, 3]], 90, vocab=V, temperature=1.0)

    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def one_round(weights, state):
        return config.step(weights, state)

    state = start(config, weights, asking, 128)

    def play(state, limit):
        calls.clear()
        state = jax.block_until_ready(one_round(weights, state._replace(schedule=jnp.full((1,), limit))))
        jax.effects_barrier()
        return state, list(calls)

    state, _ = play(state, 1)
    for limit in (0, 1, 2, 3, 2, 0, 3):
        behind = int(state.length[0] - state.draft.cache.length[0])
        state, now = play(state, limit)
        widest = max(map(len, tree.parents_by_level[1:]))
        assert now == ([2] * -(-behind // 2) + [widest] * (limit - 1) if limit else [])
        drafted = int(state.log.drafted[0, int(state.round[0]) - 1])
        assert drafted == (tree.tree.depths <= limit).sum() - 1
    for _ in range(40):
        state, now = play(state, 0)
        assert not now
    behind, far = int(state.length[0] - state.draft.cache.length[0]), min(16, tree.shape.nodes + 3)
    assert behind >= 40
    state, now = play(state, 1)
    wide = -(-(behind - 2) // far)
    assert now == [far] * wide + [2] * (behind > wide * far)
    fresh = start(config, weights, asking._replace(tokens=state.tokens, count=state.length), 128)
    read = int(state.draft.cache.length[0])
    np.testing.assert_array_equal(
        state.draft.cache.stores.keys[..., :read, :], fresh.draft.cache.stores.keys[..., :read, :]
    )


# Rules that weigh laws stay exact.


@pytest.mark.parametrize("rule", [name for name in cases.LOSSLESS if name in cases.WEIGHING])
def test_lossless_rules_stay_exact(rule):
    """All proposals enumerated: a limit, and both kinds of doubt, leave the law of the round what it is."""
    rule = find("rule", rule)()
    trees = [chain(2)] if type(rule).__name__ == "Block" else [chain(2), branching(2, 1)]
    schedules = [Confidence(threshold=0.6), Constant(1), Confidence(threshold=0.6, entropy=True)]
    for tree, schedule in zip(itertools.cycle(reversed(trees)), schedules):
        withheld = 0
        for seed, kind in enumerate(("dense", "peaked", "sparse")):
            target, draft = random_laws(seed, 3, "dense"), random_laws(seed + 50, 3, kind)
            withheld += (enumerate_proposals(tree, target, draft, schedule=schedule).tokens < 0).any()
            assert bias(rule, tree, target, draft, schedule=schedule) < 1e-12
        assert withheld


def test_looking_at_the_token_would_be_seen():
    """Dropping a token because the draft thought it unlikely moves the law; the enumeration finds that."""
    target, draft = random_laws(0, 3), random_laws(1, 3)
    tree, first = chain(1), draft(())
    law = np.zeros(3)
    for token in range(3):
        if first[token] < 0.5:  # drawn, and dropped
            law += first[token] * target(())
        else:
            kept = min(1.0, target(())[token] / first[token])
            rest = np.maximum(target(()) - first, 0)
            law += first[token] * (kept * np.eye(3)[token] + (1 - kept) * rest / rest.sum())
    honest = round_law(Rejection(), tree, target, draft, schedule=Confidence(threshold=0.5)).sum(1)
    assert total_variation(honest, target(())) < 1e-12
    assert total_variation(law, target(())) > 0.02


@pytest.mark.slow  # one round of each is enumerated above
@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(Confidence(threshold=0.6), id="doubt"),
        pytest.param(Adaptive((1.0, 1.1), prior_rounds=1.0), id="past"),
    ],
)
def test_the_decoded_text_follows_the_law(schedule):
    """G-test of the first four tokens over 60,000 keys with the rejection rule, through several rounds."""
    vocab, batch, chunks, length = 3, 20_000, 3, 4
    lm = TableLM(vocab)
    params = jax.tree.map(np.asarray, lm.init_params(jax.random.key(0), 1.2))
    config = Decoder(lm, ModelDraft(lm, chain(2)), Rejection(), schedule, chunk=4)
    counts = np.zeros((vocab,) * length)
    for seed in range(chunks):
        asking = request([[2, 1]] * batch, length, vocab=vocab, seed=seed, temperature=1.0)
        result = generate(config, Weights(params, lm.init_params(jax.random.key(1), 1.2)), asking, 128, quick=False)
        np.add.at(counts, tuple(np.asarray(result.tokens)[:, 2 : 2 + length].T), 1)
        log = jax.device_get(result.log)
        assert len(set(log.drafted[log.emitted > 0].tolist())) > 1, "drafts of several lengths"

    def law(text):
        logits = np.asarray(lm.logits(params, [2, 1, *text]), np.float64)
        return np.exp(logits) / np.exp(logits).sum()

    assert g_test(counts, joint_law(law, length)).p > 1e-3


# What they decide.


def played(schedule, shape, rounds):
    """The limits of one row, given (drafted, accepted) of each round."""
    state, limits = schedule.init(1, shape), []
    for drafted, accepted in rounds:
        state = schedule.update(state, of_a_chain(jnp.array([drafted]), jnp.array([accepted])))
        limits.append(int(schedule.limit(state)[0]))
    return limits


def test_plus_minus_by_hand():
    """Two more after a draft accepted whole, within the tree; one less otherwise, not below one; else no change."""
    rounds = [(4, 4), (6, 6), (7, 7), (7, 6), (0, 0), (3, 3), (7, 0), *[(1, 0)] * 7]
    assert played(PlusMinus(), TreeShape(8, 7, 1), rounds) == [6, 7, 7, 6, 6, 7, 6, 5, 4, 3, 2, 1, 1, 1]
    assert int(PlusMinus().limit(PlusMinus().init(1, TreeShape(3, 2, 1)))[0]) == 2


def test_stop_after_by_hand():
    laws = np.array([[0.5, 0.25, 0.25, 0.0], [0.4, 0.3, 0.2, 0.1], [1.0, 0.0, 0.0, 0.0]])
    with np.errstate(divide="ignore"):
        logs = jnp.asarray(np.log(laws))
    entropy = -np.where(laws > 0, laws * np.log(np.maximum(laws, 1e-30)), 0).sum(-1)
    for threshold in (0.1, 0.45, 0.5, 0.7, 1.0):
        np.testing.assert_array_equal(Confidence(threshold=threshold).stop_after(logs), laws.max(-1) < threshold)
        np.testing.assert_array_equal(
            Confidence(threshold=threshold, entropy=True).stop_after(logs), 1 - np.sqrt(0.2 * entropy) < threshold
        )
        own = jnp.array([0.1, 0.5, 0.9])  # of a drafter: it takes the place of the law's, unless asked for the entropy
        np.testing.assert_array_equal(Confidence(threshold=threshold).stop_after(logs, own), own < threshold)
        np.testing.assert_array_equal(
            Confidence(threshold=threshold, entropy=True).stop_after(logs, own), 1 - np.sqrt(0.2 * entropy) < threshold
        )


def test_the_closed_form_is_the_best_length():
    """Against the speedup of every length, over a grid; and the worked table of section 3.3's formula."""
    for acceptance, cost in itertools.product(np.linspace(0, 0.98, 50), (0.0, 0.01, 0.05, 0.1, 0.3, 0.7, 1.0, 2.5)):
        tokens = np.cumsum(acceptance ** np.arange(41))
        speedup = tokens / (1 + cost * np.arange(41))
        found = best_length(float(acceptance), cost, 40)
        assert speedup[found] >= speedup.max() * (1 - 1e-12), (acceptance, cost)
    assert [best_length(0.8, c, 99) for c in (0.01, 0.05, 0.1, 0.2)] == [14, 8, 6, 4]
    assert best_length(1.0, 0.5, 30) == 30
    assert best_length(1.0, 1.5, 30) == best_length(0.3, 0.3, 30) == 0
    for bad in ((1.1, 0.1, 3), (0.5, -1.0, 3), (0.5, float("nan"), 3), (0.5, 0.1, -1), (0.5, 0.1, True)):
        with pytest.raises(InvalidConfig):
            best_length(*bad)


ROWS = 64


@functools.partial(jax.jit, static_argnums=(0, 2))
def simulated(schedule, acceptance, rounds):
    """`[rounds, ROWS]` depths and tokens of rows whose every depth is accepted with a known probability."""
    depth = acceptance.shape[-1]

    def one(state, key):
        drafted = schedule.limit(state)
        kept = jax.random.uniform(key, (ROWS, depth)) < acceptance
        accepted = jnp.minimum(jnp.cumprod(kept, -1).sum(-1), drafted)
        return schedule.update(state, of_a_chain(drafted, accepted)), (drafted, 1 + accepted)

    keys = jax.random.split(jax.random.key(0), rounds)
    return jax.lax.scan(one, schedule.init(ROWS, TreeShape(depth + 1, depth, 1)), keys)[1]


def speed(schedule, drafted, tokens):
    """Times plain decoding, all rows and rounds together."""
    return tokens.sum() / (1 + schedule.extra_costs(8)[drafted]).sum()


@pytest.mark.parametrize("costs", [(1.0, 1.05), (1.0, 1.25), (1.0, 1.6, 1.8, 2.1, 2.4, 2.5)], ids=str)
@pytest.mark.parametrize("acceptance", [0.0, 0.1, 0.5, 0.8, 0.95])
def test_adaptive_finds_the_best_depth(costs, acceptance):
    """Never below 0.97 of plain decoding, and within a few percent of the best constant depth."""
    schedule = Adaptive(costs)
    drafted, tokens = map(np.asarray, simulated(schedule, jnp.full((8,), acceptance), 400))
    constant = np.cumsum(acceptance ** np.arange(9)) / (1 + schedule.extra_costs(8))
    assert speed(schedule, drafted, tokens) >= max(0.97, 0.96 * constant.max())
    assert speed(schedule, drafted[200:], tokens[200:]) >= max(0.98, 0.97 * constant.max())
    assert abs(np.median(drafted[200:]) - constant.argmax()) <= 1
    if acceptance == 0.0:
        assert np.median(drafted[200:]) == 0


def test_adaptive_follows_a_change():
    """Nothing accepted, then nearly all, then nothing: it stops, goes deep, and stops again."""
    schedule = Adaptive((1.0, 1.1))
    acceptance = jnp.repeat(jnp.array([0.0, 0.95, 0.0]), 200)

    @jax.jit
    def run(key):
        def one(state, given):
            level, key = given
            drafted = schedule.limit(state)
            kept = jax.random.uniform(key, (ROWS, 8)) < level
            accepted = jnp.minimum(jnp.cumprod(kept, -1).sum(-1), drafted)
            return schedule.update(state, of_a_chain(drafted, accepted)), drafted

        state = schedule.init(ROWS, TreeShape(9, 8, 1))
        return jax.lax.scan(one, state, (acceptance, jax.random.split(key, 600)))[1]

    drafted = np.asarray(run(jax.random.key(1)))
    assert drafted[100:200].mean() < 0.3
    assert drafted[300:400].mean() > 6.5
    assert drafted[500:600].mean() < 0.3


@pytest.mark.parametrize(("prior_rounds", "deep"), [(4.0, True), (1.0, False)])
def test_one_bad_guess_does_not_keep_drafts_short(prior_rounds, deep):
    """A first draft of which two tokens are kept, then all that is tried is: deep drafts are tried again."""
    schedule = Adaptive((1.0, 1.3, 1.6, 1.9, 2.2, 2.4, *[2.6] * 10), prior_acceptance=0.9, prior_rounds=prior_rounds)
    state = schedule.init(1, TreeShape(16, 15, 1))
    tried = []
    for i in range(8):
        limit = schedule.limit(state)
        tried.append(int(limit[0]))
        state = schedule.update(state, of_a_chain(limit, limit if i else jnp.minimum(limit, 2)))
    assert tried[0] == 15
    assert (max(tried[1:]) == 15) == deep, tried


@pytest.mark.parametrize(("nodes", "accepted", "limits"), [
    (4, [0, 0, 0], [3, 3, 3]),
    (16, [0] * 31, [7, 7, *[3] * 27, 0, 0]),
    (16, [3, 7, 7, 15], [7, 7, 15, 15]),
])  # fmt: skip
def test_copied_drafts_start_short_and_grow(nodes, accepted, limits):
    """The loss budget allows 29 rejected windows at first; whole windows follow where all of a window was right."""
    schedule = default_schedule(ScriptedDrafter(chain(nodes - 1)), {})
    state = schedule.init(1, TreeShape(nodes, nodes - 1, 1))
    tried = []
    for kept in accepted:
        limit = schedule.limit(state)
        tried.append(int(limit[0]))
        state = schedule.update(state, of_a_chain(limit, jnp.minimum(limit, kept)))
    assert tried == limits


def test_adaptive_in_the_loop():
    """A target that drafts for itself goes to full depth; a draft that is never right comes to draft nothing."""
    config = decoder(LM, ModelDraft(LM, chain(6)), schedule=Adaptive((1.0, 1.2), widths=()))
    asking = request([[1, 2]] * 4, 100, vocab=V, temperature=1.0)
    right = whole(config, Weights(PARAMS, PARAMS), asking, 128).log
    assert (right.drafted[:, 3:14] == 6).all()
    wrong = jax.device_get(whole(config, Weights(PARAMS, {"table": -4 * PARAMS["table"]}), asking, 128).log)
    ran = wrong.emitted.T > 0  # in the order of the rounds
    drafted, accepted = wrong.drafted.T[ran], wrong.accepted.T[ran]
    assert (drafted[50:] > 0).mean() < 0.2
    assert (0.2 * drafted).sum() - accepted.sum() <= 4 * (2.0 + 0.015 * 100) + 1e-3


def test_finished_rows_learn_nothing():
    config = decoder(LM, ScriptedDrafter(chain(2)), schedule=Adaptive())
    weights = Weights(PARAMS, jnp.asarray(np.random.default_rng(0).integers(0, V, (V, 3))))
    state = start(config, weights, request([[1], [2]], [1, 20], vocab=V), 128)
    state = before = step(config, weights, state)
    for _ in range(4):
        state = step(config, weights, state)
    same = [bool((a[0] == b[0]).all()) for a, b in zip(state.schedule, before.schedule)]
    moved = [bool((a[1] == b[1]).all()) for a, b in zip(state.schedule, before.schedule)]
    assert all(same)
    assert not all(moved)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Constant(-1),
        lambda: Constant(True),
        lambda: Constant(2, (0,)),
        lambda: Constant(2, cast(Any, [3])),
        lambda: PlusMinus(first=0),
        lambda: PlusMinus(least=5),
        lambda: Confidence(threshold=1.5),
        lambda: Confidence(threshold=float("nan")),
        lambda: Confidence(threshold=cast(Any, "high")),
        lambda: Adaptive(costs=(1.0,)),
        lambda: Adaptive(costs=(1.0, 0.0)),
        lambda: Adaptive(costs=cast(Any, [1.0, 2.0])),
        lambda: Adaptive(prior_acceptance=0.0),
        lambda: Adaptive(prior_acceptance=1.5),
        lambda: Adaptive(loss_per_token=-0.1),
        lambda: Adaptive(decay_rounds=float("inf")),
    ],
)
def test_wrong_settings_are_refused(build):
    with pytest.raises(InvalidConfig):
        build()
