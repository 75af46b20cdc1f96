"""Tests the loop over levels with a reader whose logits depend on the whole path, through each kind of carry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.draw import Draw, Noise
from jaxspec.core.noise import RoundNoise
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import Dynamic, branching, chain, dynamic, from_paths
from jaxspec.drafters._grow import grow
from jaxspec.drafters._level import count_slots

V, IDS = 11, np.array([0, 2, 3, 5, 7, 8, 10])
HASHES, SUMS = np.random.default_rng(0).normal(size=(2, 97, IDS.size)).astype(np.float32)
ROOTS, FED = np.array([3, 9, 4]), np.array([5, 60, 13])
TREES = {
    "chain": chain(4),
    "wide": branching(3, 2),
    "ragged": from_paths([(0, 0, 0), (0, 1), (1,), (2, 0, 0), (2, 0, 1)]),
    "dynamic": dynamic(3, 3, 9),
}


def logits(state, total):
    return HASHES[state] + SUMS[total % 97]


def mix(state, token):
    return (31 * state + token) % 97


def expected(path: list[int], row: int, first: int) -> np.ndarray:
    """The logits after a path that begins with the root."""
    state = FED[row]
    for token in path:
        state = mix(state, token)
    return logits(state, sum(path[first:]))


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", TREES)
def test_a_node_reads_its_parent_and_its_ancestors(name, first, unroll):
    tree, calls = TREES[name], []
    noise = RoundNoise(jax.random.split(jax.random.key(0), 3), jnp.array([5, 6, 7]), jnp.asarray(False), V)
    limits = np.array([tree.shape.depth, 1, 2])

    def read(level, carry):
        calls.append(level)
        states, tokens = carry
        own = mix(level.of_parents(states), level.tokens[..., None])
        above = (level.ancestors * tokens[:, None]).sum(-1)
        carry = level.put(states, own), level.put(tokens, level.tokens)
        return jnp.asarray(HASHES)[own[..., 0]] + jnp.asarray(SUMS)[(above + level.tokens) % 97], carry

    @jax.jit
    def proposal(roots, fed, limits):
        draw = Draw(Noise.NONE, noise, Sampling().rows(3, V), limits)
        start = mix(fed, roots) if first else fed
        shape = (3, count_slots(tree))
        carry = jnp.broadcast_to(start[:, None, None], (*shape, 1)), jnp.zeros(shape, jnp.int32)
        after = (lambda: (jnp.asarray(HASHES)[start] + SUMS[0])[:, None]) if first else None
        ids = jnp.asarray(IDS)
        grown = grow(tree, roots, draw, read, carry, root_logits=after, ids=ids, unroll=unroll)
        return grown.proposal, grown.carry, grown.slots

    drafted, (_, kept), slots = jax.device_get(proposal(ROOTS, FED, limits))
    assert len(calls) == (tree.shape.depth - first if unroll else 1)
    for row in range(3):
        parents = drafted.tree.parents if drafted.tree.parents.ndim == 1 else drafted.tree.parents[row]
        depths = drafted.tree.depths if drafted.tree.depths.ndim == 1 else drafted.tree.depths[row]
        tokens, paths = drafted.tokens[row], [[int(ROOTS[row])]]
        for node in range(1, tree.shape.nodes):
            path = paths[parents[node]]
            paths.append([*path, int(tokens[node])])
            if depths[node] > limits[row]:
                assert tokens[node] == -1
                continue
            siblings = [other for other in range(1, tree.shape.nodes) if parents[other] == parents[node]]
            best = IDS[np.argsort(-expected(path, row, first), kind="stable")]
            if isinstance(tree, Dynamic):
                assert tokens[node] in (-1, *best[: tree.beam])
            else:
                assert tokens[node] == best[siblings.index(node)]
            if slots[row, node] >= 0 and tokens[node] >= 0 and node in parents and depths[node] < limits[row]:
                assert kept[row, slots[row, node]] == tokens[node]
    assert (drafted.tokens[0, 1:] >= 0).all()
