"""Tests the bound of promise 2: how much longer than plain decoding a text may take, with every schedule that has one.

An adversary knows the schedule, claims any probability of acceptance, and accepts what it likes. The proof is in
`jaxspec.schedules._balance`. The costs of rounds are computed here a second time, in float64.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.costs import COST
from helpers.tiers import with_slow
from helpers.toys import decoder, request, whole
from jaxspec.core.drafter import Needs
from jaxspec.core.records import Proposal, RoundResult
from jaxspec.core.schedule import Schedule
from jaxspec.core.theory import TokenCost, assumed_cost
from jaxspec.core.topology import chain
from jaxspec.decode.state import Weights
from jaxspec.registry import SCHEDULES, find
from jaxspec.rules.deterministic import Deterministic
from jaxspec.schedules.adaptive import Adaptive
from jaxspec.schedules.best_width import BestWidth
from jaxspec.testing import TableLM

DEPTH, ROUNDS, ROWS = 15, 240, 8
SHAPE = chain(DEPTH).shape
WITH_A_BALANCE: dict[str, Any] = {
    "adaptive": Adaptive(),
    "adaptive, uneven costs": Adaptive((1.0, 1.5, 1.4, 2.5), resume=0.01, loss_budget=3.0, loss_per_token=0.03),
    "adaptive, nothing to lose": Adaptive((1.0, 1.1), loss_budget=0.0, loss_per_token=0.0, prior_acceptance=1.0),
    "best-width": BestWidth(cpu=COST),
    "best-width, slow": BestWidth(cpu=TokenCost(0.1, 3.7)),
    "best-width, generous": BestWidth((5,), TokenCost(0.1, 4.0), loss_budget=2.0, loss_per_token=0.1),
    "best-width, nothing to lose": BestWidth(cpu=TokenCost(0.1, 2.0), loss_budget=0.0, loss_per_token=0.0),
}
EVERY = pytest.mark.parametrize("name", WITH_A_BALANCE)


def test_every_schedule_with_a_balance_is_here():
    fields = {name: {field.name for field in dataclasses.fields(find("schedule", name))} for name in SCHEDULES}
    with_a_balance = {name for name, own in fields.items() if "loss_budget" in own}
    assert with_a_balance == {name.partition(",")[0] for name in WITH_A_BALANCE}


@functools.partial(jax.jit, static_argnums=(0, 4))
def play(schedule: Schedule, claimed, kept, most, together):
    """Plays rounds `[R, B]`: each node is claimed to be accepted with a probability if its parent is, `kept` tokens are
    accepted at most, and the drafter has `most` tokens at most. Returns the drafted and the accepted tokens."""

    def one(state, given):
        claim, kept, most = given
        most = jnp.minimum(schedule.limit(state), most)
        steps = jnp.arange(1, DEPTH + 1)
        log_acceptance = jnp.where(steps <= most[:, None], steps * jnp.log(claim)[:, None], -jnp.inf)
        count = schedule.count_nodes(state, log_acceptance, most > 0, together)
        drafted = most if count is None else jnp.minimum(count, most)
        accepted = jnp.minimum(kept, drafted)
        result = RoundResult(drafted, accepted, 1 + drafted, 1 + accepted, together=together)
        return schedule.update(state, result), (drafted, accepted)

    return jax.lax.scan(one, schedule.init(claimed.shape[1], SHAPE), (claimed, kept, most))[1]


def times(schedule, drafted, together=False) -> np.ndarray:
    """The time of each round of each row, in plain rounds."""
    if isinstance(schedule, Adaptive):
        behind, out = np.zeros(drafted.shape[1]), []
        for depth in drafted:
            out.append(1 + schedule.extra_costs(DEPTH)[depth] + np.where(depth > 0, behind * schedule.resume, 0))
            behind = np.where(depth > 0, 0, behind + 1)
        return np.array(out)
    rows = drafted.shape[1] if together else 1
    widths = sorted({1, *schedule.widths, DEPTH + 1})
    nodes = np.broadcast_to(drafted.max(1, keepdims=True), drafted.shape) + 1 if together else drafted + 1
    table = [0.0] + [assumed_cost(next(w for w in widths if w >= n), schedule.cpu, rows) for n in range(1, DEPTH + 2)]
    return np.array(table)[nodes]


def losses(schedule, claimed, kept, most: Any = DEPTH, together=False) -> tuple[np.ndarray, np.ndarray]:
    """Plays, and returns how much longer the text up to each round takes than plain decoding, and its tokens."""
    shape = np.broadcast_shapes(np.shape(claimed), np.shape(kept), np.shape(most))
    arrays = (np.broadcast_to(np.asarray(a, kind), shape) for a, kind in ((claimed, "f4"), (kept, "i4"), (most, "i4")))
    drafted, accepted = map(np.asarray, play(schedule, *map(jnp.asarray, arrays), together))
    tokens = np.cumsum(1 + accepted, 0)
    return np.cumsum(times(schedule, drafted, together), 0) - tokens, tokens


def allowed(schedule, tokens, rows=1) -> np.ndarray:
    """The bound of a text of so many tokens."""
    rejected = 0.0 if isinstance(schedule, Adaptive) else assumed_cost(DEPTH + 1, schedule.cpu, rows) - 1
    return schedule.loss_budget + schedule.loss_per_token * tokens + rejected + 1e-3


@EVERY
@pytest.mark.parametrize("claim", [0.05, 0.5, 0.96, 1.0])
def test_hopeless_drafts_cost_no_more_than_allowed(name, claim):
    """Nothing is ever accepted, whatever is claimed. Much of what may be lost is lost: the schedule does draft."""
    schedule = WITH_A_BALANCE[name]
    loss, tokens = losses(schedule, np.full((ROUNDS, 1), claim), 0)
    assert (loss <= allowed(schedule, tokens)).all()
    if claim == 0.96 and schedule.loss_per_token:
        assert loss[-1] > (schedule.loss_budget + schedule.loss_per_token * ROUNDS) / 2


@EVERY
def test_what_was_saved_may_be_lost_but_no_more(name):
    """Rows with drafts that are good, then hopeless, in turns of several lengths and with several claims."""
    schedule = WITH_A_BALANCE[name]
    lengths = np.array([1, 2, 3, 7, 20, 40, 119, 120])
    good = (np.arange(ROUNDS)[:, None] // lengths) % 2 == 0
    for claim in (0.6, 1.0, np.where(good, 0.5, 1.0), np.where(good, 1.0, 0.2)):
        loss, tokens = losses(schedule, np.broadcast_to(claim, good.shape), np.where(good, DEPTH, 0))
        assert (loss <= allowed(schedule, tokens)).all()
        assert (loss[-1] < 0).any() or not schedule.loss_budget, "good drafts pay"


CALLS = st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3, 0.7, 1.0]), st.sampled_from([0.5, 0.9, 1.0])


@EVERY
@settings(max_examples=25, deadline=None)
@given(*CALLS)
def test_no_sequence_of_rounds_exceeds_the_bound(name, seed, honest, highest):
    """Any claims, any accepted tokens, any number of tokens to draft; a part of the claims is honest."""
    schedule, rng = WITH_A_BALANCE[name], np.random.default_rng(seed)
    claims = rng.choice([0.0, 0.01, 0.3, 0.8, 1.0], (ROUNDS, ROWS)) * highest
    lucky = rng.random((ROUNDS, ROWS, DEPTH)) < np.where(rng.random((ROUNDS, ROWS)) < honest, claims, 0.1)[..., None]
    most = np.where(rng.random((ROUNDS, ROWS)) < 0.3, rng.integers(0, DEPTH + 1, (ROUNDS, ROWS)), DEPTH)
    loss, tokens = losses(schedule, claims, np.cumprod(lucky, -1).sum(-1), most)
    assert (loss <= allowed(schedule, tokens)).all()


@pytest.mark.parametrize("name", [name for name in WITH_A_BALANCE if name.startswith("best-width")])
@settings(max_examples=25, deadline=None)
@given(*CALLS)
def test_rows_that_choose_together_lose_no_more_than_all_of_them_may(name, seed, honest, highest):
    """Each pays for the widest draft; some rows are hopeless, some are good, and they change."""
    schedule, rng = WITH_A_BALANCE[name], np.random.default_rng(seed)
    claims = rng.choice([0.0, 0.3, 0.8, 1.0], (ROUNDS, ROWS)) * highest
    good = (np.arange(ROUNDS)[:, None] // rng.integers(1, ROUNDS, ROWS)) % 2 == (rng.random(ROWS) < honest)
    loss, tokens = losses(schedule, claims, np.where(good, rng.integers(0, DEPTH + 1, good.shape), 0), together=True)
    assert (loss.sum(1) <= allowed(schedule, tokens, ROWS).sum(1)).all()


# In the loop.

V = 8
LM = TableLM(V, order=1)
PARAMS = LM.init_params(jax.random.key(0), 4.0)


@dataclasses.dataclass(frozen=True)
class Boasting:
    """Claims that its tokens are accepted with a probability. They are never accepted, or always in some rows.

    Attributes:
        claim: the probability.
    """

    claim: float

    tree = chain(DEPTH)
    shape = SHAPE
    draws = False
    calls = 0
    needs = Needs(node_count=True)

    def init(self, params, batch, capacity):
        return ()

    def absorb(self, params, state, advance):
        return state

    def propose(self, params, state, context, draw):
        log_acceptance = jnp.log(self.claim) * jnp.arange(1, DEPTH + 1)
        allowed = jnp.stack([draw.below(depth) for depth in range(DEPTH)], 1)
        count = draw.count_nodes(jnp.where(allowed, log_acceptance, -jnp.inf))
        path = [context.root]
        for _ in range(DEPTH):
            path.append(jnp.argmax(params["table"], -1)[path[-1]])
        right = context.tokens[:, :1] == 1  # the first token of the prompt says what the row's drafts are
        tokens = jnp.where(right, jnp.stack(path, 1), (jnp.stack(path, 1) + 1) % V)
        return Proposal(jnp.where(jnp.arange(DEPTH + 1) <= count[:, None], tokens, -1), self.tree.tree), state


@pytest.mark.parametrize("rule", ["coupled", "deterministic"])
@pytest.mark.parametrize("name", with_slow(WITH_A_BALANCE, WITH_A_BALANCE.keys() - {"adaptive", "best-width"}))
def test_the_loop_keeps_the_bound(name, rule):
    """A batch of hopeless rows and one row whose drafts are right; the time is computed from the log of the rounds.

    The balance is what the log says: the tokens that were cut at the end of a row do not count.
    """
    schedule = WITH_A_BALANCE[name]
    config = decoder(LM, Boasting(0.96), schedule=schedule)
    if rule == "deterministic":
        config = dataclasses.replace(config, rule=Deterministic())
    asking = request([[2, 3], [1, 3], [2, 5]], [60, 500, 50], vocab=V, temperature=0.0)
    state = whole(config, Weights(PARAMS, PARAMS), asking, 640)
    log = jax.device_get(state.log)
    together = rule == "coupled" and isinstance(schedule, BestWidth)
    ran = int((log.emitted > 0).all(0).sum())  # rounds in which all rows run
    drafted, tokens = log.drafted.T[:ran], np.cumsum(log.emitted.T[:ran], 0)
    loss = np.cumsum(times(schedule, drafted, together), 0) - tokens
    if together:
        assert (loss.sum(1) <= allowed(schedule, tokens, 3).sum(1)).all()
    else:
        assert (loss <= allowed(schedule, tokens)).all()
    assert loss[:, 1].min() < 0 or not schedule.loss_budget, "the row whose drafts are right gains"
    if rule == "deterministic" and isinstance(schedule, BestWidth):
        spent = np.where(log.emitted.T > 0, times(schedule, log.drafted.T), 0).sum(0)
        saved = (1 + schedule.loss_per_token) * log.emitted.sum(1) - spent
        np.testing.assert_allclose(state.schedule.balance, schedule.loss_budget + saved, atol=0.01)
