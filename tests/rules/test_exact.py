"""Tests that every lossless rule emits exactly the target's law, by enumeration, without sampling error."""

import itertools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import RULES, WEIGHING, verifies
from helpers.toys import allowed
from jaxspec.analysis.enumeration import ordered_draws, total_variation
from jaxspec.core.draw import Noise
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import Topology, branching, chain, from_paths
from jaxspec.errors import InvalidConfig
from jaxspec.testing import TableLM, accepted_length, bias, joint_law, model_law, random_laws, round_law

pytestmark = pytest.mark.quick

CHAINS = [(chain(0), 5), (chain(1), 6), (chain(2), 5), (chain(3), 4), (chain(4), 3), (chain(6), 2)]
TREES = [
    (branching(2), 6),
    (branching(4), 5),
    (branching(1, 3), 4),
    (branching(2, 2), 3),
    (from_paths([(0, 0, 0), (0, 1), (1, 0)]), 3),
    (from_paths([(0, 0, 0), (1,), (2, 0)]), 3),  # ragged, 7 nodes
    (from_paths([(0,), (1, 0, 0, 0, 0)]), 2),  # the younger branch is the deep one, 7 nodes
]
LOSSLESS = [name for name, rule in WEIGHING.items() if rule.lossless]
KINDS = ["dense", "sparse", "peaked", "point"]


def disjoint(seed, vocab):
    """Target and draft that have no token in common, after any text."""
    low = np.arange(vocab) < (vocab + 1) // 2

    def part(law, kept):
        return lambda text: (law(text) + 1e-3) * kept / ((law(text) + 1e-3) * kept).sum()

    return part(random_laws(seed, vocab), low), part(random_laws(seed + 1, vocab), ~low)


def pairs(seed, vocab):
    """Target and draft of every two kinds, equal, nearly equal, and disjoint."""
    for i, (target, draft) in enumerate(itertools.product(KINDS, KINDS)):
        yield random_laws(seed + 100 * i, vocab, target), random_laws(seed + 100 * i + 1, vocab, draft)
    same, noise = random_laws(seed, vocab), random_laws(seed + 1, vocab)
    yield same, same
    yield same, lambda text: 0.999 * same(text) + 0.001 * noise(text)
    yield disjoint(seed, vocab)


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_round_follows_the_target_exactly(name, seed):
    """Over 2,000 random cases in all: total variation below 1e-12 in float64, and 1e-6 in float32.

    Laws depend on the whole text: a rule that reads a wrong row is found. Some of them are point masses.
    """
    rule, worst, coarse, count = WEIGHING[name], 0.0, 0.0, 0
    for t, (topology, vocab) in enumerate(case for case in CHAINS + TREES if verifies(rule, case[0])):
        for repeat in range(3 if name == "deterministic" else 2):
            points = {Noise.NONE} if repeat and t % 2 else set()
            for i, (target, draft) in enumerate(pairs(10_000 * seed + 1000 * repeat, vocab)):
                for noise in {rule.noise} | points:
                    worst = np.maximum(worst, bias(rule, topology, target, draft, noise=noise))  # NaN stays
                    count += 1
                if t % 3 == 0 and i % 3 == repeat:
                    coarse = np.maximum(coarse, bias(rule, topology, target, draft, dtype=np.float32))
    print(f"{name}: {count} cases, worst {worst:.1e}, in float32 {coarse:.1e}")
    assert worst < 1e-12
    assert coarse < 1e-6
    assert count >= {"block": 285, "deterministic": 740}.get(name, 608)


def test_what_is_enumerated_is_a_law():
    """The instrument itself: draws without replacement by hand, all masses 1, and a text law of the right shape."""
    law = np.array([0.5, 0.0, 0.3, 0.2])
    draws = {drawn: chance for chance, drawn in ordered_draws(law, 2)}
    assert draws == pytest.approx({(0, 2): 0.3, (0, 3): 0.2, (2, 0): 0.3 * 5 / 7, (2, 3): 0.3 * 2 / 7,
                                   (3, 0): 0.2 * 5 / 8, (3, 2): 0.2 * 3 / 8})  # fmt: skip
    assert ordered_draws(np.array([1.0, 0.0]), 2) == [(1.0, (0, -1))]
    found = round_law(WEIGHING["rejection"], branching(2, 1), random_laws(0, 3), random_laws(1, 3))
    assert found.shape == (3, 3, 3)
    assert found.sum() == pytest.approx(1, abs=1e-12)
    stopped = joint_law(random_laws(0, 3), 3, stops=[2])
    assert stopped.sum() == pytest.approx(1)
    assert stopped[2, 2, 2] == pytest.approx(random_laws(0, 3)(())[2])
    assert not stopped[2, :2].any()
    with pytest.raises(InvalidConfig, match="plain decoding"):
        round_law(cast(Any, RULES["coupled"]), chain(1), random_laws(0, 3), random_laws(1, 3))
    with pytest.raises(InvalidConfig, match="supports only chains"):
        bias(WEIGHING["block"], branching(2), random_laws(0, 3), random_laws(1, 3))
    with pytest.raises(InvalidConfig, match="dense"):
        random_laws(0, 3, "odd")


def test_laws_of_a_model_are_those_of_its_settings():
    """Against the sort of the reference sampler, after every text, for each order of table."""
    for order in range(3):
        lm = TableLM(4, order=order)
        params = lm.init_params(jax.random.key(order))
        settings = {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1}
        law = model_law(lm, params, [1, 2], Sampling(**settings))
        for text in itertools.chain.from_iterable(itertools.product(range(4), repeat=n) for n in range(3)):
            logits = np.asarray(lm.logits(params, [1, 2, *text]), np.float64)
            wanted = np.where(allowed(logits, **settings), np.exp(logits / 0.7), 0.0)
            np.testing.assert_allclose(law(text), wanted / wanted.sum(), atol=1e-6)
        greedy = model_law(lm, params, [1, 2], Sampling())(())
        assert greedy[int(lm.logits(params, [1, 2]).argmax())] == 1
    with pytest.raises(InvalidConfig, match="0, 1 or 2"):
        TableLM(4, order=3)


