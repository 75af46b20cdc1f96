"""Tests the invariants named in `jaxspec.core.records`, one test each, and their consequences."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.narrow import not_none
from helpers.tiers import with_slow
from helpers.toys import (
    RAGGED,
    decoder,
    extend,
    generate,
    lively,
    noisy,
    random_request,
    request,
    run,
    start,
    step,
    texts,
    transformer,
    truncate,
    whole,
)
from jaxspec.core.cache import BLOCK_SLOTS
from jaxspec.core.records import Status
from jaxspec.core.topology import branching, chain, dynamic
from jaxspec.decode import session as sessions
from jaxspec.decode.session import Session
from jaxspec.decode.state import Weights
from jaxspec.drafters.model import ModelDraft
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.schedules.adaptive import Adaptive
from jaxspec.testing import ScriptedDrafter, TableLM

V, B, CAPACITY = 8, 12, 128
LM = TableLM(V)
PARAMS = LM.init_params(jax.random.key(0))
TABLE = decoder(LM, ModelDraft(LM, RAGGED), top_logprobs=2)
DYNAMIC = decoder(LM, ModelDraft(LM, dynamic(3, 4, 9)), top_logprobs=2)
WEIGHTS = Weights(PARAMS, noisy(PARAMS, 1, 0.5))
D = RAGGED.shape.depth

REAL = transformer(num_layers=2)
REAL_PARAMS = lively(REAL.init_params(jax.random.key(0)))
REAL_WEIGHTS = Weights(REAL_PARAMS, noisy(REAL_PARAMS, 1, 0.05))
REAL_DECODER = decoder(REAL, ModelDraft(REAL, RAGGED), width_matched=True, top_logprobs=2)


def asked(seed=0, **changes):
    return random_request(seed, B, V)._replace(logprobs=jnp.full(B, True), **changes)


def real_request(**changes):
    prompts = [[1, 2, 3], [4] * 7, list(range(1, 13)), [9]]
    return request(
        prompts, 16, vocab=REAL.vocab, temperature=[0.0, 1.0, 0.7, 0.0], size=20, **{"logprobs": True} | changes
    )


def rounds(config, weights, asked, capacity=CAPACITY, most=40):
    """The states after prefill and after every round."""
    state = start(config, weights, asked, capacity)
    yield state
    for _ in range(most):
        if not (np.asarray(state.status) == Status.RUNNING).any():
            return
        state = step(config, weights, state)
        yield state


def below(cache) -> list[np.ndarray]:
    """The cache with its scratch set to zero."""
    slots = np.arange(cache.stores.keys.shape[3]) < np.asarray(cache.length)[:, None]
    return [np.where(slots[None, :, None, :, None], np.asarray(a), 0) for a in cache.stores]


def caches(state) -> list[np.ndarray]:
    """Target's and draft model's, scratch set to zero."""
    return below(state.cache) + below(state.draft.cache)


def written(state) -> np.ndarray:
    """The text with its scratch set to -1."""
    tokens = np.asarray(state.tokens)
    return np.where(np.arange(tokens.shape[1]) < np.asarray(state.length)[:, None], tokens, -1)


@functools.partial(jax.jit, static_argnums=0)
def caught_up(config, weights, state):
    """The state with all of its text read by the draft model, too."""
    return state._replace(draft=config.drafter.catch_up(weights.draft, state.draft, state.tokens, state.length))


def test_root_is_pending():
    """The last token of the text is not in the target's cache, nor in a draft model's that has not caught up."""
    behind = set()
    for i, state in enumerate(rounds(TABLE, WEIGHTS, asked())):
        np.testing.assert_array_equal(state.cache.length, state.length - 1)
        np.testing.assert_array_equal(state.absorbed, state.length)
        if i:
            played = np.asarray(state.round) == i
            behind |= set(np.asarray(state.length - state.draft.cache.length)[played].tolist())
        np.testing.assert_array_equal(caught_up(TABLE, WEIGHTS, state).draft.cache.length, state.length)
    assert behind == {1, 2}, "the root, and before it a leaf"


@pytest.mark.parametrize("real", with_slow([False, True], (True,)), ids=["table", "transformer"])
def test_scratch_is_never_read(real):
    """With large finite values in all scratch between the rounds: the same tokens and log-probabilities."""
    config, weights, asking = (REAL_DECODER, REAL_WEIGHTS, real_request()) if real else (TABLE, WEIGHTS, asked())

    @jax.jit
    def soil(state):
        def spoil(cache):
            scratch = jnp.arange(cache.stores.keys.shape[3]) >= cache.length[:, None]
            kv = jax.tree.map(lambda a: jnp.where(scratch[None, :, None, :, None], 1e30, a), cache.stores)
            return cache._replace(stores=kv)

        past = jnp.arange(state.tokens.shape[1]) >= state.length[:, None]
        entries = jax.tree.map(lambda a: jnp.full_like(a, -1e30), state.draft.entries)
        return state._replace(
            tokens=jnp.where(past, 2**30, state.tokens),
            cache=spoil(state.cache),
            draft=state.draft._replace(cache=spoil(state.draft.cache), entries=entries),
            logprobs=jax.tree.map(
                lambda a: jnp.where(past.reshape(*past.shape, *[1] * (a.ndim - 2)), 2**30, a), state.logprobs
            ),
        )

    clean = soiled = start(config, weights, asking, CAPACITY)
    for _ in range(8):
        clean, soiled = step(config, weights, clean), step(config, weights, soil(soiled))
        assert texts(clean) == texts(soiled)
        for row, (first, end) in enumerate(zip(np.asarray(clean.start), np.asarray(clean.length))):
            for a, b in zip(clean.logprobs, soiled.logprobs):
                np.testing.assert_array_equal(a[row, first:end], b[row, first:end])
        for ours, theirs in ((clean.cache, soiled.cache), (clean.draft.cache, soiled.draft.cache)):
            for a, b in zip(below(ours), below(theirs)):
                np.testing.assert_array_equal(a, b)
    assert (np.asarray(clean.length) > np.asarray(clean.start) + 3).any()


def test_capacity_covers_the_window():
    """A text that fills the smallest capacity to the last slot is the text in a large one."""
    longest = BLOCK_SLOTS - RAGGED.shape.nodes
    assert TABLE.slots(longest) == BLOCK_SLOTS
    assert TABLE.slots(longest + 1) == 2 * BLOCK_SLOTS
    prompts = [(list(range(8)) * 15)[:n] for n in (3, 1, 96, 119, 118, 117, 110, 100, 64, 63, 20, 2)]
    budgets = [longest - len(prompt) for prompt in prompts]
    budgets[1] = 40
    asking = asked(0, stop_ids=jnp.full((B, 2), -1))
    asking = request(prompts, budgets, vocab=V, size=120)._replace(sampling=asking.sampling, key=asking.key)
    tight, ample = (whole(TABLE, WEIGHTS, asking, c) for c in (TABLE.slots(longest), 2 * BLOCK_SLOTS))
    assert tight.tokens.shape[1] == BLOCK_SLOTS
    assert texts(tight) == texts(ample)
    assert (np.asarray(tight.length) == longest).sum() >= B - 1
    for a, b in zip(below(tight.cache), below(ample.cache)):
        np.testing.assert_array_equal(a, b[:, :, :, :BLOCK_SLOTS])


def same_prefix(tight, ample):
    for a, b in ((tight.cache, ample.cache), (tight.draft.cache, ample.draft.cache)):
        np.testing.assert_array_equal(a.length, b.length)
        for x, y in zip(below(a), below(b)):
            np.testing.assert_array_equal(x, y[:, :, :, : x.shape[3]])


@pytest.mark.parametrize("chunk", [48, 64])
def test_capacity_covers_the_prompt_chunks(chunk):
    """The chunk in which a prompt ends may reach past the text; the cache must not shift for it."""
    config = dataclasses.replace(TABLE, chunk=chunk)
    asking = request([(list(range(8)) * 15)[:n] for n in (110, 113, 97, 5)], 6, vocab=V, size=114)
    tight = start(config, WEIGHTS, asking, config.slots(113 + 6))
    same_prefix(tight, start(config, WEIGHTS, asking, 4 * BLOCK_SLOTS))


def test_capacity_covers_a_continuation():
    """Rows continued near the end of their cache, alone or beside another row that has more to read."""
    config = dataclasses.replace(TABLE, chunk=64)
    asking = request([(list(range(8)) * 15)[:n] for n in (110, 100, 90, 4)], 6, vocab=V, size=114)
    more = request([[1, 2, 3], [], [4], [5] * 70], 6, vocab=V, size=72)
    tight, ample = (start(config, WEIGHTS, asking, c) for c in (config.slots(113 + 6), 4 * BLOCK_SLOTS))
    same_prefix(*(extend(config, WEIGHTS, state, more) for state in (tight, ample)))


def fresh(config, weights, state, asking):
    """A prefill of a state's own text."""
    return start(config, weights, asking._replace(tokens=state.tokens, count=state.length), CAPACITY)


