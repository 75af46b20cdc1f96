"""Speculative cascades, which are lossy: the text follows a mixture of target and draft, exactly.

Narasimhan et al. 2025 (arXiv:2405.19261), section 4.3, the token-specific deferral: a token whose probability
under the target is within a factor of the highest is left to the draft; the others' mass goes to the target as a
whole. Any other mixture is another `transform`: the hook replaces the target's law before the rule sees it.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.core.draw import Noise
from jaxspec.core.records import Ends, Proposal
from jaxspec.core.tree import TreeShape
from jaxspec.errors import InvalidConfig
from jaxspec.rules._siblings import tried

Transform = Callable[[Array, Array], Array]
"""Target's and draft's log-laws `[V]` of one node -> the log-law that is followed instead."""


@dataclasses.dataclass(frozen=True)
class Tolerant:
    """Tokens within (1 - tolerance) of the target's highest probability are drawn as the draft draws them."""

    tolerance: float = 0.3

    def __post_init__(self):
        if not 0 <= self.tolerance <= 1:
            raise InvalidConfig(f"tolerance must be from 0 to 1, got {self.tolerance!r}")

    def __call__(self, target: Float[Array, "V"], draft: Float[Array, "V"]) -> Float[Array, "V"]:
        good = target >= target.max() + jnp.log1p(-self.tolerance)
        refused = jax.nn.logsumexp(jnp.where(good, -jnp.inf, draft))
        return jnp.logaddexp(jnp.where(good, draft, -jnp.inf), target + refused)


@dataclasses.dataclass(frozen=True)
class Cascade:
    """Follows `transform(target, draft)` instead of the target, wherever there is a draft.

    Attributes:
        transform: see `Transform`; hashable.
    """

    transform: Transform = Tolerant()

    noise: ClassVar[Noise] = Noise.FRESH
    lossless: ClassVar[bool] = False

    def check(self, shape: TreeShape) -> None:
        """Takes every tree."""

    def __call__(self, law: Float[Array, "N V"], proposal: Proposal) -> Ends:
        if proposal.law is None:
            raise InvalidConfig(
                "the cascade mixes the draft's law in, and this drafter has none; use a drafter that draws its "
                "tokens from a law, such as 'model' or 'early-exit'"
            )
        inner = (proposal.tokens[jnp.maximum(proposal.tree.children, 0)] >= 0) & (proposal.tree.children >= 0)
        mixed = jax.vmap(self.transform)(law, proposal.law)
        return tried(jnp.where(inner.any(-1)[:, None], mixed, law), proposal)
