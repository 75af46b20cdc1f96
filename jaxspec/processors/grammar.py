"""The processor that allows only texts of a grammar."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core.automaton import MAX_STATES, TokenAutomaton
from jaxspec.core.processor import Beginning, Shared, spread_states, walk
from jaxspec.errors import InvalidConfig, shown

DEAD, FREE, ENDED = 0, 1, 2
"""States of every table: no token is allowed; every token is allowed; the text has ended, and nothing follows."""

PADDING, STOP, UNKNOWN = 0, 1, 2
"""Classes of every table: no token, which keeps the state; a stop token of the row; an id without a token."""

_MOST_NEW = 64  # tokens of a round; more are a prompt, or a text that is read as a whole


class Tables(NamedTuple):
    """The automata of a batch in one table, and the automaton of each row. Sizes are rounded up to powers of two."""

    next: Shared  # [S, C], the next state of each state and class
    classes: Shared  # [G, V], the class of each token in each automaton
    drafts: Shared  # [S], the token to draft in each state, see `TokenAutomaton`; or -1
    automaton: Int[Array | np.ndarray, "B"]
    start: Int[Array | np.ndarray, "B"]


class GrammarState(NamedTuple):
    """The state of each row's automaton, and the row's stop tokens, padded with -1."""

    current: Int[Array, "B"]
    stop_ids: Int[Array, "B M"]


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class Grammar:
    """Allows only the texts that an automaton accepts, and stop tokens only at the end of such a text.

    Attributes:
        automata: a `TokenAutomaton` for all rows, as from `jaxspec.compile_grammar`; or a list with an automaton for
            each row, and None for a row without a grammar.
        tables: the automata as arrays, which `rows` makes.
    """

    automata: Any
    tables: Tables | None = None

    def rows(self, batch: int, vocab: int) -> Self:
        if self.tables is not None:
            return self  # as made by this method
        given = self.automata
        listed: list[Any] = (
            list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given] * batch
        )
        wrong = [one for one in listed if one is not None and not isinstance(one, TokenAutomaton)]
        if wrong:
            raise InvalidConfig(
                "the automata of Grammar must be token automata, as from jaxspec.compile_grammar(model, schema), or "
                f"None; got {shown(wrong[0])}"
            )
        if len(listed) != batch:
            raise InvalidConfig(f"Grammar needs one automaton, or one for each of the {batch} rows; got {len(listed)}")
        distinct = list({id(one): one for one in listed if one is not None}.values())
        for one in distinct:
            if one.vocab > vocab:
                raise InvalidConfig(f"an automaton of Grammar has {one.vocab} tokens, but the model has only {vocab}")
        return dataclasses.replace(self, automata=None, tables=_tables(distinct, listed, vocab))

    def init(self, beginning: Beginning) -> GrammarState:
        return GrammarState(jnp.asarray(self._tables.start), beginning.stop_ids)

    def absorb(
        self, state: GrammarState, tokens: Int[Array, "B M"], count: Int[Array, "B"], start: Int[Array, "B"]
    ) -> GrammarState:
        index = jnp.arange(tokens.shape[1])
        new = (index < count[:, None]) & (index >= start[:, None])
        classes = jnp.where(new, self._classes_of(state.stop_ids, tokens[:, None])[:, 0], PADDING)
        if tokens.shape[1] <= _MOST_NEW:
            return state._replace(current=walk(self._next, state.current, classes))
        # A prompt is not read: the loop goes only over positions that are new in some row.
        first = jnp.where(new.any(0), index, tokens.shape[1]).min()
        last = jnp.where(new.any(0), index, -1).max()

        def step(i: Array, current: Array) -> Array:
            return self._next(current, lax.dynamic_index_in_dim(classes, i, 1, keepdims=False))

        return state._replace(current=lax.fori_loop(first, last + 1, step, state.current))

    def apply(
        self, state: GrammarState, path: Int[Array, "B N D"], logits: Float[Array, "B N V"]
    ) -> Float[Array, "B N V"]:
        allowed = self._tables.next.value[self._states(state, path)] != DEAD
        classes = self._classes(state)
        return jnp.where(jax.vmap(lambda row, kinds: row[:, kinds])(allowed, classes), logits, -jnp.inf)

    def apply_to(
        self, state: GrammarState, path: Int[Array, "B N D"], tokens: Int[Array, "B N R"], logits: Float[Array, "B N R"]
    ) -> Float[Array, "B N R"]:
        """Returns the logits of some tokens as `apply` changes them; tokens below 0 are left out."""
        allowed = self._tables.next.value[self._states(state, path)] != DEAD
        kinds = self._classes_of(state.stop_ids, tokens)
        return jnp.where((tokens < 0) | jnp.take_along_axis(allowed, kinds, 2), logits, -jnp.inf)

    def step(self, states: GrammarState, tokens: Int[Array, "B N"]) -> GrammarState:
        kinds = self._classes_of(states.stop_ids, tokens[..., None])[..., 0]
        return states._replace(current=self._next(states.current, kinds))

    def forced(self, states: GrammarState) -> Int[Array, "B N"]:
        """Returns the token to draft in each state: the only allowed one, or the longest one of forced bytes."""
        return self._tables.drafts.value[states.current]

    def tree_flatten_with_keys(self) -> tuple[tuple, bool]:
        made = self.tables is not None
        key = jax.tree_util.GetAttrKey("tables" if made else "automata")
        return ((key, self.tables if made else self.automata),), made

    @classmethod
    def tree_unflatten(cls, made: bool, fields: Any) -> "Grammar":
        grammar = object.__new__(cls)
        object.__setattr__(grammar, "automata", None if made else fields[0])
        object.__setattr__(grammar, "tables", fields[0] if made else None)
        return grammar

    @property
    def _tables(self) -> Tables:
        assert self.tables is not None, "call rows first"
        return self.tables

    def _classes(self, state: GrammarState) -> Int[Array, "B V"]:
        """Returns the class of every token of the vocabulary in each row."""
        classes = self._tables.classes.value[self._tables.automaton].astype(jnp.int32)
        row = jnp.arange(len(classes))[:, None]
        return classes.at[row, jnp.where(state.stop_ids < 0, classes.shape[1], state.stop_ids)].set(STOP, mode="drop")

    def _classes_of(self, stop_ids: Int[Array, "B *N M"], tokens: Int[Array, "B N R"]) -> Int[Array, "B N R"]:
        """Returns the classes of some tokens; a token below 0 is padding."""
        table, at = self._tables.classes.value, self._tables.automaton[:, None, None]
        kinds = table.at[at, jnp.maximum(tokens, 0)].get(mode="clip").astype(jnp.int32)
        stops = stop_ids.reshape(len(stop_ids), -1, 1, stop_ids.shape[-1])
        kinds = jnp.where((tokens[..., None] == stops).any(-1), STOP, kinds)
        return jnp.where(tokens < 0, PADDING, kinds)

    def _states(self, state: GrammarState, path: Int[Array, "B N D"]) -> Int[Array, "B N"]:
        """Returns the state after each text: the row's state, and then the path."""
        return walk(self._next, spread_states(state.current, path.shape[1]), self._classes_of(state.stop_ids, path))

    def _next(self, current: Int[Array, "*B"], kinds: Int[Array, "*B"]) -> Int[Array, "*B"]:
        """Returns the states after one more token of each class."""
        return self._tables.next.value[current, kinds].astype(jnp.int32)


