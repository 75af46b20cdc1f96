"""Tests of automata that read tokens: what is allowed is what a search over bytes finds, and classes are exact."""

import re

import numpy as np
import pytest

from helpers.automata import PIECES, Oracle, random_automaton
from jaxspec.core.automaton import MAX_STATES, ByteAutomaton, TokenAutomaton, read_vocabulary
from jaxspec.errors import InvalidConfig

pytestmark = pytest.mark.quick

V = len(PIECES)


def texts(automaton: TokenAutomaton, rng: np.random.Generator, longest: int = 7) -> list[list[int]]:
    """Texts of allowed tokens, and the same with a last token of any kind."""
    found = []
    for _ in range(12):
        text, state = [], 0
        for _ in range(rng.integers(longest)):
            tokens = np.flatnonzero(automaton.allowed(state))
            if not len(tokens):
                break
            text.append(int(rng.choice(tokens)))
            state = automaton.walk(text)
        found += [text, [*text, int(rng.integers(V))]]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_tokens_are_allowed_as_a_search_over_bytes_finds(seed):
    bytes_automaton, rng = random_automaton(seed), np.random.default_rng(seed)
    automaton, oracle = read_vocabulary(bytes_automaton, PIECES), Oracle(bytes_automaton)
    for text in texts(automaton, rng):
        state, spelled = automaton.walk(text), b"".join(PIECES[token] or b"" for token in text)
        fits = all(PIECES[token] for token in text) and oracle.may_end(spelled)
        assert (state >= 0) == fits, text
        if fits:
            allowed, may_end = oracle.allowed(text)
            np.testing.assert_array_equal(automaton.allowed(state), allowed)
            assert bool(automaton.final[state]) == may_end


@pytest.mark.parametrize("seed", range(20))
def test_a_trigger_starts_the_grammar(seed):
    bytes_automaton, rng = random_automaton(seed), np.random.default_rng(seed)
    trigger = [[7], [0, 0, 1], [3, 7, 3], [0, 1, 0, 0]][seed % 4]
    inner, oracle = read_vocabulary(bytes_automaton, PIECES), Oracle(bytes_automaton)
    automaton, optional = inner.after(trigger), inner.after(trigger, required=False)
    for _ in range(10):
        free = [int(rng.choice([0, 1, 3, 7])) for _ in range(rng.integers(8))]
        for text in (free, free + trigger, *(free + trigger + more for more in texts(inner, rng)[:3])):
            allowed, may_end = oracle.allowed(text, trigger)
            began = any(text[i : i + len(trigger)] == trigger for i in range(len(text)))
            state = automaton.walk(text)
            if state >= 0:
                np.testing.assert_array_equal(automaton.allowed(state), allowed)
                assert bool(automaton.final[state]) == may_end
                assert bool(optional.final[optional.walk(text)]) == (may_end or not began)
            else:
                assert began


def test_classes_hold_the_tokens_that_every_state_treats_alike():
    for seed in range(20):
        automaton = read_vocabulary(random_automaton(seed), PIECES)
        columns = automaton.next[:, automaton.classes]
        for token in range(V):
            for other in range(token):
                alike = (columns[:, token] == columns[:, other]).all()
                assert alike == (automaton.classes[token] == automaton.classes[other])


def test_an_automaton_that_cannot_be_used_is_refused():
    good = read_vocabulary(random_automaton(0), PIECES)
    table = np.full((2, 256), -1, np.int32)
    table[0, 120] = 1
    big = np.zeros((MAX_STATES + 1, 1), np.int32)
    for call, words in (
        (lambda: TokenAutomaton(big, np.ones(len(big), bool), np.zeros(3, int)), "at most 16,384 are supported"),
        (lambda: TokenAutomaton(good.next, good.final[1:], good.classes), "got shapes"),
        (lambda: TokenAutomaton(good.next + 9, good.final, good.classes), "next of a TokenAutomaton must be whole"),
        (lambda: TokenAutomaton(good.next, good.final, good.classes - 9), "classes of a TokenAutomaton must be"),
        (lambda: good.after([]), "a trigger needs at least one token id"),
        (lambda: good.after([V]), "a trigger needs at least one token id from 0 to 11"),
        (lambda: read_vocabulary(ByteAutomaton(table, np.array([False, True])), PIECES), "no sequence of the voc"),
    ):
        with pytest.raises(InvalidConfig, match=re.escape(words)):
            call()
