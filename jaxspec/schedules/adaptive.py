"""The schedule "adaptive": drafts to the depth with the most expected tokens per cost, estimated per row.

A round that drafts to depth g is expected to emit 1 plus the sum over i <= g of the product of the acceptance rates at
depths 1 to i (Leviathan et al. 2023, arXiv:2211.17192, section 3.1, with a separate acceptance rate for each depth).
Depth 0 is plain decoding.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.checks import number
from jaxspec.core.records import RoundResult
from jaxspec.core.schedule import check_widths
from jaxspec.core.theory import node_acceptance
from jaxspec.core.topology import chain
from jaxspec.core.tree import TreeShape
from jaxspec.errors import InvalidConfig, shown
from jaxspec.schedules._balance import MAX_COST, affordable, settle

SURPLUS_ROUNDS = 4
"""The balance is capped at `loss_budget` plus the cost of this many rounds at full depth, so that a row whose text
becomes hard to predict cannot spend all that easy text has earned."""


class AdaptiveState(NamedTuple):
    """What a row has observed. Counts decay exponentially; costs are in units of plain rounds."""

    tested: Float[Array, "B D"]  # rounds that drafted to each depth with all shallower tokens accepted
    accepted: Float[Array, "B D"]  # of these rounds, those whose token at this depth was accepted as well
    balance: Float[Array, "B"]  # the loss that drafting may still cause
    behind: Float[Array, "B"]  # rounds since the drafter last read the text
    depth: Int[Array, "B"]  # the depth of the next draft


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Drafts to the fastest depth, by measured costs and the acceptance seen so far in the row; see the module.

    The acceptance rate of a depth is a posterior mean. Its prior is the estimate of the depth above, and
    `prior_acceptance` at depth 1. Observations decay, so a depth that is no longer drafted returns to its prior and is
    tried again.

    Every round updates the row's balance: the tokens that a draft saved, minus its cost beyond a plain round. A row
    drafts no deeper than its balance covers if no token is accepted. A text of n tokens therefore takes at most
    `loss_budget + loss_per_token * n` plain rounds longer than plain decoding, whatever the estimates are; the proof is
    in `jaxspec.schedules._balance`.

    Attributes:
        costs: the cost of a round that drafts to depth 0, 1, ..., in any unit; `jaxspec tune` measures them. Beyond
            the last depth, costs grow linearly by the last step.
        resume: the cost, in the same unit, of each token that the drafter reads late because a round had no draft.
        prior_acceptance: the acceptance rate assumed at depth 1 before anything is observed; above 0, at most 1.
        loss_budget: what a row may lose to plain decoding at the start, in plain rounds.
        loss_per_token: what a row may lose in addition for each emitted token, in plain rounds.
        decay_rounds: rounds after which an observation's weight has decayed to 1/e.
        prior_rounds: the weight of the prior, in rounds.
        hysteresis: the depth changes only to a depth whose expected speed is better by this fraction.
        widths: see `Schedule`.
    """

    costs: tuple[float, ...] = (1.0, 1.25)
    resume: float = 0.0
    prior_acceptance: float = 0.7
    loss_budget: float = 2.0
    loss_per_token: float = 0.015
    decay_rounds: float = 32.0
    prior_rounds: float = 4.0
    hysteresis: float = 0.02
    widths: tuple[int, ...] = (3, 5, 9)

    def __post_init__(self):
        check_widths(self.widths)
        if not isinstance(self.costs, tuple) or len(self.costs) < 2:
            raise InvalidConfig(
                f"costs must be a tuple of at least two finite numbers above 0, got {shown(self.costs)}"
            )
        costs = tuple(number("a cost", cost, above=True) for cost in self.costs)
        object.__setattr__(self, "costs", costs)
        if max(costs) >= MAX_COST * min(costs):
            raise InvalidConfig(f"costs must be within a factor of {MAX_COST:g} of one another, got {shown(costs)}")
        above, limits = {"prior_acceptance", "decay_rounds", "prior_rounds"}, {"prior_acceptance": 1.0}
        for field in dataclasses.fields(self):
            if isinstance(field.default, float):
                value, most = getattr(self, field.name), limits.get(field.name, MAX_COST)
                value = number(field.name, value, 0, most, above=field.name in above)
                object.__setattr__(self, field.name, value)

    def extra_costs(self, depth: int) -> np.ndarray:
        """Returns the costs of rounds to depths 0 to `depth` beyond a plain round, in plain rounds, `[depth + 1]`.

        They are made non-decreasing, because measured costs are noisy.
        """
        costs = np.asarray(self.costs, np.float64)
        more = np.maximum(np.arange(depth + 1) - (costs.size - 1), 0)
        at = np.minimum(np.arange(depth + 1), costs.size - 1)
        return np.maximum.accumulate(costs[at] + more * (costs[-1] - costs[-2])) / costs[0] - 1

    def init(self, batch: int, shape: TreeShape) -> AdaptiveState:
        counts, none = jnp.zeros((batch, shape.depth)), jnp.zeros((batch,))
        return self._choose_depth(AdaptiveState(counts, counts, none + self.loss_budget, none, none.astype(jnp.int32)))

    def limit(self, state: AdaptiveState) -> Int[Array, "B"]:
        return state.depth

    def _choose_depth(self, state: AdaptiveState) -> AdaptiveState:
        extra = jnp.asarray(self.extra_costs(state.tested.shape[1]), jnp.float32)
        tokens = jnp.cumsum(node_acceptance(chain(state.tested.shape[1]).tree, self.acceptance(state)[:, :, None]), -1)
        speed = tokens / (1 + extra)
        speed = jnp.where(affordable(state.balance, self._extra_with_resume(state, extra)), speed, 0.0)
        current = jnp.take_along_axis(speed, state.depth[:, None], 1)[:, 0]
        depth = jnp.where(current * (1 + self.hysteresis) >= speed.max(-1), state.depth, speed.argmax(-1))
        return state._replace(depth=depth.astype(jnp.int32))

    def _extra_with_resume(self, state: AdaptiveState, extra: Float[Array, "D1"]) -> Float[Array, "B D1"]:
        """Returns each depth's cost beyond a plain round, including the text that the drafter must read first."""
        return extra + (state.behind * (self.resume / self.costs[0]))[:, None]

    def acceptance(self, state: AdaptiveState) -> Float[Array, "B D"]:
        """Returns the estimated acceptance rate of each depth, conditional on acceptance at the depth above."""

        def deeper(above: Array, counts: tuple[Array, Array]) -> tuple[Array, Array]:
            tested, accepted = counts
            rate = (accepted + self.prior_rounds * above) / (tested + self.prior_rounds)
            return rate, rate

        first = jnp.full(state.balance.shape, self.prior_acceptance)
        # Unrolled, because a loop nested in the decoding loop costs a GPU more than the computation itself.
        return lax.scan(deeper, first, (state.tested.T, state.accepted.T), unroll=True)[1].T

    def update(self, state: AdaptiveState, result: RoundResult) -> AdaptiveState:
        extra = self.extra_costs(state.tested.shape[1])
        costs = self._extra_with_resume(state, jnp.asarray(extra, jnp.float32))
        cost = 1 + jnp.where(result.drafted > 0, jnp.take_along_axis(costs, result.drafted[:, None], 1)[:, 0], 0.0)
        cap = self.loss_budget + SURPLUS_ROUNDS * extra[-1]
        balance = settle(state.balance, result.emitted, cost, self.loss_per_token, cap)
        levels, accepted = jnp.arange(1, extra.size), result.accepted[:, None]
        tested = (levels <= result.drafted[:, None]) & (levels <= accepted + 1)
        decay = math.exp(-1 / self.decay_rounds)
        updated = AdaptiveState(
            decay * state.tested + tested,
            decay * state.accepted + (tested & (levels <= accepted)),
            balance,
            jnp.where(result.drafted > 0, 0.0, state.behind + 1),
            state.depth,
        )
        return self._choose_depth(updated)

    def count_nodes(
        self, state: AdaptiveState, log_acceptance: Float[Array, "B N1"], drafting: Bool[Array, "B"], together: bool
    ) -> Int[Array, "B"] | None:
        return None

    def stop_after(
        self, law: Float[Array, "*b V"], estimate: Float[Array, "*b"] | None = None
    ) -> Bool[Array, "*b"] | None:
        return None
