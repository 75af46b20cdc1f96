"""Automata that read bytes or tokens, and the folding of a vocabulary into classes of tokens.

An automaton of a grammar has some hundred states, and nearly all tokens of a vocabulary behave alike: two tokens belong
to one class if every state goes to the same next state with both. A table of states and classes takes some 100 KB where
a table of states and tokens takes some 100 MB.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.errors import InvalidConfig

MAX_STATES = 16_384
"""The largest number of states of a token automaton."""

_MAX_ENTRIES = 1 << 27  # of the functions of prefixes of tokens, in `read_vocabulary`

_COLUMNS = 64


@dataclasses.dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton that reads bytes.

    Attributes:
        next: `[S, 256]`, the next state after each byte; -1 for none.
        final: `[S]`, whether a text may end in each state.
        start: the state of the empty text.
    """

    next: np.ndarray
    final: np.ndarray
    start: int = 0

    def accepts(self, text: Sequence[int]) -> bool:
        """Returns whether the automaton accepts the bytes of a whole text."""
        state = self.start
        for byte in text:
            state = int(self.next[state, byte])
            if state < 0:
                return False
        return bool(self.final[state])


@dataclasses.dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """A deterministic automaton that reads tokens. Its first state is 0, the state of the empty text.

    Attributes:
        next: `[S, C]`, the next state after a token of each class; -1 for none.
        final: `[S]`, whether a text may end in each state.
        classes: `[V]`, the class of each token.
        drafts: `[S]`, the token to draft in each state, or -1: where the next bytes are forced, the longest token of
            them. None if tokens are not spelled.

    Raises:
        InvalidConfig: the shapes or the numbers do not fit together, or there are too many states.
    """

    next: Any
    final: Any
    classes: Any
    drafts: Any = None

    def __post_init__(self):
        shapes = [np.shape(value) for value in (self.next, self.final, self.classes)]
        if [len(shape) for shape in shapes] != [2, 1, 1] or shapes[0][0] != shapes[1][0] or 0 in shapes[0]:
            raise InvalidConfig(
                f"a TokenAutomaton needs arrays next [S, C], final [S] and classes [V], got shapes {shapes}"
            )
        states, classes = shapes[0]
        if states > MAX_STATES:
            raise InvalidConfig(
                f"the grammar has {states:,} states; at most {MAX_STATES:,} are supported. Use a smaller grammar, such "
                "as shorter strings (maxLength) or fewer repetitions (maxItems)"
            )
        for name, value, least, end in (("next", self.next, -1, states), ("classes", self.classes, 0, classes)):
            array = np.asarray(value)
            if array.dtype.kind not in "iu" or (array.size and not least <= array.min() <= array.max() < end):
                raise InvalidConfig(f"{name} of a TokenAutomaton must be whole numbers from {least} to {end - 1}")
            object.__setattr__(self, name, array.astype(np.int32))
        object.__setattr__(self, "final", np.asarray(self.final, bool))
        drafts = np.full(states, -1) if self.drafts is None else np.asarray(self.drafts)
        if drafts.shape != (states,) or not -1 <= drafts.min() <= drafts.max() < self.vocab:
            raise InvalidConfig(f"drafts of a TokenAutomaton must be a token id or -1 for each of the {states} states")
        object.__setattr__(self, "drafts", drafts.astype(np.int32))

    def __repr__(self) -> str:
        return f"TokenAutomaton({self.next.shape[0]} states, {self.next.shape[1]} classes of {self.vocab} tokens)"

    @property
    def vocab(self) -> int:
        """The number of tokens, V."""
        return len(self.classes)

    def walk(self, tokens: Sequence[int]) -> int:
        """Returns the state after tokens; -1 if they are not the beginning of a text that the automaton accepts."""
        state = 0
        for token in tokens:
            state = int(self.next[state, self.classes[token]]) if state >= 0 else -1
        return state

    def allowed(self, state: int) -> np.ndarray:
        """Returns whether each token may follow in a state, `[V]`; without the tokens that end a text."""
        return (self.next[state] >= 0)[self.classes]

    def after(self, trigger: Sequence[int], required: bool = True) -> "TokenAutomaton":
        """Returns an automaton that allows every token until a sequence of tokens, and then is this automaton.

        Args:
            trigger: the tokens of the sequence, at least one.
            required: whether the text may end only after the sequence.

        Raises:
            InvalidConfig: the sequence is empty, or has a token that does not exist.
        """
        trigger = [int(token) for token in trigger]
        if not trigger or not all(0 <= token < self.vocab for token in trigger):
            raise InvalidConfig(f"a trigger needs at least one token id from 0 to {self.vocab - 1}, got {trigger}")
        size, count = len(trigger), self.next.shape[1]
        tokens = sorted(set(trigger))
        columns = np.concatenate([np.arange(count), self.classes[tokens]])  # each token of the trigger has a class
        classes = self.classes.copy()
        classes[tokens] = count + np.arange(len(tokens))
        table = self.next[:, columns]
        waiting = np.zeros((size, len(columns)), np.int32)
        for read in range(size):
            for i, token in enumerate(tokens):
                text = [*trigger[:read], token]
                fits = (k for k in range(len(text), 0, -1) if text[-k:] == trigger[:k])
                waiting[read, count + i] = next(fits, 0)  # the last one is the first state of the grammar
        return _folded(
            np.concatenate([waiting, np.where(table < 0, -1, table + size)]),
            np.concatenate([np.full(size, not required), self.final]),
            classes,
            np.concatenate([np.full(size, -1, np.int32), self.drafts]),
        )


