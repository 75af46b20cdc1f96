"""Coupled verification: the target draws its token after every node with the noise that the drafter used.

The walk descends while the target's token is among the children. Every emitted token is the target's own draw, so the
text equals the text of plain decoding with the same key, for any draft. Greedy verification is the case without noise.
With one child per node, this is Daliri, Musco and Suresh 2025 (arXiv:2408.07978), section 3. With several children,
these are the tokens with the draft's highest perturbed scores under the shared noise.

A walk from node to node draws only after the few nodes that it reaches. On a GPU, where launching a kernel costs more
than its work, the target draws after all nodes at once. Both ways give the same verdict.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.backend.layout import gpu_dependent
from jaxspec.core.draw import Noise
from jaxspec.core.laws import choose
from jaxspec.core.records import Proposal, Verdict
from jaxspec.core.sampling import Sampling
from jaxspec.core.tree import TreeShape

ReadNodes = Callable[[Int[Array, "B n"]], Float[Array, "B n V"]]
"""Returns the scores after these nodes, or the noise after nodes of these depths."""


@dataclasses.dataclass(frozen=True)
class Coupled:
    """Accepts a drafted token if the target draws the same one with the same noise; see the module."""

    noise = Noise.SHARED
    lossless = True

    def check(self, shape: TreeShape) -> None:
        """Supports every tree."""

    def __call__(self, scores: ReadNodes, noise: ReadNodes, sampling: Sampling, proposal: Proposal) -> Verdict:
        accepted, drawn = gpu_dependent(
            sampling,
            proposal,
            gpu=functools.partial(draw_at_once, scores, noise),
            default=functools.partial(draw_along_walk, scores, noise),
        )
        return find_deepest(accepted, drawn, proposal)


def find_deepest(accepted: Bool[Array, "B N"], drawn: Int[Array, "B N"], proposal: Proposal) -> Verdict:
    """Returns the deepest accepted node of each row, and the token drawn after it."""
    node = jnp.argmax(jnp.where(accepted, proposal.tree.depths, -1), -1).astype(jnp.int32)
    return Verdict(node, jnp.take_along_axis(drawn, node[:, None], 1)[:, 0])


def draw_along_walk(
    scores: ReadNodes, noise: ReadNodes, sampling: Sampling, proposal: Proposal
) -> tuple[Bool[Array, "B N"], Int[Array, "B N"]]:
    """Returns the accepted nodes, and the token drawn after each of them."""
    tree, tokens = proposal.tree, proposal.tokens
    nodes = jnp.arange(tokens.shape[1])

    def draw(state: tuple[Array, ...]) -> tuple[Array, ...]:
        # Most nodes of a tree are never reached. Children come after their parents.
        steps, node, accepted, drawn = state
        read = jnp.minimum(node, nodes.size - 1)[:, None]  # a row may have ended before other rows
        token = choose(scores(read), noise(jnp.take_along_axis(tree.depths, read, 1)), sampling)
        accepted |= (tree.parents == node[:, None]) & (tokens == token)
        drawn = jnp.where(nodes == node[:, None], token, drawn)
        unvisited = accepted & (nodes > node[:, None])
        node = jnp.where(unvisited.any(-1), unvisited.argmax(-1), nodes.size).astype(jnp.int32)
        return steps + 1, node, accepted, drawn

    def unfinished(state: tuple[Array, ...]) -> Array:
        return (state[0] < nodes.size) & (state[1] < nodes.size).any()

    start = (
        jnp.int32(0),
        jnp.zeros(len(tokens), jnp.int32),
        jnp.zeros_like(tokens, bool).at[:, 0].set(True),
        jnp.zeros_like(tokens),
    )
    _, _, accepted, drawn = lax.while_loop(unfinished, draw, start)
    return accepted, drawn


def draw_at_once(
    scores: ReadNodes, noise: ReadNodes, sampling: Sampling, proposal: Proposal
) -> tuple[Bool[Array, "B N"], Int[Array, "B N"]]:
    """Returns the accepted nodes, and the token drawn after every node, from one draw of noise per depth."""
    tree, tokens = proposal.tree, proposal.tokens

    def all_ids(count: int) -> Array:
        return jnp.broadcast_to(jnp.arange(count), (len(tokens), count))

    extra = jnp.take_along_axis(noise(all_ids(tree.paths.shape[-1])), tree.depths[..., None], 1)
    drawn = choose(scores(all_ids(tokens.shape[1])), extra, sampling)
    agrees = (tokens == jnp.take_along_axis(drawn, jnp.maximum(tree.parents, 0), 1)).at[:, 0].set(True)
    return (agrees[:, None] | ~tree.ancestors).all(-1), drawn