def _tables(distinct: Sequence[TokenAutomaton], listed: Sequence[TokenAutomaton | None], vocab: int) -> Tables:
    """Writes automata into one table.

    Raises:
        InvalidConfig: the automata have too many states together.
    """
    sizes = [len(one.final) for one in distinct]
    if 3 + sum(sizes) > 2 * MAX_STATES:
        raise InvalidConfig(
            f"the grammars of a call have {sum(sizes):,} states together; at most {2 * MAX_STATES:,} are supported. "
            "Generate with fewer grammars at a time"
        )
    starts = np.cumsum([3, *sizes])[:-1].astype(np.int32)
    widest = max((one.next.shape[1] for one in distinct), default=1)
    table = np.full((_round(3 + sum(sizes)), _round(3 + widest)), DEAD, np.int16)
    classes = np.full((_round(len(distinct), 1), vocab), UNKNOWN, np.int16 if widest < 2**15 - 3 else np.int32)
    drafts = np.full(len(table), -1, np.int32)
    table[FREE], table[:, PADDING] = FREE, np.arange(len(table))
    for number, (one, start) in enumerate(zip(distinct, starts)):
        states, kinds = one.next.shape
        table[start : start + states, 3 : 3 + kinds] = np.where(one.next < 0, DEAD, one.next + start)
        table[start : start + states, STOP] = np.where(one.final, ENDED, DEAD)
        classes[number, : one.vocab] = 3 + one.classes
        drafts[start : start + states] = np.where(one.drafts < 0, _only(one), one.drafts)
    of_row = {id(one): number for number, one in enumerate(distinct)}
    automaton = np.asarray([of_row.get(id(one), 0) for one in listed], np.int32)
    start = np.asarray([FREE if one is None else starts[of_row[id(one)]] for one in listed], np.int32)
    table, classes, drafts = (Shared(jnp.asarray(array)) for array in (table, classes, drafts))
    return Tables(table, classes, drafts, jnp.asarray(automaton), jnp.asarray(start))


def _only(automaton: TokenAutomaton) -> Int[np.ndarray, "S"]:
    """Returns the only allowed token of each state, or -1."""
    kinds, first, count = np.unique(automaton.classes, return_index=True, return_counts=True)
    allowed = automaton.next[:, kinds] >= 0
    single = ((allowed * count).sum(1) == 1) & ~automaton.final
    return np.where(single, first[allowed.argmax(1)], -1)


def _round(size: int, least: int = 64) -> int:
    """Rounds a size of a table up to a power of two, so that similar grammars share a program."""
    return max(least, 1 << max(size - 1, 0).bit_length())
