"""What a draft is worth, by the acceptance of its tokens and its costs (Leviathan et al. 2023, arXiv:2211.17192)."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxspec.core.tree import Tree
from jaxspec.errors import InvalidConfig


def node_acceptance(tree: Tree, acceptance: Float[Array | np.ndarray, "*b D C"], xp: Any = jnp) -> Any:
    """The probability that each node of a tree is kept; their sum is the expected tokens of a round.

    The root counts for the target's own token. Summed node by node along a chain they are the tokens of its shorter
    drafts (section 3.1).

    Args:
        tree: of one topology, for all rows.
        acceptance: that of the child of each depth and rank, where its parent was kept.
        xp: `jax.numpy` or `numpy`, which keeps float64.

    Returns:
        `[*b, N]`.
    """
    share = acceptance[..., tree.depths[1:] - 1, tree.ranks[1:]]
    share = xp.concatenate([xp.ones_like(share, shape=(*share.shape[:-1], 1)), share], -1)
    return xp.where(tree.ancestors, share[..., None, :], 1.0).prod(-1)


def best_length(acceptance: float, cost: float, longest: int) -> int:
    """The length of a chain, up to `longest`, that decodes fastest if every token is accepted with one probability.

    A token more pays while `acceptance^(g + 1) (1 + (1 - acceptance)(g + 1 / cost)) > 1`, g the length without it:
    the speedup of section 3.3 has one maximum in g.

    Args:
        acceptance: 0 to 1.
        cost: of drafting one token, in target calls; those are taken to cost the same at any width.
        longest: the length not to be exceeded; with acceptance 1, or cost 0, longer is always better.

    Raises:
        InvalidConfig: a value outside its range.
    """
    if not 0 <= acceptance <= 1:
        raise InvalidConfig(f"acceptance must be from 0 to 1, got {acceptance!r}")
    if not (math.isfinite(cost) and cost >= 0):
        raise InvalidConfig(f"cost must be finite and at least 0, got {cost!r}")
    if isinstance(longest, bool) or not isinstance(longest, int) or longest < 0:
        raise InvalidConfig(f"longest must be a whole number from 0, got {longest!r}")

    def pays(length: int) -> bool:
        # Both sides times the cost, which may be 0.
        return acceptance ** (length + 1) * (cost + (1 - acceptance) * (length * cost + 1)) > cost

    length = 0
    while length < longest and (pays(length) or (acceptance == 1 and cost < 1)):
        length += 1
    return length
