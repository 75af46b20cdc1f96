"""The cost of drafted tokens that tests assume, so that schedules choose the same widths everywhere."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxspec.core.theory import TokenCost
from jaxspec.core.tree import TreeShape
from jaxspec.schedules.best_width import BestWidth, WidthState

COST = TokenCost(0.025, 14.0)
DEFAULT = BestWidth(cpu=COST)


def counting(rows: int, shape: TreeShape, balance: Any = 99.0, schedule: BestWidth = DEFAULT) -> Callable[..., Any]:
    """Returns the `count` of a `Draw` with the schedule "best-width", for rows with this balance."""
    state = WidthState(jnp.broadcast_to(jnp.float32(balance), (rows,)), shape)
    return functools.partial(schedule.count_nodes, state)
