"""Tests continuous batching: more prompts than rows of the batch do not change a text."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import jaxspec
from helpers.narrow import not_none
from helpers.tiers import with_slow
from helpers.toys import noisy, transformer
from jaxspec.core.sampling import Sampling
from jaxspec.decode import session as sessions
from jaxspec.errors import InvalidConfig, WrongArguments
from jaxspec.testing import TableLM
from jaxspec.text import Tokenizer

V = 24
LM = TableLM(V)
PARAMS = LM.init_params(jax.random.key(0))
TARGET, DRAFT = jaxspec.Model(LM, PARAMS), jaxspec.Model(LM, noisy(PARAMS, 1, 0.4))
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, V, RNG.integers(1, 40)).tolist() for _ in range(23)]
STOPPING: dict[str, Any] = {"stop_ids": [3], "max_new_tokens": 30}  # a third of the texts stops early
SAMPLED: dict[str, Any] = {"key": jax.random.key(5), "sampling": Sampling(temperature=np.linspace(0, 1.5, 23))}
DRAFTERS = [
    {"drafter": "none"},
    {"drafter": "prompt-lookup", "tree": 3},
    {"drafter": "model", "draft": DRAFT, "tree": jaxspec.branching(2, 2, 1)},
]


def tokens(output) -> list[list[int]]:
    return [row.tokens for row in output]


@pytest.fixture(scope="module")
def whole():
    """All prompts in one batch, without a draft."""
    return jaxspec.generate(TARGET, PROMPTS, drafter="none", **STOPPING, **SAMPLED)


@pytest.mark.parametrize(
    ("options", "batch"),
    [
        pytest.param(DRAFTERS[0], 4, id="none"),
        pytest.param(DRAFTERS[1], 1, id="prompt-lookup, one by one"),
        pytest.param(DRAFTERS[2], 4, id="model", marks=pytest.mark.slow),
        pytest.param(DRAFTERS[2], 99, id="model, more places than rows", marks=pytest.mark.slow),
    ],
)
def test_texts_do_not_depend_on_the_batch(whole, options, batch):
    """Greedy and sampled rows of a table of laws, each with a temperature of its own; the order is the prompts'."""
    assert 4 < sum(row.finish_reason == "stop" for row in whole) < 20
    got = jaxspec.generate(TARGET, iter(PROMPTS), batch=batch, **options, **STOPPING, **SAMPLED)
    assert tokens(got) == tokens(whole)
    assert [row.prompt for row in got] == list(range(23))
    assert [row.finish_reason for row in got] == [row.finish_reason for row in whole]
    assert [row.stats.committed for row in got] == list(map(len, tokens(whole)))
    assert got.timing.tokens == got.stats.committed == sum(map(len, tokens(whole)))
    if options["drafter"] == "model":
        alone = jaxspec.generate(TARGET, PROMPTS, **options, **STOPPING, **SAMPLED)
        assert [row.stats for row in got] == [row.stats for row in alone], "a row's rounds are its own"
        assert got.stats.accepted > 100


@pytest.mark.slow
def test_the_schedule_and_log_probabilities_are_the_rows_own():
    """What a place learnt of one text is forgotten with it."""
    options = DRAFTERS[2] | STOPPING | SAMPLED | {"schedule": "adaptive", "logprobs": True, "samples": 2}
    options["sampling"] = Sampling(temperature=0.7)
    alone = jaxspec.generate(TARGET, PROMPTS, **options)
    got = jaxspec.generate(TARGET, PROMPTS, batch=5, **options)
    assert [row.stats for row in got] == [row.stats for row in alone]
    for a, b in zip(got, alone):
        assert (a.prompt, a.sample, a.tokens) == (b.prompt, b.sample, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


@pytest.mark.slow
def test_a_transformer_in_turns():
    """A cache with real keys and values: a place's earlier text leaves no trace."""
    lm = transformer()
    target = jaxspec.Model(lm, lm.init_params(jax.random.key(0)))
    prompts = [RNG.integers(0, 61, n).tolist() for n in (70, 3, 21, 9, 300, 5, 64)]
    options: dict[str, Any] = {"drafter": "prompt-lookup", "max_new_tokens": 20, "ignore_eos": True}
    options |= {"key": jax.random.key(1), "sampling": Sampling(temperature=1.0)}
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(options["key"], i), 0))(np.arange(7))
    alone = [jaxspec.generate(target, [p], **{**options, "key": keys[i : i + 1]}) for i, p in enumerate(prompts)]
    got = jaxspec.generate(target, prompts, batch=2, **options)
    assert tokens(got) == [tokens(one)[0] for one in alone]
    assert got.session is None


