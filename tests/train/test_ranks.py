"""Tests the ranks of correct tokens, from which the trees of trained heads are found."""

import numpy as np
import pytest

from jaxspec.train import evaluate
from jaxspec.train.evaluate import NUM_PARENTS, NUM_RANKS, Ranks, find_trees

pytestmark = pytest.mark.quick


def test_frequencies_by_hand():
    """Positions past the answer, and those after a token that no tree would hold, do not count."""
    at = np.array([[0, 0], [0, 1], [1, 3], [NUM_RANKS, 0], [0, -1], [2, NUM_RANKS]])
    by_rank = Ranks(at).by_rank()
    assert by_rank.shape == (2, NUM_RANKS)
    np.testing.assert_allclose(by_rank[0, :3], np.array([3, 1, 1]) / 6)
    np.testing.assert_allclose(by_rank[1, :4], np.array([1, 1, 0, 1]) / 4)
    assert by_rank.sum(-1) == pytest.approx([5 / 6, 3 / 4])
    assert not Ranks(np.array([[0, -1]])).by_rank()[1].any()


def test_frequencies_by_the_rank_before(monkeypatch):
    """Without a prior: the frequencies after each rank, the last of which stands for all higher ranks."""
    monkeypatch.setattr(evaluate, "PRIOR_POSITIONS", 1e-9)
    at = np.array([[0, 0], [0, 0], [0, 1], [1, 2], [1, NUM_RANKS], [3, 0], [NUM_PARENTS + 2, 1], [0, -1]])
    table = Ranks(at).acceptance()
    assert table.shape == (2, NUM_PARENTS, NUM_RANKS)
    np.testing.assert_allclose(table[0, 0], Ranks(at).by_rank()[0], atol=1e-9)
    np.testing.assert_allclose(table[1, 0, :2], [2 / 3, 1 / 3], atol=1e-9)
    np.testing.assert_allclose(table[1, 1, :3], [0, 0, 1 / 2], atol=1e-9)
    np.testing.assert_allclose(table[1, 2], Ranks(at).by_rank()[1], atol=1e-9)  # never seen: those after any token
    np.testing.assert_allclose(table[1, 3, :2], [1 / 2, 1 / 2], atol=1e-9)


def test_rare_ranks_are_drawn_towards_all():
    """With the prior, a few positions change little, and many change much; the mean over positions stays."""
    rng = np.random.default_rng(0)
    first = rng.choice(3, 20_000, p=[0.99, 0.009, 0.001])
    second = np.where(first == 0, rng.random(20_000) < 0.2, rng.random(20_000) < 0.9).astype(int)
    ranks = Ranks(np.stack([first, second], 1))
    table, whole = ranks.acceptance()[1, :3, 1], ranks.by_rank()[1, 1]
    assert whole < table[2] < table[1] < 0.9
    assert table[0] == pytest.approx(0.2, abs=0.02)
    assert table[2] < whole + 0.25


def test_trees_know_the_rank_of_the_parent():
    """Heads whose second guess is right only after their first guess: no node has children but the first."""
    rng = np.random.default_rng(1)
    first = rng.choice(2, 50_000, p=[0.6, 0.4])
    second = np.where(first == 0, rng.choice(2, 50_000, p=[0.7, 0.3]), 9)
    ranks = Ranks(np.stack([first, second], 1))
    trees = {tree.shape.nodes: (tree, expected) for tree, expected in find_trees(ranks.acceptance())}
    tree, expected = trees[5]
    assert [*tree.parents] == [-1, 0, 0, 1, 1]
    assert expected == pytest.approx(1 + 1 + 0.6, abs=0.01)
    blind = {tree.shape.nodes: tree for tree, _ in find_trees(ranks.by_rank())}[5]
    assert [*blind.parents] == [-1, 0, 0, 1, 2]
