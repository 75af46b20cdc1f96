"""Tests of grammars in the decoder: with any drafter, the text is that of a NumPy decoder that searches over bytes."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import WEIGHING
from helpers.automata import PIECES, Oracle, random_automaton
from helpers.tiers import with_slow
from helpers.toy_drafters import require_equal, toy_drafters
from helpers.toys import all_noise, by_hand, decoder, generate, random_request, texts
from helpers.toys import request as make_request
from jaxspec.analysis.enumeration import bias, joint_law
from jaxspec.core.automaton import TokenAutomaton, read_vocabulary
from jaxspec.core.bias import LogitBias
from jaxspec.core.processor import Beginning, map_rows, process, spread_states, walk
from jaxspec.core.records import Status
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import branching, chain
from jaxspec.decode.state import Weights
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.errors import InvalidConfig
from jaxspec.processors.grammar import Grammar
from jaxspec.processors.penalties import RepetitionPenalty
from jaxspec.testing import TableLM

pytestmark = pytest.mark.quick

V, BATCH = len(PIECES), 48
LM = TableLM(V)
PARAMS = LM.init_params(jax.random.key(0))
TRIGGERS = [None, [7], [0, 7], None]
BYTES = [random_automaton(seed, 6, 0.5) for seed in range(4)]
AUTOMATA = [
    automaton if trigger is None else automaton.after(trigger)
    for automaton, trigger in zip([read_vocabulary(one, PIECES) for one in BYTES], TRIGGERS)
]
ORACLES = [Oracle(one) for one in BYTES]
DRAFTERS = toy_drafters(LM, PARAMS)


def of_row(row: int) -> int | None:
    """The number of a row's automaton; every fifth row has none."""
    return None if row % 5 == 4 else row % 5


def asked(penalty: float = 1.0):
    """A random request whose rows have several grammars, or none."""
    made = random_request(3, BATCH, V)
    numbers = [of_row(row) for row in range(BATCH)]
    grammar = Grammar([None if number is None else AUTOMATA[number] for number in numbers])
    own = [LogitBias(np.where(np.isneginf(one.bias), 0.0, one.bias)) for one in made.sampling.processors]
    processors = [*own, RepetitionPenalty(penalty), grammar]
    sampling = dataclasses.replace(made.sampling, processors=processors).rows(BATCH, V)
    return made._replace(sampling=sampling, logprobs=jnp.ones(BATCH, bool))


def masked(row: int, prompt: int, stops: set[int]):
    """What the grammar of a row forbids, by a search over bytes."""

    def change(logits, text):
        number, logits = of_row(row), np.array(logits, np.float32)
        if number is None:
            return logits
        allowed, may_end = ORACLES[number].allowed(text[prompt:], TRIGGERS[number])
        allowed[[stop for stop in stops if stop >= 0]] = may_end
        return np.where(allowed, logits, -np.inf)

    return change


@pytest.fixture(scope="module")
def plain():
    return generate(decoder(LM, NoDraft()), Weights(PARAMS), asked(), 128)


def test_plain_decoding_is_that_of_a_search_over_bytes(plain):
    request = asked()
    noise, table = np.asarray(all_noise(request.key, 48, V)), np.asarray(PARAMS["table"])
    stopped = ended = 0
    for row, got in enumerate(texts(plain)):
        prompt, stops = int(request.count[row]), set(np.asarray(request.stop_ids)[row].tolist())
        change = masked(row, prompt, stops)
        if plain.status[row] == Status.ERROR:
            ended += 1
            assert np.isneginf(change(np.zeros(V), got)).all(), row  # no token is allowed
            continue
        stopped += plain.status[row] == Status.STOP
        assert got == by_hand(table, request, noise, row, change), row
    assert stopped > 3
    assert ended < BATCH / 2


@pytest.mark.parametrize("name", with_slow(DRAFTERS, DRAFTERS.keys() - {"chaos"}))
def test_drafts_change_neither_texts_nor_log_probabilities(name, plain):
    drafter, options, draft = DRAFTERS[name]
    got = generate(decoder(LM, drafter, **options), Weights(PARAMS, draft), asked(), 128)
    require_equal(got, plain, drafts=name != "none")


@pytest.mark.slow
def test_examples_under_vmap_share_tables_or_have_their_own():
    config = decoder(LM, PromptLookup(chain(4), min_match=1))
    prompts, options = [[1, 2], [3], [4, 5, 6], [0]], {"vocab": V, "temperature": 1.0, "stops": [[11]] * 4}
    first, second = (
        make_request(prompts, 12, **options, processors=[Grammar(given)])
        for given in ([*AUTOMATA[:2], None, AUTOMATA[3]], [AUTOMATA[3], None, *AUTOMATA[:2]])
    )

    def one(request):
        return config.generate(Weights(PARAMS), request, 128).tokens

    alone = [np.asarray(generate(config, Weights(PARAMS), request, 128).tokens) for request in (first, second)]
    keep = map_rows(lambda _: 0, first, shared=lambda _: None)
    halves = map_rows(lambda leaf: jnp.stack([leaf[:2], leaf[2:]]), first)
    shared = jax.jit(jax.vmap(one, in_axes=(keep,)))(halves)
    np.testing.assert_array_equal(shared.reshape(alone[0].shape), alone[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), first, second)
    both = jax.jit(jax.vmap(one))(stacked)
    np.testing.assert_array_equal(both, np.stack(alone))


