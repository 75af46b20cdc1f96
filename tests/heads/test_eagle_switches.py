"""Tests EAGLE-3 heads with every switch against speculators, which wrote their config.json, too.

`scripts/golden/make_eagle_switches.py` ran it.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.eagle_heads import STEPS, SWITCHES, drafted, parameters, switch_inputs
from helpers.paths import GOLDEN_DIR
from jaxspec.core.records import KV, Window
from jaxspec.heads.eagle import init_cache, module
from jaxspec.heads.files import load_heads
from jaxspec.heads.headers import open_heads

GOLDEN = json.loads((GOLDEN_DIR / "eagle_switches.json").read_text())["cases"]


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
    head, params = module(heads.config, heads.params), heads.params
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
