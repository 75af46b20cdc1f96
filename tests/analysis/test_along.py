"""Tests the laws of a model along a text, and the expected lengths of chains that follow from them."""

from typing import Any

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec import analysis
from jaxspec.core.topology import chain
from jaxspec.rules.block import Block
from jaxspec.rules.rejection import Rejection
from jaxspec.rules.traversal import Traversal
from jaxspec.testing import TableLM

pytestmark = pytest.mark.quick


def test_the_laws_along_a_text_are_those_of_the_model():
    """Of a table, by its definition, for texts of every length up to three chunks, and truncated as in sampling."""
    lm, rng = TableLM(7), np.random.default_rng(0)
    params = lm.init_params(jax.random.key(0))
    table, text = np.asarray(params["table"], np.float64), rng.integers(0, 7, 150).tolist()
    logits = np.stack([table[text[i - 1] if i else 7, text[i]] for i in range(len(text))])
    whole = np.exp(logits - logits.max(-1, keepdims=True))
    whole /= whole.sum(-1, keepdims=True)
    for size in (1, 2, 16, 17, 63, 64, 65, 128, 150):
        np.testing.assert_allclose(analysis.text_laws(lm, params, text[:size]), whole[:size], atol=1e-5)
    np.testing.assert_allclose(analysis.text_laws(lm, params, text, first=99), whole[99:], atol=1e-5)
    limited = analysis.text_laws(lm, params, text, jaxspec.Sampling(temperature=1.0, top_k=2))
    assert ((limited > 0).sum(-1) == 2).all()
    greedy = analysis.text_laws(lm, params, text, jaxspec.Sampling())
    np.testing.assert_array_equal(greedy.argmax(-1), whole.argmax(-1))
    assert set(greedy.ravel().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_expected_lengths_along_a_text_of_the_target_are_those_of_the_rules(depth):
    """Against enumeration of all drafts, for laws that do not depend on the text, within five standard errors."""
    rng = np.random.default_rng(depth)
    target, draft = rng.dirichlet(np.ones(4), 2)
    draft = np.where(np.arange(4) == 3, 0.0, draft)
    draft /= draft.sum()
    tokens = rng.choice(4, 100_000, p=target)
    laws = (np.broadcast_to(law.astype(np.float32), (len(tokens), 4)) for law in (target, draft))
    found = analysis.text_chain_lengths(*laws, tokens, depth)
    for rule, lengths in ((Rejection(), found.token), (Block(), found.block), (Traversal(), found.block)):
        exact = analysis.expected_length(rule, chain(depth), lambda _: target, lambda _: draft)
        values = np.asarray(lengths, np.float64)
        assert abs(values.mean() - exact) < 5 * depth * values.std() / len(values) ** 0.5
    assert (np.asarray(found.token) <= np.asarray(found.block) + 1e-6).all()
    assert (np.asarray(found.block) <= np.asarray(found.bound) + 1e-6).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ([], "the text is empty"),
        ([7], "the text has token 7 at index 0; ids go from 0 to 6"),
        ([-1], "the text has token -1 at index 0"),
        ("text", "a text must be a list of token ids"),
        (None, "a text must be a list of token ids"),
        ([0.5], "a text must be a list of token ids"),
        (range(10**12), "the text has 1000000000000 tokens; at most "),
    ],
)
def test_what_is_not_a_text_is_refused(text: Any, message):
    lm = TableLM(7)
    with pytest.raises(jaxspec.JaxspecError, match=message):
        analysis.text_laws(lm, {}, text)
