"""More prompts than places: rows take turns, texts are those of one batch, and a file keeps them."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from toys import noisy, transformer

import jaxspec
from jaxspec.core.sampling import Sampling
from jaxspec.decode import session as sessions
from jaxspec.errors import InvalidConfig
from jaxspec.testing import TableLM
from jaxspec.text import Tokenizer

V = 24
LM = TableLM(V)
PARAMS = LM.init_params(jax.random.key(0))
TARGET, DRAFT = jaxspec.Model(LM, PARAMS), jaxspec.Model(LM, noisy(PARAMS, 1, 0.4))
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, V, RNG.integers(1, 40)).tolist() for _ in range(23)]
STOPPING = {"stop_ids": [3], "max_new_tokens": 30}  # a third of the texts stops early
SAMPLED = {"key": jax.random.key(5), "sampling": Sampling(temperature=np.linspace(0, 1.5, 23))}
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
    [(DRAFTERS[0], 4), (DRAFTERS[1], 1), (DRAFTERS[2], 4), (DRAFTERS[2], 99)],
    ids=["none", "prompt-lookup, one by one", "model", "model, more places than rows"],
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


def test_a_transformer_in_turns():
    """A cache with real keys and values: a place's earlier text leaves no trace."""
    lm = transformer()
    target = jaxspec.Model(lm, lm.init_params(jax.random.key(0)))
    prompts = [RNG.integers(0, 61, n).tolist() for n in (70, 3, 21, 9, 300, 5, 64)]
    options = {"drafter": "prompt-lookup", "max_new_tokens": 20, "key": jax.random.key(1)}
    options |= {"sampling": Sampling(temperature=1.0), "ignore_eos": True}
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(options["key"], i), 0))(np.arange(7))
    alone = [jaxspec.generate(target, [p], **options | {"key": keys[i : i + 1]}) for i, p in enumerate(prompts)]
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


@pytest.mark.parametrize("batch", [None, 4], ids=["at once", "by turns"])
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
    with pytest.raises(InvalidConfig, match="without out="):
        jaxspec.precompile(TARGET, PROMPTS, out="texts.jsonl")


def test_sizes_are_decoded_apart_and_memory_is_known():
    """The long texts first, in a cache of their size; what is told beforehand is what the largest takes."""
    prompts = [[1, 2]] * 5 + [[1] * 700] * 3
    running = jaxspec.stream(TARGET, prompts, drafter="none", max_new_tokens=10, batch=2)
    capacities = {running._session.capacity}
    row = sum(a.nbytes for a in jax.tree.leaves(LM.init_cache(1, 1024)))
    assert running.memory == 3 * row, "two places, and the row that is read for the next"
    ended = []
    for chunk in running:
        capacities.add(running._session.capacity)
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


# The file.


OPTIONS = DRAFTERS[2] | STOPPING | SAMPLED | {"batch": 3, "logprobs": True}


def test_a_file_keeps_the_texts(tmp_path, whole):
    """Stopped after every few texts, within a line too, and gone on with: the same texts, each decoded once."""
    path, counts = tmp_path / "texts.jsonl", []

    class Killed(Exception):
        pass

    def until(n):
        def progress(ended, rows):
            counts.append((ended, rows))
            if ended == n:
                raise Killed

        return progress

    for n in (2, 9, 10):
        with pytest.raises(Killed):
            jaxspec.generate(TARGET, PROMPTS, out=path, progress=until(n), **OPTIONS)
        with path.open("ab") as file:
            file.write(b'{"row": 5, "tok')
    got = jaxspec.generate(TARGET, PROMPTS, out=path, progress=until(None), **OPTIONS)
    assert counts == [(n, 23) for n in range(1, 24)]
    assert tokens(got) == tokens(whole)
    right = jaxspec.generate(TARGET, PROMPTS, **OPTIONS | {"batch": None})
    assert [row.stats for row in got] == [row.stats for row in right]
    np.testing.assert_allclose(np.concatenate([row.logprobs for row in got]),
                               np.concatenate([row.logprobs for row in right]), atol=1e-5)  # fmt: skip
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert lines[0]["texts"] == 1
    assert sorted(line["row"] for line in lines[1:]) == list(range(23))
    again = jaxspec.generate(TARGET, PROMPTS, out=path, **OPTIONS)
    assert tokens(again) == tokens(whole)
    assert again.timing.tokens == 0, "nothing was left to decode"
    plain = {name: value for name, value in OPTIONS.items() if name not in DRAFTERS[2]}
    other = jaxspec.generate(TARGET, PROMPTS, out=path, **plain, **DRAFTERS[0])
    assert tokens(other) == tokens(whole), "with the coupled rule any drafter may go on"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"key": jax.random.key(6)}, "key"),
        ({"sampling": Sampling(temperature=0.3)}, "sampling"),
        ({"max_new_tokens": 31}, "max new tokens"),
        ({"stop_ids": [4]}, "stops"),
        ({"samples": 2, "sampling": Sampling(temperature=1.0)}, "key"),
        ({"rule": "deterministic"}, "rule"),
        ({"logprobs": False}, "logprobs"),
        ({"width_matched": True}, "drafter"),
    ],
)
def test_a_file_is_for_one_job(tmp_path, change, named):
    path = tmp_path / "texts.jsonl"
    jaxspec.generate(TARGET, PROMPTS[:2], out=path, **OPTIONS | {"sampling": Sampling(temperature=1.0)})
    before = path.read_bytes()
    with pytest.raises(InvalidConfig, match=f"texts of another {named}"):
        jaxspec.generate(TARGET, PROMPTS[:2], out=path, **OPTIONS | {"sampling": Sampling(temperature=1.0)} | change)
    with pytest.raises(InvalidConfig, match="texts of another prompts"):
        jaxspec.generate(TARGET, PROMPTS[1:3], out=path, **OPTIONS | {"sampling": Sampling(temperature=1.0)})
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["hello\n", "[]\n", '{"texts": 9}\n', '{"a": 1}\n{"row": 0}\n', "\x00\n"])
def test_other_files_are_left_alone(tmp_path, text):
    path = tmp_path / "mine.txt"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match="no file of texts to go on from"):
        jaxspec.generate(TARGET, PROMPTS[:2], out=path, **OPTIONS | {"sampling": Sampling(temperature=1.0)})
    assert path.read_text() == text


def test_what_does_not_fit_is_refused():
    first = jaxspec.generate(TARGET, [[1]], drafter="none", max_new_tokens=2)
    for wrong in (
        {"batch": 0},
        {"batch": 2.0},
        {"batch": True},
        {"progress": 3},
        {"session": first.session, "batch": 1},
    ):
        with pytest.raises(InvalidConfig):
            jaxspec.generate(TARGET, [[1]], drafter="none", max_new_tokens=2, **wrong)
    with pytest.raises(InvalidConfig, match="temperature must be one value, or one for each of the 2 rows"):
        jaxspec.generate(TARGET, [[1], [2]], batch=1, sampling=Sampling(temperature=[0.1, 0.2, 0.3]), max_new_tokens=2)
