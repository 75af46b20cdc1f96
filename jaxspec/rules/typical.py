"""Medusa's typical acceptance (lossy): a drafted token is accepted if its target probability exceeds a threshold.

Cai et al. 2024 (arXiv:2401.10774), section 2.3.1, after Hewitt et al. 2022: the threshold is
min(epsilon, delta * exp(-H)), where H is the entropy of the target's law at that node.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.core.checks import number
from jaxspec.core.draw import Noise
from jaxspec.core.records import Proposal, StopLaw
from jaxspec.core.tree import TreeShape


@dataclasses.dataclass(frozen=True)
class Typical:
    """Accepts the deepest path whose tokens all exceed the threshold; the first one among equally deep paths.

    Attributes:
        epsilon: the probability above which a token is always accepted; above 0 and at most 1.
        delta: the factor of exp(-entropy) in the threshold; above 0 and at most 1.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    noise = Noise.NONE
    lossless = False

    def __post_init__(self):
        for name in ("epsilon", "delta"):
            object.__setattr__(self, name, number(name, getattr(self, name), 0, 1, above=True))

    def check(self, shape: TreeShape) -> None:
        """Supports every tree."""

    def __call__(self, law: Float[Array, "N V"], proposal: Proposal) -> StopLaw:
        tree = proposal.tree
        entropy = -jnp.where(law > -jnp.inf, jnp.exp(law) * law, 0.0).sum(-1)
        threshold = jnp.minimum(jnp.log(self.epsilon), jnp.log(self.delta) - entropy)
        at = jnp.maximum(tree.parents, 0)
        likely = (law[at, jnp.maximum(proposal.tokens, 0)] > threshold[at]) & (proposal.tokens >= 0)
        accepted = (likely.at[0].set(True)[None, :] | ~tree.ancestors).all(-1)
        deepest = jnp.argmax(jnp.where(accepted, tree.depths, -1))
        return StopLaw(jax.nn.one_hot(deepest, law.shape[0], dtype=law.dtype), lambda node: law[node])
