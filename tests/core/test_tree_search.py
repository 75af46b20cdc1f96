"""Tests the best static tree against Sequoia's dynamic programme, and its expectation against a decode."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.core.theory import node_acceptance
from jaxspec.core.topology import branching, chain, from_paths
from jaxspec.errors import InvalidConfig
from jaxspec.rules.deterministic import Deterministic
from jaxspec.testing import accepted_length

pytestmark = pytest.mark.quick


def sequoia(table: np.ndarray, nodes: int, depth: int) -> float:
    """The most expected tokens of a tree of so many nodes at most: the dynamic programme over subtrees' sizes."""

    table = table if table.ndim == 3 else table[:, None]
    depths, parents, ranks = table.shape

    @functools.cache
    def below(nodes: int, at: int, parent: int, rank: int) -> float:
        """What children from `rank` on of one node at depth `at` add, with `nodes` nodes among their subtrees."""
        if nodes == 0 or at in (depth, depths) or rank == ranks:
            return 0.0
        share = table[at, min(parent, parents - 1), rank]
        return max(
            share * (1 + below(n - 1, at + 1, rank, 0)) + below(nodes - n, at, parent, rank + 1)
            for n in range(1, nodes + 1)
        )

    return 1 + below(nodes - 1, 0, 0, 0)


def random_table(rng, depths: int, ranks: int) -> np.ndarray:
    """Falling with the rank, with ties and zeros now and then."""
    table = -np.sort(-rng.dirichlet(np.full(ranks + 1, 0.5), depths)[:, :ranks], axis=-1)
    return np.where(rng.random() < 0.3, np.round(table, 1) * (np.round(table, 1).sum(-1, keepdims=True) <= 1), table)


def test_it_equals_the_dynamic_programme():
    """400 random acceptances, one for all depths and one each, with limits of depth, ties and zeros."""
    rng, limited = np.random.default_rng(0), 0
    for case in range(400):
        nodes, ranks = int(rng.integers(1, 14)), int(rng.integers(1, 5))
        depth = int(rng.integers(0, 6)) if case % 2 else nodes - 1
        table = random_table(rng, depth if case % 3 else 1, ranks)
        acceptance = table if case % 3 else table[0]
        if not acceptance.size:
            continue
        tree = jaxspec.best_tree(acceptance, nodes, depth)
        assert tree.shape.nodes <= nodes
        assert tree.shape.depth <= depth
        every = np.broadcast_to(table, (max(depth, 1), ranks))
        expected = sequoia(every, nodes, depth)
        assert jaxspec.expected_tokens(tree, acceptance) == pytest.approx(expected, abs=1e-12)
        limited += sequoia(every, nodes, nodes) > expected + 1e-9 if not case % 3 else 0
    assert limited > 10


def test_it_equals_the_dynamic_programme_by_the_rank_of_the_parent():
    """300 random acceptances with one to three ranks of parents; knowing them is worth something."""
    rng, gains = np.random.default_rng(3), []
    for _ in range(300):
        nodes, ranks, depth, parents = (int(rng.integers(1, high)) for high in (14, 5, 5, 4))
        acceptance = np.stack([random_table(rng, depth, ranks) for _ in range(parents)], 1)
        tree = jaxspec.best_tree(acceptance, nodes)
        expected = sequoia(acceptance, nodes, depth)
        assert jaxspec.expected_tokens(tree, acceptance) == pytest.approx(expected, abs=1e-12)
        blind = jaxspec.best_tree(acceptance.mean(1), nodes)
        gains.append(expected / jaxspec.expected_tokens(blind, acceptance))
        if parents == 1:
            assert tree == jaxspec.best_tree(acceptance[:, 0], nodes)
    assert min(gains) > 1 - 1e-12
    assert max(gains) > 1.1


def test_children_of_siblings():
    """By hand: the second child's children are seldom accepted, so the tree grows below the first."""
    rates = np.array([[[0.6, 0.3], [0.6, 0.3]], [[0.5, 0.2], [0.1, 0.05]]])
    assert jaxspec.best_tree(rates, 5) == from_paths([(0, 0), (0, 1), (1,)])
    assert jaxspec.best_tree(rates[:, 0], 5) == from_paths([(0, 0), (1, 0)])
    wide = from_paths([(0, 0), (1, 0), (1, 1)])
    assert jaxspec.expected_tokens(wide, rates) == pytest.approx(1 + 0.6 + 0.3 + 0.3 + 0.03 + 0.015)
    beyond = np.array([[[0.5, 0.2, 0.1]] * 2, [[0.5, 0.2, 0.1], [0.1, 0.05, 0.0]]])
    third = jaxspec.expected_tokens(from_paths([(0,), (1,), (2, 0), (2, 1)]), beyond)
    assert third == pytest.approx(1 + 0.5 + 0.2 + 0.1 * (1 + 0.1 + 0.05)), "the last row stands for all higher ranks"


