"""Coupled verification: the target draws its own token after every node, with the noise the drafter drew with.

The walk goes down while the target's token is among the children. Every emitted token is the target's own
draw, so the text is that of plain decoding with the same key, whatever the draft. Greedy verification is the
case of zero noise. For one child: Daliri, Musco and Suresh 2025 (arXiv:2408.07978), section 3; for more, the
children are the drafter's highest perturbed scores under that noise.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.core.draw import Noise
from jaxspec.core.laws import choose
from jaxspec.core.records import Proposal, Verdict
from jaxspec.core.sampling import Sampling
from jaxspec.core.tree import TreeShape


@dataclasses.dataclass(frozen=True)
class Coupled:
    """The default rule; see the module."""

    noise: ClassVar[Noise] = Noise.SHARED
    lossless: ClassVar[bool] = True

    def check(self, shape: TreeShape) -> None:
        """Takes every tree."""

    def __call__(
        self, scores: Float[Array, "N V"], noise: Float[Array, "D1 V"], sampling: Sampling, proposal: Proposal
    ) -> Verdict:
        tree = proposal.tree
        drawn = choose(scores, noise[tree.depths], sampling)
        right = (proposal.tokens == drawn[jnp.maximum(tree.parents, 0)]).at[0].set(True)
        kept = jnp.all(right[None, :] | ~tree.ancestors, axis=-1)
        node = jnp.argmax(jnp.where(kept, tree.depths, -1)).astype(jnp.int32)
        return Verdict(node, drawn[node])