@pytest.mark.parametrize("config", [TABLE, DYNAMIC], ids=["ragged", "dynamic"])
def test_cache_equals_fresh_prefill(config):
    """After every round, target's and draft model's caches, feature and text are those of a new prefill.

    The draft model's once it has caught up, which is where it drafts from.
    """
    asking = asked(1)
    for state in rounds(config, WEIGHTS, asking):
        again, state = fresh(config, WEIGHTS, state, asking), caught_up(config, WEIGHTS, state)
        np.testing.assert_array_equal(written(state), written(again))
        np.testing.assert_array_equal(state.cache.length, again.cache.length)
        np.testing.assert_array_equal(state.draft.cache.length, again.draft.cache.length)
        np.testing.assert_array_equal(state.draft.feature, again.draft.feature)
        for a, b in zip(caches(state), caches(again)):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_cache_equals_fresh_prefill_of_a_transformer():
    """The same up to the rounding between windows of other widths."""
    asking = real_request()
    for i, state in enumerate(rounds(REAL_DECODER, REAL_WEIGHTS, asking)):
        if i % 2:
            continue
        again, state = fresh(REAL_DECODER, REAL_WEIGHTS, state, asking), caught_up(REAL_DECODER, REAL_WEIGHTS, state)
        assert texts(state) == texts(again)
        np.testing.assert_allclose(state.draft.feature, again.draft.feature, atol=2e-5)
        for a, b in zip(caches(state), caches(again)):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_every_round_makes_progress():
    """One to D + 1 tokens in every round of a running row, as the log says; all ends are seen."""
    seen = set()
    for seed in (0, 1, 2):
        before = None
        for state in rounds(TABLE, WEIGHTS, asked(seed)):
            if before is not None:
                gained = np.asarray(state.length - before.length)
                running = np.asarray(before.status) == Status.RUNNING
                assert ((gained >= 1) & (gained <= D + 1))[running].all()
                assert not gained[~running].any()
                np.testing.assert_array_equal(state.log.emitted[np.arange(len(gained)), before.round], gained)
                np.testing.assert_array_equal(state.round - before.round, running)
                seen |= set(gained[running].tolist())
            before = state
        assert not (np.asarray(not_none(before).status) == Status.RUNNING).any()
    assert seen == set(range(1, D + 2))