def test_known_trees():
    assert jaxspec.best_tree([0.9], 5) == chain(4)
    assert jaxspec.best_tree([0.3, 0.3, 0.3], 4) == branching(3)
    assert jaxspec.best_tree([0.6, 0.3], 4) == from_paths([(0, 0), (1,)])
    assert jaxspec.best_tree([0.6, 0.3], 4, depth=1) == branching(2), "no more ranks to take"
    assert jaxspec.best_tree([[0.9, 0.05], [0.1, 0.05]], 9).shape.depth == 2, "as deep as was measured"
    assert jaxspec.best_tree([0.0, 0.0], 9) == jaxspec.best_tree([0.5], 9, depth=0) == chain(0)
    assert jaxspec.expected_tokens(chain(2), [0.5]) == 1.75
    assert jaxspec.expected_tokens(branching(2, 1), [[0.5, 0.25], [0.5, 0.0]]) == 1 + 0.75 + 0.375
    shorter = np.cumsum(node_acceptance(chain(3).tree, jnp.array([[[0.5], [0.5], [0.0]]] * 2)), -1)
    np.testing.assert_allclose(shorter, [[1.0, 1.5, 1.75, 1.75]] * 2)


def test_where_acceptance_rises_with_the_rank():
    """The tree is the best one of the envelope; what that costs against the dynamic programme is bounded and seen."""
    rising = np.array([0.1, 0.5, 0.2])
    envelope = np.array([0.3, 0.3, 0.2])
    assert jaxspec.best_tree(rising, 7) == jaxspec.best_tree(envelope, 7)
    assert jaxspec.best_tree(rising, 3) == branching(2), "the second cannot be had without the first"
    rng = np.random.default_rng(1)

    def lost(measured) -> float:
        """The share of the expected tokens that the best tree would have had more."""
        exact = sequoia(np.broadcast_to(measured, (8, 4)), 9, 8)
        return 1 - jaxspec.expected_tokens(jaxspec.best_tree(measured, 9), measured) / exact

    shuffled = [lost(rng.dirichlet(np.ones(5))[:4]) for _ in range(50)]
    assert min(shuffled) > -1e-12
    assert 0.01 < max(shuffled) < 0.4, "not optimal for ranks in no order at all"
    falling = [np.array([0.6, 0.12, 0.06, 0.06]) + rng.uniform(-0.02, 0.02, 4) for _ in range(50)]
    assert np.mean([(np.diff(a) > 0).any() for a in falling]) > 0.3
    assert max(map(lost, falling)) < 0.005, "chance rises cost next to nothing"


def test_the_expectation_is_that_of_a_round():
    """Where the laws do not depend on the text: tokens kept by the deterministic rule, by enumeration."""
    target, draft = np.array([0.5, 0.05, 0.3, 0.15]), np.array([0.4, 0.3, 0.2, 0.1])
    kept = target[np.argsort(-draft)]
    tree = from_paths([(0, 0, 0), (0, 0, 1), (1, 0), (2,)])
    exact = accepted_length(Deterministic(), tree, lambda text: target, lambda text: draft)
    assert jaxspec.expected_tokens(tree, kept) == pytest.approx(1 + exact, abs=1e-12)


def test_the_fastest_tree():
    """Brute force over all sizes and depths; plain decoding where drafting does not pay."""
    acceptance, rng = [0.7, 0.15, 0.05], np.random.default_rng(2)
    for _ in range(20):
        costs = {n: 1 + rng.random() * n / 8 for n in (1, 2, 4, 8, 16)}
        draft = float(rng.choice([0.0, 0.05, 0.3]))

        def rate(tree, costs=costs, draft=draft, width=None):
            width = width or min(n for n in costs if n >= tree.shape.nodes)
            return jaxspec.expected_tokens(tree, acceptance) / (costs[width] + tree.shape.depth * draft)

        best = max(rate(jaxspec.best_tree(acceptance, n, d), width=n) for n in costs for d in range(n))
        tree = jaxspec.fastest_tree(acceptance, costs, draft)
        assert rate(tree) == pytest.approx(best)
    assert jaxspec.fastest_tree([0.1], {1: 1.0, 2: 1.0, 5: 1.0}, 0.2) == chain(0)
    assert jaxspec.fastest_tree([0.9], {1: 1.0, 5: 1.0}, 0.0) == chain(4)


@pytest.mark.parametrize(
    ("acceptance", "nodes", "message"),
    [
        ([], 3, "ranks"),
        ([0.5, float("nan")], 3, "probabilities"),
        ([0.8, 0.3], 3, "add up to at most 1"),
        ([-0.1], 3, "probabilities"),
        ([[0.5], [0.1, 0.2]], 3, "ranks"),
        ([[[[0.5]]]], 3, "ranks of parents"),
        ([[[0.5, 0.1], [0.9, 0.2]]], 3, "add up to at most 1"),
        ("high", 3, "ranks"),
        ([0.5], 0, "whole number"),
        ([0.5], 2.0, "whole number"),
    ],
)
def test_it_refuses(acceptance, nodes, message):
    with pytest.raises(InvalidConfig, match=message):
        jaxspec.best_tree(acceptance, nodes)


def test_its_siblings_refuse():
    with pytest.raises(InvalidConfig, match="whole number from 0"):
        jaxspec.best_tree([0.5], 3, depth=-1)
    with pytest.raises(InvalidConfig, match="2 depths of up to 2 ranks"):
        jaxspec.expected_tokens(branching(2, 1), [0.5])
    for costs, draft in (({}, 0.1), ({1: 0.0}, 0.1), ({1: 1.0}, -1.0), ({1: 1.0}, float("nan"))):
        with pytest.raises(InvalidConfig, match="cost"):
            jaxspec.fastest_tree([0.5], costs, draft)
