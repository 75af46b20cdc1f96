"""Expected tokens of a draft, and the best draft length (Leviathan et al. 2023, arXiv:2211.17192)."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxspec.core.tree import Tree
from jaxspec.errors import InvalidConfig


def node_acceptance(tree: Tree, acceptance: Float[Array | np.ndarray, "*b D C"], xp: Any = jnp) -> Any:
    """Returns the probability that each node of a tree is accepted; their sum is the expected tokens of a round.

    The root has probability 1, for the target's own token. On a chain, partial sums are the expected tokens of shorter
    chains (section 3.1).

    Args:
        tree: the tables of one topology, for all rows.
        acceptance: the probability that the child of each depth and rank is accepted if its parent is.
        xp: `jax.numpy`, or `numpy`, which keeps float64.

    Returns:
        The probabilities, `[*b, N]`.
    """
    return path_products(tree, acceptance[..., tree.depths[1:] - 1, tree.ranks[1:]], xp)


def path_products(tree: Tree, rates: Float[Array | np.ndarray, "*b M"], xp: Any = jnp) -> Any:
    """Returns the product of rates along the path to each node, `[*b, N]`; the root has 1.

    Args:
        tree: the tables of one topology, for all rows.
        rates: the rate of each node below the root, M = N - 1.
        xp: `jax.numpy`, or `numpy`.
    """
    rates = xp.concatenate([xp.ones_like(rates, shape=(*rates.shape[:-1], 1)), rates], -1)
    return xp.where(tree.ancestors, rates[..., None, :], 1.0).prod(-1)


class TokenCost(NamedTuple):
    """The time that more tokens in a target call take on a CPU, in units of a call of one token.

    Attributes:
        each: the time of one more token, as long as reading the weights takes longer than multiplying by them.
        at_once: the number of tokens that are multiplied in the time of a call of one token.
    """

    each: float
    at_once: float


XLA_TOKEN_COST = TokenCost(0.025, 1.7)
"""The measured cost of tokens with XLA's own products, in float32."""


class ExpertReads(NamedTuple):
    """What a call of a network with mixtures of experts reads of its weights.

    Attributes:
        total: X, the number of experts of a layer.
        per_token: k, the number of experts of a token.
        share: the share of a token's experts in the bytes that a call of one token reads, 0 to 1.
    """

    total: int
    per_token: int
    share: float

    def expected(self, tokens: int) -> float:
        """Returns the expected number of distinct experts of tokens that choose independently."""
        return self.total * (1 - (1 - self.per_token / self.total) ** tokens)

    def cost(self, tokens: int) -> float:
        """Returns the expected bytes that a call reads, in units of a call of one token.

        It is an upper bound: tokens of one text share more experts than independent tokens.
        """
        return 1 - self.share + self.share * self.expected(tokens) / self.per_token


def assumed_cost(width: int, cpu: TokenCost | None, rows: int = 1, experts: ExpertReads | None = None) -> float:
    """Returns the assumed time of a target call of a width, before it is measured, in units of a call of width 1.

    On a CPU, a call of few tokens mostly reads the weights. Beyond that, its time grows with the number of tokens. On
    accelerators, more tokens are nearly free up to the number by which a weight is multiplied in the time in which it
    is read (156 on an A100, 240 on a TPU v5e, 295 on an H100, in bfloat16). In a network with mixtures of experts, more
    tokens also read more weights.

    Args:
        width: the number of tokens of each row.
        cpu: the time that tokens take on the CPU (`jaxspec.kernels.library.token_cost`); None for an accelerator.
        rows: the number of rows.
        experts: what a call of the network reads; None for a network without experts.
    """

    def read(tokens: int) -> float:
        return 1.0 if experts is None else experts.cost(tokens)

    if cpu is None and experts is None:
        return max(1 + 0.01 * (width - 1), rows * width / max(rows, 256))
    if cpu is None:
        few, many = (max(read(tokens), tokens / 256) for tokens in (rows, rows * width))
        return many / few + 0.01 * (width - 1)
    few, many = (max(read(tokens) + cpu.each * (tokens - 1), tokens / cpu.at_once) for tokens in (rows, rows * width))
    return many / few


def best_length(acceptance: float, cost: float, longest: int) -> int:
    """Returns the length of the chain that decodes fastest if every token has the same probability of acceptance.

    The speedup of section 3.3 has one maximum in the length g: one more token pays as long as
    `acceptance^(g + 1) (1 + (1 - acceptance)(g + 1 / cost)) > 1`.

    Args:
        acceptance: the probability that a token is accepted, 0 to 1.
        cost: the cost of drafting one token, in target calls, which are assumed to cost the same at any width.
        longest: the longest chain to consider; with acceptance 1 or cost 0, longer is always better.

    Raises:
        InvalidConfig: a value is outside its range.
    """
    if not 0 <= acceptance <= 1:
        raise InvalidConfig(f"acceptance must be from 0 to 1, got {acceptance!r}")
    if not (math.isfinite(cost) and cost >= 0):
        raise InvalidConfig(f"cost must be finite and at least 0, got {cost!r}")
    if isinstance(longest, bool) or not isinstance(longest, int) or longest < 0:
        raise InvalidConfig(f"longest must be a whole number from 0, got {longest!r}")

    def pays(length: int) -> bool:
        # Both sides are multiplied by the cost, which may be 0.
        return acceptance ** (length + 1) * (cost + (1 - acceptance) * (length * cost + 1)) > cost

    length = 0
    while length < longest and (pays(length) or (acceptance == 1 and cost < 1)):
        length += 1
    return length
