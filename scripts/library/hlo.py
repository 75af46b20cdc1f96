"""Reads the text of an optimized HLO module of a TPU or GPU: its computations, and the bytes that a part moves."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

WIDTH = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}
ARRAY = r"(\w+)\[([\d,]*)\](\{[^}]*\})?"
MOVE_NOTHING = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "copy-done", "slice-done",
    "partition-id", "replica-id",
)  # fmt: skip
IN_PLACE = ("dynamic-update-slice", "scatter")
"""What writes a part of its first operand, if that is not read later."""
KERNELS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "triton_kernel_call_ffi")
"""Targets of custom calls that are Pallas kernels."""
HOLD_OTHERS = ("while", "conditional", "call", "fusion", "tuple", "optimization-barrier")


class Instruction(NamedTuple):
    """One line: `%name = type op(%operand, ...), rest`."""

    name: str
    type: str
    op: str
    operands: list[str]
    rest: str
    root: bool


def computations(text: str) -> dict[str, list[Instruction]]:
    """Returns the instructions of every computation of a module; the entry computation is under "ENTRY"."""
    found: dict[str, list[Instruction]] = {}
    here: list[Instruction] | None = None
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            here = found.setdefault("ENTRY" if head[1] else head[2], [])
        elif line.startswith("}"):
            here = None
        elif here is not None and " = " in line:
            here.append(_instruction(line.strip()))
    return found


def _instruction(line: str) -> Instruction:
    name, rest = line.removeprefix("ROOT ").split(" = ", 1)
    end = rest.index(" ")
    if rest.startswith("("):  # the type of a tuple has spaces, and may be nested
        depth = 0
        for end, character in enumerate(rest):
            depth += (character == "(") - (character == ")")
            if depth == 0:
                end += 1
                break
    type, call = rest[:end], re.sub(r"/\*index=\d+\*/", "", rest[end + 1 :])
    op, rest = call.split("(", 1)
    operands = [part.split()[-1].lstrip("%") for part in rest.split(")", 1)[0].split(", ") if part]
    return Instruction(name.lstrip("%"), type, op, operands, rest, line.startswith("ROOT "))


def size(type: str, anywhere: bool = False) -> int:
    """Returns the bytes of the arrays of a type in HBM or, with `anywhere`, in every memory space, such as `S(1)`."""
    return sum(
        math.prod(map(int, filter(None, dims.split(",")))) * WIDTH.get(dtype, 4)
        for dtype, dims, layout in re.findall(ARRAY, type)
        if anywhere or not re.search(r"S\([1-9]", layout)
    )


def shape(type: str) -> tuple[int, ...]:
    """Returns the shape of an array's type."""
    return tuple(map(int, filter(None, re.findall(ARRAY, type)[0][1].split(","))))


def float_shapes(type: str) -> list[tuple[int, ...]]:
    """Returns the shapes of the float32 arrays in the type of a tuple that have at least two axes."""
    found = [shape(array[0]) for array in re.finditer(ARRAY, type) if array[1] == "f32"]
    return [sizes for sizes in found if len(sizes) > 1]


def elements(type: str) -> int:
    """Returns the number of elements of an array's type."""
    return math.prod(shape(type))


def called(instruction: Instruction, key: str) -> str:
    found = re.search(rf"\b{key}=%?([\w.\-]+)", instruction.rest)
    if not found:
        raise ValueError(f"{instruction.name}: {instruction.op} without {key}=")
    return found[1]


def callees(one: Instruction) -> list[str]:
    """Returns the computations of a loop, a call or a conditional."""
    if one.op == "while":
        return [called(one, "condition"), called(one, "body")]
    if one.op == "call":
        return [called(one, "to_apply")]
    if one.op != "conditional":
        return []
    if listed := re.search(r"branch_computations=\{([^}]*)\}", one.rest):
        return re.findall(r"[\w.\-]+", listed[1])
    return [called(one, f"{which}_computation") for which in ("true", "false")]


