"""Token trees, the shape of every draft. A chain is a tree without branches. Without a draft, the tree is the root
alone.

Node 0 is the root: the last committed token. Nodes are numbered in level order, so the ids of a level are contiguous
and a parent comes before its children.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """The static sizes of a tree. They alone decide what is compiled.

    Attributes:
        nodes: N, the number of nodes, root included.
        depth: D, the number of edges from the root to the deepest node.
        width: C, the largest number of children of a node.
        pruned: whether the tree is dynamic: it keeps the most likely of the drafted tokens, which are not a sample of
            the draft's law. Rules that compare laws refuse such trees; see `refuse_pruned`.
    """

    nodes: int
    depth: int
    width: int
    pruned: bool = False


class Tree(NamedTuple):
    """The tables of a tree, constant or traced, with any leading batch axes."""

    parents: Int[Array, "*b N"]  # parents[0] = -1
    depths: Int[Array, "*b N"]  # edges from the root
    ranks: Int[Array, "*b N"]  # index among the siblings, in draw order
    ancestors: Bool[Array, "*b N N"]  # [n, m]: whether m is on the path from the root to n, both included
    children: Int[Array, "*b N C"]  # the children by rank, -1 for none
    paths: Int[Array, "*b N D1"]  # node ids from the root to n, then -1


def build(parents: Any, shape: TreeShape, xp: Any = jnp) -> Tree:
    """Returns the tables of a tree from its parents `[N]`, which may be traced; `xp=numpy` gives constants."""
    ids = xp.arange(shape.nodes)
    ancestors = ids[:, None] == ids[None, :]
    above = parents
    for _ in range(shape.depth):
        ancestors = ancestors | (above[:, None] == ids[None, :])
        above = xp.where(above >= 0, parents[xp.maximum(above, 0)], -1)
    depths = ancestors.sum(-1) - 1
    siblings = (parents[:, None] == parents[None, :]) & (ids[None, :] < ids[:, None])
    ranks = siblings.sum(-1)
    child_ranks = xp.arange(shape.width)
    child = (parents[None, None, :] == ids[:, None, None]) & (ranks[None, None, :] == child_ranks[None, :, None])
    children = xp.where(child, ids[None, None, :], -1).max(-1)
    steps = xp.arange(shape.depth + 1)
    on_path = ancestors[:, None, :] & (depths[None, None, :] == steps[None, :, None])
    paths = xp.where(on_path, ids[None, None, :], -1).max(-1)
    return Tree(*(xp.asarray(a, bool if a.dtype == bool else xp.int32) for a in
                  (parents, depths, ranks, ancestors, children, paths)))  # fmt: skip
