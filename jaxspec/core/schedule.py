"""The protocol of schedules, and the default schedule: every round drafts to the same depth.

A schedule is a frozen, hashable dataclass, and is passed as a static argument: equal schedules do not retrace. Its
state is a pytree of arrays, with one entry per row.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.checks import whole
from jaxspec.core.records import RoundResult
from jaxspec.core.tree import TreeShape
from jaxspec.errors import InvalidConfig, shown


@runtime_checkable
class Schedule(Protocol):
    """Decides how deep each row may draft, round by round, and how many nodes.

    It may use the row's earlier rounds and the draft's law after each node. It must not use other rows, except in
    `count_nodes` and `update` if the rows may choose together. It must not use the tokens that it decides about either,
    except in `count_nodes`, because that would bias rules that compare laws.

    Attributes:
        widths: widths of target calls to compile, besides the decoder's widths. A round runs at the smallest width that
            holds all drafts.
    """

    @property
    def widths(self) -> tuple[int, ...]: ...

    def init(self, batch: int, shape: TreeShape) -> Any:
        """Returns the state before the first round; every leaf has a leading axis of rows."""
        ...

    def limit(self, state: Any) -> Int[Array, "B"]:
        """Returns the depth to which each row may draft in this round; 0 for no draft."""
        ...

    def count_nodes(
        self, state: Any, log_acceptance: Float[Array, "B N1"], drafting: Bool[Array, "B"], together: bool
    ) -> Int[Array, "B"] | None:
        """Returns how many of its best nodes each row drafts, root excluded; None for all of them.

        Only drafters that can propose any number of their best nodes ask (`Draw.count_nodes`). No rule compares laws of
        their proposals, so the answer may depend on the tokens.

        Args:
            state: the state before the round.
            log_acceptance: the log-probability that each node is accepted, in descending order; -inf for nodes that
                cannot be drafted. These are estimates.
            drafting: the rows that may draft in this round.
            together: whether drafts cannot change a text, so that rows may choose together. If it is false, a row's
                number must not depend on other rows.
        """
        ...

    def update(self, state: Any, result: RoundResult) -> Any:
        """Returns the state after a round."""
        ...

    def stop_after(
        self, law: Float[Array, "*b V"], estimate: Float[Array, "*b"] | None = None
    ) -> Bool[Array, "*b"] | None:
        """Returns the nodes below which nothing is drafted, by the draft's log-law after each node; None for no test.

        The law is the distribution that children are drawn from: tempered, and truncated if the rule reads it.
        `estimate` is passed if the drafter itself estimates how much of each law the target shares
        (`jaxspec.core.draw.Judged`).
        """
        ...


def check_widths(widths: tuple[int, ...]) -> None:
    """Refuses values that are not tuples of window widths.

    Raises:
        InvalidConfig: the value is not a tuple of whole numbers from 1.
    """
    if not isinstance(widths, tuple) or any(type(width) is not int or width < 1 for width in widths):
        raise InvalidConfig(f"widths must be a tuple of whole numbers from 1, got {shown(widths)}")


@dataclasses.dataclass(frozen=True)
class Constant:
    """Drafts to the same depth in every round.

    Attributes:
        length: the depth; None for the tree's depth. A shallower tree is cheaper than a smaller `length`.
        widths: see `Schedule`.
    """

    length: int | None = None
    widths: tuple[int, ...] = ()

    def __post_init__(self):
        if self.length is not None:
            object.__setattr__(self, "length", whole("a draft length", self.length, 0))
        check_widths(self.widths)

    def init(self, batch: int, shape: TreeShape) -> Int[Array, "B"]:
        return jnp.full((batch,), shape.depth if self.length is None else min(self.length, shape.depth), jnp.int32)

    def limit(self, state: Int[Array, "B"]) -> Int[Array, "B"]:
        return state

    def count_nodes(
        self, state: Int[Array, "B"], log_acceptance: Float[Array, "B N1"], drafting: Bool[Array, "B"], together: bool
    ) -> Int[Array, "B"] | None:
        return None

    def update(self, state: Int[Array, "B"], result: RoundResult) -> Int[Array, "B"]:
        return state

    def stop_after(
        self, law: Float[Array, "*b V"], estimate: Float[Array, "*b"] | None = None
    ) -> Bool[Array, "*b"] | None:
        return None
