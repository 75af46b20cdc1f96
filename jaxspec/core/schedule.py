"""The default schedule of a decoder: every round drafts to the same depth."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.checks import whole
from jaxspec.core.records import RoundResult
from jaxspec.core.tree import TreeShape
from jaxspec.errors import InvalidConfig, shown


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
        length: the depth; None for that of the tree. A tree that is no deeper costs less.
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

    def update(self, state: Int[Array, "B"], result: RoundResult) -> Int[Array, "B"]:
        return state

    def stop_after(
        self, law: Float[Array, "*b V"], estimate: Float[Array, "*b"] | None = None
    ) -> Bool[Array, "*b"] | None:
        return None
