"""The schedule "best-width": drafts the number of nodes with the most expected tokens per cost that a row can afford.

A drafter that ranks its nodes estimates with which probability each node is accepted; see `Draw.count_nodes`. This
schedule knows what target calls of each width cost, and chooses the width. Estimates can be wrong, so each row has a
balance, which limits what its drafts may lose; see `jaxspec.schedules._balance`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.checks import number, whole
from jaxspec.core.records import RoundResult
from jaxspec.core.schedule import check_widths
from jaxspec.core.theory import XLA_TOKEN_COST, ExpertReads, TokenCost, assumed_cost
from jaxspec.core.tree import TreeShape
from jaxspec.errors import InvalidConfig, shown
from jaxspec.schedules._balance import MAX_COST, affordable, settle


@functools.partial(jax.tree_util.register_dataclass, data_fields=("balance",), meta_fields=("shape",))
@dataclasses.dataclass(frozen=True)
class WidthState:
    """The balance of each row, in plain rounds, and the sizes of the tree, which are static."""

    balance: Any  # [B], float32: an array of JAX, or of NumPy on the host
    shape: TreeShape


@dataclasses.dataclass(frozen=True)
class BestWidth:
    """Drafts the number of nodes with the most expected tokens per cost, by the drafter's own estimates.

    It is the default schedule of drafters that rank their nodes at next to no cost (`Needs.node_count`), and also
    serves other dynamic trees. A drafter with a static tree does not ask, and drafts the whole tree in every round;
    `adaptive` is the schedule for it.

    The target reads the same number of tokens in every row. With shared noise, drafts cannot change a text, so the rows
    that draft choose one width together. Otherwise a row's text must not depend on other rows, so each row chooses as
    if it were alone.

    Every round updates the row's balance: the tokens that drafts saved, minus the cost beyond plain rounds. A row does
    not choose a width if its cost beyond a plain round, times the probability that nothing is accepted, exceeds the
    balance. A text of n tokens that is decoded alone therefore takes at most `loss_budget + loss_per_token * n` plain
    rounds and one rejected draft longer than plain decoding, if costs are as assumed.

    Attributes:
        widths: the widths of target calls to choose among, root included, besides 1, which is plain decoding, and the
            number of nodes of the tree. They are compiled.
        cpu: the time that tokens take in a target call on a CPU (`jaxspec.kernels.library.token_cost` knows it for a
            target on this processor), as a pair of the fields of `jaxspec.core.theory.TokenCost`. The costs of
            accelerators are those of `jaxspec.core.theory.assumed_cost`.
        loss_budget: what a row may lose to plain decoding at the start, in plain rounds.
        loss_per_token: what a row may lose in addition for each emitted token, in plain rounds.
        experts: what a call of a target with mixtures of experts reads (`jaxspec.models.experts.count_reads`), as a
            tuple of the fields of `jaxspec.core.theory.ExpertReads`; None for a target without experts.
    """

    widths: tuple[int, ...] = (1, 4, 8)
    cpu: TokenCost = XLA_TOKEN_COST
    loss_budget: float = 0.03
    loss_per_token: float = 0.03
    experts: ExpertReads | None = None

    def __post_init__(self):
        check_widths(self.widths)
        if not isinstance(self.cpu, tuple) or len(self.cpu) != 2:
            raise InvalidConfig(f"cpu must be a pair of numbers, such as TokenCost(0.025, 1.7), got {shown(self.cpu)}")
        each, at_once = self.cpu
        cpu = TokenCost(number("cpu.each", each, 0, 1), number("cpu.at_once", at_once, 1))
        object.__setattr__(self, "cpu", cpu)
        if self.experts is not None:
            object.__setattr__(self, "experts", _checked_experts(self.experts))
        for name in ("loss_budget", "loss_per_token"):
            object.__setattr__(self, name, number(name, getattr(self, name), 0, MAX_COST))

    def init(self, batch: int, shape: TreeShape) -> WidthState:
        return WidthState(jnp.full((batch,), self.loss_budget, jnp.float32), shape)

    def limit(self, state: WidthState) -> Int[Array, "B"]:
        return jnp.full(state.balance.shape, state.shape.depth, jnp.int32)

    def count_nodes(
        self, state: WidthState, log_acceptance: Float[Array, "B N1"], drafting: Bool[Array, "B"], together: bool
    ) -> Int[Array, "B"]:
        choices = self._choices(log_acceptance.shape[1] + 1)
        chances = jnp.exp(log_acceptance)
        tokens = 1 + jnp.pad(jnp.cumsum(chances, -1), ((0, 0), (1, 0)))[:, choices - 1]
        failure, balance = 1 - chances[:, :1], state.balance
        costs = self._costs(choices, balance.size if together else 1)
        if together:

            def of_all(values: Array) -> Array:
                rows = drafting.reshape(-1, *[1] * (values.ndim - 1))
                return jnp.broadcast_to(jnp.where(rows, values, 0.0).sum(0), values.shape)

            tokens, failure, balance = of_all(tokens), of_all(failure), of_all(balance)
        speed = jnp.where(affordable(balance, failure * (costs - 1)), tokens / costs, 0.0)
        return jnp.asarray(choices - 1)[jnp.argmax(speed, -1)]

    def update(self, state: WidthState, result: RoundResult) -> WidthState:
        nodes, rows = result.nodes, 1
        if result.together:
            nodes, rows = jnp.broadcast_to(nodes.max(), nodes.shape), nodes.size
        choices = self._choices(state.shape.nodes)
        costs = self._costs(choices, rows)[(jnp.asarray(choices) < nodes[:, None]).sum(-1)]
        balance = settle(state.balance, result.emitted, costs, self.loss_per_token)
        return dataclasses.replace(state, balance=balance)

    def stop_after(
        self, law: Float[Array, "*b V"], estimate: Float[Array, "*b"] | None = None
    ) -> Bool[Array, "*b"] | None:
        return None

    def _choices(self, nodes: int) -> np.ndarray:
        """Returns the widths to choose among, in ascending order."""
        return np.array(sorted({1, nodes} | {width for width in self.widths if width < nodes}))

    def _costs(self, choices: np.ndarray, rows: int) -> Float[Array, "C"]:
        """Returns the assumed costs of rounds of these widths, in plain rounds."""
        cpu, other = (
            np.array([assumed_cost(width, cost, rows, self.experts) for width in choices.tolist()], np.float32)
            for cost in (self.cpu, None)
        )
        return lax.platform_dependent(cpu=lambda: jnp.asarray(cpu), default=lambda: jnp.asarray(other))


def _checked_experts(experts: object) -> ExpertReads:
    if not isinstance(experts, tuple) or len(experts) != 3:
        raise InvalidConfig(f"experts must be None or three numbers, such as (128, 8, 0.6), got {shown(experts)}")
    total, each, share = experts
    if whole("experts.per_token", each, 1) > whole("experts.total", total, 1):
        raise InvalidConfig(f"experts.per_token must be at most experts.total, got {shown(experts)}")
    return ExpertReads(total, each, number("experts.share", share, 0, 1))
