"""Two deeper after a draft that was accepted whole, one less deep after any other.

The "heuristic" schedule of Hugging Face's assisted generation; it knows no costs, and never stops drafting.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.records import Played
from jaxspec.core.schedule import check_widths
from jaxspec.core.tree import TreeShape
from jaxspec.errors import InvalidConfig


class Bounded(NamedTuple):
    """The depth of the next draft, and the tree's."""

    depth: Int[Array, "B"]
    most: Int[Array, "B"]


@dataclasses.dataclass(frozen=True)
class PlusMinus:
    """The heuristic; see the module.

    Attributes:
        first: the depth of the first draft.
        least: the smallest depth, at least 1.
        widths: see `Schedule`.
    """

    first: int = 4
    least: int = 1
    widths: tuple[int, ...] = (3, 5, 9)

    def __post_init__(self):
        whole = all(type(value) is int for value in (self.first, self.least))
        if not whole or not 1 <= self.least <= self.first:
            raise InvalidConfig(
                f"expected whole numbers with 1 <= least <= first, got least {self.least!r} and first {self.first!r}"
            )
        check_widths(self.widths)

    def init(self, batch: int, shape: TreeShape) -> Bounded:
        most = jnp.full((batch,), shape.depth, jnp.int32)
        return Bounded(jnp.minimum(most, self.first), most)

    def limit(self, state: Bounded) -> Int[Array, "B"]:
        return state.depth

    def update(self, state: Bounded, played: Played) -> Bounded:
        depth = jnp.where(played.accepted >= played.drafted, state.depth + 2, jnp.maximum(state.depth - 1, self.least))
        return state._replace(depth=jnp.where(played.drafted > 0, jnp.minimum(depth, state.most), state.depth))

    def doubts(self, law: Float[Array, "*b V"]) -> Bool[Array, "*b"] | None:
        return None
