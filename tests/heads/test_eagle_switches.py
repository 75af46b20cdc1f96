"""Tests EAGLE-3 heads with every switch against speculators, which wrote their config.json, too.

`scripts/golden/make_eagle_switches.py` and `make_eagle_losses.py` ran it.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxspec
from helpers import trainees
from helpers.eagle_heads import STEPS, SWITCHES, drafted, parameters, supervision, switch_inputs
from helpers.paths import GOLDEN_DIR
from jaxspec.core.records import KV, Window
from jaxspec.heads.eagle_layouts import EAGLE
from jaxspec.heads.files import load_heads
from jaxspec.heads.headers import open_heads
from jaxspec.heads.layouts import LAYOUTS
from jaxspec.heads.network import flatten, init_cache, make_network
from jaxspec.train.batch import Batch, FrozenTarget
from jaxspec.train.eagle import EagleTrainee

GOLDEN = json.loads((GOLDEN_DIR / "eagle_switches.json").read_text())["cases"]
LOSSES = json.loads((GOLDEN_DIR / "eagle_losses.json").read_text())["cases"]


def written(folder, name):
    case, golden = SWITCHES[name], GOLDEN[name]
    tensors = parameters(name, golden["shapes"])
    vocab, count = case.layer["vocab_size"], case.draft_vocab_size
    if count < vocab:
        ids = drafted(vocab, count)
        tensors |= {"d2t": ids - np.arange(count), "t2d": np.isin(np.arange(vocab), ids)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(golden["settings"]))
    return folder


@pytest.mark.parametrize("name", SWITCHES)
def test_three_steps_after_every_token(tmp_path, name):
    """A row of a later step sees the rows of true states up to its own, and its own earlier steps."""
    place = written(tmp_path, name)
    heads = load_heads(place)
    assert open_heads(place).layout == "speculators"
    assert heads.notes == ()
    for switch, value in SWITCHES[name].switches.items():
        field = "taps" if "layer_ids" in switch else switch
        assert getattr(heads.config, field) == (tuple(value) if isinstance(value, list) else value)
    head, params = make_network(heads.config, heads.params), heads.params
    taps, tokens = switch_inputs(name, SWITCHES[name])
    size = taps.shape[1]
    nothing = np.zeros((1, size, heads.config.hidden_size), np.float32)
    states = head.fuse(jnp.asarray(np.concatenate([nothing, taps], -1)))
    causal, own, past = np.tri(size, dtype=bool), np.eye(size, dtype=bool), None
    for step in range(STEPS):
        after = jnp.asarray(np.pad(tokens, ((0, 0), (0, step)))[:, 1 + step : 1 + step + size])
        mask = np.concatenate([causal, *[own] * step], 1)[None]
        window = Window(after, step + jnp.arange(size)[None], jnp.asarray(mask))
        cache = init_cache(heads.config, 1, 0, "float32")
        states, new = head(states, params["embed"][after], window, cache, past)
        past = new if past is None else KV(*(jnp.concatenate([a, b], 3) for a, b in zip(past, new)))
        np.testing.assert_allclose(head.logits(states)[0], GOLDEN[name]["logits"][step], atol=1e-5)


@pytest.mark.parametrize("name", SWITCHES)
def test_losses_and_gradients_of_three_steps(tmp_path, name):
    """To 1e-5 of the loss and of each gradient's norm; gradients get their names as heads do when they are exported."""
    case, heads = SWITCHES[name], load_heads(written(tmp_path, name))
    taps, tokens = switch_inputs(name, case)
    features, table, mask = supervision(name, case)
    ids = heads.params.get("tokens")
    index = None if ids is None else jnp.full(len(table), -1).at[ids].set(jnp.arange(len(ids)))
    frozen = FrozenTarget(jnp.asarray(table if ids is None else table[ids]), None, None, index, ids)
    read = np.concatenate([features, np.pad(taps, ((0, 0), (0, 1), (0, 0)))], -1)
    batch = Batch(*map(jnp.asarray, (tokens, np.ones_like(tokens), mask, read)))
    trained = {key: leaf for key, leaf in heads.params.items() if key != "tokens"}

    def loss(params):
        weights = 0.8 ** jnp.arange(STEPS)
        args = jaxspec.Eagle3Settings(), EagleTrainee.of(heads.config, STEPS), params, frozen, batch
        value, sums = trainees.weighted(*args, lambda sums: weights / sums.counted)
        return value, weights * sums.loss / sums.counted

    (_, each), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(trained)
    np.testing.assert_allclose(each, LOSSES[name]["losses"], rtol=1e-5)
    whole = heads.params | gradient
    found = EAGLE.tensors(heads.config, flatten(whole), LAYOUTS["speculators"])
    expected = LOSSES[name]["gradients"]
    frozen_there = {"embed_tokens.weight", "lm_head.weight"}
    assert set(expected) == set(found) - {"d2t", "t2d"} - frozen_there
    directions = parameters(f"{name}, direction", {key: found[key].shape for key in expected})
    for key, (norm, product) in expected.items():
        assert np.linalg.norm(found[key]) == pytest.approx(norm, rel=1e-5), key
        tolerance = 1e-5 * norm * float(np.linalg.norm(directions[key]))
        assert (found[key] * directions[key]).sum() == pytest.approx(product, abs=tolerance), key
