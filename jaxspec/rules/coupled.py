"""Coupled verification: the target draws its token after every node with the noise that the drafter used.

The walk descends while the target's token is among the children. Every emitted token is the target's own draw, so the
text equals that of plain decoding with the same key, for any draft. Greedy verification is the case without noise.
For one child this is Daliri, Musco and Suresh 2025 (arXiv:2408.07978), section 3; with several, the children are the
draft's highest perturbed scores under the shared noise.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.core.draw import Noise
from jaxspec.core.laws import choose
from jaxspec.core.records import Proposal, Verdict
from jaxspec.core.sampling import Sampling
from jaxspec.core.tree import TreeShape


@dataclasses.dataclass(frozen=True)
class Coupled:
    """Accepts a drafted token if the target draws the same one with the same noise; see the module."""

    noise = Noise.SHARED
    lossless = True

    def check(self, shape: TreeShape) -> None:
        """Takes every tree."""

    def __call__(
        self, scores: Float[Array, "N V"], noise: Float[Array, "D1 V"], sampling: Sampling, proposal: Proposal
    ) -> Verdict:
        tree = proposal.tree
        drawn = choose(scores, noise[tree.depths], sampling)
        agrees = (proposal.tokens == drawn[jnp.maximum(tree.parents, 0)]).at[0].set(True)
        accepted = jnp.all(agrees[None, :] | ~tree.ancestors, axis=-1)
        node = jnp.argmax(jnp.where(accepted, tree.depths, -1)).astype(jnp.int32)
        return Verdict(node, drawn[node])
