"""Tests the formulas of acceptance against enumeration: of sets, of draws, and of rounds under the rules themselves."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.shapes import unchecked
from jaxspec import analysis
from jaxspec.analysis.enumeration import ordered_draws, top_tokens
from jaxspec.core.topology import branching, chain, from_paths
from jaxspec.errors import InvalidConfig, ShapeMismatch
from jaxspec.registry import find
from jaxspec.testing import accepted_length, random_laws

KINDS = ("dense", "sparse", "peaked")


@pytest.fixture(autouse=True)
def double():
    """Float64 throughout."""
    with jax.enable_x64(True):
        yield


def pairs(vocab: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Laws of all kinds, some of them equal, `[count, V]` each."""
    kinds = itertools.cycle(itertools.product(KINDS, KINDS))
    laws = [(random_laws(2 * i, vocab, a)(()), random_laws(2 * i + 1, vocab, b)(())) for i, (a, b) in
            zip(range(count), kinds)]  # fmt: skip
    laws[0] = (laws[0][0], laws[0][0])
    return np.stack([t for t, _ in laws]), np.stack([d for _, d in laws])


def subsets(vocab: int) -> list[list[int]]:
    return [[t for t in range(vocab) if bits >> t & 1] for bits in range(2**vocab)]


def within(draft: np.ndarray, kept: list[int], children: int, replacement: bool) -> float:
    """The probability that all draws are among the kept tokens."""
    if replacement:
        return draft[kept].sum() ** children
    return sum(chance for chance, drawn in ordered_draws(draft, children) if {t for t in drawn if t >= 0} <= set(kept))


@pytest.mark.parametrize("replacement", [True, False])
def test_the_optimum_is_the_smallest_cut(replacement):
    """Over all sets of 5 tokens, for 45 pairs of laws and 1 to 3 children."""
    targets, drafts = pairs(5, 45)
    got = np.asarray(analysis.optimal_acceptance(targets, drafts, 3, replacement=replacement))
    for row, (target, draft) in enumerate(zip(targets, drafts)):
        for children in (1, 2, 3):
            cuts = [target[s].sum() + 1 - within(draft, s, children, replacement) for s in subsets(5)]
            assert got[row, children - 1] == pytest.approx(min(cuts), abs=1e-9)
    np.testing.assert_allclose(got[:, 0], np.minimum(targets, drafts).sum(-1), atol=1e-9)


