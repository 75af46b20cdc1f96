"""Speculative sampling, token by token.

On a chain: Leviathan et al. 2023 (arXiv:2211.17192), section 2.3, and Chen et al. 2023 (arXiv:2302.01318). On a tree,
with siblings drawn without replacement: SpecInfer (arXiv:2305.09781), Sequoia (arXiv:2402.12374) and EAGLE
(arXiv:2401.15077).
"""

import dataclasses

from jaxtyping import Array, Float

from jaxspec.core.draw import Noise
from jaxspec.core.records import Proposal, StopLaw
from jaxspec.core.rule import refuse_pruned
from jaxspec.core.tree import TreeShape
from jaxspec.rules._siblings import sequential_acceptance


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Accepts a drafted token with probability min(1, target / draft), siblings in order; see the module."""

    noise = Noise.FRESH
    lossless = True

    def check(self, shape: TreeShape) -> None:
        """Supports every fixed tree."""
        refuse_pruned(self, shape)

    def __call__(self, law: Float[Array, "N V"], proposal: Proposal) -> StopLaw:
        return sequential_acceptance(law, proposal)
