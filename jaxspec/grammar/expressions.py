"""Regular expressions as automata that read bytes, compiled by the optional package outlines-core."""

import numpy as np

from jaxspec.confined.process import Limits, RemoteError, RemoteObject
from jaxspec.core.automaton import ByteAutomaton, leads_to
from jaxspec.errors import InvalidConfig, LimitError, shown

SECONDS, MEMORY = 20.0, 1 << 30
"""Processor time and bytes for an automaton."""

MAX_BYTE_STATES = 60_000
"""The largest number of states of an automaton that reads bytes."""

END = "\U0010ffff"
"""A character that is appended to every expression, and that no text contains.

outlines-core drops the other alternatives where one has matched, as a search from the left does: `a|ab` would not match
"ab". No alternative has matched before this character, so none is dropped.
"""

INSTALL = "compiling a grammar needs the package outlines-core; run `pip install outlines-core`"


def compile_expression(expression: str) -> ByteAutomaton:
    """Returns the automaton of a regular expression that matches whole texts.

    The syntax is that of the regex crate of Rust, without anchors, lookarounds and references. The package compiles it
    in the confined process, with limits of time and memory.

    Raises:
        InvalidConfig: the expression is invalid, or its automaton is too large; or outlines-core is not installed.
    """
    if not isinstance(expression, str) or not expression:
        raise InvalidConfig(f"a regular expression must be a text that is not empty, got {shown(expression)}")
    limits = Limits(SECONDS, MEMORY)
    try:
        remote = RemoteObject("grammar", "expression", (f"(?:{expression}){END}", MAX_BYTE_STATES), limits)
        numbers = np.frombuffer(remote.call("read", limits=limits), "<u4").astype(np.int64)
    except RemoteError as error:
        raise InvalidConfig(_reason(error, expression)) from None
    except LimitError:
        raise InvalidConfig(
            f"the grammar needs more than {SECONDS:.0f} s or {MEMORY >> 30} GB to compile; use a smaller one, such as "
            "shorter strings (maxLength) or fewer repetitions (maxItems)"
        ) from None
    count, start = numbers[:2].tolist()
    final, rows = numbers[2 : 2 + count], numbers[2 + count :].reshape(-1, 3)
    names, index = np.unique(np.concatenate([[start], final, rows[:, 0], rows[:, 2]]), return_inverse=True)
    final, source, after = np.split(index[1:], np.cumsum([count, len(rows)]))
    table, ends = np.full((len(names), 256), -1, np.int32), np.zeros(len(names), bool)
    table[source, rows[:, 1]], ends[final] = after, True
    state = np.arange(len(names))
    for byte in END.encode():  # a text may end where the character would follow
        state = np.where(state < 0, -1, table[state, byte])
    complete = (state >= 0) & ends[state]
    table = np.where((table >= 0) & ends[table], -1, table)
    kept = leads_to(table, complete)
    kept[index[0]] = True
    position = np.where(kept, np.cumsum(kept) - 1, -1)
    table = np.where(table < 0, -1, position[table])[kept].astype(np.int32)
    return ByteAutomaton(table, complete[kept], int(position[index[0]]))


def _reason(error: RemoteError, expression: str) -> str:
    if error.kind == "ModuleNotFoundError":
        return INSTALL
    if error.kind == "OverflowError":
        return (
            f"the grammar has {int(error.text):,} states of bytes; at most {MAX_BYTE_STATES:,} are supported. Use a "
            "smaller one, such as shorter strings (maxLength) or fewer repetitions (maxItems)"
        )
    return (
        f"the regular expression {shown(expression)} cannot be compiled ({error.text}); anchors, lookarounds and "
        "references are not supported, and an expression matches the whole text"
    )
