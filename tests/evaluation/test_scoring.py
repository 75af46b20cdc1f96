"""Log-likelihoods of given texts, against the log-softmax of every position computed alone."""

import jax
import numpy as np
import pytest

import jaxspec
from helpers.toys import lively, log_softmax, transformer
from jaxspec.errors import InvalidConfig, TokenOutOfRange
from jaxspec.evaluation import scoring
from jaxspec.evaluation.scoring import Continuation, score

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def target() -> jaxspec.Model:
    lm = transformer()
    return jaxspec.Model(lm, lively(lm.init_params(jax.random.key(3))))


def random_continuations(vocab: int) -> list[Continuation]:
    rng = np.random.default_rng(0)
    lengths, starts = [2, 9, 65, 66, 90, 5, 70], [1, 4, 1, 60, 89, 5, 30]
    return [
        Continuation(rng.integers(vocab, size=length).tolist(), start)
        for length, start in zip(lengths, starts, strict=True)
    ]


def by_hand(target: jaxspec.Model, continuation: Continuation) -> float:
    tokens, start = continuation
    output = 0.0
    for end in range(start, len(tokens)):
        (row,) = jaxspec.generate(target, [tokens[:end]], max_new_tokens=1, ignore_eos=True, logprobs=target.lm.vocab)
        assert row.top_logprobs is not None
        output += dict(row.top_logprobs[0])[tokens[end]]
    return output


def test_a_score_is_the_sum_of_the_log_probabilities_of_decoding(target):
    continuations = random_continuations(target.lm.vocab)[:2]
    for result, continuation in zip(score(target, continuations), continuations, strict=True):
        assert result.logprob == pytest.approx(by_hand(target, continuation), abs=1e-4, rel=1e-6)


def test_log_probabilities_are_added_in_float64(target, monkeypatch):
    """The sum of this text is no number of float32."""
    logprobs = np.array([[-(2.0**24), *[-1.0] * 9]], np.float32)
    monkeypatch.setattr(scoring, "_score", lambda *given: (logprobs, np.array([False])))
    (result,) = score(target, [Continuation([1, 2, 3], 1)])
    assert result.logprob == -(2.0**24) - 9


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_scores_do_not_depend_on_the_batch(target, batch):
    continuations = random_continuations(target.lm.vocab)
    alone = [score(target, [each])[0] for each in continuations]
    for result, expected in zip(score(target, continuations, batch), alone, strict=True):
        assert result.greedy == expected.greedy
        assert result.logprob == pytest.approx(expected.logprob, abs=1e-4, rel=1e-6)
    assert alone[5] == (0.0, True)  # nothing to score


def test_the_text_of_greedy_decoding_is_greedy_and_another_is_not(target):
    prompt = [3, 1, 4]
    (row,) = jaxspec.generate(target, [prompt], max_new_tokens=80, ignore_eos=True, logprobs=True)
    text = [*prompt, *row.tokens]
    other = [*text[:-1], (text[-1] + 1) % target.lm.vocab]
    greedy, changed = score(target, [Continuation(text, 3), Continuation(other, 3)])
    assert greedy.greedy
    assert not changed.greedy
    assert row.logprobs is not None
    assert greedy.logprob == pytest.approx(sum(row.logprobs), abs=1e-3)


def test_a_text_is_scored_in_chunks_of_positions(target, monkeypatch):
    continuations = random_continuations(target.lm.vocab)
    expected = score(target, continuations)
    monkeypatch.setattr(scoring, "POSITIONS_AT_ONCE", 16)
    jax.clear_caches()
    for result, before in zip(score(target, continuations), expected, strict=True):
        assert result.logprob == pytest.approx(before.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("continuation", "error", "message"),
    [
        (Continuation([1, 2], 0), InvalidConfig, "starts at token 0 of 2; at least one token must precede it"),
        (Continuation([1, 2], 3), InvalidConfig, "starts at token 3 of 2"),
        (Continuation([1, 10**6], 1), TokenOutOfRange, "continuation 0 has token 1000000; ids go from 0 to"),
        (Continuation([1] * 100_000, 1), InvalidConfig, "continuation 0 has 100000 tokens; the model reads"),
    ],
)
def test_a_continuation_that_cannot_be_scored_is_refused(target, continuation, error, message):
    with pytest.raises(error, match=message):
        score(target, [continuation])


def test_the_arithmetic_is_a_log_softmax(target):
    tokens = random_continuations(target.lm.vocab)[2].tokens
    (result,) = score(target, [Continuation(tokens, 64)])
    (row,) = jaxspec.generate(target, [tokens[:64]], max_new_tokens=1, ignore_eos=True, logprobs=target.lm.vocab)
    assert row.top_logprobs is not None
    every = np.array([value for _, value in sorted(row.top_logprobs[0])])
    assert result.logprob == pytest.approx(log_softmax(every)[tokens[64]], abs=1e-4)
