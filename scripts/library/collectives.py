"""Reads the collectives of an optimized HLO module: what devices exchange, and how many bytes each receives."""

from scripts.library import hlo
from scripts.library.hlo import Instruction

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
GATHER = "all-gather"


def kind(one: Instruction) -> str | None:
    """Returns the kind of a collective; None for another instruction, and for the end of an asynchronous one."""
    op = one.op.removesuffix("-start")
    return op if op in KINDS else None


def found(parts: dict[str, list[Instruction]], name: str = "ENTRY") -> list[Instruction]:
    """Returns the collectives of a computation and of what it calls."""
    return [one for part in hlo.reached(parts, name) for one in parts[part] if kind(one)]


def received(parts: dict[str, list[Instruction]], name: str = "ENTRY") -> int:
    """Returns the bytes that a device receives from other devices by the gathers of a computation.

    A loop counts as one iteration, and of the loops of which one runs the costliest counts.
    """
    types = {one.name: one.type for one in parts[name]}
    every, alternatives = 0, [0]
    for one in parts[name]:
        if kind(one) == GATHER:
            own = sum(hlo.size(types[operand], anywhere=True) for operand in one.operands)
            # The type of an asynchronous gather contains its operands.
            both = hlo.size(one.type, anywhere=True)
            every += both - own * (2 if one.op.endswith("-start") else 1)
        inner = sum(received(parts, callee) for callee in hlo.callees(one))
        if hlo.is_alternative(one):
            alternatives.append(inner)
        else:
            every += inner
    return every + max(alternatives)