def read_vocabulary(automaton: ByteAutomaton, pieces: Sequence[bytes | None]) -> TokenAutomaton:
    """Returns the automaton that reads tokens in place of their bytes.

    A token is allowed if some text of tokens that the automaton accepts goes on with it.

    Args:
        automaton: reads bytes.
        pieces: the bytes of each token; None for a token that is not text. Such tokens and tokens without bytes are
            never allowed.

    Raises:
        InvalidConfig: no sequence of tokens is accepted, or there are too many states.
    """
    functions, of_token = _functions(automaton, pieces)
    numbers, classes = np.unique(of_token, return_inverse=True)
    dead = len(automaton.final)
    table = np.stack([functions[number][:dead] for number in numbers], axis=1)
    del functions  # a large grammar has some 100 MB of them
    table[table == dead] = -1
    reached = _reached(table, [automaton.start])
    position = np.full(dead + 1, -1, np.int32)
    position[reached] = np.arange(len(reached))
    table, final = position[table[reached]], automaton.final[reached]  # position[-1] is -1
    alive = leads_to(table, final)
    if not alive[0]:
        raise InvalidConfig("no sequence of the vocabulary's tokens fits the grammar; the grammar may be empty")
    position = np.where(alive, np.cumsum(alive) - 1, -1).astype(np.int32)
    table = np.where(table < 0, np.int32(-1), position[table])[alive]
    drafts = _forced_tokens(automaton, pieces, reached[alive])
    drafts = np.where(table[np.arange(len(table)), classes[drafts]] < 0, -1, drafts)
    return _folded(table, final[alive], classes.astype(np.int32), drafts)


def _forced_tokens(automaton: ByteAutomaton, pieces: Sequence[bytes | None], states: np.ndarray) -> np.ndarray:
    """Returns for each state the longest token of the bytes that are forced there; -1 if none are."""
    tokens = {piece: token for token, piece in reversed([*enumerate(pieces)]) if piece}
    longest = max(map(len, tokens))
    forced = ((automaton.next >= 0).sum(1) == 1) & ~automaton.final
    byte = (automaton.next >= 0).argmax(1)
    found = []
    for state in states.tolist():
        text, best = b"", -1
        while forced[state] and len(text) < longest:
            text += bytes([byte[state]])
            best, state = tokens.get(text, best), int(automaton.next[state, byte[state]])
        found.append(best)
    return np.asarray(found, np.int32)


