"""The kernels on the way to the target's logits, in compiled programs of a TPU or GPU, and how two programs differ.

Two kernels are the same if their operations, types, layouts, tiles and other settings are the same. Names, metadata and
the order of schedules are not compared.
"""

import collections
import functools
import hashlib
import re
from typing import NamedTuple

from scripts.library import hlo

KERNEL_OPS = ("fusion", "custom-call", "copy", "reduce", "convolution", "dot", "concatenate", "pad", "slice")
"""Operations of a round that are kernels of their own."""
SUMS = ("dot", "convolution", "reduce", "reduce-window", "custom-call", "divide", "multiply", "add", "exponential")
"""Operations of which at least one is in a kernel that rounds."""
FLOATS = r"\b(?:bf16|f16|f32|f64)\["
_UNNAMED = (
    r", metadata=\{(?:[^{}]|\{[^{}]*\})*\}",
    r", control-predecessors=\{[^}]*\}",
    r", frontend_attributes=\{(?:[^{}]|\{[^{}]*\})*\}",
    r'"(?:scheduling_name|operation_queue_id|deduplicated_name|name)":"[^"]*",?',
    r'"force_earliest_schedule":\w+,?',
    r'"reification_cost":\[[^\]]*\],?',
)


class Kernel(NamedTuple):
    """A kernel of a round."""

    name: str
    type: str
    rounds: bool  # whether it computes with floating-point numbers, and does not only move them
    fingerprint: str


class Difference(NamedTuple):
    """How the kernels of a program differ from the kernels of a reference."""

    kernels: int
    same: int
    rounding: tuple[str, ...]  # kernels that compute with floats, and that only one of both programs has
    others: int  # kernels that only move numbers

    @property
    def sentence(self) -> str:
        """What a table says."""
        return f"{self.same} of {self.kernels} kernels before the logits are those of plain decoding"


def before_logits(parts: dict[str, list[hlo.Instruction]], vocab: int) -> list[Kernel]:
    """Returns the kernels of a round through which floating-point numbers reach the target's logits.

    What a drafter proposes reaches them as integers, such as tokens and masks, which are exact.

    Args:
        parts: the computations of the program, whose loop is the loop of the rounds.
        vocab: V, the number of columns of the logits.
    """
    loop = next(one for one in parts["ENTRY"] if one.op == "while")
    of_round = parts[hlo.called(loop, "body")]
    by_name = {one.name: one for one in of_round}
    found: dict[str, hlo.Instruction] = {}
    inside: list[hlo.Instruction] = []
    todo = [_head(parts, of_round, vocab).name]
    while todo:
        one = by_name.get(todo.pop())
        if one is None or one.name in found:
            continue
        found[one.name] = one
        if one.op == "while" and re.search(r'op_name="[^"]*/blocks/', one.rest):  # attention's loop over the text
            bodies = hlo.reached(parts, hlo.called(one, "body"))
            inside += [each for body in bodies for each in parts[body] if each.op in KERNEL_OPS]
        if one.op not in ("while", "conditional", "parameter"):
            todo += [name for name in one.operands if name in by_name and re.search(FLOATS, by_name[name].type)]
    own = [one for one in of_round if one.name in found and one.op in KERNEL_OPS]
    return [Kernel(one.name, one.type, _rounds(parts, one), _fingerprint(parts, one)) for one in own + inside]


def compare(kernels: list[Kernel], reference: list[Kernel]) -> Difference:
    """Returns how kernels differ from the kernels of a reference, as multisets."""
    own, expected = (collections.Counter(one.fingerprint for one in each) for each in (kernels, reference))
    missing, more = expected - own, own - expected
    rounding = []
    for sign, odd, listed in (("+", more, kernels), ("-", missing, reference)):
        for one in listed:
            if odd[one.fingerprint] > 0:
                odd[one.fingerprint] -= 1
                rounding += [f"{sign} {one.name} {_brief(one.type)}"] * one.rounds
    same = sum((own & expected).values())
    others = len(kernels) - same - sum(line.startswith("+") for line in rounding)
    return Difference(len(kernels), same, tuple(rounding), others)