def reached(parts: dict[str, list[Instruction]], name: str = "ENTRY") -> list[str]:
    """Returns the computations that a program runs, itself first; not those that are fused."""
    found = dict.fromkeys([name])
    for one in parts[name]:
        for inner in callees(one):
            found |= dict.fromkeys(reached(parts, inner))
    return list(found)


def written(parts: dict[str, list[Instruction]], one: Instruction) -> list[tuple[str, str]]:
    """Returns operation and type of each array that an instruction writes as a whole, looking into a fusion.

    An array that is updated in place or prefetched is not among them.
    """
    if one.op == "fusion":
        inside = {each.name: each for each in parts[called(one, "calls")]}
        return _results(parts, inside, next(each for each in inside.values() if each.root))
    silent = (*MOVE_NOTHING, *IN_PLACE, *HOLD_OTHERS)
    if one.op in silent or one.op.endswith("-start") or "ConcatBitcast" in one.rest:
        return []
    return [(one.op, array[0]) for array in re.finditer(ARRAY, one.type)]


def _results(
    parts: dict[str, list[Instruction]], inside: dict[str, Instruction], root: Instruction
) -> list[tuple[str, str]]:
    """Returns what a result of a fusion writes: each of a tuple, and nothing if it is a parameter."""
    if root.op == "tuple":
        return [pair for name in root.operands for pair in _results(parts, inside, inside[name])]
    if root.op == "bitcast":
        return _results(parts, inside, inside[root.operands[0]])
    return written(parts, root)


def once(loop: Instruction) -> int:
    """Returns 1, the number of iterations of a loop about which nothing is known."""
    return 1


def moved(parts: dict[str, list[Instruction]], name: str, iterations: Callable[[Instruction], int] = once) -> int:
    """Returns the bytes of HBM that a computation reads and writes.

    A conditional counts as its costliest branch, and so do loops of which one runs (see `is_alternative`). Of an array
    that is sliced, gathered or updated in place, only that part counts. An array that is copied to VMEM counts at the
    copy. Of a cache [L, B, H, S, K] a Pallas kernel reads one layer, and of an array for all experts those in use.

    Args:
        parts: the computations of the program.
        name: the computation.
        iterations: the number of iterations of an inner loop, and the number of experts that a kernel reads; or 1.
    """
    types = {one.name: one.type for one in parts[name]}
    costs = [(is_alternative(one), _moved(parts, types, one, iterations)) for one in parts[name]]
    return sum(cost for other, cost in costs if not other) + max((cost for other, cost in costs if other), default=0)


def is_alternative(one: Instruction) -> bool:
    """Returns whether an instruction is a loop of the decoder of which one runs, once; see `jaxspec.decode.loop`."""
    return one.op == "while" and re.search(r'op_name="[^"]*/alternatives/while"', one.rest) is not None


def is_floating(type: str) -> bool:
    """Returns whether a type has an array of floating-point numbers."""
    return re.search(r"\b(f|bf)\d+\[", type) is not None


def is_kernel(one: Instruction) -> bool:
    """Returns whether an instruction is a Pallas kernel."""
    target = re.search(r'custom_call_target="([^"]*)"', one.rest)
    return one.op == "custom-call" and target is not None and target[1] in KERNELS


def _read_by_kernel(type: str, experts: int) -> int:
    """Returns the bytes that a kernel reads of an array: one layer of a cache, and of all experts those in use."""
    sizes = shape(type)
    if len(sizes) == 5:
        return size(type) // sizes[0]
    return size(type) * experts // sizes[0] if len(sizes) == 3 and 1 < experts < sizes[0] else size(type)


def moved_by_kernels(parts: dict[str, list[Instruction]]) -> list[int]:
    """Returns the bytes of HBM that each Pallas kernel of a program reads and writes."""
    found = []
    for name in reached(parts):
        types = {one.name: one.type for one in parts[name]}
        found += [_moved(parts, types, one) for one in parts[name] if is_kernel(one)]
    return found


