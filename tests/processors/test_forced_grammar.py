"""Tests of tokens that a grammar forces: they are drafted in batches, rollouts and sessions, and change no text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers.toys import decoder, extend, run, start, texts
from helpers.toys import request as make_request
from jaxspec.core.automaton import TokenAutomaton
from jaxspec.core.topology import chain
from jaxspec.decode.state import Weights
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.testing import TableLM

pytestmark = pytest.mark.quick

V, STOP = 24, 5
LM = TableLM(V)
PARAMS = LM.init_params(jax.random.key(0))
MODEL = jaxspec.Model(LM, PARAMS, stop_ids=(STOP,))
PROMPTS = [[3, 1, 4, 1], [2], [9, 2], [7, 7, 1]]
KEYWORD = [11, 12, 13, 14, 15]


def keywords() -> TokenAutomaton:
    """Any of the tokens 0 to 4, and then the keyword, again and again; a text may end after a keyword."""
    table = np.full((len(KEYWORD) + 1, V), -1)
    table[0, :5] = 1
    for read, token in enumerate(KEYWORD):
        table[read + 1, token] = (read + 2) % len(table)
    return TokenAutomaton(table, [True, *[False] * len(KEYWORD)], np.arange(V))


GRAMMAR = jaxspec.Grammar(keywords())


def is_of_grammar(tokens: list[int]) -> bool:
    """Whether a text is a beginning of what the grammar allows."""
    tokens = [token for token in tokens if token != STOP]
    parts = [tokens[i : i + 1 + len(KEYWORD)] for i in range(0, len(tokens), 1 + len(KEYWORD))]
    return all(part[0] < 5 and part[1:] == KEYWORD[: len(part) - 1] for part in parts)


def test_rows_that_take_the_places_of_others_draft_forced_tokens():
    sampling = jaxspec.Sampling([1.0, 0.7, 0.0, 1.0], processors=[GRAMMAR])
    say = functools.partial(
        jaxspec.generate, MODEL, PROMPTS, sampling=sampling, key=jax.random.key(3), max_new_tokens=20, verbose=False
    )
    plain = say(drafter="none")
    drafted = say(drafter="prompt-lookup", schedule="constant", tree=4, batch=2)
    assert [row.tokens for row in drafted] == [row.tokens for row in plain]
    assert all(is_of_grammar(row.tokens) for row in plain)
    # Four of the five forced tokens of a keyword are drafted behind the one that follows a free token, at least.
    assert drafted.stats.accepted > 0.5 * sum(len(row.tokens) for row in plain)


def test_rollouts_draft_forced_tokens():
    tokens, count = jnp.array([[3, 1, 4, 1], [2, 7, 7, 7], [9, 2, 7, 7]]), jnp.array([4, 1, 2])
    sampling = jaxspec.Sampling(1.0, processors=[GRAMMAR])
    drafted, plain = (
        jax.jit(
            lambda d=d: jaxspec.rollout(
                MODEL, tokens, count, key=jax.random.key(1), max_new_tokens=18, sampling=sampling, drafting=d
            )
        )()
        for d in (jaxspec.Drafting("prompt-lookup", tree=3, schedule="constant"), jaxspec.Drafting("none"))
    )
    np.testing.assert_array_equal(drafted.new_tokens, plain.new_tokens)
    again = jaxspec.log_probs(MODEL, drafted)
    np.testing.assert_allclose(again.sampled, drafted.logprobs.sampled, atol=1e-5)


def test_the_grammar_of_a_turn_begins_with_the_turn_and_drafts():
    weights, said = Weights(PARAMS), []
    for config in (decoder(LM, PromptLookup(chain(4), min_match=2)), decoder(LM, NoDraft())):
        asked = make_request(PROMPTS, 8, vocab=V, processors=[GRAMMAR])
        state = run(config, weights, start(config, weights, asked, 128))
        turn = make_request([[1, 2], [3], [5, 8], [0]], 11, vocab=V, processors=[GRAMMAR])
        state = run(config, weights, extend(config, weights, state, turn))
        said.append(texts(state))
        last = [row[int(begin) :] for row, begin in zip(texts(state), state.start)]
        assert all(len(row) == 11 and is_of_grammar(row) for row in last)
    assert said[0] == said[1]
