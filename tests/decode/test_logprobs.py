"""Tests the log-probabilities of emitted tokens: the target's at their positions, whoever proposed them."""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jaxspec
from helpers.tiers import with_slow
from helpers.toys import allowed, generate, log_softmax, noisy, random_request, request, start, whole
from jaxspec.cli.generate import logprobs_record
from jaxspec.core import sizes
from jaxspec.core.laws import highest, log_law, log_prob, scores
from jaxspec.core.sampling import MIN_TEMPERATURE, Sampling
from jaxspec.core.topology import branching, chain, dynamic
from jaxspec.decode.lifecycle import extend
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Weights
from jaxspec.decode.stats import mark_drafted
from jaxspec.drafters.model import ModelDraft
from jaxspec.drafters.none import NoDraft
from jaxspec.errors import InvalidConfig
from jaxspec.generation.inputs import check_logprobs
from jaxspec.generation.output import Generation
from jaxspec.rules.coupled import Coupled
from jaxspec.testing import TableLM

V, B, K = 24, 16, 3
LM = TableLM(V)
PARAMS = LM.init_params(jax.random.key(0))
WEIGHTS = Weights(PARAMS, noisy(PARAMS, 1, 0.4))
TARGET = jaxspec.Model(LM, PARAMS)


def law(logits, temperature, top_k, top_p, min_p, logit_bias) -> np.ndarray:
    """The log-law that is sampled, in float64."""
    logits = logits.astype(np.float64) + logit_bias
    tempered = logits if temperature < MIN_TEMPERATURE else logits / temperature
    tempered = np.where(allowed(logits, temperature, top_k, top_p, min_p), tempered, -np.inf)
    if temperature < MIN_TEMPERATURE:
        tempered = np.where(np.arange(logits.size) == logits.argmax(), 0.0, -np.inf)
    with np.errstate(divide="ignore"):
        return log_softmax(tempered)


def logits_after(text) -> np.ndarray:
    """Of a `TableLM`, by its definition."""
    table = np.asarray(PARAMS["table"])
    return table[text[-2] if len(text) > 1 else V, text[-1]]


@pytest.mark.parametrize("name", with_slow(cases.LOSSLESS, set(cases.LOSSLESS) - {"rejection"}))
def test_they_are_the_targets_whoever_proposed_the_token(name):
    """Raw, sampled and the likeliest, under every rule and every setting: accepted, replaced and bonus tokens."""
    rule, tree = cases.RULES[name], branching(2, 2, 1)
    tree = tree if cases.verifies(rule, tree) else chain(3)
    config = Decoder(LM, ModelDraft(LM, tree), rule, chunk=4, top_logprobs=K)
    asked = random_request(3, B, V, budget=40)._replace(logprobs=jnp.full(B, True))
    got = jax.tree.map(np.asarray, whole(config, WEIGHTS, asked, 128)._replace(key=None))
    sampling, accepted, own, limited = asked.sampling, 0, 0, 0
    for row in range(B):
        first, end = got.start[row], got.length[row]
        settings = [np.asarray(getattr(sampling, f))[row] for f in ("temperature", "top_k", "top_p", "min_p")]
        drafted = mark_drafted(got.log.part(np.s_[row, : got.round[row]]))
        accepted, own = accepted + drafted.sum(), own + (~drafted).sum()
        for at in range(first, end):
            logits, token = logits_after(got.tokens[row, :at]), got.tokens[row, at]
            bias = np.asarray(sampling.processors[0].bias)[row]
            raw, sampled = log_softmax(logits), law(logits, *settings, logit_bias=bias)
            likeliest = np.argsort(-raw, kind="stable")[:K]
            assert math.isclose(got.logprobs.raw[row, at], raw[token], abs_tol=1e-5)
            assert math.isclose(got.logprobs.sampled[row, at], sampled[token], abs_tol=1e-5)
            np.testing.assert_array_equal(got.logprobs.top_tokens[row, at], likeliest)
            np.testing.assert_allclose(got.logprobs.top[row, at], raw[likeliest], atol=1e-5)
            limited += (sampled == -np.inf).sum() > 3 and settings[0] >= MIN_TEMPERATURE
    assert accepted > 20
    assert own > 40
    assert limited > 40, "truncation took tokens away"
    assert (np.asarray(sampling.temperature) < MIN_TEMPERATURE).sum() > 2


