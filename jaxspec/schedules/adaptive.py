"""The depth that brings the most tokens for its cost, by what the row has seen accepted; zero included.

Expected tokens of a round that drafts to depth g are 1 plus the sum over i <= g of the product of the acceptances at
depths 1 to i (Leviathan et al. 2023, arXiv:2211.17192, section 3.1, with an acceptance of its own for every depth).
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.records import Played
from jaxspec.core.schedule import check_widths
from jaxspec.core.theory import kept
from jaxspec.core.tree import TreeShape, chain
from jaxspec.errors import InvalidConfig

RISKED = 4
"""Of what drafts have won, a row may lose again what this many of the deepest cost, should the text change."""


class Account(NamedTuple):
    """What a row has learned. Counts fade with time; the rest is in plain rounds."""

    tried: Float[Array, "B D"]  # rounds that came to each depth, and drafted there
    kept: Float[Array, "B D"]  # those that accepted there
    balance: Float[Array, "B"]  # what may still be lost
    behind: Float[Array, "B"]  # rounds since the drafter last read the text
    depth: Int[Array, "B"]  # of the next draft


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """The controller; see the module.

    Acceptance at a depth is estimated from the rounds that came there, and as far as these are few or long ago, taken
    to be that of the depth before, at depth 1 `hope`. So what is no longer tried is hoped for again, and tried.

    Every round that drafts is entered in the row's balance: its cost beyond a plain round against the tokens it
    saved. A row drafts no deeper than its balance could bear if nothing were accepted. So whatever the estimates, a
    text of n tokens is never later than plain decoding by more than `credit + share * n` plain rounds.

    Attributes:
        costs: of a round that drafts to depth 0, 1, ..., in any unit; measured by `jaxspec tune`. Deeper ones cost
            as the last step does.
        resume: the cost of reading a token that was missed in a round without a draft, in the same unit.
        hope: the acceptance that is assumed before anything is known.
        credit: what a row may lose at first, in plain rounds.
        share: what it may lose besides for each token, in plain rounds.
        memory: rounds over which counts fade to 1/e.
        weight: of the assumed acceptance, in rounds.
        hysteresis: a depth is left for one that is better by this share.
        widths: see `Schedule`.
    """

    costs: tuple[float, ...] = (1.0, 1.25)
    resume: float = 0.0
    hope: float = 0.7
    credit: float = 2.0
    share: float = 0.015
    memory: float = 32.0
    weight: float = 4.0
    hysteresis: float = 0.02
    widths: tuple[int, ...] = (3, 5, 9)

    def __post_init__(self):
        check_widths(self.widths)
        if not isinstance(self.costs, tuple) or len(self.costs) < 2 or not all(map(_positive, self.costs)):
            raise InvalidConfig(f"costs must be two finite numbers above 0 or more, got {self.costs!r:.80}")
        for name in ("hope", "memory", "weight"):
            if not _positive(getattr(self, name)):
                raise InvalidConfig(f"{name} must be finite and above 0, got {getattr(self, name)!r}")
        for name in ("resume", "credit", "share", "hysteresis"):
            if getattr(self, name) != 0 and not _positive(getattr(self, name)):
                raise InvalidConfig(f"{name} must be finite and at least 0, got {getattr(self, name)!r}")
            if getattr(self, name) >= 1 << 31:  # a whole number is an int32 on a device
                raise InvalidConfig(f"{name} must be below 2**31, got {getattr(self, name)!r}")
        if self.weight >= 1 << 31 or self.memory >= 1 << 31:
            raise InvalidConfig(f"memory and weight must be below 2**31, got {self.memory!r} and {self.weight!r}")
        if self.hope > 1:
            raise InvalidConfig(f"hope must be a probability, got {self.hope!r}")

    def extra(self, depth: int) -> np.ndarray:
        """What rounds that draft to depths 0 to `depth` cost beyond a plain one, in plain ones; no depth less than one
        before, whatever was measured."""
        costs = np.asarray(self.costs, np.float64)
        more = np.maximum(np.arange(depth + 1) - (costs.size - 1), 0)
        at = np.minimum(np.arange(depth + 1), costs.size - 1)
        return np.maximum.accumulate(costs[at] + more * (costs[-1] - costs[-2])) / costs[0] - 1

    def init(self, batch: int, shape: TreeShape) -> Account:
        counts, none = jnp.zeros((batch, shape.depth)), jnp.zeros((batch,))
        return self._choose(Account(counts, counts, none + self.credit, none, none.astype(jnp.int32)))

    def limit(self, state: Account) -> Int[Array, "B"]:
        return state.depth

    def _choose(self, state: Account) -> Account:
        extra = jnp.asarray(self.extra(state.tried.shape[1]), jnp.float32)
        tokens = jnp.cumsum(kept(chain(state.tried.shape[1]).tree, self.acceptance(state)[:, :, None]), -1)
        score = tokens / (1 + extra)
        afford = (self._bill(state, extra) <= state.balance[:, None]).at[:, 0].set(True)
        score = jnp.where(afford, score, 0.0)
        now = jnp.take_along_axis(score, state.depth[:, None], 1)[:, 0]
        depth = jnp.where(now * (1 + self.hysteresis) >= score.max(-1), state.depth, score.argmax(-1))
        return state._replace(depth=depth.astype(jnp.int32))

    def _bill(self, state: Account, extra: Float[Array, "D1"]) -> Float[Array, "B D1"]:
        """What a round at each depth costs beyond a plain one."""
        return extra + (state.behind * (self.resume / self.costs[0]))[:, None]

    def acceptance(self, state: Account) -> Float[Array, "B D"]:
        """The estimates, of each depth where the one before was accepted."""

        def deeper(above: Array, counts: tuple[Array, Array]) -> tuple[Array, Array]:
            tried, kept = counts
            share = (kept + self.weight * above) / (tried + self.weight)
            return share, share

        first = jnp.full(state.balance.shape, self.hope)
        # Unrolled: a loop in the loop would cost a GPU more than all of it.
        return lax.scan(deeper, first, (state.tried.T, state.kept.T), unroll=True)[1].T

    def update(self, state: Account, played: Played) -> Account:
        most = self.extra(state.tried.shape[1])
        bill = jnp.take_along_axis(self._bill(state, jnp.asarray(most, jnp.float32)), played.drafted[:, None], 1)[:, 0]
        lost = jnp.where(played.drafted > 0, bill, 0.0) - played.accepted
        balance = state.balance - lost + self.share * (1 + played.accepted)
        levels, accepted = jnp.arange(1, most.size), played.accepted[:, None]
        tried = (levels <= played.drafted[:, None]) & (levels <= accepted + 1)
        fade = math.exp(-1 / self.memory)
        account = Account(
            fade * state.tried + tried,
            fade * state.kept + (tried & (levels <= accepted)),
            jnp.minimum(balance, self.credit + RISKED * most[-1]),
            jnp.where(played.drafted > 0, 0.0, state.behind + 1),
            state.depth,
        )
        return self._choose(account)

    def doubts(self, law: Float[Array, "*b V"]) -> Bool[Array, "*b"] | None:
        return None


def _positive(value: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
