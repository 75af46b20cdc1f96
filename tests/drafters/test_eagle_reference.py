"""Tests EAGLE heads and their dynamic trees against EAGLE's own code; `scripts/golden/make_eagle.py` ran it."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers.eagle_heads import CASES, LENGTHS, TREES, inputs, write
from helpers.paths import GOLDEN_DIR
from helpers.tables import target
from helpers.tiers import with_slow
from jaxspec.core.draw import Draw, Noise
from jaxspec.core.noise import RoundNoise
from jaxspec.core.records import Advance, Context, Window
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import Dynamic
from jaxspec.drafters.eagle import Eagle
from jaxspec.heads.network import init_cache, make_network

GOLDEN = json.loads((GOLDEN_DIR / "eagle.json").read_text())["cases"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    @functools.cache
    def load(name):
        place = write(tmp_path_factory.mktemp("heads") / name, name)
        model = target(name)
        return model, jaxspec.load_heads(place, target=model)

    return load


def features(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The target's features `[1, T - 1, F]`, and the text `[1, T]`."""
    states, tokens = inputs(name, CASES[name])
    nothing = np.zeros((*states.shape[:2], 32), np.float32)
    return (states if CASES[name].version == 1 else np.concatenate([nothing, states], -1)), tokens


@pytest.mark.parametrize("name", CASES)
def test_states_and_logits(loaded, name):
    model, heads = loaded(name)
    assert not heads.config.own_embedding, "the file's is the target's"
    read, tokens = features(name)
    size = read.shape[1]
    window = Window(jnp.asarray(tokens[:, 1:]), jnp.arange(size)[None], jnp.asarray(np.tri(size, dtype=bool)[None]))
    head = make_network(heads.config, heads.params)
    cache = init_cache(heads.config, 1, 0, "float32")
    states, _ = head(head.fuse(jnp.asarray(read)), model.params["embed"][window.tokens], window, cache)
    np.testing.assert_allclose(states[0], GOLDEN[name]["states"], atol=1e-5)
    logits = head.logits(states) if heads.config.own_projection else model.lm.head(model.params, states)
    expected = np.asarray(GOLDEN[name]["logits"])  # up to 20
    np.testing.assert_allclose(logits[0], expected, atol=1e-5 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("which", with_slow(range(len(TREES)), range(1, len(TREES))))
def test_dynamic_trees_of_two_rounds(loaded, name, which):
    """EAGLE's depth counts the levels below the first, and its size the root: `Dynamic` counts all levels."""
    model, heads = loaded(name)
    depth, beam, nodes = TREES[which]
    tree = Dynamic(beam, depth + 1, nodes)
    drafter, params = Eagle.build(jaxspec.DrafterInputs(model, tree=tree, heads=heads))
    read, tokens = features(name)
    before = np.concatenate([np.zeros_like(read[:, :1]), read], 1)

    @jax.jit
    def play(params, state, tokens, before, start):
        count = jnp.full((1,), tokens.shape[1])
        text = jnp.zeros((1, 16), jnp.int32)
        text = jax.lax.dynamic_update_slice(text, tokens, (0, start))
        advance = Advance(tokens, before, count, None, text, jnp.full((1,), start), model.params)
        state = drafter.absorb(params, state, advance)
        length = start + count
        noise = RoundNoise(jax.random.split(jax.random.key(0), 1), length, jnp.asarray(False), 48)
        draw = Draw(Noise.NONE, noise, Sampling().rows(1, 48))
        return drafter.propose(params, state, Context(text, length, state.cache, model.params), draw)

    state, start = drafter.init(params, 1, 16), 0
    for end, expected in zip(LENGTHS, GOLDEN[name]["trees"][which]):
        at = slice(start, end)
        found, state = play(params, state, jnp.asarray(tokens[:, at], jnp.int32), jnp.asarray(before[:, at]), start)
        assert [int(tokens[0, end - 1]), *found.tokens[0, 1:].tolist()] == expected["tokens"]
        assert ["".join(map(str, row)) for row in found.tree.ancestors[0].astype(int).tolist()] == expected["mask"]
        assert found.tree.depths[0].tolist() == expected["positions"]
        assert int(state.cache.length[0]) == end - 1
        start = end
