"""Tests the buckets of batch sizes: sizes in one bucket share a program, and padding rows have no effect."""

from typing import Any

import jax
import numpy as np
import pytest

import jaxspec
from helpers.narrow import not_none
from helpers.toys import noisy, transformer
from jaxspec.core import sizes
from jaxspec.core.records import Status
from jaxspec.core.sampling import Sampling
from jaxspec.decode import session as sessions
from jaxspec.errors import InvalidConfig
from jaxspec.testing import TableLM

V = 24
LM = TableLM(V)
PARAMS = LM.init_params(jax.random.key(0))
TARGET, DRAFT = jaxspec.Model(LM, PARAMS), jaxspec.Model(LM, noisy(PARAMS, 1, 0.4))
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, V, RNG.integers(1, 40)).tolist() for _ in range(8)]
OPTIONS: dict[str, Any] = {
    "drafter": "model",
    "draft": DRAFT,
    "tree": 2,
    "max_new_tokens": 20,
    "key": jax.random.key(5),
}
COMPILED = "/jax/core/compile/backend_compile_duration"


def tokens(output) -> list[list[int]]:
    return [row.tokens for row in output]


def test_sizes_are_few_and_waste_less_than_a_third():
    found = [sizes.round_rows(count) for count in range(1, 5000)]
    assert list(dict.fromkeys(found))[:12] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert found == sorted(found)
    assert all(count <= size < 1.5 * count for count, size in enumerate(found, start=1))
    assert len(set(found)) < 26


def test_another_call_of_like_size_compiles_nothing():
    """Not one XLA program, small ones included: rows, `logprobs`, lengths, budget, settings, stop tokens and keys."""
    calls: list[dict[str, Any]] = [
        {"prompts": PROMPTS[:6]},
        {"logprobs": True},
        {"logprobs": 5},
        {"logprobs": 8},
        {"sampling": Sampling(temperature=[0.0, 0.3, 1.0, 1.2, 0.9])},
        {"sampling": Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1), "logprobs": 2},
        {"stop_ids": [3]},
        {"stop_ids": [3, 4, 5, 6], "ignore_eos": True},
        {"max_new_tokens": 301, "key": jax.random.key(6)},
        {"prompts": [[1] * 200, [2]] * 3, "stop_ids": [0]},
        {"prompts": PROMPTS[:3], "samples": 2},
        {"prompts": PROMPTS[:6], "batch": 8},
    ]
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **more: compiled.append(event) if event == COMPILED else None
    )
    sessions.clear_executables()
    jax.clear_caches()
    jaxspec.generate(TARGET, PROMPTS[:5], **OPTIONS)
    assert compiled
    compiled.clear()
    for change in calls:
        got = jaxspec.generate(TARGET, **{**OPTIONS, "prompts": PROMPTS[:5], **change})
        assert got.timing.compile_s == 0, change
        assert not compiled, change
    jaxspec.generate(TARGET, PROMPTS[:7], **OPTIONS)
    assert compiled, "eight places are another size"


@pytest.mark.slow
def test_turns_of_any_length_compile_nothing_more():
    """A session's next prompts: the executables of the second turn do for the third."""
    sessions.clear_executables()
    output = jaxspec.generate(TARGET, PROMPTS[:2], capacity=2048, **OPTIONS)
    output = jaxspec.generate(TARGET, PROMPTS[:2], session=output.session, **OPTIONS)
    for size in (1, 63, 65, 300):
        output = jaxspec.generate(TARGET, [[1] * size, [2]], session=output.session, logprobs=size == 65, **OPTIONS)
        assert output.timing.compile_s == 0


@pytest.fixture(scope="module")
def alone():
    """Each prompt by itself, with the key of its row."""
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(OPTIONS["key"], i), 0))(np.arange(8))
    return [
        jaxspec.generate(TARGET, [prompt], **HOT | {"key": keys[i : i + 1], "logprobs": 3})
        for i, prompt in enumerate(PROMPTS)
    ]


HOT = OPTIONS | {"sampling": Sampling(temperature=0.9), "stop_ids": [3]}


