"""Tests SmolLM2-135M-Instruct on a few prompts. `scripts/prove/identity.py` is the long form."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers.paths import GOLDEN_DIR
from jaxspec.bench.run import find_buildable
from jaxspec.checkpoints.source import open_source
from jaxspec.testing import tie_gap

pytestmark = pytest.mark.smollm2
GOLDEN = GOLDEN_DIR / "smollm2_greedy.json"
TIE = 1e-3
CAPACITY = 512  # one for all, so that a drafter compiles once
LOOKUP: dict[str, Any] = {"drafter": "prompt-lookup", "tree": 3, "schedule": "constant"}


def assert_same_up_to_ties(model, reference, output, keys, sampling, limit):
    """Token for token; a row may part at a certified tie, and `limit` rows may."""
    ties = []
    for b, (one, other) in enumerate(zip(reference, output)):
        if one.tokens == other.tokens:
            continue
        place = next(i for i, (x, y) in enumerate(zip(one.tokens, other.tokens)) if x != y)
        text = one.prompt_tokens + one.tokens[:place]
        tokens = (one.tokens[place], other.tokens[place])
        ties.append((b, place, tie_gap(model.lm, model.params, text, tokens, keys[b], sampling[b])))
    assert all(gap < TIE for _, _, gap in ties), ties
    assert len(ties) <= limit, ties


def test_greedy_text_is_that_of_transformers(smollm2):
    """10 prompts x 64 tokens in float32, with prompt lookup; `scripts/golden/make_greedy.py` made the golden."""
    count = 64
    rows = json.loads(GOLDEN.read_text())["rows"]
    prompts = [row["prompt"] for row in rows]
    output = jaxspec.generate(smollm2, prompts, **LOOKUP, chat=True, max_new_tokens=count, capacity=CAPACITY)
    agreed = 0
    for row, out in zip(rows, output):
        assert out.prompt_tokens == row["prompt_tokens"]
        differ = [i for i, (a, b) in enumerate(zip(out.tokens, row["tokens"])) if a != b]
        if differ:
            assert row["gaps"][differ[0]] < TIE, (row["prompt"], differ[0])
        else:
            assert out.tokens == row["tokens"][:count]
        agreed += not differ
    assert agreed >= 9


@pytest.fixture(scope="module")
def rows():
    """Prompts with per-row settings: greedy and sampled rows in one batch, as many as the golden has."""
    prompts = ["Why is the sky blue?", "Repeat: one two three one two three one two", "Hello", "Hi", "Ten!"] * 2
    sampling = [jaxspec.Sampling()] * 5 + [jaxspec.Sampling(0.8, 0, 0.95)] * 5
    keys = jax.vmap(jax.random.key)(jnp.arange(10))
    return prompts, sampling, keys


def decode(model, rows, drafter, **options):
    prompts, sampling, keys = rows
    stacked = jaxspec.Sampling(
        *(np.array([getattr(s, n) for s in sampling]) for n in ("temperature", "top_k", "top_p"))
    )
    settings = {"key": keys, "sampling": stacked, "chat": True, "max_new_tokens": 16, "ignore_eos": True}
    return jaxspec.generate(model, prompts, drafter=drafter, capacity=CAPACITY, **settings, **options)


def shallow(model):
    """Its first layers, the norm and the head: real weights and sizes, compiled in a tenth of the time."""
    return dataclasses.replace(model, lm=dataclasses.replace(model.lm, layers=3))


def test_drafts_leave_the_text_as_it_is(smollm2, rows):
    """Float32, greedy and sampled rows, against plain decoding."""
    reference = decode(smollm2, rows, "none")
    output = decode(smollm2, rows, **LOOKUP)  # compiled by the test before
    assert_same_up_to_ties(smollm2, reference, output, rows[2], rows[1], limit=1)
    assert output.stats.accepted > 0


@pytest.mark.slow
def test_a_ragged_tree_leaves_the_text_as_it_is(smollm2, rows):
    """The same of a tree with drafts of a model's first layers."""
    model, tree = shallow(smollm2), jaxspec.from_paths([(0, 0), (0, 1), (1,)])
    reference = decode(model, rows, "none")
    output = decode(model, rows, "early-exit", tree=tree, drafter_options={"exit_layers": 2})
    assert_same_up_to_ties(model, reference, output, rows[2], rows[1], limit=1)
    assert output.stats.accepted > 0


@pytest.mark.slow
def test_bfloat16_is_bit_identical_to_the_width_matched_reference(smollm2_path, rows):
    model = shallow(jaxspec.load(smollm2_path, dtype="bfloat16"))
    tree = jaxspec.from_paths([(0, 0), (0, 1), (1,)])
    options = {"tree": tree, "width_matched": True, "logprobs": True}
    reference = decode(model, rows, "none", **options)
    output = decode(model, rows, "model", draft=model, **options)
    assert output.stats.tokens_per_round > 1.5
    for one, other in zip(reference, output):
        assert one.tokens == other.tokens
        assert one.logprobs == other.logprobs


def test_a_preset_that_was_opened_first_is_still_the_preset(smollm2_path):
    """Commands read headers before weights; a benchmark finds the heads of a preset by its name."""
    model = jaxspec.load(open_source("smollm2-135m-instruct"), dtype="int8")
    assert model.preset == "smollm2-135m-instruct"
    heads = {name: jaxspec.load_heads(f"{model.preset}/{name}") for name in ("medusa", "eagle")}
    assert {"medusa", "eagle"} <= {method.drafting.drafter for method in find_buildable(model, None, heads)}
