"""Search for the best tree, from the acceptance rate of children by rank.

If a node is accepted with the product of the acceptance rates along its path, the expected tokens of a round are the
sum of these products over all nodes (Chen et al. 2024, Sequoia, arXiv:2402.12374, section 3.1). The product of a node
never exceeds the product of its parent or of its elder sibling, so a greedy search finds the tree of Sequoia's dynamic
program. With one vector per depth it finds Medusa's calibrated trees (Cai et al. 2024, arXiv:2401.10774, section
2.3.3). The children of a less likely node may be accepted less, because heads that guess all depths at once do not
know which node is the parent. With one vector for each rank of the parent, the search knows it. `jaxspec.analysis`
computes acceptance by rank for known laws, `jaxspec acceptance` measures it for two models; `Stats` has acceptance by
depth only.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.core.checks import whole
from jaxspec.core.sizes import MAX_NODES
from jaxspec.core.theory import path_products
from jaxspec.core.topology import Topology, from_paths
from jaxspec.errors import InvalidConfig, shown

Acceptance = Sequence[float] | Sequence[Sequence[float]] | np.ndarray
"""`[K]`: the probability that the child of rank k is accepted if its parent is; or `[D, K]`, by depth, for trees of
depth D at most; or `[D, P, K]`, by depth and by the rank of the parent among its siblings. Rank P - 1 of the parent
stands for all higher ranks, and the root has rank 0."""


def best_tree(acceptance: Acceptance, nodes: int, depth: int | None = None) -> Topology:
    """Returns the tree with the most expected tokens per round.

    It is optimal if acceptance does not rise with the rank. Measured rates may rise by chance. The rates of a depth are
    then replaced by the closest vector that does not rise (least squares), because a child cannot be proposed without
    its elder siblings.

    Args:
        acceptance: `[K]`, `[D, K]` or `[D, P, K]`; see `Acceptance`.
        nodes: N, the number of nodes, root included; the tree has fewer nodes if no other node could be accepted.
        depth: the greatest depth; None for no limit, or for D if acceptance is by depth.

    Raises:
        InvalidConfig: the acceptance does not hold probabilities, or a size is below 1.
    """
    nodes = whole("nodes of a tree, its root included,", nodes, 1, MAX_NODES + 1)
    measured = _by_depth(acceptance, nodes - 1 if depth is None else depth)
    depths, parents, ranks = measured.shape
    table = np.reshape([_falling(row) for rows in measured for row in rows], measured.shape)
    products: dict[tuple[int, ...], float] = {(): 1.0}  # of each node of the tree
    candidates: list[tuple[float, tuple[int, ...]]] = []  # a heap of negative products

    def add_candidate(path: tuple[int, ...]) -> None:
        *above, rank = path
        if len(path) > depths or rank >= ranks:
            return
        rate = float(table[len(above), min(above[-1], parents - 1) if above else 0, rank])
        if rate > 0:
            heapq.heappush(candidates, (-products[path[:-1]] * rate, path))

    add_candidate((0,))
    while candidates and len(products) < nodes:
        negative, path = heapq.heappop(candidates)
        products[path] = -negative
        add_candidate((*path, 0))
        add_candidate((*path[:-1], path[-1] + 1))
    return from_paths([path for path in products if path])


def expected_tokens(topology: Topology, acceptance: Acceptance) -> float:
    """Returns the expected tokens of a round, the target's own token included: 1 for the root alone.

    Args:
        topology: the tree.
        acceptance: `[K]`, `[D, K]` or `[D, P, K]`; see `Acceptance`.

    Raises:
        InvalidConfig: the acceptance does not hold probabilities, or has fewer ranks or depths than the tree.
    """
    if not isinstance(topology, Topology):
        raise InvalidConfig(f"topology must be a Topology, as from jaxspec.chain; got {shown(topology)}")
    shape = topology.shape
    table = _by_depth(acceptance, shape.depth)
    depths, parents, ranks = table.shape
    if depths < shape.depth or ranks < shape.width:
        raise InvalidConfig(
            f"the tree has {shape.depth} depths of up to {shape.width} ranks, but acceptance has {depths} "
            f"depths of {ranks}"
        )
    tree = topology.tree
    above = np.minimum(tree.ranks[tree.parents[1:]], parents - 1)
    return float(path_products(tree, table[tree.depths[1:] - 1, above, tree.ranks[1:]], np).sum())


def fastest_tree(acceptance: Acceptance, target_cost: Mapping[int, float], draft_cost: float) -> Topology:
    """Returns the tree with the most expected tokens per unit of cost: Sequoia's hardware-aware choice (section 3.3).

    Args:
        acceptance: `[K]`, `[D, K]` or `[D, P, K]`; see `Acceptance`.
        target_cost: the cost of a target call by its width in tokens, root included, in any unit. Trees of these widths
            are considered.
        draft_cost: the cost of a call of the draft model, in the same unit; a tree takes one call per depth.

    Returns:
        The tree; the root alone, which is plain decoding, if width 1 is considered and no tree is faster.

    Raises:
        InvalidConfig: the acceptance does not hold probabilities, there are no widths, or a cost is not positive.
    """
    if not isinstance(target_cost, Mapping) or not target_cost:
        raise InvalidConfig(f"target_cost must map at least one width to its cost, got {shown(target_cost)}")
    costs = {
        whole("a width of target_cost", width, 1, MAX_NODES + 1): _cost("a cost of target_cost", cost)
        for width, cost in target_cost.items()
    }
    if not all(costs.values()):
        raise InvalidConfig(f"target_cost must give every width a cost above 0, got {shown(target_cost)}")
    draft_cost = _cost("draft_cost", draft_cost)
    rates = []
    for width, cost in sorted(costs.items()):
        deepest = best_tree(acceptance, width).shape.depth
        for depth in range(deepest + 1):
            tree = best_tree(acceptance, width, depth)
            rates.append((expected_tokens(tree, acceptance) / (cost + depth * draft_cost), tree))
    return max(rates, key=lambda pair: pair[0])[1]


def _by_depth(acceptance: Acceptance, depth: int) -> np.ndarray:
    """Returns checked acceptance `[D, P, K]`; a single vector is repeated for every depth."""
    depth = whole("a depth", depth, 0, MAX_NODES)
    try:
        table = np.asarray(acceptance, np.float64)
    except Exception:  # ragged, not numbers, or numbers that are too large
        table = np.zeros(())
    if table.ndim not in (1, 2, 3) or not table.size:
        raise InvalidConfig(
            f"acceptance must be [ranks], [depths, ranks] or [depths, ranks of parents, ranks], got {shown(acceptance)}"
        )
    if not (np.isfinite(table).all() and (table >= 0).all() and (table.sum(-1) <= 1 + 1e-6).all()):
        raise InvalidConfig(
            f"acceptance must hold probabilities by rank that add up to at most 1; got {shown(acceptance)}"
        )
    if table.ndim == 1:
        return np.broadcast_to(table, (depth, 1, table.size))
    return table[:depth] if table.ndim == 3 else table[:depth, None]


def _cost(name: str, value: Any) -> float:
    """Returns a cost as a finite number from 0."""
    try:
        cost = float(value)
    except Exception:
        cost = math.nan
    if isinstance(value, (bool, str, bytes)) or not 0 <= cost < math.inf:
        raise InvalidConfig(f"{name} must be finite and at least 0, got {shown(value)}")
    return cost


def _falling(row: np.ndarray) -> np.ndarray:
    """Returns the closest vector that does not rise: rising neighbours are pooled into their mean."""
    pools: list[tuple[float, int]] = []
    for value in row:
        total, count = float(value), 1
        while pools and pools[-1][0] * count < total * pools[-1][1]:
            more, members = pools.pop()
            total, count = total + more, count + members
        pools.append((total, count))
    return np.concatenate([np.full(count, total / count) for total, count in pools])
