"""Verification of deterministic drafts: a child is accepted with its probability under the target.

This is the rule for drafts that are not samples: the trees of EAGLE-2 and Medusa, prompt lookup, and any greedy draft
(Li et al. 2024, arXiv:2406.16858, section 4.2). At every node one token is drawn from the target, and the walk descends
if it is among the children.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.core.draw import Noise
from jaxspec.core.records import Proposal, StopLaw
from jaxspec.core.tree import TreeShape
from jaxspec.rules._siblings import child_tokens


@dataclasses.dataclass(frozen=True)
class Deterministic:
    """Accepts a drafted token with its probability under the target; no distribution of the draft is read."""

    noise = Noise.NONE
    lossless = True

    def check(self, shape: TreeShape) -> None:
        """Supports every tree."""

    def __call__(self, law: Float[Array, "N V"], proposal: Proposal) -> StopLaw:
        tree, tokens = proposal.tree, child_tokens(proposal)
        at = jnp.maximum(tree.parents, 0)
        step = jnp.where(proposal.tokens >= 0, jnp.exp(law[at, jnp.maximum(proposal.tokens, 0)]), 0.0).at[0].set(1.0)
        below = jnp.where(tree.children >= 0, step[jnp.maximum(tree.children, 0)], 0.0).sum(-1)
        reached = jnp.where(tree.ancestors, step, 1.0).prod(-1)

        def after(node: Array) -> Array:
            spent = (jnp.arange(law.shape[1]) == tokens[node][:, None]).any(0)
            rest = jnp.where(spent, -jnp.inf, law[node])
            return jnp.where(rest.max() > -jnp.inf, rest, law[node])

        return StopLaw(reached * jnp.maximum(1 - below, 0.0), after)
