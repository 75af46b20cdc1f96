"""Topologies: the parents of all nodes of a tree, or the sizes of a tree that is chosen in every round."""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.core.checks import index, whole
from jaxspec.core.sizes import MAX_NODES
from jaxspec.core.tree import Tree, TreeShape, build
from jaxspec.errors import InvalidConfig, shown


@dataclasses.dataclass(frozen=True)
class Topology:
    """A tree that is known before tracing; static and hashable. See `chain`, `branching` and `from_paths`.

    Attributes:
        parents: the parent of every node, -1 for the root, in level order.

    Raises:
        InvalidConfig: the parents do not describe a tree in level order.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        parents = _numbers(self.parents, MAX_NODES + 1)
        if parents is None or not parents or parents[0] != -1:
            raise InvalidConfig(
                f"parents of a tree must be 1 to {MAX_NODES + 1} whole numbers, of which the first is -1 (the root); "
                f"got {shown(self.parents)}"
            )
        object.__setattr__(self, "parents", parents)
        depths = [0]
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise InvalidConfig(f"node {node} must have a parent before it (0 to {node - 1}), got {parent}")
            depths.append(depths[parent] + 1)
            if depths[node] < depths[node - 1]:
                raise InvalidConfig(f"nodes must be in level order, but node {node} is less deep than node {node - 1}")

    @functools.cached_property
    def shape(self) -> TreeShape:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        width = max(collections.Counter(self.parents[1:]).values(), default=0)
        return TreeShape(len(self.parents), max(depths), width)

    @functools.cached_property
    def tree(self) -> Tree:
        """The tables that `build` returns, as NumPy constants, which take less time and memory to make."""
        nodes, parents = np.arange(self.shape.nodes), np.asarray(self.parents)
        ancestors, ranks = np.eye(nodes.size, dtype=bool), np.zeros(nodes.size, int)
        seen = collections.Counter()
        for node, parent in enumerate(self.parents[1:], start=1):
            ancestors[node] |= ancestors[parent]
            ranks[node] = seen[parent]
            seen[parent] += 1
        depths = ancestors.sum(-1) - 1
        children = np.full((nodes.size, self.shape.width), -1)
        children[parents[1:], ranks[1:]] = nodes[1:]
        paths = np.full((nodes.size, self.shape.depth + 1), -1)
        below, above = np.nonzero(ancestors)
        paths[below, depths[above]] = above
        tables: Any = (parents, depths, ranks, ancestors, children, paths)
        return Tree(*(table if table.dtype == bool else table.astype(np.int32) for table in tables))

    @functools.cached_property
    def levels(self) -> tuple[np.ndarray, ...]:
        """The node ids of each depth, 0 to D."""
        return tuple(np.flatnonzero(self.tree.depths == d) for d in range(self.shape.depth + 1))

    @functools.cached_property
    def parents_by_level(self) -> tuple[np.ndarray, ...]:
        """The node ids with children at each depth from 0 to D - 1, which a drafter must evaluate."""
        return tuple(level[self.tree.children[level, 0] >= 0] for level in self.levels[:-1])

    @property
    def is_chain(self) -> bool:
        return self.shape.width <= 1


def read_parents(parents: Any) -> Topology:
    """Returns the tree of a list of parents that was read from a file.

    Raises:
        InvalidConfig: the value is not a list of whole numbers, has more than `MAX_NODES`, or is not a tree.
    """
    if not isinstance(parents, list) or not all(type(parent) is int for parent in parents):
        raise InvalidConfig(f"tree must be a list of parents, got {parents!r:.40}")
    if len(parents) > MAX_NODES:
        raise InvalidConfig(f"the tree in the file has {len(parents)} nodes; at most {MAX_NODES} are supported")
    return Topology(tuple(parents))


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """A tree that is chosen in every round: the most likely nodes of the draft. See `dynamic`.

    EAGLE-2's expansion and reranking (Li et al. 2024, arXiv:2406.16858, section 4): in every level the `beam` nodes of
    highest score are expanded into `beam` children each, and the best `nodes - 1` of all expanded nodes are proposed. A
    node's score is the product of the draft's probabilities along its path.

    Attributes:
        beam: the number of nodes expanded per level, and the number of children of each of them.
        depth: D, the number of levels below the root, each with one call of the draft model.
        nodes: N, the number of proposed nodes, root included.

    Raises:
        InvalidConfig: a size is out of range, or the sizes contradict each other.
    """

    beam: int
    depth: int
    nodes: int

    def __post_init__(self):
        for name in ("beam", "depth", "nodes"):
            size = whole(f"{name} of a dynamic tree", getattr(self, name), 1, MAX_NODES)
            object.__setattr__(self, name, size)
        if self.beam * self.depth > MAX_NODES:
            raise InvalidConfig(
                f"a dynamic tree reads beam x depth nodes; {self.beam} x {self.depth} is more than {MAX_NODES}"
            )
        if not self.depth < self.nodes <= self.found:
            raise InvalidConfig(
                f"a dynamic tree of {self.depth} levels with a beam of {self.beam} expands {self.found} nodes, root "
                f"included; nodes must be from {self.depth + 1} to {self.found}, got {self.nodes}"
            )

    @property
    def found(self) -> int:
        """The number of nodes before reranking, root included."""
        return 1 + self.beam + (self.depth - 1) * self.beam**2

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.nodes, self.depth, min(self.beam, self.nodes - 1), pruned=True)

    @functools.cached_property
    def tree(self) -> Tree:
        """A tree of this shape, for a drafter that proposes nothing."""
        return build((np.arange(self.nodes) - 1) // self.beam, self.shape, np)

    @property
    def is_chain(self) -> bool:
        """Always false, since its tokens differ from round to round."""
        return False


def dynamic(beam: int = 8, depth: int = 5, nodes: int = 32) -> Dynamic:
    """Returns a tree of `nodes` nodes that is chosen in every round; see `Dynamic`."""
    return Dynamic(beam, depth, nodes)


def chain(length: int) -> Topology:
    """Returns a chain of `length` drafted tokens; length 0 is the root alone, for plain autoregressive decoding."""
    return Topology(tuple(range(-1, whole("a draft length", length, 0, MAX_NODES))))


def branching(*counts: int) -> Topology:
    """Returns the tree whose nodes of depth d have `counts[d]` children: `branching(4, 2, 1)` has levels of 4, 8, 8."""
    parents, level = [-1], [0]
    for given in counts:
        count = whole("the children of a node", given, 1, MAX_NODES)
        if len(parents) - 1 + len(level) * count > MAX_NODES:
            raise InvalidConfig(f"a tree has at most {MAX_NODES} drafted nodes; branching{shown(counts)} has more")
        below = [(node, len(parents) + i * count + j) for i, node in enumerate(level) for j in range(count)]
        parents += [node for node, _ in below]
        level = [child for _, child in below]
    return Topology(tuple(parents))


def from_paths(paths: Iterable[Sequence[int]]) -> Topology:
    """Returns the tree with these paths of ranks and their prefixes: `[(0, 0), (1,)]` has the nodes 0, 1 and 0-0.

    Medusa lists its trees in this form (Cai et al. 2024, section 2.3.3).

    Raises:
        InvalidConfig: a rank is negative, or the ranks below a node are not 0, 1, 2, ...
    """
    nodes: set[tuple[int, ...]] = set()
    for given in _items(paths):
        path = _numbers(given, MAX_NODES)
        if path is None or any(rank < 0 for rank in path):
            raise InvalidConfig(
                f"a path must be a list of at most {MAX_NODES} ranks (whole numbers from 0), got {shown(given)}"
            )
        nodes |= {path[:end] for end in range(1, len(path) + 1)}
        if len(nodes) > MAX_NODES:
            raise InvalidConfig(f"a tree has at most {MAX_NODES} drafted nodes; these paths have more: {shown(paths)}")
    for path in nodes:
        if path[-1] and (*path[:-1], path[-1] - 1) not in nodes:
            raise InvalidConfig(
                f"paths has {path}, but not its sibling {(*path[:-1], path[-1] - 1)}; ranks must be 0, 1, 2, ..."
            )
    order = [(), *sorted(nodes, key=lambda path: (len(path), path))]
    ids = {path: i for i, path in enumerate(order)}
    return Topology((-1, *(ids[path[:-1]] for path in order[1:])))


def _items(paths: Any) -> Iterable[Any]:
    """Iterates over a collection of paths.

    Raises:
        InvalidConfig: the value is not a collection.
    """
    if isinstance(paths, (str, bytes, Mapping)) or not isinstance(paths, (Iterable, np.ndarray)):
        raise InvalidConfig(f"paths must be a list of paths, each a list of ranks, got {shown(paths)}")
    try:
        yield from paths
    except TypeError:  # an array without an axis
        raise InvalidConfig(f"paths must be a list of paths, each a list of ranks, got {shown(paths)}") from None


def _numbers(values: Any, most: int) -> tuple[int, ...] | None:
    """Returns the integers of a sequence.

    Returns None if the value is not a sequence, has more than `most` items, or has items that are not integers.
    """
    if isinstance(values, (str, bytes, Mapping)):
        return None
    try:
        if len(values) > most:
            return None
        numbers = tuple(map(index, values))
    except TypeError:  # no length, or an array without an axis
        return None
    return None if None in numbers else numbers  # pyright: ignore[reportReturnType]


def as_topology(tree: Topology | Dynamic | int | None) -> Topology | Dynamic | None:
    """Returns a topology; a draft length becomes a chain, and None remains None.

    Raises:
        InvalidConfig: the value is neither a tree nor a whole number.
    """
    if tree is None or isinstance(tree, (Topology, Dynamic)):
        return tree
    if index(tree) is None:
        raise InvalidConfig(
            "tree must be a tree such as jaxspec.branching(4, 2), or a draft length (a whole number from 0); got "
            f"{shown(tree)}"
        )
    return chain(tree)