@pytest.mark.parametrize(
    "drafter", [ModelDraft(LM, RAGGED), PromptLookup(chain(3), min_match=1)], ids=["model", "lookup"]
)
def test_finished_rows_stand_still(drafter):
    """Round after round, nothing of a finished row moves: cursors, text, cache, log, statistics, drafter, schedule."""
    config = decoder(LM, drafter, schedule=Adaptive((1.0, 1.1), widths=()))
    before = None
    for state in rounds(config, WEIGHTS, asked(3)):
        if before is not None:
            still = np.asarray(before.status) != Status.RUNNING
            for name in ("length", "start", "limit", "status", "absorbed"):
                np.testing.assert_array_equal(getattr(state, name)[still], getattr(before, name)[still], err_msg=name)
            np.testing.assert_array_equal(state.cache.length[still], before.cache.length[still])
            np.testing.assert_array_equal(written(state)[still], written(before)[still])
            np.testing.assert_array_equal(state.log.counts[still], before.log.counts[still])
            np.testing.assert_array_equal(state.round[still], before.round[still])
            pairs = [(below(state.cache), below(before.cache))]
            if isinstance(drafter, ModelDraft):
                pairs.append((below(state.draft.cache), below(before.draft.cache)))
                np.testing.assert_array_equal(state.draft.cache.length[still], before.draft.cache.length[still])
                np.testing.assert_array_equal(state.draft.feature[still], before.draft.feature[still])
            for ours, theirs in zip(state.schedule, before.schedule):
                np.testing.assert_array_equal(ours[still], theirs[still])
            for a, b in (pair for ours, theirs in pairs for pair in zip(ours, theirs)):
                np.testing.assert_array_equal(a[:, still], b[:, still])
        before = state
    assert int(not_none(before).round.max()) > 3