def serial_sums(parts: dict[str, list[Instruction]]) -> list[tuple[str, int]]:
    """Returns the fusions of a GPU program in which one thread sums many elements, and how many, the worst first.

    XLA spreads the sums of a fusion over threads where the fusion's result is one. In others each element of the result
    is computed by one thread, from the beginning.
    """
    found = {}
    for one in (one for name in reached(parts) for one in parts[name] if one.op == "fusion"):
        by_threads = "kind=kInput" in one.rest and "reduce" in one.name  # its result is a sum
        if by_threads or not re.search("kind=k(Loop|Input)", one.rest):
            continue
        inside = parts[called(one, "calls")]
        types = {each.name: each.type for each in inside}
        sums = [elements(types[each.operands[0]]) // elements(each.type) for each in inside if each.op == "reduce"]
        found[one.name] = max(sums, default=1)
    return sorted(found.items(), key=lambda pair: -pair[1])


def _moved(
    parts: dict[str, list[Instruction]],
    types: dict[str, str],
    one: Instruction,
    iterations: Callable[[Instruction], int] = once,
) -> int:
    if one.op in MOVE_NOTHING or "ConcatBitcast" in one.rest:
        return 0
    if one.op == "while":
        return iterations(one) * moved(parts, called(one, "body"), iterations)
    if one.op in ("call", "conditional"):
        return max(moved(parts, name, iterations) for name in callees(one))
    operands = [types.get(operand, "") for operand in one.operands]
    if one.op in ("dynamic-slice", "slice", "gather"):
        return 2 * size(one.type)
    if one.op == "dynamic-update-slice":
        return 2 * size(operands[1])
    if one.op == "copy-start":  # its type contains both source and destination
        return size(one.type)
    if one.op == "slice-start":
        _, part = [array[0] for array in re.finditer(ARRAY, one.type)][:2]
        return size(part, anywhere=True) + size(part)
    if is_kernel(one):
        experts = iterations(one)
        read = {name: _read_by_kernel(types[name], experts) for name in one.operands}
        return _read_by_kernel(one.type, experts) + sum(read.values())
    if one.op != "fusion":
        return size(one.type) + sum(map(size, operands))
    inner = called(one, "calls")
    read = 0
    for i, type in enumerate(operands):
        if whole := size(type):
            part = _read(parts, inner, i, whole)
            read += whole if part is None else part
    return read + _written(parts[inner], one.type)


def _read(parts: dict[str, list[Instruction]], name: str, index: int, whole: int) -> int | None:
    """Returns the bytes of a parameter that a fusion reads, or None if the fusion returns the parameter itself."""
    root = next(one.name for one in parts[name] if one.root)

    def of(value: str) -> int | None:
        if value == root:
            return None
        total = 0
        for one in parts[name]:
            for place, operand in enumerate(one.operands):
                if operand != value or one.op == "parameter":
                    continue
                if one.op == "bitcast" or "output_to_operand_aliasing" in one.rest:  # the same memory
                    part = of(one.name)
                elif one.op in ("dynamic-slice", "slice", "gather") and place == 0:
                    part = size(one.type, anywhere=True)
                elif one.op == "dynamic-update-slice" and place == 0:
                    part = 0
                elif one.op == "fusion":
                    part = _read(parts, called(one, "calls"), place, whole)
                    part = of(one.name) if part is None else part
                else:
                    return whole
                if part is None:
                    return None
                total += part
        return min(total, whole)

    return next(of(one.name) for one in parts[name] if one.op == "parameter" and one.operands == [str(index)])


def _written(inside: list[Instruction], type: str) -> int:
    """Returns the bytes that a fusion writes: its result, or only the part that it updates in place."""
    by_name = {one.name: one for one in inside}
    root = next(one for one in inside if one.root)
    while root.op == "bitcast":
        root = by_name[root.operands[0]]
    if root.op == "dynamic-update-slice" and size(type):
        return size(by_name[root.operands[1]].type, anywhere=True)
    return size(type)
