"""Tests the watermark: its law, its noise, texts with drafts, and what the detector says of texts with and without."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxspec
from helpers.checkpoints import random_params, tiny_config, write_bytes
from helpers.tiers import with_slow
from helpers.toys import RAGGED, decoder, noisy, request, start, texts
from helpers.toys import run as decode
from jaxspec.analysis.watermark import Detection, detect_watermark
from jaxspec.core import threefry
from jaxspec.core.processor import Beginning, read_text
from jaxspec.core.records import Status
from jaxspec.core.sampling import Sampling
from jaxspec.core.secret import secret_words
from jaxspec.core.topology import chain
from jaxspec.decode.state import Weights
from jaxspec.drafters.model import ModelDraft
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.errors import InvalidConfig
from jaxspec.processors.masks import SuppressTokens
from jaxspec.processors.watermark import Watermark
from jaxspec.testing import TableLM, check_processor

pytestmark = pytest.mark.quick

V = 32
LM = TableLM(V, order=1)
PARAMS = LM.init_params(jax.random.key(0))
PROMPTS = [[1, 2, 3, 4, 1, 2], [5, 6], [7, 8, 9, 7, 8, 9, 7]]


def after(mark: Watermark, rows: list[list[int]], prompts: list[int], logits) -> np.ndarray:
    """The changed logits after texts of at most 8 tokens, of which the first tokens are prompts."""
    tokens = np.zeros((len(rows), 8), np.int32)
    for row, text in zip(tokens, rows):
        row[: len(text)] = text
    one = mark.rows(len(rows), logits.shape[-1])
    return np.asarray(_after(one, tokens, np.asarray([len(row) for row in rows]), np.asarray(prompts), logits))


@jax.jit
def _after(one, tokens, lengths, prompts, logits):
    beginning = Beginning(logits.shape[-1], 8, jnp.full((len(tokens), 1), -1))
    states = read_text([one], beginning, tokens, lengths, prompts)
    return one.apply(states[0], jnp.zeros((len(tokens), 1, 0), jnp.int32), logits)[:, 0]


def test_tokens_of_drafted_paths_count_as_text():
    check_processor(Watermark(7, context=1))


@pytest.mark.parametrize(
    "law", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7}, {"temperature": 1.5, "min_p": 0.1}]
)
def test_over_secrets_a_token_follows_the_law(law):
    """A G-test at a level of 1e-6 with 20,000 secrets; a token of probability 0 is never drawn."""
    count, size = 20_000, 6
    logits = np.random.default_rng(0).normal(size=size)
    mark = Watermark(list(range(count)), **law)
    drawn = after(mark, [[1, 2, 3, 4]] * count, [2] * count, jnp.tile(jnp.asarray(logits, jnp.float32), (count, 1, 1)))
    found = np.bincount(drawn.argmax(-1), minlength=size)
    weights = np.exp(logits / law.get("temperature", 1.0))
    order = np.argsort(-weights)
    if "top_k" in law:
        weights[order[law["top_k"] :]] = 0
    probs = weights / weights.sum()
    if "top_p" in law:
        probs[order[1:][np.cumsum(probs[order])[:-1] >= law["top_p"]]] = 0
    if "min_p" in law:
        probs[probs < law["min_p"] * probs.max()] = 0
    probs /= probs.sum()
    kept = probs > 0
    assert found[~kept].sum() == 0
    assert stats.power_divergence(found[kept], count * probs[kept], lambda_="log-likelihood").pvalue > 1e-6


def test_the_noise_is_of_the_secret_the_last_tokens_and_how_often_they_stood_there():
    flat = jnp.zeros((1, 1, V))

    def noise(text: list[int], prompt: int = 0, secret: int = 3) -> bytes:
        return after(Watermark(secret, context=2), [text], [prompt], flat).tobytes()

    first = noise([9, 9, 1, 2])
    assert noise([5, 1, 2]) == first  # tokens before the context change nothing
    assert noise([9, 9, 2, 1]) != first
    assert noise([9, 9, 1, 2], secret=4) != first
    again, third = noise([1, 2, 7, 1, 2]), noise([1, 2, 7, 1, 2, 7, 1, 2])
    assert len({first, again, third}) == 3
    assert noise([1, 2, 7, 1, 2], prompt=3) == first  # the token 7 belongs to the prompt
    assert noise([1, 2, 7, 1, 2], prompt=2) == again


def test_entries_of_noise_are_those_of_all_noise():
    keys = jax.random.key_data(jax.random.split(jax.random.key(3), 4))
    whole = threefry.gumbel(keys, 100)
    at = jnp.asarray([[0, 99, 7]] * 4)
    np.testing.assert_array_equal(threefry.gumbel_at(keys, at, 100), whole[:, jnp.asarray([0, 99, 7])])


@pytest.mark.parametrize(
    "drafter",
    with_slow(
        [ModelDraft(LM, RAGGED), PromptLookup(chain(4)), ModelDraft(LM, chain(5))],
        {ModelDraft(LM, chain(5))},
    ),
)
def test_drafts_change_no_text_and_a_right_draft_model_is_accepted(drafter):
    processors = [SuppressTokens([5]), Watermark([1, 2, 3], temperature=[0.9, 1.3, 0.0])]
    asked = request(PROMPTS, 24, vocab=V, processors=processors)
    plain = decoder(LM, NoDraft())
    expected = texts(decode(plain, Weights(PARAMS), start(plain, Weights(PARAMS), asked, 64)))
    for draft in (PARAMS, noisy(PARAMS, 1, 0.5)):
        own, weights = decoder(LM, drafter), Weights(PARAMS, draft if isinstance(drafter, ModelDraft) else None)
        state = decode(own, weights, start(own, weights, asked, 64))
        assert texts(state) == expected
        assert (np.asarray(state.status) == Status.LENGTH).all()
        if isinstance(drafter, ModelDraft) and draft is PARAMS:
            # The draft model draws with the same noise, so that every draft is right.
            depth = drafter.shape.depth
            assert np.asarray(state.round).tolist() == [-(-24 // (depth + 1))] * 3


def marked(tokens: int, secret: int, context: int = 4) -> list[int]:
    """A text with the watermark, of a law of which each token has a few bits."""
    mark, text = Watermark(secret, context=context), [1, 2, 3, 4]
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(1, 1, V)), jnp.float32)
    one = mark.rows(1, V)
    state = one.init(Beginning(V, tokens + 8, jnp.full((1, 1), -1)))
    absorb, apply = jax.jit(one.absorb), jax.jit(one.apply)
    state = absorb(state, jnp.asarray([text]), jnp.asarray([4]), jnp.asarray([4]))
    for _ in range(tokens):
        token = int(apply(state, jnp.zeros((1, 1, 0), jnp.int32), logits).argmax())
        text.append(token)
        state = absorb(state, jnp.asarray([[token]]), jnp.asarray([1]), jnp.asarray([0]))
    return text[4:]


def test_a_text_is_recognised_by_its_own_secret_also_in_part():
    text = marked(200, 11)
    found = detect_watermark(text, 11, V)
    assert found.tokens == 196
    assert found.p_value < 1e-30
    assert detect_watermark(text[50:120], 11, V).p_value < 1e-6
    edited = [token if i % 10 else (token + 1) % V for i, token in enumerate(text)]
    assert detect_watermark(edited, 11, V).p_value < 1e-4
    assert detect_watermark(text, 12, V).p_value > 1e-4
    assert detect_watermark(text, 11, V, context=3).p_value > 1e-4


def test_repeated_tokens_are_evidence_each_time():
    """In a text of one token, every place has noise of its own."""
    assert detect_watermark([3] * 40, 5, V).p_value > 1e-4
    assert detect_watermark([3] * 40, 5, V) == detect_watermark([3] * 40, 5, V)


def test_p_values_of_other_texts_are_uniform():
    """By a Kolmogorov-Smirnov test at a level of 1e-4, for texts of 3 to 60 tokens, of which many repeat."""
    rng = np.random.default_rng(5)
    found = [
        detect_watermark(rng.integers(0, 6, rng.integers(7, 64)).tolist(), int(secret), V, context=2).p_value
        for secret in rng.integers(0, 2**63, 400)
    ]
    assert stats.kstest(found, "uniform").pvalue > 1e-4


def test_a_text_without_enough_tokens_says_nothing():
    assert detect_watermark([1, 2, 3, 4], 0, V) == Detection(0, 0.0, 1.0)
    assert detect_watermark([], 0, V) == Detection(0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"secret": -1}, r"the secret of a watermark must be a whole number from 0 to 2\^64 - 1, got -1"),
        ({"secret": 2**64}, "the secret of a watermark must be a whole number"),
        ({"secret": "x"}, "the secret of a watermark must be a whole number"),
        ({"secret": [1, 2, 3]}, "one for each of the 2 rows; got 3"),
        ({"secret": 1, "context": 0}, "the context of Watermark must be a whole number from 1 to 16"),
        ({"secret": 1, "temperature": -1.0}, "temperature must be finite and at least 0"),
        ({"secret": 1, "top_p": 0.0}, "top_p must be above 0"),
    ],
)
def test_wrong_settings_are_refused(settings, said):
    with pytest.raises(InvalidConfig, match=said):
        Watermark(**settings).rows(2, V)


def test_it_draws_alone_and_last():
    mark = Watermark(1)
    with pytest.raises(InvalidConfig, match="Watermark draws the token, so it must be the last of the processors"):
        Sampling(processors=[mark, SuppressTokens([1])])
    with pytest.raises(InvalidConfig, match="temperature must be 0 with Watermark, which draws the tokens; pass"):
        Sampling(temperature=0.5, processors=[mark]).rows(2, V)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [("text", "tokens must be a list"), ([V], "a token id is 32; ids go from 0 to 31"), ([0.5], "a token id is 0.5")],
)
def test_the_detector_refuses_what_are_no_tokens(tokens, said):
    with pytest.raises(InvalidConfig, match=said):
        detect_watermark(tokens, 1, V)


def test_secrets_may_be_an_array():
    rows = Watermark(np.asarray([3, 2**63 + 1], np.uint64)).rows(2, V)
    np.testing.assert_array_equal(rows.secret, [secret_words(3), secret_words(2**63 + 1)])
    np.testing.assert_array_equal(Watermark(np.uint64(5)).rows(2, V).secret, [secret_words(5)] * 2)
    with pytest.raises(InvalidConfig, match="one for each of the 2 rows; got 3"):
        Watermark(np.arange(3)).rows(2, V)


def test_secrets_have_64_bits():
    assert secret_words(2**64 - 1) == (2**32 - 1, 2**32 - 1)
    assert secret_words(2**32 + 5) == (1, 5)


def test_the_command_reads_what_generate_wrote(tmp_path, capsys):
    config = tiny_config(vocab_size=259)
    model = write_bytes(tmp_path / "model", config, random_params(config))
    target = jaxspec.load(model)
    assert target.tokenizer is not None
    letters = jaxspec.AllowedTokens(target.tokenizer.encode("abcdefghijklmnopqrstuvwxyz ", False, False))
    sampling = jaxspec.Sampling(processors=[letters, jaxspec.Watermark(99)])
    options = {"sampling": sampling, "drafter": "none", "max_new_tokens": 60, "ignore_eos": True, "verbose": False}
    (output,) = jaxspec.generate(target, ["A text"], **options)
    expected = detect_watermark(output.tokens, 99, 259)
    assert expected.p_value < 1e-9
    file = tmp_path / "a.txt"
    file.write_bytes(output.text.encode())
    from jaxspec.cli import main

    assert main(["detect", str(file), "--target", str(model), "--secret", "99", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"text": str(file), **dataclasses.asdict(expected)}
    assert main(["detect", str(tmp_path / "none.txt"), "--target", str(model), "--secret", "99"]) == 1
    assert "none.txt: cannot be read" in capsys.readouterr().err
    assert main(["detect", str(file), "--secret", "-1"]) == 2