def test_nothing_compiles_once_places_change_hands():
    """A batch of four, then a hundred prompts more: the same few executables."""
    sessions.clear_executables()
    options = {"drafter": "prompt-lookup", "tree": 2, "max_new_tokens": 6, "batch": 4}
    jaxspec.generate(TARGET, PROMPTS[:6], **options)
    compiled = list(sessions._EXECUTABLES)
    assert len(compiled) == 6, "init and prefill of four rows and of one, run, replace"
    got = jaxspec.generate(TARGET, (PROMPTS[i % 23] for i in range(106)), **options)
    assert len(got) == 106
    assert set(sessions._EXECUTABLES) == set(compiled)


@pytest.mark.parametrize("batch", with_slow([None, 4], (None,)), ids=["at once", "by turns"])
def test_what_was_compiled_before_is_not_compiled_again(batch):
    """By the lengths alone: other tokens, another key, other settings."""
    sessions.clear_executables()
    options = {"drafter": "prompt-lookup", "tree": 2, "batch": batch, **STOPPING}
    assert jaxspec.precompile(TARGET, [[0] * len(prompt) for prompt in PROMPTS], **options) > 0
    compiled = set(sessions._EXECUTABLES)
    got = jaxspec.generate(TARGET, PROMPTS, **options, **SAMPLED)
    assert len(got) == 23
    assert got.timing.compile_s == 0
    assert set(sessions._EXECUTABLES) == compiled
    assert jaxspec.precompile(TARGET, PROMPTS, **options) == 0
    unknown: dict[str, Any] = {"out": "texts.jsonl"}
    with pytest.raises(WrongArguments, match=r"precompile\(\) has no argument 'out'; it has target, prompts"):
        jaxspec.precompile(TARGET, PROMPTS, **unknown)


def test_sizes_are_decoded_apart_and_memory_is_known():
    """The long texts first, in a cache of their size; what is told beforehand is what the largest takes."""
    prompts = [[1, 2]] * 5 + [[1] * 700] * 3
    running = jaxspec.stream(TARGET, prompts, drafter="none", max_new_tokens=10, batch=2)
    capacities = {not_none(running._session).capacity}
    row = sum(a.nbytes for a in jax.tree.leaves(LM.init_cache(1, 1024)))
    assert running.memory == 3 * row, "two places, and the row that is read for the next"
    ended = []
    for chunk in running:
        capacities.add(not_none(running._session).capacity)
        ended += [chunk.row] * (chunk.finish_reason is not None)
    assert capacities == {1024, 512}
    assert set(ended[:3]) == {5, 6, 7}
    assert [len(row.tokens) for row in running.output] == [10] * 8


def test_stop_strings_end_rows_in_turns():
    letters = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [chr(ord("A") + i) for i in range(V)],
        "tokenizer.ggml.token_type": [1] * V,
        "tokenizer.ggml.merges": [],
    }
    target = dataclasses.replace(TARGET, tokenizer=Tokenizer.from_gguf(letters))
    options = {"drafter": "none", "max_new_tokens": 20} | SAMPLED
    plain = [row.text for row in jaxspec.generate(target, PROMPTS, **options)]
    stop = [plain[0][4:6], plain[7][9:11]]
    ends = [min((text.find(one) for one in stop if one in text), default=None) for text in plain]
    assert 2 <= sum(end is not None for end in ends) < 23
    got = jaxspec.generate(target, PROMPTS, batch=3, stop=stop, **options)
    assert [row.text for row in got] == [text[:end] for text, end in zip(plain, ends)]
    assert [row.finish_reason == "stop" for row in got] == [end is not None for end in ends]


def test_callbacks_end_rows_in_turns():
    seen = []

    def on_token(row, token, text):
        seen.append(row)
        return seen.count(row) < 4 + row % 3

    got = jaxspec.generate(TARGET, PROMPTS, batch=3, drafter="none", max_new_tokens=20, on_token=on_token)
    assert [len(row.tokens) for row in got] == [4 + row % 3 for row in range(23)]
    assert {row.finish_reason for row in got} == {"callback"}
    plain = jaxspec.generate(TARGET, PROMPTS, drafter="none", max_new_tokens=20)
    assert tokens(got) == [t[: 4 + i % 3] for i, t in enumerate(tokens(plain))]


def test_what_does_not_fit_is_refused():
    first = jaxspec.generate(TARGET, [[1]], drafter="none", max_new_tokens=2)
    refused: list[dict[str, Any]] = [
        {"batch": 0},
        {"batch": 2.0},
        {"batch": True},
        {"progress": 3},
        {"session": first.session, "batch": 1},
    ]
    for wrong in refused:
        with pytest.raises(InvalidConfig):
            jaxspec.generate(TARGET, [[1]], drafter="none", max_new_tokens=2, **wrong)
    with pytest.raises(InvalidConfig, match="temperature must be one value, or one for each of the 2 rows"):
        jaxspec.generate(TARGET, [[1], [2]], batch=1, sampling=Sampling(temperature=[0.1, 0.2, 0.3]), max_new_tokens=2)
