"""Tests of the processors that generation_config.json sets."""

import jax
import numpy as np
import pytest

import jaxspec
from helpers.checkpoints import random_params, tiny_config, write_hf
from jaxspec.checkpoints.defaults import default_processors
from jaxspec.errors import CheckpointError

pytestmark = pytest.mark.quick

SETTINGS = {
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[3], [1, 4]],
    "min_new_tokens": 6,
    "suppress_tokens": [5, 7],
    "temperature": 0.7,
    "do_sample": True,
    "top_p": 0.8,
    "forced_eos_token_id": 2,
}
SAME = [
    jaxspec.RepetitionPenalty(1.3), jaxspec.NoRepeatNgram(2), jaxspec.BadWords([[3], [1, 4]]), jaxspec.MinNewTokens(6),
    jaxspec.SuppressTokens([5, 7]),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    files = {"generation_config.json": SETTINGS}
    return write_hf(tmp_path_factory.mktemp("model"), tiny_config(), random_params(tiny_config()), files=files)


def test_the_settings_are_read_used_said_and_can_be_turned_off(folder):
    said: list[str] = []
    model = jaxspec.load(folder, report=said.append, kernels=False)
    plain = jaxspec.load(folder, report=said.append, kernels=False, generation_config=False)
    assert model.processors == tuple(SAME)
    assert plain.processors == ()
    (line,) = said
    assert all(name in line for name in SETTINGS if name not in ("temperature", "do_sample", "top_p"))
    assert "repetition_penalty 1.3" in line
    assert "forced_eos_token_id: not used" in line
    assert "RepetitionPenalty" in repr(model)

    def say(model, processors=(), bias=None):
        sampling = jaxspec.Sampling(0.8, processors=processors, logit_bias=bias)
        options = {"key": jax.random.key(0), "max_new_tokens": 12, "drafter": "none", "ignore_eos": True}
        rows = jaxspec.generate(model, [[6, 8, 9], [4]], sampling=sampling, verbose=False, **options)
        return [row.tokens for row in rows]

    bias = np.linspace(-1, 1, model.lm.vocab)
    assert say(model, bias=bias) == say(plain, SAME, bias) != say(plain, (), bias)
    others = [jaxspec.RepetitionPenalty(0.4), *SAME[1:]]
    assert say(model, [jaxspec.RepetitionPenalty(0.4)]) == say(plain, others)


@pytest.mark.parametrize(
    "setting",
    [
        {"repetition_penalty": 0},
        {"repetition_penalty": "1.1"},
        {"no_repeat_ngram_size": -1},
        {"bad_words_ids": [[99]]},
        {"bad_words_ids": 3},
        {"min_new_tokens": 1.5},
        {"suppress_tokens": [-1]},
        {"suppress_tokens": "all"},
    ],
)
def test_a_malformed_setting_is_refused_by_its_name(setting):
    with pytest.raises(CheckpointError, match=f"model: {next(iter(setting))} of generation_config.json"):
        default_processors("model", setting, 16)


def test_settings_that_change_nothing_are_not_said():
    off = {
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "bad_words_ids": None,
        "min_new_tokens": 0,
        "suppress_tokens": [],
        "forced_eos_token_id": None,
        "max_length": 20,
    }
    assert default_processors("model", off, 16) == default_processors("model", {}, 16) == ((), None)
