"""Tests networks of attention and Gated DeltaNet in the decoder: texts, cuts, sessions, broken rows, meshes, laws."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers import hybrids
from helpers.compiling import simulated
from helpers.hybrids import LM, PARAMS
from helpers.paths import TESTS
from helpers.toys import RAGGED, decoder, extend, random_request, run, start, texts, truncate
from jaxspec.core.records import Window
from jaxspec.core.topology import chain
from jaxspec.decode.state import Weights
from jaxspec.drafters.model import ModelDraft
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.errors import InvalidConfig
from jaxspec.generation.memory import cache_bytes
from jaxspec.kernels.library import kernels_available
from jaxspec.models.kernels import with_kernels
from jaxspec.testing import model_law

B, CAPACITY = 6, 128
WEIGHTS = Weights(PARAMS, hybrids.DRAFT)


def test_cuts_longer_texts_and_shorter_texts():
    """Stops and budgets fall inside accepted paths; the text then goes on, is cut back, and goes on again."""
    asked = random_request(3, B, LM.vocab)
    turn = asked._replace(count=asked.count % 3, new_tokens=jnp.full((B,), 9))
    ends = []
    for each in (decoder(LM, NoDraft()), decoder(LM, ModelDraft(LM, RAGGED))):
        state = run(each, WEIGHTS, start(each, WEIGHTS, asked, CAPACITY))
        ends.append([texts(state)])
        state = run(each, WEIGHTS, extend(each, WEIGHTS, state, turn))
        ends[-1].append(texts(state))
        state = truncate(each, WEIGHTS, state, jnp.maximum(state.length - 4, 1))
        state = run(each, WEIGHTS, extend(each, WEIGHTS, state, turn))
        ends[-1].append(texts(state))
        fresh = start(each, WEIGHTS, asked._replace(tokens=state.tokens, count=state.length), CAPACITY)
        for found, expected in zip(*(jax.tree.leaves(each.cache.stores.recurrent) for each in (state, fresh))):
            np.testing.assert_allclose(found, expected, atol=2e-4)
    assert ends[0] == ends[1]
    assert len(set(map(str, ends[0][2]))) > 3


@pytest.mark.slow
def test_a_broken_row_ends_and_harms_no_other():
    """One row's prompt holds a token whose embedding is NaN."""
    broken = PARAMS | {"embed": PARAMS["embed"].at[7].set(jnp.nan)}
    prompts = [[1, 2, 3], [1, 7, 3], [4, 5, 6, 1]]
    options = {"key": jax.random.key(0), "max_new_tokens": 16, "logprobs": True, "ignore_eos": True}
    sound = jaxspec.generate(jaxspec.Model(LM, PARAMS), prompts, drafter="none", **options)
    for drafting in ({"drafter": "none"}, {"drafter": "model", "draft": jaxspec.Model(LM, hybrids.DRAFT)}):
        out = jaxspec.generate(jaxspec.Model(LM, broken), prompts, **drafting, **options)
        assert out[1].finish_reason == "error"
        for row in (0, 2):
            assert 7 not in sound[row].tokens
            assert out[row].tokens == sound[row].tokens


@pytest.mark.slow
def test_continuous_batching_has_the_texts_of_plain_decoding():
    """Seven prompts in three rows: a row's state begins afresh for each of its texts."""
    prompts = [[1, 2, 3], [9], [30, 31, 32, 30], [5, 6], [7, 8, 9, 10, 11], [12], [13, 14]]
    options = {"key": jax.random.key(2), "max_new_tokens": [3, 9, 5, 12, 4, 7, 6], "ignore_eos": True}
    model = jaxspec.Model(LM, PARAMS)
    plain = jaxspec.generate(model, prompts, drafter="none", **options)
    out = jaxspec.generate(
        model, prompts, drafter="model", draft=jaxspec.Model(LM, hybrids.DRAFT), tree=RAGGED, batch=3, **options
    )
    assert [row.tokens for row in out] == [row.tokens for row in plain]
    assert out.stats.accepted > 0