# What is not finite. Token BAD has an embedding of NaN, the head is sound.

BAD = 13
BROKEN = REAL_PARAMS | {"embed": REAL_PARAMS["embed"].at[BAD].set(jnp.nan)}
BAN = np.where(np.arange(REAL.vocab) == BAD, -np.inf, 0.0).astype(np.float32)
TREE = branching(2, 2)


def script(bad_at):
    """After every token: the plain text's likely tokens, with BAD at the given nodes."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, REAL.vocab, (REAL.vocab, TREE.shape.nodes)).astype(np.int32)
    tokens[:, bad_at] = BAD
    return jnp.asarray(tokens)


def bigrams(text_rows) -> dict[int, int]:
    return {a: b for row in text_rows for a, b in itertools.pairwise(row)}


def test_a_broken_sibling_does_not_spoil_the_path():
    """A drafted token whose own logits are NaN, at every node that is not walked: the text is plain text."""
    asking = real_request(logit_bias=BAN)
    plain = texts(generate(decoder(REAL, NoDraft()), Weights(BROKEN), asking, CAPACITY))
    after = bigrams(plain)
    for bad_at in ([1, 3, 4, 6], [2, 4, 5, 6]):
        tokens = np.array(script(bad_at))
        good = [n for n in range(1, 7) if n not in bad_at]
        for root in range(REAL.vocab):
            once = after.get(root, 0)
            tokens[root, good] = [once if TREE.tree.depths[n] == 1 else after.get(once, 0) for n in good]
        config = decoder(REAL, ScriptedDrafter(TREE), width_matched=True)
        result = generate(config, Weights(BROKEN, jnp.asarray(tokens)), asking, CAPACITY)
        assert texts(result) == plain
        assert (np.asarray(result.status) == Status.LENGTH).all()
        assert np.asarray(result.log.accepted).sum() > 10, "paths beside the broken nodes are walked"


def test_a_prompt_that_is_not_finite_ends_the_row():
    """Its keys would be stored as zeros, and text go on from a wrong prefix; the other rows go on."""
    asking = real_request(logit_bias=BAN)
    plain = texts(generate(decoder(REAL, NoDraft()), Weights(BROKEN), asking, CAPACITY))
    row = int(np.argmax(asking.count > 1))  # so that the token is not the root
    broken = asking._replace(tokens=asking.tokens.at[row, 0].set(BAD))
    result = generate(decoder(REAL, NoDraft()), Weights(BROKEN), broken, CAPACITY)
    assert result.status[row] == Status.ERROR
    assert result.length[row] == asking.count[row]
    others = [b for b in range(len(plain)) if b != row]
    assert [texts(result)[b] for b in others] == [plain[b] for b in others]
    assert (np.asarray(result.status)[others] == Status.LENGTH).all()


def test_non_finite_never_reaches_the_cache():
    """With broken nodes drafted in every round, walked ones too, all slots stay finite, scratch included."""
    asking = real_request(logit_bias=-BAN.clip(-4, 0))  # token BAD is likely
    config = decoder(REAL, ScriptedDrafter(TREE), width_matched=True)
    weights = Weights(BROKEN, script([1, 4]))
    for state in rounds(config, weights, asking, most=10):
        assert all(np.isfinite(np.asarray(a)).all() for a in state.cache.stores)
    broken_draft = Weights(REAL_PARAMS, BROKEN)
    for state in rounds(REAL_DECODER, broken_draft, real_request(), most=6):
        assert all(np.isfinite(np.asarray(a)).all() for a in (*state.cache.stores, *state.draft.cache.stores))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_end_the_row(value):
    """After one context the law is broken: ERROR, top-k or not, no token of it, the text of plain decoding."""
    table = PARAMS["table"].at[:, 5, 2].set(value)
    broken = {"table": table.at[:, 4].set(-jnp.inf)}
    asking = asked(4, new_tokens=jnp.full((B,), 30), stop_ids=jnp.full((B, 2), -1))
    plain = whole(decoder(LM, NoDraft()), Weights(broken), asking, CAPACITY)
    sound = whole(decoder(LM, NoDraft()), Weights(PARAMS), asking, CAPACITY)
    tree = whole(TABLE, Weights(broken, PARAMS), asking, CAPACITY)
    status = np.asarray(plain.status)
    assert texts(tree) == texts(plain)
    np.testing.assert_array_equal(tree.status, status)
    assert (status == Status.ERROR).sum() >= 3
    for row, (text, unbroken) in enumerate(zip(texts(plain), texts(sound))):
        prompt = int(asking.count[row])
        broken_at = next((i for i in range(prompt, len(unbroken)) if unbroken[i - 1] in (4, 5)), None)
        if broken_at is None:
            assert status[row] == Status.LENGTH
            assert text == unbroken, "a row beside a broken one goes on"
        else:
            assert status[row] == Status.ERROR
            assert text == unbroken[:broken_at]


# What follows: rows, rounds, capacities and continuations do not matter.


def test_a_row_alone_in_a_batch_or_elsewhere_in_it():
    asking = asked(5)
    batch = texts(whole(TABLE, WEIGHTS, asking, CAPACITY))
    order = np.random.default_rng(0).permutation(B)
    permuted = texts(whole(TABLE, WEIGHTS, jax.tree.map(lambda a: a[order], asking), CAPACITY))
    assert permuted == [batch[i] for i in order]
    for row in range(B):
        alone = whole(TABLE, WEIGHTS, jax.tree.map(lambda a, row=row: a[row : row + 1], asking), CAPACITY)
        assert texts(alone) == [batch[row]]


def test_single_rounds_are_one_run():
    """The same executable with a traced number of rounds; every leaf of the state ends up equal."""
    asking = asked(6)
    config = decoder(LM, ScriptedDrafter(chain(3)), width_matched=True)
    weights = Weights(PARAMS, jnp.asarray(np.random.default_rng(0).integers(0, V, (V, 4))))
    once, stepped = (Session(config, weights, asking, CAPACITY) for _ in range(2))
    once.run()
    compiled = len(sessions._EXECUTABLES)
    calls = 0
    while stepped.running:
        stepped.run(1 + calls % 2)
        calls += 1
    assert len(sessions._EXECUTABLES) == compiled
    assert calls > 3
    unkeyed = (s.state._replace(key=jax.random.key_data(s.state.key)) for s in (once, stepped))
    chex.assert_trees_all_equal(*unkeyed)
    assert once.timing.tokens == stepped.timing.tokens == int((once.state.length - once.state.start).sum())


def test_bits_do_not_depend_on_the_capacity():
    """A transformer with one cache block and with two: equal tokens and log-probabilities."""
    config = decoder(REAL, NoDraft(RAGGED), width_matched=True, top_logprobs=2)
    small, large = (whole(config, REAL_WEIGHTS, real_request(), c) for c in (CAPACITY, 512))
    assert texts(small) == texts(large)
    for a, b in zip(small.logprobs, large.logprobs):
        np.testing.assert_array_equal(a, b[:, : a.shape[1]])


@pytest.fixture(scope="module")
def unlimited():
    """No stops, and sampling that stays the same in both halves."""
    return asked(7, new_tokens=jnp.full((B,), 24), stop_ids=jnp.full((B, 2), -1))


def test_continuing_with_nothing_is_one_long_call(unlimited):
    """Budgets used up at any point, also inside a path; then no new tokens and a larger budget."""
    long = run(TABLE, WEIGHTS, start(TABLE, WEIGHTS, unlimited, CAPACITY))
    part = jnp.arange(B) * 2
    state = run(TABLE, WEIGHTS, start(TABLE, WEIGHTS, unlimited._replace(new_tokens=part), CAPACITY))
    np.testing.assert_array_equal(state.length - state.start, part)
    nothing = unlimited._replace(count=jnp.zeros((B,), jnp.int32), new_tokens=24 - part)
    state = run(TABLE, WEIGHTS, extend(TABLE, WEIGHTS, state, nothing))
    assert texts(state) == texts(long)
    for a, b in zip(*(caches(caught_up(TABLE, WEIGHTS, end)) for end in (state, long))):
        np.testing.assert_array_equal(a, b)


def test_continuing_with_more_text_is_one_long_prompt(unlimited):
    """A second turn, of another length for each row, equals a call with all the text as its prompt."""
    turn = asked(8)
    turn = unlimited._replace(tokens=turn.tokens, count=turn.count, new_tokens=jnp.full((B,), 9))
    state = run(TABLE, WEIGHTS, start(TABLE, WEIGHTS, unlimited, CAPACITY))
    state = extend(TABLE, WEIGHTS, state, turn)
    joined = fresh(TABLE, WEIGHTS, state, turn)
    assert np.asarray(state.length).max() > 40
    for a, b in zip(*(caches(caught_up(TABLE, WEIGHTS, end)) for end in (state, joined))):
        np.testing.assert_array_equal(a, b)
    assert texts(run(TABLE, WEIGHTS, state)) == texts(run(TABLE, WEIGHTS, joined))


def test_a_text_cut_back_and_continued_is_a_fresh_one(unlimited):
    """`truncate` forgets what was decoded after the cut; the next turn goes on from there."""
    state = run(TABLE, WEIGHTS, start(TABLE, WEIGHTS, unlimited, CAPACITY))
    cut = truncate(TABLE, WEIGHTS, state, state.length - 1 - jnp.arange(B))
    turn = unlimited._replace(tokens=jnp.full((B, 20), 3), count=jnp.arange(B) % 3, new_tokens=jnp.full((B,), 9))
    again = extend(TABLE, WEIGHTS, cut, turn)
    joined = fresh(TABLE, WEIGHTS, again, turn)
    assert texts(again) == texts(joined)
    assert texts(run(TABLE, WEIGHTS, again)) == texts(run(TABLE, WEIGHTS, joined))


def test_the_cut_inside_an_accepted_path(unlimited):
    """A perfect draft of 4: stop tokens and budgets everywhere in a round, the stop kept, nothing after."""
    weights = Weights(PARAMS, PARAMS)
    no_limits = unlimited._replace(
        sampling=request([[1]] * B, vocab=V, temperature=1.0, logit_bias=np.zeros(V, np.float32)).sampling
    )
    long = texts(whole(TABLE, weights, no_limits, CAPACITY))
    counts = np.asarray(no_limits.count)
    inside = set()
    for budget in (1, 3, 5, 6, 24):
        for stop in (2, 6):
            asking = no_limits._replace(
                new_tokens=jnp.full((B,), budget), stop_ids=jnp.full((B, 2), -1).at[:, 1].set(stop)
            )
            result = whole(TABLE, weights, asking, CAPACITY)
            for row, text in enumerate(texts(result)):
                emitted = long[row][counts[row] :][:budget]
                stopped = stop in emitted
                expected = emitted[: emitted.index(stop) + 1] if stopped else emitted
                assert text[counts[row] :] == expected
                assert result.status[row] == (Status.STOP if stopped else Status.LENGTH)
                last = int((result.log.emitted[row] > 0).sum()) - 1
                emitted, accepted = int(result.log.emitted[row, last]), int(result.log.accepted[row, last])
                assert accepted == min(emitted, 4), "accepted counts only what was emitted"
                inside.add(emitted)
    assert inside == {1, 2, 3, 4, 5}
