"""The schedule "plus-minus": drafts two tokens deeper after a fully accepted draft, one token less deep after others.

This is the "heuristic" schedule of Hugging Face's assisted generation. It does not use costs and never stops drafting.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.checks import whole
from jaxspec.core.records import RoundResult
from jaxspec.core.schedule import check_widths
from jaxspec.core.tree import TreeShape
from jaxspec.errors import InvalidConfig


class DepthState(NamedTuple):
    """The depth of each row's next draft."""

    depth: Int[Array, "B"]
    deepest: Int[Array, "B"]  # the tree's depth


@dataclasses.dataclass(frozen=True)
class PlusMinus:
    """Drafts two tokens deeper after a fully accepted draft, one less deep after any other.

    Attributes:
        first: the depth of the first draft.
        least: the smallest depth, at least 1.
        widths: see `Schedule`.
    """

    first: int = 4
    least: int = 1
    widths: tuple[int, ...] = (3, 5, 9)

    def __post_init__(self):
        for name in ("first", "least"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        if self.least > self.first:
            raise InvalidConfig(f"least must be at most first, got first={self.first} and least={self.least}")
        check_widths(self.widths)

    def init(self, batch: int, shape: TreeShape) -> DepthState:
        deepest = jnp.full((batch,), shape.depth, jnp.int32)
        return DepthState(jnp.minimum(deepest, self.first), deepest)

    def limit(self, state: DepthState) -> Int[Array, "B"]:
        return state.depth

    def update(self, state: DepthState, result: RoundResult) -> DepthState:
        depth = jnp.where(result.accepted >= result.drafted, state.depth + 2, jnp.maximum(state.depth - 1, self.least))
        return state._replace(depth=jnp.where(result.drafted > 0, jnp.minimum(depth, state.deepest), state.depth))

    def count_nodes(
        self, state: DepthState, log_acceptance: Float[Array, "B N1"], drafting: Bool[Array, "B"], together: bool
    ) -> Int[Array, "B"] | None:
        return None

    def stop_after(
        self, law: Float[Array, "*b V"], estimate: Float[Array, "*b"] | None = None
    ) -> Bool[Array, "*b"] | None:
        return None