@pytest.mark.slow
def test_a_short_head_only_raises_the_optimum():
    """1,000 tokens, some of them one by one: never below what all of them give, and not by much."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (8, 1000))
    laws = jax.nn.softmax(jnp.asarray(logits + rng.normal(0, 1, logits.shape))), jax.nn.softmax(jnp.asarray(logits))
    exact = analysis.optimal_acceptance(*laws, 4, head=1000)
    for head, most in ((16, 0.2), (128, 0.002)):
        more = np.asarray(analysis.optimal_acceptance(*laws, 4, head=head) - exact)
        assert more.min() > -1e-9
        assert more.max() < most
    target, draft = (law.astype(jnp.float32) for law in laws)
    single = analysis.optimal_acceptance(target, draft, 4)
    np.testing.assert_allclose(single, exact, atol=2e-5)
    assert (exact <= analysis.optimal_acceptance(*laws, 4) + 1e-12).all()


@functools.cache
def star(children: int):
    return branching(children)


@pytest.mark.parametrize("children", [1, 2, 3])
def test_acceptance_equals_a_round_of_the_rules(children):
    """Rejection and deterministic, by enumeration of a round with the code that decodes."""
    targets, drafts = pairs(5, 18)
    rejection = analysis.rejection_acceptance(targets, drafts, children)
    deterministic = analysis.deterministic_acceptance(targets, drafts, children)
    optimum = analysis.optimal_acceptance(targets, drafts, children)
    for row, laws in enumerate(zip(targets, drafts)):
        for name, got in (("rejection", rejection), ("deterministic", deterministic)):
            target, draft = ((lambda text, law=law: law) for law in laws)
            exact = accepted_length(find("rule", name)(), star(children), target, draft)
            assert got[row, -1] == pytest.approx(exact, abs=1e-9), (name, row)
    assert (rejection <= optimum + 1e-9).all()
    assert (optimum - rejection).max() > (0.02 if children > 1 else -1), "the rule is not always optimal"


def coupled_by_race(target, draft, children: int) -> float:
    """The coupled rule's acceptance for V tokens, by integrating over who comes first and who before it.

    Given that the target's token x wins at time t, every other token y has come to the draft before x with
    probability 1 - exp(-max(draft_y target_x / draft_x - target_y, 0) t).
    """
    times = np.exp(np.arange(-30, 12, 0.05))
    total = 0.0
    for x in range(len(target)):
        if not target[x] or not draft[x]:
            continue
        came = np.zeros((len(times), children))
        came[:, 0] = 1
        for y in range(len(target)):
            if y != x:
                hit = -np.expm1(-max(draft[y] * target[x] / draft[x] - target[y], 0) * times)[:, None]
                came = came * (1 - hit) + np.pad(came, ((0, 0), (1, 0)))[:, :-1] * hit
        total += (0.05 * target[x] * times * np.exp(-times) * came.sum(1)).sum()
    return total


def test_matching_draws():
    """The formula in its quadratic form; summed, it is the race with one child, and within its known bounds."""
    targets, drafts = pairs(6, 30)
    got = np.asarray(analysis.match_probability(targets, drafts))
    for row, (p, q) in enumerate(zip(targets, drafts)):
        for x in range(6):
            with np.errstate(divide="ignore", invalid="ignore"):
                naive = 1 / np.maximum(p / p[x], q / q[x]).sum() if p[x] and q[x] else 0.0
            assert got[row, x] == pytest.approx(naive, abs=1e-12)
        assert got[row].sum() == pytest.approx(coupled_by_race(p, q, 1), abs=1e-9)
        overlap = np.minimum(p, q).sum()
        assert overlap / (2 - overlap) - 1e-12 <= got[row].sum() <= overlap + 1e-12


def test_what_is_sampled_is_unbiased():
    """Coupled and rejection with several children, within 5 standard errors of what is exact."""
    targets, drafts = pairs(5, 9)
    draws = 20_000
    coupled = analysis.coupled_acceptance(targets, drafts, 3, jax.random.key(0), draws)
    rejection = analysis.rejection_acceptance(targets, drafts, 3, jax.random.key(1), draws)
    exact = np.asarray(analysis.rejection_acceptance(targets, drafts, 3))
    race = np.array([[coupled_by_race(p, q, k) for k in (1, 2, 3)] for p, q in zip(targets, drafts)])
    optimum = np.asarray(analysis.optimal_acceptance(targets, drafts, 3))
    assert (race <= optimum + 1e-9).all()
    for got, expected in ((coupled, race), (rejection, exact)):
        error = np.sqrt(expected * (1 - expected).clip(0) / draws)
        assert (np.abs(got - expected) <= 5 * error + 1e-9).all()
        np.testing.assert_allclose(got[:, 0], expected[:, 0], atol=1e-9)


def test_all_rules_in_one_call():
    """In float32, jitted, as the command line has it; where the coupled draft is another law, so is its optimum."""
    targets, drafts = (law.astype(np.float32) for law in pairs(6, 12))
    free = (drafts + 0.1) / (drafts + 0.1).sum(-1, keepdims=True)
    found = jax.jit(analysis.acceptance_by_rule, static_argnums=(2, 4))(targets, drafts, 3, jax.random.key(0), 8, free)
    assert set(found) == {"rejection", "coupled", "deterministic"}
    for name, kept in found.items():
        assert kept.acceptance.shape == kept.optimum.shape == (12, 3)
        assert kept.acceptance.dtype == np.float32
        assert (np.diff(kept.acceptance, axis=1)[:, 1:] > -1e-6).all()
        if name != "coupled":
            assert (kept.gap > -1e-5).all()
    np.testing.assert_allclose(found["coupled"].optimum, analysis.optimal_acceptance(targets, free, 3), atol=1e-6)
    np.testing.assert_allclose(
        found["rejection"].acceptance,
        analysis.rejection_acceptance(targets, drafts, 3),
        atol=0.3,
    )


# Whole drafts.


@pytest.mark.parametrize(("seed", "kind"), [(0, "dense"), (1, "peaked"), (2, "sparse")])
def test_lengths_of_chains(seed, kind):
    """Token, block and traversal by enumeration; token <= block <= bound, draft by draft; coupled below the bound."""
    vocab, depth = 3, 3
    target, draft = random_laws(seed, vocab, kind), random_laws(seed + 100, vocab)
    drafts = list(itertools.product(range(vocab), repeat=depth))
    chance = np.array([np.prod([draft(d[:i])[d[i]] for i in range(depth)]) for d in drafts])
    with np.errstate(divide="ignore"):
        ratios = np.log([[target(d[:i])[d[i]] / draft(d[:i])[d[i]] for i in range(depth)] for d in drafts])
    lengths = analysis.chain_lengths(jnp.asarray(ratios))
    assert (lengths.token <= lengths.block + 1e-12).all()
    assert (lengths.block <= lengths.bound + 1e-12).all()
    mean = {name: float(chance @ getattr(lengths, name)) for name in lengths._fields}
    exact = {
        name: analysis.expected_length(find("rule", name)(), chain(depth), target, draft)
        for name in ("rejection", "block", "traversal", "deterministic", "coupled")
    }
    assert mean["token"] == pytest.approx(exact["rejection"], abs=1e-9)
    assert mean["block"] == pytest.approx(exact["block"], abs=1e-9)
    assert exact["traversal"] == pytest.approx(exact["block"], abs=1e-9)
    assert exact["coupled"] < exact["rejection"] + 1e-12
    texts = [t for i in range(1, depth + 1) for t in itertools.product(range(vocab), repeat=i)]
    joint = [[np.prod([law(t[:i])[t[i]] for i in range(len(t))]) for law in (target, draft)] for t in texts]
    assert mean["bound"] == pytest.approx(np.min(joint, axis=1).sum(), abs=1e-9)


def test_lengths_of_trees():
    """Traversal keeps no less than trying siblings one by one; the deterministic rule by its own formula."""
    target, draft, tree = random_laws(3, 3), random_laws(4, 3), from_paths([(0, 0), (0, 1), (1,)])
    one, other, fixed = (
        analysis.expected_length(find("rule", name)(), tree, target, draft)
        for name in ("rejection", "traversal", "deterministic")
    )
    assert one < other + 1e-12
    first, second = top_tokens(draft(()), 2)
    below = sum(target((first,))[t] for t in top_tokens(draft((first,)), 2))
    assert fixed == pytest.approx(target(())[first] * (1 + below) + target(())[second], abs=1e-9)
    with pytest.raises(InvalidConfig, match="has a formula only for chains"):
        analysis.expected_length(find("rule", "coupled")(), tree, target, draft)


def test_bad_input_is_refused():
    law = np.full(4, 0.25)
    with pytest.raises(InvalidConfig, match="whole number"):
        analysis.optimal_acceptance(law, law, 0)
    with pytest.raises(InvalidConfig, match="at most the vocabulary size 4, got 5"):
        analysis.deterministic_acceptance(law, law, 5)
    with unchecked(), pytest.raises(ShapeMismatch, match="the same shape"):
        analysis.match_probability(law, law[:3])
