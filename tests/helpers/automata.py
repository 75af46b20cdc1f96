"""Random automata that read bytes, a vocabulary of toy tokens, and what a grammar allows, from the definitions."""

import functools

import numpy as np

from jaxspec.core.automaton import ByteAutomaton

PIECES: list[bytes | None] = [b"a", b"b", b"c", b"ab", b"ba", b"abc", b"cc", None, b"", b"bca", b"a", None]
"""Twelve tokens: two with the same bytes, one without bytes, and two special ones."""


def random_automaton(seed: int, states: int = 5, missing: float = 0.35) -> ByteAutomaton:
    """Returns an automaton of the letters a, b and c that accepts some text of tokens."""
    rng = np.random.default_rng(seed)
    while True:
        table = np.full((states, 256), -1, np.int32)
        letters = rng.integers(0, states, (states, 3))
        table[:, [97, 98, 99]] = np.where(rng.random((states, 3)) < missing, -1, letters)
        automaton = ByteAutomaton(table, rng.random(states) < 0.3, int(rng.integers(states)))
        if Oracle(automaton).may_end(b""):
            return automaton


class Oracle:
    """What a byte automaton allows, token by token, by search over bytes.

    Attributes:
        automaton: the automaton.
        pieces: the bytes of each token.
    """

    def __init__(self, automaton: ByteAutomaton, pieces: list[bytes | None] = PIECES):
        self.automaton, self.pieces = automaton, pieces
        self._may_end = functools.cache(self._search)

    def read(self, state: int, text: bytes) -> int:
        for byte in text:
            state = int(self.automaton.next[state, byte]) if state >= 0 else -1
        return state

    def may_end(self, text: bytes) -> bool:
        """Whether tokens can continue the text to one that the automaton accepts."""
        return self._may_end(self.read(self.automaton.start, text))

    def _search(self, first: int) -> bool:
        seen, left = {first}, [first]
        while left:
            state = left.pop()
            if state >= 0 and self.automaton.final[state]:
                return True
            following = {self.read(state, piece) for piece in self.pieces if piece and state >= 0}
            left += following - seen
            seen |= following
        return False

    def accepts(self, text: bytes) -> bool:
        return self.automaton.accepts(text)

    def allowed(self, tokens: list[int], trigger: list[int] | None = None) -> tuple[np.ndarray, bool]:
        """Whether each token may follow, `[V]`, and whether the text may end; both of a grammar after a trigger.

        Before the trigger every token may follow, and the text may not end.
        """
        if trigger is not None:
            ends = (i for i in range(len(trigger), len(tokens) + 1) if tokens[i - len(trigger) : i] == trigger)
            begin = next(ends, None)
            if begin is None:
                return np.ones(len(self.pieces), bool), False
            tokens = tokens[begin:]
        text = b"".join(self.pieces[token] or b"" for token in tokens)
        allowed = [bool(piece) and self.may_end(text + piece) for piece in self.pieces]  # type: ignore[operator]
        return np.asarray(allowed), self.accepts(text)
