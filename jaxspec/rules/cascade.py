"""Speculative cascades (lossy): the text follows a mixture of the target's and the draft's law, exactly.

Narasimhan et al. 2025 (arXiv:2405.19261), section 4.3, token-specific deferral: tokens whose target probability is
within a factor of the highest keep the draft's probability, and the draft's mass on all other tokens is redistributed
by the target's law. A `transform` function defines the mixture and replaces the target's law before verification; other
functions define other mixtures.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.core.checks import number
from jaxspec.core.draw import Noise
from jaxspec.core.records import Proposal, StopLaw
from jaxspec.core.rule import refuse_pruned
from jaxspec.core.tree import TreeShape
from jaxspec.errors import InvalidConfig
from jaxspec.rules._siblings import sequential_acceptance

Transform = Callable[[Array, Array], Array]
"""Maps the target's and the draft's log-law of one node, `[V]` each, to the log-law that the text follows instead."""


@dataclasses.dataclass(frozen=True)
class Tolerant:
    """Keeps the draft's probability of tokens that the target finds nearly as likely as its best one.

    Attributes:
        tolerance: a number from 0 to 1; a token qualifies with at least (1 - tolerance) times the target's highest
            probability.
    """

    tolerance: float = 0.3

    def __post_init__(self):
        object.__setattr__(self, "tolerance", number("tolerance", self.tolerance, 0, 1))

    def __call__(self, target: Float[Array, "V"], draft: Float[Array, "V"]) -> Float[Array, "V"]:
        likely = target >= target.max() + jnp.log1p(-self.tolerance)
        deferred = jax.nn.logsumexp(jnp.where(likely, -jnp.inf, draft))
        return jnp.logaddexp(jnp.where(likely, draft, -jnp.inf), target + deferred)


@dataclasses.dataclass(frozen=True)
class Cascade:
    """Accepts as rejection sampling does, for a mixture of both distributions in place of the target's.

    The mixture is `transform(target, draft)`.

    Nodes without proposed children keep the target's law.

    Attributes:
        transform: the mixture, a hashable `Transform`.
    """

    transform: Transform = Tolerant()

    noise = Noise.FRESH
    lossless = False

    def check(self, shape: TreeShape) -> None:
        """Supports every fixed tree."""
        refuse_pruned(self, shape)

    def __call__(self, law: Float[Array, "N V"], proposal: Proposal) -> StopLaw:
        if proposal.tokens.shape[0] == 1:  # the root alone: nothing to mix
            return sequential_acceptance(law, proposal)
        if proposal.law is None:
            raise InvalidConfig(
                "the rule 'cascade' mixes the distributions of target and draft, but this drafter proposes tokens "
                "without a distribution; use a drafter that draws its tokens, such as 'model' or 'early-exit'"
            )
        inner = (proposal.tokens[jnp.maximum(proposal.tree.children, 0)] >= 0) & (proposal.tree.children >= 0)
        mixed = jax.vmap(self.transform)(law, proposal.law)
        return sequential_acceptance(jnp.where(inner.any(-1)[:, None], mixed, law), proposal)