def _head(parts: dict[str, list[hlo.Instruction]], of_round: list[hlo.Instruction], vocab: int) -> hlo.Instruction:
    """Returns the matrix product that gives the target's logits: the first one with a result of V columns."""
    for one in of_round:
        product = one.op in ("dot", "convolution") or _operations(parts, one) & {"dot", "convolution"}
        if product and re.search(rf"\[(?:\d+,)*{vocab}(?:,\d+)*\]", one.type):
            return one
    raise ValueError(f"the program has no matrix product with {vocab} columns")


def _operations(parts: dict[str, list[hlo.Instruction]], one: hlo.Instruction) -> set[str]:
    """Returns the operations of an instruction, of the computations that it calls for a fusion."""
    if one.op != "fusion":
        return {one.op}
    return {op for inner in parts[hlo.called(one, "calls")] for op in _operations(parts, inner)}


def _rounds(parts: dict[str, list[hlo.Instruction]], one: hlo.Instruction) -> bool:
    """Returns whether a kernel computes with floats; conversions, copies and paddings round nothing that matters."""
    if one.op != "fusion":
        moves = "ConcatBitcast" in one.rest  # a matrix that a TPU fetches in parts
        return one.op in SUMS and re.search(FLOATS, one.type) is not None and not moves
    inner = parts[hlo.called(one, "calls")]
    direct = any(each.op in SUMS and re.search(FLOATS, each.type) for each in inner)
    return direct or any(_rounds(parts, each) for each in inner if each.op == "fusion")


def _fingerprint(parts: dict[str, list[hlo.Instruction]], one: hlo.Instruction) -> str:
    rest = _unnamed(one.rest)
    inner = _body(parts, hlo.called(one, "calls")) if one.op == "fusion" else ""
    kind, config = (re.search(pattern, rest) for pattern in (r"kind=(\w+)", r"backend_config=(.*)$"))
    target = re.search(r'custom_call_target="([^"]*)"', rest)
    parts_of = [_anywhere(one.type), one.op, *(match[1] for match in (kind, config, target) if match), inner]
    return hashlib.sha256("\n".join(parts_of).encode()).hexdigest()[:16]


def _unnamed(rest: str) -> str:
    """Returns the rest of a line without names, estimates, and the memory in which a TPU keeps an array."""
    rest = functools.reduce(lambda text, pattern: re.sub(pattern, "", text), _UNNAMED, rest)
    if '"flag_configs"' in rest:  # a TPU
        bounds = re.findall(r'"(?:\w+_window_bounds|iteration_bounds|emitter)":(?:\[[^\]]*\]|"[^"]*")', rest)
        rest = re.sub(r"backend_config=.*$", f"backend_config={' '.join(bounds)}", rest)
    return rest


def _anywhere(type: str) -> str:
    """Returns a type without memory spaces, such as S(1), the on-chip memory of a TPU."""
    return re.sub(r"S\(\d+\)", "", type)


def _body(parts: dict[str, list[hlo.Instruction]], name: str) -> str:
    """Returns the text of a computation, in which instructions have numbers instead of names."""
    parameters = sorted((one for one in parts[name] if one.op == "parameter"), key=lambda one: int(one.operands[0]))
    numbers: dict[str, str] = {}
    lines = []
    for one in parameters + [one for one in parts[name] if one.op != "parameter"]:
        numbers[one.name] = f"v{len(numbers)}"
        rest = _unnamed(one.rest)
        for key in ("calls", "to_apply", "body", "condition"):
            called = re.search(rf"\b{key}=%?([\w.\-]+)", rest)
            if called and called[1] in parts:
                digest = hashlib.sha256(_body(parts, called[1]).encode()).hexdigest()[:16]
                rest = rest.replace(called[0], f"{key}={digest}")
        for operand in sorted(one.operands, key=len, reverse=True):
            number = numbers.get(operand, operand if one.op in ("constant", "parameter") else "?")
            rest = re.sub(rf"%?(?<![\w.\-]){re.escape(operand)}(?![\w.\-])", number, rest)
        lines.append(f"{numbers[one.name]} = {_anywhere(one.type)} {one.op}({_anywhere(rest)}")
    return "\n".join(lines)


def _brief(type: str) -> str:
    """Returns a type without layouts."""
    return re.sub(r"\{[^}]*\}", "", type)
