"""Tests a model whose cache is the state of a recurrence: the loop leaves what a cache holds to the model."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers.toys import RAGGED, decoder, extend, noisy, random_request, run, start, texts, truncate
from jaxspec.core.records import Cache
from jaxspec.core.topology import dynamic
from jaxspec.decode.state import Weights
from jaxspec.drafters.model import ModelDraft
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup

V, B, CAPACITY, WIDTH = 8, 6, 128, 16


@dataclasses.dataclass(frozen=True)
class RecurrentLM:
    """A state that every token of the text changes. The entries are what the tokens add to the state.

    The cache holds one state per row and no slots. A node's state is computed from its ancestors, in level order.
    """

    vocab: int = V
    context: int = 1 << 20

    def init_cache(self, batch, capacity):
        return Cache(jnp.zeros((batch, WIDTH)), jnp.zeros((batch,), jnp.int32))

    def apply(self, params, window, cache, past=None):
        own = params["embed"][window.tokens]
        new = own[None, :, None]
        seen = own if past is None else jnp.concatenate([past[0, :, 0], own], 1)

        def read(state, entry_and_mask):
            entry, mask = entry_and_mask
            return jnp.where(mask[..., None], follow(state, entry[:, None]), state), None

        first = jnp.broadcast_to(of_text(cache)[:, None], own.shape)
        return lax.scan(read, first, (seen.swapaxes(0, 1), jnp.moveaxis(window.mask, 2, 0)))[0], new

    def commit(self, cache, entries, nodes, count, after: Any = 0):
        size = entries.shape[3] if nodes is None else nodes.shape[1]
        nodes = jnp.broadcast_to(jnp.arange(size) if nodes is None else jnp.maximum(nodes, 0), (len(count), size))
        path = jnp.take_along_axis(entries[0, :, 0], nodes[:, :, None], 1)

        def read(state, entry_and_step):
            entry, step = entry_and_step
            return jnp.where((step < count)[:, None], follow(state, entry), state), None

        state = lax.scan(read, of_text(cache), (path.swapaxes(0, 1), jnp.arange(size)))[0]
        return Cache(state, cache.length + count)

    def head(self, params, features):
        return 3 * features @ params["out"]


def follow(state, entry):
    return jnp.tanh(0.9 * jnp.roll(state, 1, -1) + entry)


def of_text(cache):
    """A row of length 0 is empty, whatever its state holds."""
    return jnp.where((cache.length > 0)[:, None], cache.stores, 0.0)


def params(seed: int):
    embed, out = (jax.random.normal(key, (V, WIDTH)) for key in jax.random.split(jax.random.key(seed)))
    return {"embed": embed, "out": out.T}


LM, PARAMS = RecurrentLM(), params(0)
DRAFTERS = {
    "none": NoDraft(),
    "prompt-lookup": PromptLookup(dynamic(2, 3, 6)),
    "model": ModelDraft(LM, RAGGED),
    "model, dynamic": ModelDraft(LM, dynamic(3, 3, 8)),
}


def by_hand(text, count):
    """The logits after each of the last tokens of a text, which is read token by token."""
    state, logits = jnp.zeros(WIDTH), []
    for token in text:
        state = follow(state, PARAMS["embed"][token])
        logits.append(np.asarray(LM.head(PARAMS, state)))
    return logits[-count - 1 : -1]


@pytest.mark.parametrize("name", DRAFTERS)
def test_text_of_a_recurrent_model(name):
    """Stops and budgets fall inside accepted paths; the text then goes on, is cut back, and goes on again."""
    decoding = [decoder(LM, drafter) for drafter in (NoDraft(), DRAFTERS[name])]
    weights = Weights(PARAMS, noisy(PARAMS, 1, 0.2) if name.startswith("model") else None)
    asked = random_request(3, B, V)
    turn = asked._replace(count=asked.count % 3, new_tokens=jnp.full((B,), 9))
    ends = []
    for each in decoding:
        state = run(each, weights, start(each, weights, asked, CAPACITY))
        ends.append([texts(state)])
        state = run(each, weights, extend(each, weights, state, turn))
        ends[-1].append(texts(state))
        state = truncate(each, weights, state, jnp.maximum(state.length - 4, 1))
        state = run(each, weights, extend(each, weights, state, turn))
        ends[-1].append(texts(state))
        for row, text in enumerate(texts(state)):
            np.testing.assert_array_equal(state.cache.length[row], len(text) - 1)
    assert ends[0] == ends[1]


@pytest.mark.parametrize("name", DRAFTERS)
def test_logits_are_those_of_reading_token_by_token(name):
    each = decoder(LM, DRAFTERS[name], top_logprobs=V)
    asked = random_request(4, B, V)._replace(logprobs=jnp.full(B, True), new_tokens=jnp.full((B,), 12))
    weights = Weights(PARAMS, PARAMS if name.startswith("model") else None)
    state = run(each, weights, start(each, weights, asked, CAPACITY))
    for row, text in enumerate(texts(state)):
        first, end = int(state.start[row]), int(state.length[row])
        expected = [jax.nn.log_softmax(logits)[text[i]] for i, logits in enumerate(by_hand(text, end - first), first)]
        np.testing.assert_allclose(state.logprobs.raw[row, first:end], expected, atol=1e-4)
    assert name == "none" or np.asarray(state.round).sum() < np.asarray(state.length - state.start).sum()
