"""Rejection sampling with lenience (lossy): the draft's probabilities are scaled down, so more tokens are accepted.

Leviathan et al. 2023 (arXiv:2211.17192), appendix A.5. No token is emitted with more than 1 / lenience times its
target probability.
"""

import dataclasses
import math

from jaxtyping import Array, Float

from jaxspec.core.checks import number
from jaxspec.core.draw import Noise
from jaxspec.core.records import Proposal, StopLaw
from jaxspec.core.rule import refuse_pruned
from jaxspec.core.tree import TreeShape
from jaxspec.rules._siblings import sequential_acceptance


@dataclasses.dataclass(frozen=True)
class Lenient:
    """Accepts a drafted token with probability min(1, target / (lenience * draft)).

    Attributes:
        lenience: the factor that scales the draft's probabilities, above 0 and at most 1; with 1, the rule is
            speculative sampling, which is lossless.
    """

    lenience: float = 0.5

    noise = Noise.FRESH

    def __post_init__(self):
        object.__setattr__(self, "lenience", number("lenience", self.lenience, 0, 1, above=True))

    @property
    def lossless(self) -> bool:
        return self.lenience == 1

    def check(self, shape: TreeShape) -> None:
        """Supports every fixed tree."""
        refuse_pruned(self, shape)

    def __call__(self, law: Float[Array, "N V"], proposal: Proposal) -> StopLaw:
        return sequential_acceptance(law, proposal, math.log(self.lenience))
