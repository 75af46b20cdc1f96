"""Token trees: the one shape of a draft. A chain is a tree without branches, no draft is the root alone.

Node 0 is the root: the last committed token. Nodes stand in level order, so a level is one run of ids and a
parent always stands before its children.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxspec.errors import InvalidConfig


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """The static sizes of a tree, all that decides what is compiled.

    Attributes:
        nodes: N, root included.
        depth: D, edges from the root to the deepest node.
        width: C, most children of a node.
        pruned: which drafted tokens stay in the tree depends on what they are. Tokens that were sampled are no sample
            of the draft's law any more once the likelier ones were picked, so rules that weigh laws refuse it.
    """

    nodes: int
    depth: int
    width: int
    pruned: bool = False


class Tree(NamedTuple):
    """A tree as arrays, made from constants or traced; leading batch axes are allowed throughout."""

    parents: Int[Array, "*b N"]  # parents[0] = -1
    depths: Int[Array, "*b N"]  # edges from the root
    ranks: Int[Array, "*b N"]  # place among the siblings, in draw order
    ancestors: Bool[Array, "*b N N"]  # [n, m]: m stands on the path from the root to n, both ends included
    children: Int[Array, "*b N C"]  # by rank, -1 where there is none
    paths: Int[Array, "*b N D1"]  # node ids from the root to n, then -1


def build(parents: Any, shape: TreeShape, xp: Any = jnp) -> Tree:
    """All the tables of a tree from its parents `[N]`, traced or not (`xp=numpy` for constants)."""
    ids = xp.arange(shape.nodes)
    ancestors = ids[:, None] == ids[None, :]
    above = parents
    for _ in range(shape.depth):
        ancestors = ancestors | (above[:, None] == ids[None, :])
        above = xp.where(above >= 0, parents[xp.maximum(above, 0)], -1)
    depths = ancestors.sum(-1) - 1
    siblings = (parents[:, None] == parents[None, :]) & (ids[None, :] < ids[:, None])
    ranks = siblings.sum(-1)
    places = xp.arange(shape.width)
    child = (parents[None, None, :] == ids[:, None, None]) & (ranks[None, None, :] == places[None, :, None])
    children = xp.where(child, ids[None, None, :], -1).max(-1)
    steps = xp.arange(shape.depth + 1)
    on_path = ancestors[:, None, :] & (depths[None, None, :] == steps[None, :, None])
    paths = xp.where(on_path, ids[None, None, :], -1).max(-1)
    return Tree(*(xp.asarray(a, bool if a.dtype == bool else xp.int32) for a in
                  (parents, depths, ranks, ancestors, children, paths)))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Topology:
    """A tree that is known before tracing; static and hashable. Make one with `chain` and its siblings.

    Attributes:
        parents: the parent of every node, -1 for the root, in level order.

    Raises:
        InvalidConfig: the parents are not a tree in level order.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        if not self.parents or self.parents[0] != -1:
            raise InvalidConfig(f"a tree starts with its root, whose parent is -1; got parents {self.parents}")
        depths = [0]
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise InvalidConfig(f"node {node} must have a parent before it (0 to {node - 1}), got {parent}")
            depths.append(depths[parent] + 1)
            if depths[node] < depths[node - 1]:
                raise InvalidConfig(f"nodes must stand in level order; node {node} is less deep than {node - 1}")

    @functools.cached_property
    def shape(self) -> TreeShape:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        width = max((self.parents.count(n) for n in range(len(self.parents))), default=0)
        return TreeShape(len(self.parents), max(depths), width)

    @functools.cached_property
    def tree(self) -> Tree:
        """The tables, as numpy constants."""
        return build(np.asarray(self.parents), self.shape, np)

    @functools.cached_property
    def levels(self) -> tuple[np.ndarray, ...]:
        """The node ids of each depth, 0 to D."""
        return tuple(np.flatnonzero(self.tree.depths == d) for d in range(self.shape.depth + 1))

    @functools.cached_property
    def parents_by_level(self) -> tuple[np.ndarray, ...]:
        """The node ids of each depth, 0 to D - 1, that have children: what a drafter must evaluate."""
        return tuple(level[self.tree.children[level, 0] >= 0] for level in self.levels[:-1])

    @property
    def is_chain(self) -> bool:
        return self.shape.width <= 1


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """Another tree every round: the likeliest nodes that the draft finds. Make one with `dynamic`.

    EAGLE-2's expansion and reranking (Li et al. 2024, arXiv:2406.16858, section 4): from every level the `beam` nodes
    of the highest worth are expanded into `beam` children each, and of all that were found the best `nodes - 1` are
    kept. A node's worth is the product of the draft's probabilities on its path.

    Attributes:
        beam: nodes that are expanded per level, and children of each.
        depth: D, levels below the root, one call of the draft for each.
        nodes: N, root included.

    Raises:
        InvalidConfig: sizes that do not go together.
    """

    beam: int
    depth: int
    nodes: int

    def __post_init__(self):
        sizes = (self.beam, self.depth, self.nodes)
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
            raise InvalidConfig(f"beam, depth and nodes of a dynamic tree are whole numbers from 1, got {sizes}")
        if not self.depth < self.nodes <= self.found:
            raise InvalidConfig(
                f"a dynamic tree of {self.depth} levels with a beam of {self.beam} finds {self.found} nodes, its root "
                f"included; it can keep from {self.depth + 1} to {self.found}, got {self.nodes}"
            )

    @property
    def found(self) -> int:
        """Nodes before the best are picked, root included."""
        return 1 + self.beam + (self.depth - 1) * self.beam**2

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.nodes, self.depth, min(self.beam, self.nodes - 1), pruned=True)

    @functools.cached_property
    def tree(self) -> Tree:
        """Some tree of this shape, for who proposes nothing at it."""
        return build((np.arange(self.nodes) - 1) // self.beam, self.shape, np)

    @property
    def is_chain(self) -> bool:
        """Never: it has no tokens of its own."""
        return False


def dynamic(beam: int = 8, depth: int = 5, nodes: int = 32) -> Dynamic:
    """A tree of `nodes` nodes, chosen anew every round; see `Dynamic`."""
    return Dynamic(beam, depth, nodes)


def chain(length: int) -> Topology:
    """A chain of `length` drafted tokens (0: the root alone, plain autoregression)."""
    if isinstance(length, bool) or not isinstance(length, int) or length < 0:
        raise InvalidConfig(f"a draft length is a whole number from 0, got {length!r}")
    return Topology(tuple(range(-1, length)))


def branching(*counts: int) -> Topology:
    """Every node of depth d has `counts[d]` children: `branching(4, 2, 1)` has 4, then 8, then 8 nodes."""
    if any(isinstance(c, bool) or not isinstance(c, int) or c < 1 for c in counts):
        raise InvalidConfig(f"every level needs at least one child per node, got {counts}")
    parents, level = [-1], [0]
    for count in counts:
        below = [(node, len(parents) + i * count + j) for i, node in enumerate(level) for j in range(count)]
        parents += [node for node, _ in below]
        level = [child for _, child in below]
    return Topology(tuple(parents))


def from_paths(paths: Iterable[Sequence[int]]) -> Topology:
    """The tree of the given paths of ranks, prefixes included: `[(0, 0), (1,)]` has nodes 0, 1 and 0-0.

    This is the form in which Medusa lists its trees (Cai et al. 2024, section 2.3.3).

    Raises:
        InvalidConfig: a rank is negative, or the ranks below a node are not 0, 1, 2, ...
    """
    wanted = {tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)}
    if any(isinstance(r, bool) or not isinstance(r, (int, np.integer)) or r < 0 for path in wanted for r in path):
        raise InvalidConfig("ranks are whole numbers from 0")
    for path in wanted:
        if path[-1] and (*path[:-1], path[-1] - 1) not in wanted:
            raise InvalidConfig(f"path {path} has no elder sibling of rank {path[-1] - 1}")
    order = [(), *sorted(wanted, key=lambda path: (len(path), path))]
    ids = {path: i for i, path in enumerate(order)}
    return Topology((-1, *(ids[path[:-1]] for path in order[1:])))