def test_of_a_lossy_rule_a_token_that_the_law_excludes_has_minus_infinity():
    """A greedy row keeps tokens of the draft that are not the target's first choice."""
    rule = next(rule for name, rule in cases.RULES.items() if "typical" in name)
    config = Decoder(LM, ModelDraft(LM, chain(3)), rule, chunk=4)
    hot = Sampling(temperature=[0.0, 1.0]).rows(2, V)
    asked = request([[1, 2], [3]], 40, vocab=V, logprobs=True)._replace(sampling=hot)
    got = jax.tree.map(np.asarray, whole(config, WEIGHTS, asked, 128)._replace(key=None))
    greedy, free = (got.logprobs.sampled[row, got.start[row] : got.length[row]] for row in range(2))
    assert set(greedy.tolist()) <= {0.0, -np.inf}
    assert np.isfinite(free).all()
    texts = [got.tokens[0, : at + 1] for at in range(got.start[0], got.length[0])]
    first = [logits_after(text[:-1]).argmax() == text[-1] for text in texts]
    np.testing.assert_array_equal(greedy == 0, first)
    record = logprobs_record(Generation(0, 0, [1], [2, 3], None, sampled_logprobs=[-np.inf, -0.5]))
    assert json.dumps(record, allow_nan=False) == '{"sampled_logprobs": [null, -0.5]}'