def test_memory_includes_states_and_the_entries_of_a_window():
    each = decoder(LM, ModelDraft(LM, RAGGED))
    cache = jax.eval_shape(lambda: (LM.init_cache(B, CAPACITY), each.drafter.init(WEIGHTS.draft, B, CAPACITY)))
    window = Window(
        *jax.tree.map(jnp.asarray, (np.zeros((B, 9), int), np.zeros((B, 9), int), np.ones((B, 9, 9), bool)))
    )
    _, entries = jax.eval_shape(LM.apply, PARAMS, window, LM.init_cache(B, CAPACITY))
    assert each.drafter.shape.nodes == 9
    assert cache_bytes(each, WEIGHTS, B, CAPACITY) == nbytes(cache) + nbytes(entries.recurrent)


def nbytes(arrays) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


@pytest.mark.slow
@pytest.mark.mesh
def test_devices_that_share_layers_have_the_text_of_one():
    words = [sys.executable, "-c", hybrids.ON_FOUR, str(TESTS)]
    done = subprocess.run(words, env=simulated(4), capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["1x1"]["tokens"] == found["2x2"]["tokens"]
    assert found["2x2"]["accepted"] > 10
    assert found["2x2"]["share"] < 0.75 * found["1x1"]["share"]  # a device holds its part of the parameters


def test_text_follows_the_law_of_the_whole_text():
    """The law of each text by enumeration: a network without a cache reads every text of three tokens."""
    lm, params = hybrids.tiny()
    law = model_law(lm, params, [1, 0], jaxspec.Sampling(temperature=1.0))
    count = 4000
    out = jaxspec.generate(
        jaxspec.Model(lm, params),
        [[1, 0]] * count,
        key=jax.random.key(5),
        drafter="model",
        draft=jaxspec.Model(lm, hybrids.noise(params, 0.5)),
        tree=jaxspec.branching(2, 1),
        rule="rejection",
        sampling=jaxspec.Sampling(temperature=1.0),
        max_new_tokens=3,
        ignore_eos=True,
    )
    seen = np.zeros((lm.vocab,) * 3)
    for row in out:
        seen[tuple(row.tokens[-3:])] += 1
    expected = np.zeros_like(seen)
    for text in np.ndindex(*expected.shape):
        expected[text] = count * np.prod([law(text[:i])[text[i]] for i in range(3)])
    statistic = 2 * np.sum(np.where(seen > 0, seen * np.log(np.where(seen > 0, seen, 1) / expected), 0))
    freedom = expected.size - 1
    # The G-test at one in a million, by the normal approximation of its root (Fisher 1925).
    assert np.sqrt(2 * statistic) - np.sqrt(2 * freedom - 1) < 4.8


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [True, False])
def test_vmap_has_the_texts_of_each_batch(kernels):
    if kernels and not kernels_available():
        pytest.skip("needs the CPU kernels")
    model = jaxspec.Model(LM, PARAMS)
    model = with_kernels(model) if kernels else model
    each, weights = decoder(model.lm, PromptLookup(chain(3))), Weights(model.params)
    asked = [random_request(seed, 2, LM.vocab, longest=6, budget=8) for seed in (1, 2)]
    size = max(one.tokens.shape[1] for one in asked)
    asked = [one._replace(tokens=jnp.pad(one.tokens, ((0, 0), (0, size - one.tokens.shape[1])))) for one in asked]
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), *asked)
    mapped = jax.jit(jax.vmap(lambda one: each.generate(weights, one, 64)))(both)
    for i, one in enumerate(asked):
        alone = jax.jit(lambda one: each.generate(weights, one, 64))(one)
        np.testing.assert_array_equal(mapped.length[i], alone.length)
        for row, length in enumerate(np.asarray(alone.length)):
            np.testing.assert_array_equal(mapped.tokens[i, row, :length], alone.tokens[row, :length])


def test_products_in_pallas_are_refused():
    with pytest.raises(InvalidConfig, match="products='pallas' has no recurrent layers"):
        LM.with_execution(attention="pallas", products="pallas")