@pytest.mark.parametrize("count", [5, 7])
@pytest.mark.parametrize("batch", [None, 7, 99])
def test_places_without_a_row_leave_no_trace(alone, batch, count):
    """Seven rows in eight places, five in six: tokens, statistics, log-probabilities and events are the rows'."""
    ended, seen = [], []
    running = jaxspec.stream(
        TARGET, PROMPTS[:count], batch=batch, logprobs=3, **HOT, progress=lambda *some: ended.append(some),
        on_token=lambda row, token, text: seen.append(row),
    )  # fmt: skip
    chunks = [chunk for chunk in running if chunk.tokens]
    places = 7 if batch == count == 7 else {5: 6, 7: 8}[count]
    session = not_none(running._session)
    assert len(session.state.length) == places
    assert running.memory == jaxspec.generation.memory.cache_bytes(session.decoder, session.weights, places, 512)
    output = running.output
    assert tokens(output) == [tokens(one)[0] for one in alone[:count]]
    assert [row.stats for row in output] == [one[0].stats for one in alone[:count]]
    for row, one in zip(output, alone):
        np.testing.assert_allclose(row.logprobs, one[0].logprobs, atol=1e-5)
        np.testing.assert_allclose(row.sampled_logprobs, one[0].sampled_logprobs, atol=1e-5)
    total = sum(map(len, tokens(output)))
    assert output.timing.tokens == output.stats.committed == len(seen) == total
    assert ended == [(i + 1, count) for i in range(count)]
    assert {chunk.row for chunk in chunks} == set(seen) == set(range(count))
    state = session.state
    assert (np.asarray(state.status)[count:] == Status.LENGTH).all()
    assert not np.asarray(state.round)[count:].any()
    assert not np.asarray(state.log.counts)[count:].any()


def test_a_place_without_a_row_costs_no_round():
    """The batch ends with its last row, also where only places without one are left in a group."""
    output = jaxspec.generate(TARGET, PROMPTS[:5], **HOT)
    session = not_none(output.session)
    rounds = np.asarray(session.state.round)
    assert rounds.max() == max(row.stats.rounds for row in output)
    session.run()
    np.testing.assert_array_equal(session.state.round, rounds)
    assert not session.running


@pytest.mark.parametrize("batch", [None, 6, 99])
def test_a_session_goes_on_with_its_rows(batch):
    """Three turns of five rows in six places; with `batch=`, too, the rows keep the order of the prompts."""
    text, output = [list(prompt) for prompt in PROMPTS[:5]], None
    for turn in range(3):
        more = PROMPTS[turn : turn + 5]
        if output is None:
            output = jaxspec.generate(TARGET, more, batch=batch, **OPTIONS)
        else:
            output = jaxspec.generate(TARGET, more, session=output.session, **OPTIONS)
            text = [whole + prompt for whole, prompt in zip(text, more)]
        fresh = jaxspec.generate(TARGET, text, **OPTIONS)
        assert tokens(output) == tokens(fresh)
        assert output.timing.tokens == 100
        text = [whole + row.tokens for whole, row in zip(text, output)]
    session = not_none(not_none(output).session)
    assert session.rows == 5
    with pytest.raises(InvalidConfig, match="the number of rows"):
        jaxspec.generate(TARGET, PROMPTS[:6], session=session, **OPTIONS)


def test_a_batch_has_no_more_places_than_asked_for():
    for batch, count in [(5, 20), (7, 7), (7, 6), (8, 5), (99, 7), (1, 9)]:
        running = jaxspec.stream(TARGET, [[1]] * count, batch=batch, **OPTIONS)
        assert len(not_none(running._session).state.length) == min(batch, sizes.round_rows(min(batch, count)))


@pytest.mark.slow
def test_a_transformer_beside_places_without_a_row():
    """Real keys and values: the texts are those of the rows alone."""
    lm = transformer()
    target = jaxspec.Model(lm, lm.init_params(jax.random.key(0)))
    options: dict[str, Any] = {"drafter": "prompt-lookup", "max_new_tokens": 16, "ignore_eos": True}
    prompts = [[int(t) for t in RNG.integers(0, 61, n)] for n in (70, 3, 21, 9, 30)]
    got = jaxspec.generate(target, prompts, **options)
    assert len(not_none(got.session).state.length) == 6
    assert tokens(got) == [tokens(jaxspec.generate(target, [prompt], **options))[0] for prompt in prompts]
