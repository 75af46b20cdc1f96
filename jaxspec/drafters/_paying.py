"""How many nodes a round should have, for drafters that choose."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core.draw import Draw, Noise
from jaxspec.core.records import Params
from jaxspec.core.theory import assumed_cost
from jaxspec.kernels.library import token_cost


def count_paying(worth: Float[Array, "B N1"], widths: tuple[int, ...], draw: Draw, target: Params) -> Int[Array, "B"]:
    """Returns how many nodes have the most expected tokens for their assumed cost, without the root.

    The target reads as many tokens of every row. Where no draft can change a text, because the noise is shared, the
    rows that draft choose together; elsewhere a row's text must not depend on other rows, and each chooses as if it was
    alone.

    Args:
        worth: the logarithm of the probability that each node is accepted, in descending order.
        widths: numbers of nodes to choose among, root included, besides that of all nodes; see `ChoosingDrafter`.
        draw: of the round.
        target: the target's parameters, whose type decides what tokens take on a CPU.
    """
    nodes, rows = worth.shape[1] + 1, 1
    choices = np.array([*(width for width in widths if width < nodes), nodes])
    tokens = 1 + jnp.pad(jnp.cumsum(jnp.exp(worth), -1), ((0, 0), (1, 0)))[:, choices - 1]
    if draw.kind is Noise.SHARED:
        rows = len(worth)
        tokens = jnp.broadcast_to(jnp.where(draw.below(0)[:, None], tokens, 0.0).sum(0), tokens.shape)
    costs = token_cost(target), None
    on_cpu, elsewhere = (np.array([assumed_cost(width, own, rows) for width in choices], np.float32) for own in costs)
    speed = lax.platform_dependent(
        tokens, cpu=lambda tokens: tokens / on_cpu, default=lambda tokens: tokens / elsewhere
    )
    return jnp.asarray(choices - 1)[jnp.argmax(speed, -1)]
