"""Block verification: accepts a chain as a whole, and on average at least as many tokens as token-by-token tests.

Sun et al. 2025 (arXiv:2403.10444), algorithm 2. Their recursion w[i] = min(1, w[i-1] ratio[i]) is a walk reflected at
1, which has a closed form: log w = S - max(0, running maximum of S), with S the running sum of the log-ratios.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxspec.core.draw import Noise
from jaxspec.core.records import Proposal, StopLaw
from jaxspec.core.rule import refuse_pruned
from jaxspec.core.tree import TreeShape
from jaxspec.errors import InvalidConfig
from jaxspec.rules._siblings import excess


@dataclasses.dataclass(frozen=True)
class Block:
    """Accepts a prefix of a chain by the probability ratios of the whole prefix (block verification)."""

    noise = Noise.FRESH
    lossless = True

    def check(self, shape: TreeShape) -> None:
        """Supports chains."""
        refuse_pruned(self, shape)
        if shape.width > 1:
            raise InvalidConfig(
                f"the rule 'block' supports only chains, got a tree with up to {shape.width} children per node; use a "
                "draft length, or the rule 'traversal', which is block verification for trees"
            )

    def __call__(self, law: Float[Array, "N V"], proposal: Proposal) -> StopLaw:
        if proposal.tree.children.shape[-1] > 1:
            self.check(TreeShape(law.shape[0], 0, proposal.tree.children.shape[-1]))
        following = jnp.concatenate([proposal.tokens[1:], jnp.full((1,), -1, proposal.tokens.dtype)])  # by node
        last = jnp.cumprod(following >= 0) == 0  # the node has no proposed child, or is not proposed itself
        token = jnp.maximum(following, 0)[:, None]
        drawn = 0.0 if proposal.law is None else jnp.take_along_axis(proposal.law, token, 1)[:, 0]
        ratio = jnp.take_along_axis(law, token, 1)[:, 0] - jnp.where(drawn > -jnp.inf, drawn, jnp.inf)
        sums = jnp.cumsum(jnp.where(last, -jnp.inf, ratio))[:-1]
        weight = sums - jnp.maximum(lax.cummax(sums), 0.0)
        weight = jnp.concatenate([jnp.zeros_like(law[:1, 0]), weight])  # the log-weight of the path to each node

        def residual(node: Array) -> Array:
            """Returns the excess of the target's law, scaled by the path's weight, over the draft's."""
            point = jnp.where(jnp.arange(law.shape[1]) == following[node], 0.0, -jnp.inf)
            return excess(jnp.exp(weight[node] + law[node]), point if proposal.law is None else proposal.law[node])

        def after(node: Array) -> Array:
            rest = residual(node)
            return jnp.where(last[node] | (rest.max() == 0), law[node], jnp.log(rest))

        mass = jax.vmap(lambda node: residual(node).sum())(jnp.arange(law.shape[0]))
        total = mass - jnp.expm1(weight)  # mass + (1 - exp(weight))
        accepted = jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), 1.0)
        accepted = jnp.where(last, jnp.exp(weight), accepted).at[0].set(1.0)
        deeper = jnp.cumprod((1 - accepted)[::-1])[::-1]
        return StopLaw(accepted * jnp.concatenate([deeper[1:], jnp.ones_like(deeper[:1])]), after)
