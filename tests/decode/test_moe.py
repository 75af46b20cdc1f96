"""Tests networks with mixtures of experts in the decoder: texts of every drafter, sessions, vmap, meshes."""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from cases import RANDOM
from helpers import moe
from helpers.compiling import simulated
from helpers.moe import LM, PARAMS
from helpers.paths import TESTS
from helpers.tiers import with_slow
from helpers.toys import RAGGED, decoder, extend, lively, noisy, random_request, run, start, texts, truncate
from jaxspec.core.topology import chain
from jaxspec.decode.state import Weights
from jaxspec.drafters.model import ModelDraft
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.kernels.library import kernels_available
from jaxspec.models.kernels import with_kernels

PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [9, 8], [30, 31, 32, 30, 31]]
DRAFTERS = ("model", "prompt-lookup", "recycling", "early-exit", "medusa", "eagle", "dflash")
NETWORKS = {"moe": (LM, PARAMS), "hybrid": (moe.HYBRID, lively(moe.HYBRID.init_params(jax.random.key(5))))}


def decode(name: str, **drafting):
    target = jaxspec.Model(*NETWORKS[name])
    out = jaxspec.generate(
        target,
        PROMPTS,
        key=jax.random.key(1),
        sampling=jaxspec.Sampling(temperature=[0.0, 0.8, 0.8]),
        max_new_tokens=16,
        ignore_eos=True,
        verbose=False,
        **drafting,
    )
    return [row.tokens for row in out]


@functools.cache
def plain(name: str) -> list[list[int]]:
    return decode(name, drafter="none")


CASES = [(name, drafter) for name in NETWORKS for drafter in DRAFTERS]


@pytest.mark.parametrize(("name", "drafter"), with_slow(CASES, set(CASES) - {("moe", "model")}))
def test_every_drafter_has_the_text_of_plain_decoding(name, drafter):
    lm, params = NETWORKS[name]
    drafting = {"drafter": drafter}
    if drafter == "model":
        drafting |= {"draft": jaxspec.Model(lm, noisy(params, 1, 0.05)), "tree": jaxspec.branching(2, 2)}
    elif drafter == "early-exit":
        drafting |= {"drafter_options": {"exit_layers": 1}}
    elif drafter in RANDOM:
        drafting |= {"heads": RANDOM[drafter](jaxspec.Model(lm, params))}
    assert decode(name, **drafting) == plain(name)


@pytest.mark.slow
def test_sessions_are_cut_and_go_on():
    weights = Weights(PARAMS, moe.DRAFT)
    asked = random_request(3, 4, LM.vocab)
    turn = asked._replace(count=asked.count % 3, new_tokens=jnp.full((4,), 9))
    ends = []
    for each in (decoder(LM, NoDraft()), decoder(LM, ModelDraft(LM, RAGGED))):
        state = run(each, weights, start(each, weights, asked, 128))
        state = truncate(each, weights, state, jnp.maximum(state.length - 4, 1))
        state = run(each, weights, extend(each, weights, state, turn))
        ends.append(texts(state))
    assert ends[0] == ends[1]


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [False, True])
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
        for row, length in enumerate(np.asarray(alone.length)):
            np.testing.assert_array_equal(mapped.tokens[i, row, :length], alone.tokens[row, :length])


@pytest.mark.slow
@pytest.mark.mesh
def test_devices_that_share_layers_have_the_logits_of_one():
    """There is one sum over devices for attention, and one for all experts of a layer, but not one for each expert.

    Also with the parts of gpt-oss: sinks, a sliding window, biases and clamped gates.
    """
    words = [sys.executable, "-c", moe.ON_FOUR, str(TESTS)]
    done = subprocess.run(words, env=simulated(4), capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    layers, kernels = json.loads(done.stdout.splitlines()[-1])
    for found in layers:
        assert found["difference"] < 1e-5
        assert found["sums"] <= 3
        assert found["share"] == 0.5
    for found in kernels:
        assert found["whole experts"] == 0
        assert found["shared experts"] < 1e-5
