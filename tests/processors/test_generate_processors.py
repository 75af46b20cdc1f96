"""Tests of processors through the public functions: batches, streams, results files, rollouts, and the command line."""

import argparse
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.cli.options import parse_processor
from jaxspec.core.processor import keep_last, last_tokens, place
from jaxspec.errors import InvalidConfig
from jaxspec.testing import TableLM

pytestmark = pytest.mark.quick

V = 24
LM = TableLM(V)
MODEL = jaxspec.Model(LM, LM.init_params(jax.random.key(0)), stop_ids=(5,))
PROMPTS = [[3, 1, 4, 1], [2], [9, 2]]
PROCESSORS = [
    jaxspec.RepetitionPenalty(np.array([1.6, 1.0, 1.3])),
    jaxspec.FrequencyPenalty(0.4),
    jaxspec.NoRepeatNgram(np.array([2, 0, 3])),
    jaxspec.MinNewTokens(np.array([0, 12, 20])),
]


def say(prompts, sampling, **more) -> list[list[int]]:
    """The new tokens of every row."""
    options = {"key": jax.random.key(3), "max_new_tokens": 20, "verbose": False}
    return [row.tokens for row in jaxspec.generate(MODEL, prompts, sampling=sampling, **options | more)]


def of_row(row: int) -> list:
    """The processors of one row."""
    own = [jax.tree.map(lambda leaf: np.asarray(leaf)[row] if np.ndim(leaf) else leaf, one) for one in PROCESSORS]
    return [dataclasses.replace(one, **({"longest": 0} if hasattr(one, "longest") else {})) for one in own]


@pytest.fixture(scope="module")
def plain():
    return say(PROMPTS, jaxspec.Sampling([1.0, 0.7, 0.0], processors=PROCESSORS), drafter="none")


def test_rows_have_processors_of_their_own(plain):
    sampling = jaxspec.Sampling([1.0, 0.7, 0.0], processors=PROCESSORS)
    assert say(PROMPTS, sampling) == plain  # prompt lookup
    assert say(PROMPTS, sampling, batch=2) == plain  # rows take the places of other rows
    greedy = jaxspec.Sampling(0.0, processors=of_row(2))
    assert say(PROMPTS[2:], greedy) == plain[2:]
    assert say(PROMPTS, jaxspec.Sampling([1.0, 0.7, 0.0])) != plain
    assert len(plain[2]) == 20
    assert 5 not in plain[1][:12]


def test_a_file_of_results_is_for_the_same_processors(tmp_path, plain):
    file = tmp_path / "results.jsonl"
    sampling = jaxspec.Sampling([1.0, 0.7, 0.0], processors=PROCESSORS)
    assert say(PROMPTS, sampling, out=file) == say(PROMPTS, sampling, out=file) == plain
    for other in (PROCESSORS[:3], [jaxspec.RepetitionPenalty(1.5), *PROCESSORS[1:]], ()):
        with pytest.raises(InvalidConfig, match="sampling"):
            say(PROMPTS, dataclasses.replace(sampling, processors=other), out=file)


def test_rollouts_draw_the_processed_law_and_know_its_log_probabilities():
    tokens, count = jnp.array([[3, 1, 4, 1], [2, 7, 7, 7], [9, 2, 7, 7]]), jnp.array([4, 1, 2])
    sampling = jaxspec.Sampling(1.0, processors=PROCESSORS)
    options = {"key": jax.random.key(1), "max_new_tokens": 16, "sampling": sampling}
    drafted, plain = (
        jax.jit(lambda d=d: jaxspec.rollout(MODEL, tokens, count, **options, drafting=d))()
        for d in (jaxspec.Drafting("prompt-lookup", tree=3), jaxspec.Drafting("none"))
    )
    np.testing.assert_array_equal(drafted.new_tokens, plain.new_tokens)
    again = jaxspec.log_probs(MODEL, drafted)
    np.testing.assert_allclose(again.sampled, drafted.logprobs.sampled, atol=1e-5)
    without = drafted._replace(sampling=dataclasses.replace(drafted.sampling, processors=()))
    assert np.abs(np.asarray(jaxspec.log_probs(MODEL, without).sampled - again.sampled)).max() > 0.1
    np.testing.assert_allclose(jaxspec.log_probs(MODEL, without).raw, again.raw, atol=1e-6)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoStutter:
    """The processor of the page: no token after itself."""

    def rows(self, batch, vocab):
        return self

    def init(self, beginning):
        return jnp.full((len(beginning.stop_ids), 1), -1, jnp.int32)

    def absorb(self, state, tokens, count, start):
        return keep_last(state, tokens, count)

    def apply(self, state, path, logits):
        return place(logits, last_tokens(state, path), -jnp.inf)


def test_a_processor_of_another_package_is_used():
    sampling = jaxspec.Sampling(0.0, processors=[NoStutter(), jaxspec.PresencePenalty(-9.0)])
    drafted, plain = say(PROMPTS, sampling), say(PROMPTS, sampling, drafter="none")
    assert drafted == plain
    repeats = [a == b for row in plain for a, b in itertools.pairwise(row)]
    assert not any(repeats)
    assert any(a == b for row in plain for a, b in zip(row, row[2:]))


def test_the_command_line_names_processors():
    assert parse_processor("repetition=1.1") == jaxspec.RepetitionPenalty(1.1)
    assert parse_processor("bad-words=[[1, 2], [3]]") == jaxspec.BadWords([[1, 2], [3]])
    for text, words in (
        ("repetition", "expected NAME=VALUE"),
        ("repetition=much", "expected NAME=VALUE"),
        ("repetition=0", "the strength of RepetitionPenalty must be finite and above 0"),
        ("repetion=1.1", "Did you mean 'repetition'"),
        ("min-new-tokens=1.5", "must be a whole number from 0"),
        ("bad-words=[1]", "must be lists of token ids"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=words):
            parse_processor(text)
