"""Tests token trees against a reference that visits one node at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.bounds import bounded
from jaxspec.core.sizes import MAX_NODES
from jaxspec.core.topology import Topology, branching, chain, from_paths, read_parents
from jaxspec.core.tree import TreeShape, build
from jaxspec.core.tree_spec import TREE_NAMES, named_tree
from jaxspec.errors import InvalidConfig, UnknownName

pytestmark = pytest.mark.quick


@st.composite
def level_ordered(draw) -> tuple[int, ...]:
    """Parents of a random tree in level order; siblings need not stand side by side."""
    parents, level = [-1], [0]
    for _ in range(draw(st.integers(0, 4))):
        below = draw(st.lists(st.sampled_from(level), min_size=1, max_size=4))
        level = list(range(len(parents), len(parents) + len(below)))
        parents += below
    return tuple(parents)


def reference(parents) -> dict[str, list]:
    """Every table of the tree, from its definition."""

    def path(node):
        return [] if node < 0 else [*path(parents[node]), node]

    ids = range(len(parents))
    paths = [path(n) for n in ids]
    children = [[m for m in ids if parents[m] == n] for n in ids]
    return {
        "parents": list(parents),
        "depths": [len(p) - 1 for p in paths],
        "ranks": [0, *(children[parents[n]].index(n) for n in ids if n)],
        "ancestors": [[m in p for m in ids] for p in paths],
        "children": [c + [-1] * (max(map(len, children)) - len(c)) for c in children],
        "paths": [p + [-1] * (max(map(len, paths)) - len(p)) for p in paths],
    }


@settings(max_examples=150, deadline=None)
@given(level_ordered())
def test_tables_equal_the_naive_walk(parents):
    topology, expected = Topology(parents), reference(parents)
    shape = topology.shape
    assert shape == TreeShape(len(parents), max(expected["depths"]), len(expected["children"][0]))
    for name, table in topology.tree._asdict().items():
        assert table.dtype == (bool if name == "ancestors" else np.int32), name
        np.testing.assert_array_equal(table, np.array(expected[name]).reshape(table.shape), err_msg=name)
    levels = [[n for n, d in enumerate(expected["depths"]) if d == depth] for depth in range(shape.depth + 1)]
    assert [level.tolist() for level in topology.levels] == levels
    inner = [[n for n in level if n in parents] for level in levels[:-1]]
    assert [level.tolist() for level in topology.parents_by_level] == inner
    assert topology.is_chain == (parents == tuple(range(-1, len(parents) - 1)))


def test_traced_tables_equal_constant_ones():
    """`build` inside a vmapped jit, with room to spare in depth and width, is `build` with numpy."""
    rng = np.random.default_rng(0)
    shape, trees = TreeShape(10, 9, 9), []
    for _ in range(200):
        parents, floor = [-1], 0
        for node in range(1, 10):
            floor = int(rng.integers(floor, node))
            parents.append(floor)
        trees.append(parents)
    traced = jax.jit(jax.vmap(lambda p: build(p, shape)))(jnp.asarray(trees))
    for i, parents in enumerate(trees):
        constant = build(np.array(parents), shape, np)
        for name in constant._fields:
            np.testing.assert_array_equal(getattr(traced, name)[i], getattr(constant, name), err_msg=name)
        own = Topology(tuple(parents)).tree
        np.testing.assert_array_equal(constant.children[:, : own.children.shape[1]], own.children)
        np.testing.assert_array_equal(constant.paths[:, : own.paths.shape[1]], own.paths)
        assert (constant.paths[:, own.paths.shape[1] :] == -1).all()


@pytest.mark.parametrize("length", [0, 1, 5])
def test_chain(length):
    topology = chain(length)
    assert topology.parents == tuple(range(-1, length))
    assert topology.shape == TreeShape(length + 1, length, min(length, 1))
    assert topology.is_chain
    np.testing.assert_array_equal(topology.tree.ancestors, np.tri(length + 1, dtype=bool))


def test_branching():
    topology = branching(4, 2, 1)
    assert [len(level) for level in topology.levels] == [1, 4, 8, 8]
    assert topology.shape == TreeShape(21, 3, 4)
    below = {n: topology.parents.count(n) for n in range(21)}
    assert {below[int(n)] for n in topology.levels[1]} == {2}
    assert branching() == chain(0)
    assert branching(1, 1) == chain(2)


@settings(max_examples=60, deadline=None)
@given(level_ordered(), st.randoms())
def test_from_paths_gives_back_the_tree(parents, random):
    """From its leaves' paths of ranks, in any order: the same shape, up to the order within a level."""
    tree = Topology(parents).tree

    def ranks(node, tree):
        return () if node == 0 else (*ranks(tree.parents[node], tree), int(tree.ranks[node]))

    leaves = [ranks(n, tree) for n in range(len(parents)) if n not in parents]
    random.shuffle(leaves)
    again = from_paths(leaves)
    order = sorted((ranks(n, tree) for n in range(len(parents))), key=lambda path: (len(path), path))
    assert [ranks(n, again.tree) for n in range(len(parents))] == order


