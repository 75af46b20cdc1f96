"""Tests of processors that force tokens, and of masks: texts are those of a decoder written in NumPy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.toys import RAGGED, all_noise, by_hand, decoder, generate, noisy, request, texts
from jaxspec.core.processor import Beginning, process, process_some, read_text
from jaxspec.core.records import Status
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import chain, dynamic
from jaxspec.decode.state import Weights
from jaxspec.drafters.model import ModelDraft
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.errors import JaxspecError
from jaxspec.processors.budget import ThinkingBudget
from jaxspec.processors.masks import AllowedTokens, SuppressTokens
from jaxspec.processors.minimum import MinNewTokens
from jaxspec.processors.penalties import FrequencyPenalty, RepetitionPenalty
from jaxspec.processors.words import BadWords, NoRepeatNgram
from jaxspec.testing import ScriptedDrafter, TableLM

pytestmark = pytest.mark.quick

V, BATCH = 12, 24
LM = TableLM(V)
PARAMS = LM.init_params(jax.random.key(0))
END, BEGIN = [7, 3, 9], [1]
BUDGETS = np.random.default_rng(0).integers(-1, 9, BATCH)
ALLOWED = [None, [0, 1, 2, 3, 4, 5, 7, 9]] * (BATCH // 2)
DRAFTERS = {
    "model-ragged": (ModelDraft(LM, RAGGED), noisy(PARAMS, 1, 0.3)),
    "model-dynamic": (ModelDraft(LM, dynamic(3, 4, 9)), noisy(PARAMS, 1, 0.3)),
    "lookup": (PromptLookup(chain(4), min_match=1), None),
}


def changed(row: int, prompt: int, begin: list[int] | None):
    """What the processors of a row do to its logits, token by token in NumPy."""
    allowed, budget = ALLOWED[row], int(BUDGETS[row])

    def thought(text: list[int]) -> int:
        """The number of tokens of thinking that has not ended; -1 outside of thinking."""
        number = -1 if begin else 0
        for at in range(0 if begin else prompt, len(text)):
            before = text[: at + 1]
            if number >= 0:
                number = -1 if before[-len(END) :] == END else number + 1
            elif begin and before[-len(begin) :] == begin:
                number = 0
        return number

    def change(logits, text):
        logits = np.array(logits, np.float32)
        if allowed is not None:
            logits[[token for token in range(V) if token not in allowed]] = -np.inf
        logits[6] = -np.inf
        if 0 <= budget <= (number := thought(text)):
            forced = END[min(number - budget, len(END) - 1)]
            logits[[token for token in range(V) if token != forced]] = -np.inf
        return logits

    return change


def asked(begin: list[int] | None):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, V, n).tolist() for n in rng.integers(1, 80, BATCH)]
    processors = [AllowedTokens(ALLOWED), SuppressTokens([6]), ThinkingBudget(BUDGETS, END, begin)]
    temperature = np.where(np.arange(BATCH) % 3, 0.9, 0.0)
    return request(prompts, 24, vocab=V, seed=2, temperature=temperature, processors=processors)


@pytest.mark.parametrize("begin", [None, BEGIN])
def test_texts_are_those_of_numpy_with_any_drafter(begin):
    request = asked(begin)
    plain = generate(decoder(LM, NoDraft()), Weights(PARAMS), request, 128)
    noise, table = np.asarray(all_noise(request.key, 112, V)), np.asarray(PARAMS["table"])
    for row, got in enumerate(texts(plain)):
        assert got == by_hand(table, request, noise, row, changed(row, int(request.count[row]), begin)), row
    assert (np.asarray(plain.status) == Status.LENGTH).all()
    ended = [END in [text[i : i + 3] for i in range(len(text))] for text in texts(plain)]
    assert np.mean(ended) > (0.1 if begin else 0.4)
    for name, (drafter, draft) in DRAFTERS.items():
        drafted = generate(decoder(LM, drafter), Weights(PARAMS, draft), request, 128)
        assert texts(drafted) == texts(plain), name
        assert int(np.asarray(drafted.log.accepted).sum()) > 0


def test_logits_of_some_tokens_are_entries_of_all_logits():
    """`apply_to` agrees with `apply`, bit by bit, for every processor that has it."""
    rng, batch, nodes = np.random.default_rng(0), 3, 4
    processors = [
        RepetitionPenalty(1.3), FrequencyPenalty(0.3), NoRepeatNgram(2), BadWords([[3], [1, 2]]), MinNewTokens(9),
        AllowedTokens(list(range(10))), SuppressTokens([0]), ThinkingBudget([4, -1, 2], END),
    ]  # fmt: skip
    rows = Sampling(processors=processors, logit_bias=rng.normal(size=V)).rows(batch, V).processors
    beginning = Beginning(V, 32, jnp.asarray([[5, -1], [2, 3], [-1, -1]]))
    tokens, length = jnp.asarray(rng.integers(0, V, (batch, 20)), jnp.int32), jnp.asarray([20, 7, 9])
    states = read_text(rows, beginning, tokens, length, jnp.asarray([17, 3, 9]))
    path = rng.integers(0, V, (batch, nodes, 3))
    path = jnp.asarray(np.where(np.arange(3) < rng.integers(0, 4, (batch, nodes, 1)), path, -1), jnp.int32)
    logits = jnp.asarray(rng.normal(size=(batch, nodes, V)), jnp.float32)
    some = jnp.asarray(rng.integers(-1, V, (batch, nodes, 5)), jnp.int32)
    taken = jnp.take_along_axis(logits, jnp.maximum(some, 0), 2)
    for one, state in zip(rows, states):
        whole = process([one], [state], path, logits)
        expected = jnp.where(some < 0, taken, jnp.take_along_axis(whole, jnp.maximum(some, 0), 2))
        np.testing.assert_array_equal(process_some([one], [state], path, some, taken, V), expected)


def test_bad_settings_are_refused_before_anything_compiles():
    for one, words in (
        (AllowedTokens("no"), "the tokens of AllowedTokens must be a list of token ids"),
        (AllowedTokens([]), "AllowedTokens forbids every token"),
        (SuppressTokens([V]), f"SuppressTokens has a token id {V}; ids go from 0 to {V - 1}"),
        (SuppressTokens([[1], [2], [3]]), "one for each of the 2 rows; got 3 lists"),
        (SuppressTokens(list(range(V))), "SuppressTokens forbids every token"),
        (ThinkingBudget(-2, END), "the number of ThinkingBudget must be a whole number from 0, or -1"),
        (ThinkingBudget(2, []), "end of ThinkingBudget must be a list of token ids, at least one"),
        (ThinkingBudget(2, END, [V]), f"begin of ThinkingBudget has a token id {V}"),
    ):
        with pytest.raises(JaxspecError, match=re.escape(words)):
            Sampling(processors=[one]).rows(2, V)


@pytest.mark.parametrize(
    ("drafter", "script"),
    [
        (PromptLookup(chain(4), min_match=2), None),
        (PromptLookup(dynamic(2, 4, 7), min_match=2), None),
        (ScriptedDrafter(chain(4)), jnp.zeros((V, 5), jnp.int32)),
    ],
    ids=["nothing", "nothing, dynamic", "forbidden tokens"],
)
def test_forced_tokens_are_drafted_whatever_the_drafter_finds(drafter, script):
    """The drafter's tokens are never right, and all forced tokens behind the first forced token are drafted."""
    end = [7, 3, 9, 2, 8, 5]
    asked = request([[1, 2]], 9, vocab=V, processors=[ThinkingBudget(2, end), SuppressTokens([0, 1])])
    drafted = generate(decoder(LM, drafter), Weights(PARAMS, script), asked, 128)
    plain = generate(decoder(LM, NoDraft()), Weights(PARAMS), asked, 128)
    assert texts(drafted) == texts(plain)
    assert texts(plain)[0][4:10] == end
    assert int(np.asarray(drafted.log.emitted).sum()) == 9
    # Rounds: two tokens of thinking, four drafted forced tokens and the one after them, and the rest.
    assert int((np.asarray(drafted.log.emitted) > 0).sum()) <= 5
