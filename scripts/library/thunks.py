"""Reads the listing of a GPU program's thunks, which XLA dumps: launches and waits of a round."""

import functools
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from scripts.library import hlo

BUFFER = "kCommandBuffer"
NO_LAUNCH = re.compile(r"k\w*Done|kNop|kPartitionId|kReplicaId")


class Thunk(NamedTuple):
    """What the host does next: a launch, or a loop, a conditional or a command buffer of other thunks."""

    kind: str
    parts: dict[str, list["Thunk"]]


class Cost(NamedTuple):
    """Kernels and copies that are launched, and times that the host waits for a value of the device."""

    launches: int = 0
    waits: int = 0

    def plus(self, other: "Cost", times: int = 1) -> "Cost":
        return Cost(self.launches + times * other.launches, self.waits + times * other.waits)


def read(text: str) -> list[Thunk]:
    """Returns the thunks of a listing, `*thunk_sequence*.txt`."""
    top: list[Thunk] = []
    open_ones: list[tuple[int, Thunk, list[Thunk]]] = []  # of each: its indentation, and where what it holds goes
    for line in text.replace("No thunks.", "\n").splitlines():  # no line of its own
        if found := re.match(r"( *)\d+: (k\w+)", line):
            indent, made = len(found[1]), Thunk(found[2], {})
            while open_ones and open_ones[-1][0] >= indent:
                open_ones.pop()
            (open_ones[-1][2] if open_ones else top).append(made)
            open_ones.append((indent, made, made.parts.setdefault("", [])))
        elif found := re.match(r"( *)(\w+):$", line):
            # XLA does not indent the heading of a condition; it follows the line of its loop.
            indent = open_ones[-1][0] + 1 if found[2] == "condition" else len(found[1])
            while open_ones[-1][0] >= indent:
                open_ones.pop()
            at, owner, _ = open_ones.pop()
            open_ones.append((at, owner, owner.parts.setdefault(found[2], [])))
    return top


def loops(parts: dict[str, list[hlo.Instruction]], name: str = "ENTRY") -> Iterator[hlo.Instruction]:
    """Yields the loops of a computation and of what it calls, in the order of the listing."""
    for one in parts[name]:
        if one.op == "while":
            yield one
        for inner in hlo.callees(one):
            yield from loops(parts, inner)


def of_a_round(
    thunks: list[Thunk], parts: dict[str, list[hlo.Instruction]], turns: Callable[[hlo.Instruction], int]
) -> tuple[Cost, bool]:
    """Returns what one turn of the program's first loop costs, and whether a command buffer holds that loop.

    Of a conditional the branch with the most launches counts, and of several loops of which one runs
    (`scripts.library.hlo.is_alternative`), that one. A loop of a known number of turns is launched without a
    look at its condition.

    Args:
        thunks: of the program.
        parts: its computations, from `scripts.library.hlo`.
        turns: the number of turns of an inner loop of which the compiler knows none.

    Raises:
        ValueError: there is no loop, or thunks and computations are not those of one program.
    """
    order = loops(parts)

    def each(thunks: list[Thunk], captured: bool) -> Cost:
        turns_of_others: list[Cost] = []
        total = functools.reduce(Cost.plus, (cost(one, captured, turns_of_others) for one in thunks), Cost())
        return total.plus(max(turns_of_others, default=Cost()))

    def cost(one: Thunk, captured: bool, turns_of_others: list[Cost]) -> Cost:
        inside = {name: held for name, held in one.parts.items() if held}
        if one.kind == "kWhile":
            loop = next(order)
            test, body = (each(inside.get(name, []), captured) for name in ("condition", "body"))
            if known := re.search(r"known_trip_count\W+n\W+(\d+)", loop.rest):
                return Cost().plus(body, int(known[1]))
            count = turns(loop)
            if hlo.is_alternative(loop):
                turns_of_others.append(Cost(0, 0 if captured else 1).plus(test).plus(body))
                count = 0
            return Cost(0, 0 if captured else count + 1).plus(test, count + 1).plus(body, count)
        if one.kind == "kConditional":
            return max(each(held, captured) for held in inside.values()).plus(Cost(0, 0 if captured else 1))
        if inside:
            return each([held for part in inside.values() for held in part], captured or one.kind == BUFFER)
        return Cost(0 if NO_LAUNCH.fullmatch(one.kind) else 1)

    outer, captured = next(_top_loops(thunks, False), (None, False))
    if outer is None:
        raise ValueError("the listing has no loop")
    next(order)
    found = each([*outer.parts.get("condition", []), *outer.parts["body"]], captured)
    if next(order, None) is not None:
        raise ValueError("the program has more loops than the listing")
    return found.plus(Cost(0, 0 if captured else 1)), captured


def _top_loops(thunks: list[Thunk], captured: bool) -> Iterator[tuple[Thunk, bool]]:
    for one in thunks:
        if one.kind == "kWhile":
            yield one, captured
        if one.kind == BUFFER:
            yield from _top_loops(one.parts[""], True)
