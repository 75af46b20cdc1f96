"""Reads PTX: by which instructions and in how many chains a product sums, and in which steps a norm sums a row."""

import collections
import re
from typing import NamedTuple

TENSOR_CORE = re.compile(r"(?P<op>(?:mma\.sync|wgmma\.mma_async)\.\S+)\s*\{(?P<result>[^}]*)\}(?P<rest>[^;]*);")


class Products(NamedTuple):
    """The products of the tensor cores in a PTX text.

    A chain is a sequence of instructions, in the body of one loop, each of which adds to the result of the one before.
    """

    instructions: frozenset[str]
    lengths: tuple[int, ...]  # of the chains, in ascending order

    @property
    def one_chain_each(self) -> bool:
        """Whether there is one instruction, and all accumulators are summed in the same number of steps."""
        return len(self.instructions) == 1 and len(set(self.lengths)) == 1


def read(ptx: str) -> Products:
    """Returns the products in a PTX text."""
    open_chains: dict[tuple[str, ...], int] = {}
    lengths: collections.Counter[int] = collections.Counter()
    instructions = set()
    for found in TENSOR_CORE.finditer(ptx):
        instructions.add(found["op"])
        result = _registers(found["result"])
        groups = re.findall(r"\{([^}]*)\}", found["rest"])
        # wgmma adds to its result in place; the last operand of mma.sync is the sum so far
        before = _registers(groups[-1]) if found["op"].startswith("mma.sync") else result
        length = open_chains.pop(before, 0)
        lengths[length] -= length > 0
        lengths[length + 1] += 1
        open_chains[result] = length + 1
    return Products(frozenset(instructions), tuple(sorted(lengths.elements())))


def _registers(operand: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in operand.split(","))


def steps_of_norm(ptx: str) -> tuple[str, ...]:
    """Returns the operations of a norm on floats, up to the reciprocal root, which decide the order of its sum."""
    before = ptx[: ptx.find("rsqrt")]
    found = re.findall(r"^\s*(?:@%p\d+ )?((?:add|mul|fma|sub)\.\S*f32|shfl\.\S+)", before, re.MULTILINE)
    return tuple(found)
