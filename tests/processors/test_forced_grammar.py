"""Tests of tokens that a grammar forces: they are drafted in batches, rollouts and sessions, and change no text."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers.narrow import not_none
from helpers.toys import RAGGED, decoder, extend, run, start, texts
from helpers.toys import request as make_request
from jaxspec.core.automaton import TokenAutomaton
from jaxspec.core.processor import Beginning, spread_states, walk
from jaxspec.core.records import Proposal
from jaxspec.core.topology import chain
from jaxspec.core.tree import Tree
from jaxspec.decode.forcing import draft_forced
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


@pytest.mark.parametrize("topology", [chain(6), RAGGED])
@pytest.mark.parametrize("one", [GRAMMAR, jaxspec.ThinkingBudget(np.array([1, -1]), [7, 3, 9])])
def test_the_first_child_of_a_node_is_the_token_that_its_path_forces(one, topology):
    rows, limits, shape = one.rows(2, V), [3, 6], topology.shape
    state = rows.init(Beginning(V, 32, jnp.full((2, 1), STOP)))
    tree = Tree(*(jnp.broadcast_to(jnp.asarray(leaf), (2, *np.shape(leaf))) for leaf in not_none(topology.tree)))
    drafted = np.random.default_rng(0).integers(0, 5, (2, shape.nodes)).astype(np.int32)
    drafted[0, 2] = -1
    law = np.log(np.full((2, shape.nodes, V), 1 / V, np.float32))
    got = draft_forced([rows], [state], Proposal(jnp.asarray(drafted), tree, jnp.asarray(law)), jnp.asarray(limits))
    parents, depths, ranks = (np.asarray(leaf) for leaf in not_none(topology.tree)[:3])
    changed = 0
    for row, node in itertools.product(range(2), range(shape.nodes)):
        path, above = [], node
        while above > 0:
            path, above = [drafted[row, above], *path], parents[above]
        if -1 in path:  # no rule reaches the node
            law[row, node] = not_none(got.law)[row, node]
            continue
        if depths[node] >= limits[row]:
            continue
        padded = [*path, *[-1] * (shape.depth - len(path))]
        states = walk(rows.step, spread_states(state, 1), jnp.asarray([[padded]] * 2, jnp.int32))
        if (only := int(rows.forced(states)[row, 0])) >= 0:
            for child in np.flatnonzero(parents == node):
                drafted[row, child] = only if ranks[child] == 0 else -1
            law[row, node] = np.where(np.arange(V) == only, 0, -np.inf)
            changed += 1
    assert changed
    np.testing.assert_array_equal(got.tokens, drafted)
    np.testing.assert_array_equal(got.law, law)


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