def _functions(automaton: ByteAutomaton, pieces: Sequence[bytes | None]) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the functions from states to states that tokens are, and the number of each token's function.

    A state that is equal to the number of states is dead. Equal functions have one number, so each function of a byte
    after another function is computed once.
    """
    dead = len(automaton.final)
    columns = np.where(automaton.next < 0, dead, automaton.next)
    columns = np.concatenate([columns, np.full((1, 256), dead)]).astype(np.int32)
    of_classes, of_byte = np.unique(columns, axis=1, return_inverse=True)
    of_classes, of_byte = np.ascontiguousarray(of_classes.T), of_byte.reshape(-1).tolist()
    functions: list[np.ndarray] = [np.arange(dead + 1, dtype=np.int32), np.full(dead + 1, dead, np.int32)]
    known = {function.tobytes(): number for number, function in enumerate(functions)}
    after: dict[tuple[int, int], int] = {}

    def compose(number: int, kind: int) -> int:
        result = after.get((number, kind))
        if result is None:
            function = of_classes[kind][functions[number]]
            result = known.setdefault(function.tobytes(), len(functions))
            if result == len(functions):
                functions.append(function)
                if len(functions) * (dead + 1) > _MAX_ENTRIES:
                    raise InvalidConfig(
                        f"the grammar has {dead:,} states of bytes, too many for this vocabulary; use a smaller grammar"
                    )
            after[number, kind] = result
        return result

    of_token = np.ones(len(pieces), np.int64)
    read, stack = b"", [0]  # the functions of the beginnings of the last token; tokens are sorted
    for piece, token in sorted((piece, token) for token, piece in enumerate(pieces) if piece):
        same = 0
        while same < min(len(read), len(piece)) and read[same] == piece[same]:
            same += 1
        del stack[same + 1 :]
        for byte in piece[same:]:
            stack.append(compose(stack[-1], of_byte[byte]))
        read, of_token[token] = piece, stack[-1]
    return functions, of_token


def _reached(table: np.ndarray, start: Sequence[int]) -> np.ndarray:
    """Returns the states that are reached from the first states, which come first."""
    seen = np.zeros(len(table), bool)
    seen[start] = True
    order, frontier = [np.asarray(start)], np.asarray(start)
    while len(frontier):
        following = np.unique(table[frontier])
        frontier = following[(following >= 0) & ~seen[following]]
        seen[frontier] = True
        order.append(frontier)
    return np.concatenate(order)


def leads_to(table: np.ndarray, final: np.ndarray) -> np.ndarray:
    """Returns for each state whether a final state is reached from it."""
    states = len(table)
    edges = []
    for first in range(0, table.shape[1], _COLUMNS):  # few columns at a time, so that a large table is not copied
        some = table[:, first : first + _COLUMNS]
        source, column = np.nonzero(some >= 0)
        edges.append(np.unique(some[source, column].astype(np.int64) * states + source))
    after, before = np.divmod(np.unique(np.concatenate(edges)), states)
    begins = np.searchsorted(after, np.arange(states + 1))
    found, left = final.copy(), np.flatnonzero(final).tolist()
    while left:
        state = left.pop()
        sources = before[begins[state] : begins[state + 1]]
        left += sources[~found[sources]].tolist()
        found[sources] = True
    return found


def _folded(table: np.ndarray, final: np.ndarray, classes: np.ndarray, drafts: np.ndarray) -> TokenAutomaton:
    """Returns an automaton with one class for all tokens that every state treats alike. Whole columns are compared."""
    used, classes = np.unique(classes, return_inverse=True)
    columns, number = np.unique(table[:, used], axis=1, return_inverse=True)
    return TokenAutomaton(columns, final, number.reshape(-1)[classes.reshape(-1)], drafts)
