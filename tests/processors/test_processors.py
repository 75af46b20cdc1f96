"""Tests of processors: the text is that of a decoder written in NumPy, with any drafter, tree, batch and session."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import WEIGHING
from helpers.tiers import with_slow
from helpers.toy_drafters import require_equal, toy_drafters
from helpers.toys import (
    all_noise,
    by_hand,
    decoder,
    extend,
    generate,
    noisy,
    random_request,
    run,
    start,
    texts,
    truncate,
)
from helpers.toys import request as make_request
from jaxspec.core.processor import Beginning, process, process_text, read_text
from jaxspec.core.records import Status
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import branching, chain
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Weights
from jaxspec.drafters.model import ModelDraft
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.errors import JaxspecError
from jaxspec.processors.minimum import MinNewTokens
from jaxspec.processors.penalties import FrequencyPenalty, PresencePenalty, RepetitionPenalty
from jaxspec.processors.words import BadWords, NoRepeatNgram
from jaxspec.rules.coupled import Coupled
from jaxspec.testing import TableLM

pytestmark = pytest.mark.quick

V, BATCH = 12, 48
LM = TableLM(V)
PARAMS = LM.init_params(jax.random.key(0))
WORDS = [[3], [1, 2], [4, 4, 5], [0, 1, 2, 3]]
DRAFTERS = toy_drafters(LM, PARAMS)


def some_processors(seed: int, batch: int) -> list[Any]:
    """One processor of each kind, with another setting for every row; some of them change nothing."""
    rng = np.random.default_rng(seed)

    def some(values, off):
        return np.where(rng.random(batch) < 0.6, values, off)

    return [
        RepetitionPenalty(some(rng.uniform(0.5, 2.0, batch), 1.0)),
        PresencePenalty(some(rng.normal(0, 1, batch), 0.0)),
        FrequencyPenalty(some(rng.normal(0, 0.5, batch), 0.0)),
        NoRepeatNgram(some(rng.integers(1, 4, batch), 0)),
        BadWords(WORDS),
        MinNewTokens(some(rng.integers(0, 12, batch), 0)),
    ]


def changed(processors: list[Any], row: int, prompt: int, stops: set[int]):
    """What processors do to the logits of a row, token by token in NumPy."""
    repetition, presence, frequency, ngram, _, least = processors
    strengths = [np.float32(one.strength[row]) for one in (repetition, presence, frequency)]
    size, minimum = int(ngram.size[row]), int(least.number[row])

    def change(logits, text):
        logits, new = np.array(logits, np.float32), text[prompt:]
        for token in set(text):
            logits[token] *= strengths[0] if logits[token] <= 0 else 1 / strengths[0]
        for token in set(new):
            logits[token] = logits[token] - strengths[1]
        for token in set(new):
            logits[token] = logits[token] - strengths[2] * np.float32(new.count(token))
        for i in range(len(text) - size + 1 if size else 0):
            if text[i : i + size - 1] == text[len(text) - size + 1 :]:
                logits[text[i + size - 1]] = -np.inf
        for *before, last in WORDS:
            if text[len(text) - len(before) :] == before:
                logits[last] = -np.inf
        if len(new) < minimum:
            logits[[token for token in stops if token >= 0]] = -np.inf
        return logits

    return change


def asked(seed: int, batch: int = BATCH):
    """A random request whose rows have processors."""
    made = random_request(seed, batch, V)
    processors = some_processors(seed, batch)
    sampling = dataclasses.replace(made.sampling, processors=[*made.sampling.processors, *processors]).rows(batch, V)
    return made._replace(sampling=sampling, logprobs=jnp.ones(batch, bool)), processors


@pytest.fixture(scope="module")
def plain():
    return generate(decoder(LM, NoDraft()), Weights(PARAMS), asked(0)[0], 128)


def test_plain_decoding_is_that_of_numpy(plain):
    request, processors = asked(0)
    noise, table = np.asarray(all_noise(request.key, 48, V)), np.asarray(PARAMS["table"])
    ended = 0
    for row, got in enumerate(texts(plain)):
        if plain.status[row] == Status.ERROR:  # every token was forbidden
            ended += 1
            continue
        stops = set(np.asarray(request.stop_ids)[row].tolist())
        change = changed(processors, row, int(request.count[row]), stops)
        assert got == by_hand(table, request, noise, row, change), row
    assert ended < BATCH / 4
    bias = request.sampling.processors[:1]
    without = request._replace(sampling=dataclasses.replace(request.sampling, processors=bias))
    others = texts(generate(decoder(LM, NoDraft()), Weights(PARAMS), without, 128))
    assert sum(a != b for a, b in zip(texts(plain), others)) > BATCH / 2


@pytest.mark.parametrize("name", with_slow(DRAFTERS, DRAFTERS.keys() - {"model-dynamic"}))
def test_drafts_change_neither_texts_nor_log_probabilities(name, plain):
    drafter, options, draft = DRAFTERS[name]
    got = generate(decoder(LM, drafter, **options), Weights(PARAMS, draft), asked(0)[0], 128)
    require_equal(got, plain, drafts=name != "none")


def test_a_later_turn_and_a_shortened_text_are_read_as_new_prompts():
    """The text of a turn is that of one prompt with everything before it, whatever was cut off."""
    config, weights = decoder(LM, PromptLookup(chain(3), min_match=1)), Weights(PARAMS)
    rows, batch = [[1, 2, 3], [4, 5], [6, 7, 8, 9]], 3
    settings = {"temperature": [0.0, 1.0, 0.7], "processors": some_processors(3, batch)[:4]}
    state = run(config, weights, start(config, weights, make_request(rows, 8, vocab=V, **settings), 128))
    cut = truncate(config, weights, state, jnp.asarray([len(row) + 4 for row in rows], jnp.int32))
    before = [text[: len(row) + 4] for text, row in zip(texts(state), rows)]
    turn = [[5, 1], [2], [3, 3]]
    state = run(config, weights, extend(config, weights, cut, make_request(turn, 9, vocab=V, **settings)))
    whole = make_request([a + b for a, b in zip(before, turn)], 9, vocab=V, **settings)
    alone = generate(config, weights, whole._replace(key=state.key), 128)
    assert texts(state) == texts(alone)


def test_a_text_is_processed_as_a_whole_as_it_is_token_by_token():
    rng = np.random.default_rng(0)
    batch, prompt, new = 5, 7, 20
    tokens = jnp.asarray(rng.integers(0, V, (batch, prompt + new)), jnp.int32)
    logits = jnp.asarray(rng.normal(size=(batch, new, V)), jnp.float32)
    processors = tuple(one.rows(batch, V) for one in some_processors(1, batch))
    beginning = Beginning(V, 64, jnp.asarray(rng.integers(-1, V, (batch, 2)), jnp.int32))
    start = jnp.full(batch, prompt, jnp.int32)

    @jax.jit
    def after(length: jax.Array, path: jax.Array, nodes: jax.Array):
        """The logits of the last token of a path, after a text without it."""
        read = jnp.full(batch, length - path, jnp.int32)
        states = read_text(processors, beginning, tokens, read, jnp.minimum(start, read))
        within = tokens[:, jnp.minimum(length - path + jnp.arange(6), tokens.shape[1] - 1)]
        padded = jnp.where(jnp.arange(6) < path, within, -1)
        return process(processors, states, padded[:, None], nodes[:, None])[:, 0]

    states = read_text(processors, beginning, tokens, start, start)
    whole = process_text(processors, states, tokens[:, prompt:], logits)
    for i in range(new):
        for path in (0, 1, min(i, 4)):
            np.testing.assert_array_equal(after(prompt + i, min(path, i), logits[:, i]), whole[:, i])


def test_bad_settings_are_refused_before_anything_compiles():
    for processors, words in (
        ("repetition", "processors must be a list"),
        ([RepetitionPenalty], "processors must be a list"),
        ([1.1], "processors must be a list"),
        ([RepetitionPenalty(0.0)], "the strength of RepetitionPenalty must be finite and above 0, got 0.0"),
        ([RepetitionPenalty([1.0, np.nan])], "the strength of RepetitionPenalty must be finite and above 0"),
        ([PresencePenalty([1.0, 2.0, 3.0])], "one for each of the 2 rows; got shape"),
        ([FrequencyPenalty(np.inf)], "the strength of FrequencyPenalty must be finite"),
        ([NoRepeatNgram(-1)], "the size of NoRepeatNgram must be a whole number from 0"),
        ([NoRepeatNgram(2.0)], "the size of NoRepeatNgram must be a whole number from 0"),
        ([MinNewTokens(-1)], "the number of MinNewTokens must be a whole number from 0"),
        ([BadWords([])], "BadWords needs at least one list of token ids"),
        ([BadWords([[]])], "a word of BadWords has no tokens"),
        ([BadWords("no")], "the words of BadWords must be lists of token ids"),
        ([BadWords(["no"])], "the words of BadWords must be lists of token ids"),
        ([BadWords([[V]])], f"BadWords has a token id {V}; ids go from 0 to {V - 1}"),
    ):
        with pytest.raises(JaxspecError, match=re.escape(words)):
            Sampling(processors=processors).rows(2, V)


def test_every_token_forbidden_ends_a_row_with_an_error_alone():
    asked = make_request([[1], [2]], 5, vocab=V, processors=[NoRepeatNgram([1, 0])])
    result = generate(decoder(LM, NoDraft()), Weights(PARAMS), asked._replace(new_tokens=jnp.full(2, 20)), 128)
    assert result.status.tolist() == [Status.ERROR, Status.LENGTH]
    assert (result.length - result.start).tolist() == [V - 1, 20]
    assert sorted(texts(result)[0]) == list(range(V))


@pytest.mark.parametrize("name", with_slow(WEIGHING, set(WEIGHING)))
def test_rules_that_weigh_laws_keep_the_processed_law(name):
    """Texts of three tokens, drafted and plain, of 4,096 rows each: a chi-squared test of two samples, at 4 sigma."""
    if not WEIGHING[name].lossless:
        pytest.skip("a lossy rule keeps no law")
    rows, tree = 4096, chain(2) if name == "block" else branching(2, 1)
    processors = [RepetitionPenalty(1.5), NoRepeatNgram(2), BadWords(WORDS)]
    asked = make_request([[1, 2, 4, 1, 2]] * rows, 3, vocab=V, seed=7, temperature=1.0, processors=processors)
    weights = Weights(PARAMS, noisy(PARAMS, 1, 0.3))
    counts = []
    for rule, drafter in ((Coupled(), NoDraft()), (WEIGHING[name], ModelDraft(LM, tree))):
        result = generate(Decoder(LM, drafter, rule, chunk=4), weights, asked, 64)
        new = np.asarray(result.tokens)[np.arange(rows)[:, None], 5 + np.arange(3)]
        counts.append(np.bincount(new @ [V * V, V, 1], minlength=V**3))
    plain, drafted = counts
    both = plain + drafted
    statistic = (((plain - drafted) ** 2)[both > 0] / both[both > 0]).sum()
    freedom = (both > 0).sum() - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)