# Accepted lengths, against the papers' formulas written out.


def drafted(draft, length, vocab):
    """Every text of a chain drawn from the draft, with its probability."""
    for text in itertools.product(range(vocab), repeat=length):
        chance = np.prod([draft(text[:i])[token] for i, token in enumerate(text)])
        if chance:
            yield text, chance


def ratios(target, draft, text):
    return [target(text[:i])[token] / draft(text[:i])[token] for i, token in enumerate(text)]


def token_by_token(target, draft, length, vocab):
    """The sum over i of the mean of prod min(1, ratio): Leviathan et al. 2023, section 3.1."""
    return sum(
        chance * np.cumprod(np.minimum(ratios(target, draft, text), 1)).sum()
        for text, chance in drafted(draft, length, vocab)
    )


def as_a_block(target, draft, length, vocab):
    """The sum over i of the mean of w[i], w[i] = min(1, w[i-1] ratio[i]): Sun et al. 2025, section 4."""
    total = 0.0
    for text, chance in drafted(draft, length, vocab):
        weight = 1.0
        for ratio in ratios(target, draft, text):
            weight = min(1.0, weight * ratio)
            total += chance * weight
    return total


def test_accepted_lengths_are_those_of_the_papers():
    """To 1e-9, for 120 pairs of laws: token by token <= block == traversal on a chain; one child: 1 - distance."""
    gained = []
    for (length, vocab), seed, kind in itertools.product([(1, 6), (2, 5), (3, 4), (4, 3)], range(10), KINDS[:3]):
        target, draft = random_laws(seed, vocab, kind), random_laws(seed + 50, vocab, "dense")
        got = {name: accepted_length(WEIGHING[name], chain(length), target, draft) for name in LOSSLESS}
        token, block = token_by_token(target, draft, length, vocab), as_a_block(target, draft, length, vocab)
        assert got["rejection"] == pytest.approx(token, abs=1e-9)
        assert got["block"] == pytest.approx(block, abs=1e-9)
        assert got["traversal"] == pytest.approx(block, abs=1e-9)
        assert token <= block + 1e-12
        if length == 1:
            assert token == pytest.approx(block, abs=1e-12)
            assert token == pytest.approx(1 - total_variation(target(()), draft(())), abs=1e-9)
        gained.append(block - token)
    assert max(gained) > 0.05, "block verification must gain somewhere"


def test_accepted_length_without_a_sample_is_the_mass_that_was_proposed():
    """Likeliest tokens: the walk goes on with the target's probability of being among them."""
    topology, vocab = branching(2, 1), 5
    for seed in range(5):
        target, draft = random_laws(seed, vocab), random_laws(seed + 9, vocab)
        first = np.argsort(-draft(()))[:2]
        expected = sum(target(())[t] * (1 + target((int(t),))[draft((int(t),)).argmax()]) for t in first)
        assert accepted_length(WEIGHING["deterministic"], topology, target, draft) == pytest.approx(expected, abs=1e-9)


def test_an_equal_draft_is_kept_whole():
    """Target and draft alike: every rule that weighs a sample walks to a leaf by first children."""
    same = random_laws(3, 3)
    for name in ("rejection", "block", "traversal"):
        assert accepted_length(WEIGHING[name], chain(4), same, same) == pytest.approx(4, abs=1e-9)
    ragged = Topology((-1, 0, 0, 1))
    for name in ("rejection", "traversal"):
        assert accepted_length(WEIGHING[name], ragged, same, same) == pytest.approx(2, abs=1e-9)


def test_the_enumeration_sees_each_known_mistake():
    """The measured total variations of algorithms that are wrong are far from 0: what a pass is worth."""
    from jaxspec.core.records import StopLaw
    from jaxspec.rules._siblings import child_tokens, reject_in_order, stop_probabilities
    from jaxspec.rules.rejection import Rejection

    class KeepsTheTarget(Rejection):
        """Draws from the target, not from what is left of it, after a rejection."""

        def __call__(self, law, proposal):
            return StopLaw(super().__call__(law, proposal).node_probs, lambda node: law[node])

    class RowBefore(Rejection):
        """Draws the last token by the law of the node before."""

        def __call__(self, law, proposal):
            found = super().__call__(law, proposal)
            leaf = proposal.tree.children.max(-1) < 0
            return StopLaw(
                found.node_probs, lambda n: jnp.where(leaf[n], law[proposal.tree.parents[n]], found.next_logits(n))
            )

    class OldDraft(Rejection):
        """Weighs second children by a law that still holds the first."""

        def __call__(self, law, proposal):
            tokens, draft = child_tokens(proposal), proposal.law
            first, _, law = jax.vmap(lambda p, q, t: reject_in_order(p, q, t[:1]))(jnp.exp(law), draft, tokens)
            second, _, law = jax.vmap(lambda p, q, t: reject_in_order(p, q, t[1:]))(law, draft, tokens)
            kept = jnp.exp(jnp.concatenate([first, second], axis=1))
            return StopLaw(stop_probabilities(kept, proposal.tree), lambda node: jnp.log(law[node]))

    target, draft = random_laws(5, 4), random_laws(6, 4)
    assert bias(KeepsTheTarget(), chain(2), target, draft) > 0.05
    assert bias(RowBefore(), chain(2), target, draft) > 0.01
    assert bias(OldDraft(), branching(2), target, draft) > 0.01
