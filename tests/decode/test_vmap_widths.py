"""Tests `vmap` over requests with arrays of width 0: without stop ids, alternatives, drafts or prompts of a draft."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.compiling import QUICK
from helpers.covering import pairwise
from helpers.paths import ROOT
from helpers.tiers import with_slow
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import chain
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import DraftPrompts, Request, Weights
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.rules.coupled import Coupled
from jaxspec.testing import TableLM

V, B = 8, 4
LM = TableLM(V)
WEIGHTS = Weights(LM.init_params(jax.random.key(0)))

FACTORS = {
    "drafter": (NoDraft(), PromptLookup(chain(3))),
    "stops": (0, 1),
    "logprobs": (None, False, True),
    "top": (0, 1, 2),
    "spelled": (None, 0, 3),
    "bias": (False, True),
}


def request(stops, logprobs, spelled, bias) -> Request:
    rng = np.random.default_rng(0)
    settings = Sampling(temperature=0.8, logit_bias=rng.normal(size=(B, V)).astype(np.float32) if bias else None)
    own = None if spelled is None else DraftPrompts(jnp.zeros((B, spelled), jnp.int32), jnp.zeros(B, jnp.int32))
    return Request(
        jnp.asarray(rng.integers(0, V, (B, 5))),
        jnp.asarray([5, 2, 3, 1]),
        jnp.full(B, 6),
        jax.random.split(jax.random.key(1), B),
        jnp.full((B, stops), 0),
        settings.rows(B, V),
        None if logprobs is None else jnp.full(B, logprobs),
        own,
    )


def nested(decoder, slots):
    """The functions of a request `[4, ...]`: a batch, one vmap, two vmaps, and a vmap over batches of two."""

    def one(request):
        return decoder.generate(WEIGHTS, request, slots)

    def split(request):
        return jax.tree.map(lambda leaf: leaf.reshape(2, 2, *leaf.shape[1:]), request)

    def joined(result):
        return jax.tree.map(lambda leaf: leaf.reshape(4, *leaf.shape[2:]), result)

    yield one
    yield jax.vmap(one)
    yield lambda request: joined(jax.vmap(jax.vmap(one))(split(request)))
    yield lambda request: joined(jax.vmap(one)(split(request)))
    deeper = jax.vmap(jax.vmap(jax.vmap(one)))
    yield lambda request: joined(jax.tree.map(lambda a: a[0], deeper(jax.tree.map(lambda a: a[None], split(request)))))


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, True])
def test_every_nesting_has_the_shapes_of_one_batch(every):
    """Traces nestings of twelve requests, in which any two widths meet: one of each, or all five in the slow tests."""
    covering = pairwise(FACTORS)
    assert len(covering) == 12
    for number, case in enumerate(covering):
        decoder = Decoder(LM, case.pop("drafter"), Coupled(), chunk=4, top_logprobs=case.pop("top"))
        batch, *others = nested(decoder, decoder.slots(11))
        asked = request(**case)
        whole = jax.eval_shape(batch, asked)
        assert (whole.logprobs is None) == (case["logprobs"] is None)
        for other in others if every else [others[number % len(others)]]:
            assert jax.eval_shape(other, asked) == whole


@pytest.mark.parametrize("name", with_slow(["none", "prompt-lookup"], {"prompt-lookup"}))
def test_every_nesting_has_the_text_of_one_batch(name):
    decoder = Decoder(LM, NoDraft() if name == "none" else PromptLookup(chain(3)), Coupled(), chunk=4)
    batch, *others = (jax.jit(f, compiler_options=QUICK) for f in nested(decoder, decoder.slots(11)))
    asked = request(0, True, None, False)
    whole = batch(asked)
    assert (np.asarray(whole.logprobs.raw) < 0).sum() >= 6 * B
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other(asked), whole)


def test_the_first_program_of_the_page_with_log_probabilities():
    page = (ROOT / "docs/functional.md").read_text()
    block = re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    settings = "    sampling=jaxspec.Sampling(temperature=0.8).rows(2, model.vocab),\n"
    assert block[1].count(settings) == 1
    names = {}
    program = block[1].replace(settings, settings + "    logprobs=jnp.array([True, True]),\n")
    exec(compile(program, "docs/functional.md", "exec"), names)
    result = names["result"]
    places = np.arange(result.tokens.shape[1])
    written = (places >= np.asarray(result.start)[:, None]) & (places < np.asarray(result.length)[:, None])
    raw = np.asarray(result.logprobs.raw)
    assert written.sum() == 39
    assert (raw[written] < 0).all()
    np.testing.assert_array_equal(np.asarray(names["state"].logprobs.raw)[written], raw[written])
