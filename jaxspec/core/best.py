"""The tree that pays best, from how often the child of each rank is the one that is kept.

If a node is kept with the product of its path's acceptances, the expected tokens of a round are the sum over all nodes
of the tree (Chen et al. 2024, Sequoia, arXiv:2402.12374, section 3.1): nodes add up, and a node is worth no more than
its parent or its elder sibling. So taking the best node at hand, again and again, gives what Sequoia's dynamic
programme gives, and with a vector per depth Medusa's calibrated trees (Cai et al. 2024, arXiv:2401.10774, section
2.3.3). `jaxspec.analysis` has acceptances by rank for given laws, `jaxspec acceptance` those of two models; `Stats` has
those of a decode by depth alone.
"""

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from jaxspec.core.theory import kept
from jaxspec.core.tree import Topology, from_paths
from jaxspec.errors import InvalidConfig

Acceptance = Sequence[float] | Sequence[Sequence[float]] | np.ndarray
"""`[K]`: the probability that the child of rank k is the one that is kept, given that its parent was; or `[D, K]`, by
depth, where a tree is then at most D deep."""


def best_tree(acceptance: Acceptance, nodes: int, depth: int | None = None) -> Topology:
    """The tree of most expected tokens a round; optimal where the acceptance falls with the rank.

    Where it rises with the rank, which a measurement may do by chance and a rule hardly does, the closest vector that
    does not (least squares, each depth for itself) is taken in its place: children are proposed in the order of their
    ranks, so a good one cannot be had without its elders.

    Args:
        acceptance: `[K]` or `[D, K]`; see `Acceptance`.
        nodes: N, root included; the tree has fewer where no other node would ever be kept.
        depth: D at most; None for no limit but that of `[D, K]`.

    Raises:
        InvalidConfig: no probabilities, or sizes below 1.
    """
    if isinstance(nodes, bool) or not isinstance(nodes, (int, np.integer)) or nodes < 1:
        raise InvalidConfig(f"a tree has a whole number of nodes from 1, its root included; got {nodes!r}")
    table = [_falling(row) for row in _by_depth(acceptance, nodes - 1 if depth is None else depth)]
    worth: dict[tuple[int, ...], float] = {(): 1.0}  # of the nodes taken
    waiting: list[tuple[float, tuple[int, ...]]] = []

    def wait(path: tuple[int, ...]) -> None:
        depth, rank = len(path), path[-1]
        if depth <= len(table) and rank < len(table[0]) and table[depth - 1][rank] > 0:
            heapq.heappush(waiting, (-worth[path[:-1]] * table[depth - 1][rank], path))

    wait((0,))
    while waiting and len(worth) < nodes:
        less, path = heapq.heappop(waiting)
        worth[path] = -less
        wait((*path, 0))
        wait((*path[:-1], path[-1] + 1))
    return from_paths([path for path in worth if path])


def expected_tokens(topology: Topology, acceptance: Acceptance) -> float:
    """The expected tokens of a round, the target's own included: 1 for the root alone.

    Args:
        topology: the tree.
        acceptance: `[K]` or `[D, K]`; see `Acceptance`.

    Raises:
        InvalidConfig: no probabilities, or of fewer ranks or depths than the tree has.
    """
    shape = topology.shape
    table = _by_depth(acceptance, shape.depth)
    if table.shape[0] < shape.depth or table.shape[1] < shape.width:
        raise InvalidConfig(
            f"the tree has {shape.depth} depths of up to {shape.width} ranks, the acceptance is given for "
            f"{table.shape[0]} of {table.shape[1]}"
        )
    return float(kept(topology.tree, table, np).sum())


def fastest_tree(acceptance: Acceptance, target_cost: Mapping[int, float], draft_cost: float) -> Topology:
    """The tree of most expected tokens per unit of cost: Sequoia's hardware-aware choice (section 3.3).

    Args:
        acceptance: `[K]` or `[D, K]`; see `Acceptance`.
        target_cost: of a target call by its width in tokens, root included, in any unit: the sizes that are tried.
        draft_cost: of a call of the draft model, in the same unit; a tree takes one for each depth.

    Returns:
        The root alone (plain decoding) where width 1 is tried and nothing pays more.

    Raises:
        InvalidConfig: no probabilities, no sizes, or costs that are not positive.
    """
    costs = np.asarray([*target_cost.values()], np.float64)
    if not costs.size or not (np.isfinite(costs).all() and (costs > 0).all()):
        raise InvalidConfig(f"target_cost must give at least one width a cost above 0, got {dict(target_cost)}")
    if not (np.isfinite(draft_cost) and draft_cost >= 0):
        raise InvalidConfig(f"draft_cost must be finite and at least 0, got {draft_cost!r}")
    found = []
    for width, cost in sorted(target_cost.items()):
        deepest = best_tree(acceptance, width).shape.depth
        for depth in range(deepest + 1):
            tree = best_tree(acceptance, width, depth)
            found.append((expected_tokens(tree, acceptance) / (cost + depth * draft_cost), tree))
    return max(found, key=lambda pair: pair[0])[1]


def _by_depth(acceptance: Acceptance, depth: int) -> np.ndarray:
    """`[D, K]`, checked; one vector stands for every depth."""
    if isinstance(depth, bool) or not isinstance(depth, (int, np.integer)) or depth < 0:
        raise InvalidConfig(f"a depth is a whole number from 0, got {depth!r}")
    try:
        table = np.asarray(acceptance, np.float64)
    except (TypeError, ValueError):  # ragged, or no numbers
        table = np.zeros(())
    if table.ndim not in (1, 2) or not table.size:
        raise InvalidConfig(f"acceptance must be [ranks] or [depths, ranks], got {acceptance!r:.80}")
    if not (np.isfinite(table).all() and (table >= 0).all() and (table.sum(-1) <= 1 + 1e-6).all()):
        raise InvalidConfig(
            "acceptance must hold probabilities that add up to 1 at most: that of each rank to be the one that is "
            f"kept; got {acceptance!r:.80}"
        )
    return np.broadcast_to(table, (depth, table.size)) if table.ndim == 1 else table[:depth]


def _falling(row: np.ndarray) -> np.ndarray:
    """The closest vector that nowhere rises: neighbours that do are pooled into their mean."""
    pools: list[tuple[float, int]] = []
    for value in row:
        total, count = float(value), 1
        while pools and pools[-1][0] * count < total * pools[-1][1]:
            more, members = pools.pop()
            total, count = total + more, count + members
        pools.append((total, count))
    return np.concatenate([np.full(count, total / count) for total, count in pools])
