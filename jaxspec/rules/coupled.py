"""Coupled verification: the target draws its token after every node with the noise that the drafter used.

The walk descends while the target's token is among the children. Every emitted token is the target's own draw, so the
text equals that of plain decoding with the same key, for any draft. Greedy verification is the case without noise.
For one child this is Daliri, Musco and Suresh 2025 (arXiv:2408.07978), section 3; with several, the children are the
draft's highest perturbed scores under the shared noise.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

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
        self,
        scores: Callable[[Int[Array, "B"]], Float[Array, "B V"]],
        noise: Callable[[Int[Array, "B"]], Float[Array, "B V"]],
        sampling: Sampling,
        proposal: Proposal,
    ) -> Verdict:
        tree, tokens = proposal.tree, proposal.tokens
        nodes = jnp.arange(tokens.shape[1])

        def at(values: Array, node: Array) -> Array:
            return jnp.take_along_axis(values, node[:, None], 1)[:, 0]

        def draw(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            # A node at a time, as most of a tree is not reached. Children come after their parents.
            node, accepted, drawn = state
            read = jnp.minimum(node, nodes.size - 1)  # a row may have ended before others
            own = jax.vmap(choose)(scores(read)[:, None], noise(at(tree.depths, read))[:, None], sampling)
            accepted |= (tree.parents == node[:, None]) & (tokens == own)
            drawn = jnp.where(nodes == node[:, None], own, drawn)
            ahead = accepted & (nodes > node[:, None])
            return jnp.where(ahead.any(-1), ahead.argmax(-1), nodes.size).astype(jnp.int32), accepted, drawn

        start = (
            jnp.zeros(len(tokens), jnp.int32),
            jnp.zeros_like(tokens, bool).at[:, 0].set(True),
            jnp.zeros_like(tokens),
        )
        _, accepted, drawn = lax.while_loop(lambda state: (state[0] < nodes.size).any(), draw, start)
        node = jnp.argmax(jnp.where(accepted, tree.depths, -1), -1).astype(jnp.int32)
        return Verdict(node, at(drawn, node))
