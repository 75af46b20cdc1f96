"""The number of nodes of a round, for drafters that choose it by the expected speed and by what a row can afford.

Each round has the size with the most expected tokens per unit of time. Expectations can be wrong, so each row has a
budget: the time that its earlier rounds saved, and a small part of the time that the text takes (`ALLOWANCE`). A row
without any budget left does not draft. So a text that is decoded alone loses at most that part and one rejected draft,
if costs are as assumed.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core.draw import Draw, Noise
from jaxspec.core.records import Params
from jaxspec.core.theory import assumed_cost
from jaxspec.kernels.library import token_cost

ALLOWANCE = 0.03
"""The time for drafts that every token adds to the budget, in rounds of plain decoding."""


class Budget(NamedTuple):
    """What each row may spend, in rounds of plain decoding."""

    left: Float[Array, "B"]
    cost: Float[Array, "B"]  # the assumed cost of the round that was proposed last; 0 for none


def new_budget(rows: int) -> Budget:
    """Returns the budget of rows whose texts begin."""
    return Budget(jnp.full((rows,), ALLOWANCE), jnp.zeros((rows,)))


def count_paying(
    worth: Float[Array, "B N1"], widths: tuple[int, ...], draw: Draw, target: Params, budget: Budget
) -> Int[Array, "B"]:
    """Returns the number of nodes, root excluded, with the most expected tokens per assumed cost.

    The target reads the same number of tokens in every row. With shared noise, drafts cannot change a text, so the rows
    that draft choose together. Otherwise a row's text must not depend on other rows, so each row chooses as if it were
    alone. A size is not chosen if its loss, times the probability of a loss, exceeds the budget.

    Args:
        worth: the logarithm of the probability that each node is accepted, in descending order.
        widths: the numbers of nodes to choose among, root included, besides the number of all nodes; see `Needs`.
        draw: the round's `Draw`.
        target: the target's parameters, whose type decides the cost of tokens on a CPU.
        budget: the budget of each row.
    """
    choices = _choices(widths, worth.shape[1] + 1)
    chances = jnp.exp(worth)
    tokens = 1 + jnp.pad(jnp.cumsum(chances, -1), ((0, 0), (1, 0)))[:, choices - 1]
    wrong, left, costs = 1 - chances[:, :1], budget.left[:, None], _costs(choices, draw, target)
    if draw.kind is Noise.SHARED:

        def of_all(values: Array) -> Array:
            return jnp.broadcast_to(jnp.where(draw.below(0)[:, None], values, 0.0).sum(0), values.shape)

        tokens, wrong, left = of_all(tokens), of_all(wrong), of_all(left)
    affordable = (wrong * (costs - 1) <= left).at[:, 0].set(True)
    return jnp.asarray(choices - 1)[jnp.argmax(jnp.where(affordable, tokens / costs, 0.0), -1)]


def spend(budget: Budget, drafted: Int[Array, "B N"], widths: tuple[int, ...], draw: Draw, target: Params) -> Budget:
    """Returns the budget with the cost of a round that drafts these tokens, -1 for none; see `count_paying`."""
    nodes = drafted.shape[1]
    needed = jnp.where(drafted >= 0, jnp.arange(nodes), 0).at[:, 0].set(0).max(-1) + 1
    if draw.kind is Noise.SHARED:
        needed = jnp.broadcast_to(needed.max(), needed.shape)
    choices = _choices(widths, nodes)
    at = (jnp.asarray(choices) < needed[:, None]).sum(-1)
    return budget._replace(cost=jnp.where(draw.below(0), _costs(choices, draw, target)[at], 0.0))


def settle(budget: Budget, count: Int[Array, "B"]) -> Budget:
    """Returns the budget after a round that committed `count` tokens; text without a proposal does not change it."""
    saved = (1 + ALLOWANCE) * count - budget.cost
    return Budget(budget.left + jnp.where(budget.cost > 0, saved, 0.0), jnp.zeros_like(budget.cost))


def _choices(widths: tuple[int, ...], nodes: int) -> np.ndarray:
    return np.array([*(width for width in widths if width < nodes), nodes])


def _costs(choices: np.ndarray, draw: Draw, target: Params) -> Float[Array, "C"]:
    """Returns the assumed costs of rounds of these widths."""
    rows = draw.roots.size if draw.kind is Noise.SHARED else 1
    costs = token_cost(target), None
    cpu, other = (np.array([assumed_cost(width, own, rows) for width in choices], np.float32) for own in costs)
    return lax.platform_dependent(cpu=lambda: jnp.asarray(cpu), default=lambda: jnp.asarray(other))