@pytest.mark.parametrize("name", with_slow(WEIGHING, WEIGHING.keys() - {"block"}))
def test_rules_keep_the_law_of_an_automaton_exactly(name):
    """The law after each path is the one that the processor makes of it, in float64."""
    if not WEIGHING[name].lossless:
        pytest.skip("a lossy rule keeps no law")
    size = 3
    automaton = TokenAutomaton([[1, 0, -1], [-1, 2, 0], [1, -1, 0]], [False, True, True], [0, 1, 2])
    grammar = Grammar(automaton.after([1])).rows(1, size)
    rng = np.random.default_rng(7)
    tables = {}

    def law(kind: str, masks: bool):
        def of(text):
            if (kind, text) not in tables:
                logits = rng.normal(0, 1.5, (1, 1, size))
                if masks:
                    path = jnp.asarray(text, jnp.int32).reshape(1, 1, -1)
                    state = grammar.init(Beginning(size, 8, jnp.full((1, 1), -1, jnp.int32)))
                    logits = process([grammar], [state], path, jnp.asarray(logits))
                row = np.asarray(logits)[0, 0]
                row = np.zeros(size) if np.isneginf(row).all() else row  # an impossible text: its law is not read
                weights = np.exp(row - row.max())
                tables[kind, text] = weights / weights.sum()
            return tables[kind, text]

        return of

    with jax.enable_x64(True):
        target = law("target", True)
        tree = chain(2) if name == "block" else branching(2, 1)
        for masks in (True, False):
            assert bias(WEIGHING[name], tree, target, law(f"draft-{masks}", masks)) < 1e-12
        zeros = joint_law(target, 3) == 0
        assert 0.2 < zeros.mean() < 0.9


def test_a_forced_token_is_the_only_one_or_the_longest_of_forced_bytes():
    spelled, longer = {token: piece for token, piece in enumerate(PIECES) if piece}, 0
    for number, automaton in enumerate(AUTOMATA):
        grammar = Grammar(automaton).rows(1, V)
        state = grammar.init(Beginning(V, 64, jnp.full((1, 1), 11, jnp.int32)))
        rng, text = np.random.default_rng(number), []
        for _ in range(12):
            where = automaton.walk(text)
            allowed = np.flatnonzero(automaton.allowed(where))
            after = walk(grammar.step, spread_states(state, 1), jnp.asarray([[[*text, -1]]], jnp.int32))
            got = int(grammar.forced(after)[0, 0])
            if len(allowed) == 1 and not automaton.final[where]:
                assert got == allowed[0]
            elif got >= 0:  # every allowed token begins with the drafted one, or is a beginning of it
                longest = spelled[got]
                begins = (
                    spelled[one].startswith(longest) or longest.startswith(spelled[one]) for one in allowed.tolist()
                )
                assert all(begins)
                assert not automaton.final[where]
                longer += len(allowed) > 1
            if not len(allowed):
                break
            text.append(int(rng.choice(allowed)))
    assert longer


def test_grammars_of_similar_size_have_tables_of_one_shape():
    shapes = {
        tuple(leaf.shape for leaf in jax.tree.leaves(Grammar(given).rows(4, V)))
        for given in (AUTOMATA[0], AUTOMATA[1], [None] * 4, [AUTOMATA[0], None, None, None])
    }
    assert len(shapes) == 1


def test_wrong_automata_are_refused_before_anything_compiles():
    for given, words in (
        ({"type": "object"}, "must be token automata, as from jaxspec.compile_grammar"),
        ("[0-9]", "must be token automata"),
        ([AUTOMATA[0]], "one for each of the 2 rows; got 1"),
        (dataclasses.replace(AUTOMATA[0], classes=np.zeros(99, int)), "has 99 tokens, but the model has only 12"),
    ):
        with pytest.raises(InvalidConfig, match=re.escape(words)):
            Sampling(processors=[Grammar(given)]).rows(2, V)


def test_a_state_without_an_allowed_token_ends_a_row_with_an_error():
    dead = TokenAutomaton([[-1, 1], [-1, -1]], [False, False], [1] * V)
    asked = make_request([[1], [2]], 5, vocab=V, processors=[Grammar([dead, None])])
    result = generate(decoder(LM, PromptLookup(chain(4), min_match=1)), Weights(PARAMS), asked, 128)
    assert result.status.tolist() == [Status.ERROR, Status.LENGTH]
    assert (result.length - result.start).tolist() == [1, 5]