@pytest.mark.slow
def test_the_sampled_law_of_one_token_is_an_entry_of_the_whole():
    """Each setting alone and all together, ties, banned tokens; a token that was drawn always counts as kept."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(8, 5, 40)).round(1) * 3, jnp.float32)
    bias = np.where(rng.random((8, 40)) < 0.1, -np.inf, 0.0)
    settings = Sampling(
        temperature=[0, 1, 0.7, 1, 1.3, 1, 0.5, 2], top_k=[0, 0, 5, 0, 0, 0, 9, 1],
        top_p=[1, 1, 1, 0.6, 1, 0.3, 0.9, 1], min_p=[0, 0, 0, 0, 0.2, 0, 0.05, 0], logit_bias=bias,
    ).rows(8, 40)  # fmt: skip
    changed = settings.processors[0].apply((), jnp.zeros((8, 5, 0), jnp.int32), logits)
    score = scores(changed, settings)
    wanted = np.asarray(log_law(score, settings))
    for token in range(40):
        tokens = jnp.full((8, 5), token)
        np.testing.assert_allclose(log_prob(score, tokens, settings, drawn=False), wanted[..., token], atol=1e-6)
    drawn = jnp.asarray(wanted.argmax(-1))
    np.testing.assert_allclose(log_prob(score, drawn, settings, drawn=True), wanted.max(-1), atol=1e-6)
    outside = jnp.asarray(np.where(wanted > -np.inf, np.inf, np.asarray(score)).argmin(-1))
    assert np.isfinite(np.asarray(log_prob(score, drawn * 0 + 3, settings, drawn=True))[3]).all()
    assert (np.asarray(log_prob(score, outside, settings, drawn=False))[3] == -np.inf).all()


@pytest.mark.parametrize("size", [7, 128, 129, 1000, 5000])
@pytest.mark.parametrize("count", [1, 5, 8])
def test_the_highest_are_those_of_top_k(size, count):
    """With many equal values and banned ones."""
    if count > size:
        return
    rng = np.random.default_rng(size)
    values = rng.integers(0, 30, (3, 4, size)).astype(np.float32)
    values[rng.random(values.shape) < 0.3] = -np.inf
    values[0, 0] = -np.inf
    for ours, theirs in zip(highest(jnp.asarray(values), count), jax.lax.top_k(values, count)):
        np.testing.assert_array_equal(ours, theirs)


def test_who_does_not_ask_has_none():
    """Nothing is compiled where the request has no field for it; nothing is written where no row asks."""
    config = Decoder(LM, NoDraft(), Coupled(), chunk=4, top_logprobs=2)
    silent = request([[1], [2]], 5, vocab=V)
    assert start(config, WEIGHTS, silent, 128).logprobs is None
    assert generate(config, WEIGHTS, silent, 128).logprobs is None
    got = generate(config, WEIGHTS, silent._replace(logprobs=jnp.full(2, False)), 128)
    assert all(not np.asarray(leaf).any() for leaf in got.logprobs)
    with pytest.raises(InvalidConfig, match="its first request had logprobs=None"):
        extend(V, config.drafter, start(config, WEIGHTS, silent, 128), silent._replace(logprobs=jnp.full(2, True)))


@pytest.mark.slow
def test_a_vmapped_request_records_its_own():
    config = Decoder(LM, ModelDraft(LM, chain(2)), Coupled(), chunk=4, top_logprobs=2)
    asked = request([[1], [2, 3], [4]], 8, vocab=V, temperature=1.0, logprobs=[True, False, True])
    batched = generate(config, WEIGHTS, asked, 128)
    mapped = jax.vmap(lambda one: generate(config, WEIGHTS, one, 128))(asked)
    for a, b in zip(batched.logprobs, mapped.logprobs):
        for row, (first, end) in enumerate(zip(np.asarray(batched.start), np.asarray(batched.length))):
            np.testing.assert_array_equal(a[row, first:end], b[row, first:end])


OPTIONS = {"drafter": "model", "draft": jaxspec.Model(LM, WEIGHTS.draft), "tree": dynamic(2, 3, 6)}
OPTIONS |= {"key": jax.random.key(1), "sampling": Sampling(temperature=[0.0, 0.8]), "max_new_tokens": 20}


@pytest.mark.parametrize("batch", with_slow([None, 1], (1,)))
def test_five_means_five(batch):
    got = jaxspec.generate(TARGET, [[1, 2], [3]], logprobs=5, batch=batch, **OPTIONS)
    plain = jaxspec.generate(TARGET, [[1, 2], [3]], logprobs=True, batch=batch, **OPTIONS)
    for row, other in zip(got, plain):
        assert row.tokens == other.tokens
        assert (row.logprobs, row.sampled_logprobs) == (other.logprobs, other.sampled_logprobs)
        assert other.top_logprobs is None
        assert len(row.top_logprobs) == len(row.logprobs) == len(row.sampled_logprobs) == 20
        for token, value, top in zip(row.tokens, row.logprobs, row.top_logprobs):
            assert len(top) == 5
            assert [v for _, v in top] == sorted((v for _, v in top), reverse=True)
            assert dict(top).get(token, value) == pytest.approx(value, abs=1e-6)
            assert type(top[0][0]) is int
    greedy = got[0]
    assert greedy.sampled_logprobs == [0.0] * 20
    assert [top[0][0] for top in greedy.top_logprobs] == greedy.tokens
    silent = jaxspec.generate(TARGET, [[1, 2], [3]], batch=batch, **OPTIONS)
    assert {(row.logprobs, row.sampled_logprobs, row.top_logprobs) for row in silent} == {(None, None, None)}


def test_a_session_may_begin_to_ask():
    first = jaxspec.generate(TARGET, [[1, 2], [3]], **OPTIONS)
    more = jaxspec.generate(TARGET, [[4], [5]], session=first.session, logprobs=3, **OPTIONS)
    for row, before in zip(more, first):
        text = [*before.prompt_tokens, *before.tokens, *row.prompt_tokens]
        for token, value in zip(row.tokens, row.logprobs):
            assert value == pytest.approx(log_softmax(logits_after(text))[token], abs=1e-5)
            text.append(token)


def test_what_logprobs_may_be():
    assert [check_logprobs(value) for value in (False, True, 0, 7, np.int8(3), np.True_)] == [None, 0, 0, 7, 3, 0]
    refused: list[Any] = [-1, 2.0, "5", None, [1], 2**63, sizes.MAX_LOGPROBS + 1, np.asarray([1, 2])]
    for wrong in refused:
        with pytest.raises(InvalidConfig, match="logprobs must be True, False, or the number") as caught:
            jaxspec.generate(TARGET, [[1]], logprobs=wrong, max_new_tokens=2)
        assert "\n" not in str(caught.value)
    with pytest.raises(InvalidConfig, match=r"logprobs=25 is too many: .* has only 24 tokens"):
        jaxspec.generate(TARGET, [[1]], logprobs=25, max_new_tokens=2)
    assert [sizes.round_top_logprobs(n, 49152) for n in (0, 1, 8, 9, 20)] == [8, 8, 8, 16, 32]
    assert sizes.round_top_logprobs(2, 4) == 4
