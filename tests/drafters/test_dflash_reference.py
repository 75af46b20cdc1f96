"""Tests DFlash, DSpark and JetSpec heads against the code of their authors; `scripts/golden/make_dflash.py` ran it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers.dflash_golden import CASES, ROOTS, inputs
from helpers.dflash_heads import E
from helpers.paths import GOLDEN_DIR
from jaxspec.core import cache as caches
from jaxspec.heads.network import init_cache, make_network
from jaxspec.models.layers import look_up, matmul

GOLDEN = json.loads((GOLDEN_DIR / "dflash.json").read_text())["cases"]


@pytest.mark.parametrize("name", CASES)
def test_contexts_states_logits_and_certainties(name, tmp_path):
    """Of a block after a text, and of another after further text, with the keys and values of the first kept."""
    heads = jaxspec.load_heads(CASES[name].write(tmp_path))
    config, head = heads.config, make_network(heads.config, heads.params)
    taps, tokens, embed, project = map(jnp.asarray, inputs(name))
    if config.own_embedding:
        embed, project = heads.params["embed"], heads.params["head"]

    @jax.jit
    def play(cache, read, block, positions, before):
        context = head.fuse(jnp.concatenate([jnp.zeros((*read.shape[:2], E)), read], -1))
        places = cache.length[:, None] + jnp.arange(read.shape[1])
        entries = head.remember(context, places, "float32")
        cache = caches.append_to_cache(cache, entries, None, jnp.full((1,), read.shape[1]))
        states = head(look_up(embed, block), positions, cache)[:, config.skipped :]
        logits, words = matmul(states, project, transposed=True), None
        if config.markov:
            words, memory = head.words(before), jnp.zeros((1, 1, config.memory))
            rows = []
            for row in range(states.shape[1]):
                one, memory = head.follow(words[:, row : row + 1], states[:, row : row + 1], memory)
                rows.append(one)
            logits = logits + head.correction(jnp.concatenate(rows, 1))
        certain = head.certainty(states, words) if config.confidence else jnp.zeros((1, 0))
        return cache, context, states, logits, certain

    cache, start, contexts = init_cache(config, 1, 32, "float32"), 0, []
    for root, expected in zip(ROOTS, GOLDEN[name]["rounds"], strict=True):
        block = jnp.full((1, config.block_size), config.mask_token).at[0, 0].set(tokens[0, root])
        positions = root + jnp.arange(config.block_size)[None]
        before = tokens[:, root : root + config.max_depth]
        cache, context, states, logits, certain = play(cache, taps[:, start:root], block, positions, before)
        contexts.append(context[0])
        np.testing.assert_allclose(states[0], expected["states"], atol=1e-5)
        np.testing.assert_allclose(logits[0], expected["logits"], atol=1e-5)
        np.testing.assert_allclose(certain[0], expected.get("certainty", []), atol=1e-5)
        start = root
    np.testing.assert_allclose(jnp.concatenate(contexts)[-2:], GOLDEN[name]["context"], atol=1e-5)