def test_equal_trees_are_one_static_argument():
    assert chain(3) == Topology((-1, 0, 1, 2))
    assert hash(chain(3)) == hash(Topology((-1, 0, 1, 2)))
    assert from_paths([(0, 0), (1,)]).parents == (-1, 0, 0, 1)
    assert from_paths([]) == chain(0)


@pytest.mark.parametrize("parents", [(), (0,), (-1, 1), (-1, -1), (-1, 0, 1, 0), (-1, 0, 2), (-1, 0, 3)])
def test_parents_that_are_no_tree_are_refused(parents):
    with pytest.raises(InvalidConfig):
        Topology(parents)


@pytest.mark.parametrize("length", [-1, True, 1.0, "3"])
def test_chain_refuses(length):
    with pytest.raises(InvalidConfig, match="whole number"):
        chain(length)


@pytest.mark.parametrize("counts", [(0,), (2, -1), (True,), (2.0,)])
def test_branching_refuses(counts):
    with pytest.raises(InvalidConfig, match="the children of a node must be a whole number from 1"):
        branching(*counts)


@pytest.mark.parametrize("paths", [[(1,)], [(0,), (0, 2)], [(-1,)], [(0.0,)], [(True,)], [(0, 1), (1,)]])
def test_from_paths_refuses(paths):
    with pytest.raises(InvalidConfig):
        from_paths(paths)


def test_medusas_tree():
    """The buffers that Medusa makes of its own list, in its own order."""
    tree = named_tree("mc_sim_7b_63").tree
    assert np.bincount(tree.depths).tolist() == [1, 10, 28, 23, 2]
    assert (tree.ancestors.sum(), tree.depths.sum()) == (207, 143)
    tops = tree.ranks + 10 * (tree.depths - 1) + 1  # places in [root, ten of head 0, ten of head 1, ...]
    assert tops[1:].sum() == 1029
    leaves = [node for node in reversed(range(64)) if (tree.children[node] < 0).all()]
    rows = tree.paths[leaves]
    assert rows.shape == (42, 5)
    assert rows[:3].tolist() == [[0, 1, 11, 39, 63], [0, 1, 11, 39, 62], [0, 3, 28, 61, -1]]
    assert rows[-1].tolist() == [0, 1, 19, -1, -1]


def test_named_trees():
    assert all(named_tree(name).shape.nodes > 1 for name in TREE_NAMES)
    with pytest.raises(UnknownName, match="Did you mean 'mc_sim_7b_63'"):
        named_tree("mc_sim_7b_64")


@pytest.mark.parametrize("parents", [[-1] + [0] * (MAX_NODES - 1), [*range(-1, MAX_NODES - 1)]], ids=["star", "chain"])
def test_the_largest_trees_of_files_are_made_at_once(parents):
    with bounded(seconds=10):
        tree = read_parents(parents).tree
    assert tree.depths.max() + (tree.children >= 0).sum(-1).max() == MAX_NODES


@pytest.mark.parametrize(
    ("parents", "said"),
    [
        ([-1] + [0] * 20_000, "has 20001 nodes; at most 1024 are supported"),
        ([*range(-1, 20_000)], "has 20001 nodes; at most 1024 are supported"),
        ([-1, 0.0], "list of parents"),
        ([-1, True], "list of parents"),
        ([-1, "0"], "list of parents"),
        ([-1, [0]], "list of parents"),
        ("chain", "list of parents"),
        ({"0": -1}, "list of parents"),
        (3, "list of parents"),
        ([], "parents of a tree must be 1 to"),
        ([0], "parents of a tree must be 1 to"),
        ([-1, 1], "node 1 must have a parent before it"),
        ([-1, 10**30], "node 1 must have a parent before it"),
    ],
)
def test_files_name_trees_of_bounded_size(parents, said):
    with bounded(), pytest.raises(InvalidConfig, match=said):
        read_parents(parents)
