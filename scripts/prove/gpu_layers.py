"""Compiles the fixed-order kernels of a layer for GPUs without one, and says what the machine code does: `make gpu`.

    python -m scripts.prove.gpu_layers                              # an H100, 16 and 64 rows
    python -m scripts.prove.gpu_layers --chips a100 --rows 16,48,128

Shapes of Llama 3 8B, and of the experts of Qwen3-30B-A3B, in bfloat16 and int8. For each call of a layer
(`jaxspec.models.products_pallas`, `jaxspec.models.experts_pallas`) it reads the PTX: every accumulator must be one
chain of one instruction, of the same length for any number of rows, and no register may be spilled. Then it compiles
whole layers: XLA may not sum anything between the embedding and the logits, and the bytes that are moved may exceed
those of the matrices by 5 % at most. Then it counts the launches of a plain round.
Nothing is run.
"""

import argparse
import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from jaxspec.bench.measurements import add_record, write_record
from jaxspec.core.records import KV, Window
from jaxspec.models import attention_pieces, experts_pallas
from jaxspec.models import products_pallas as products
from jaxspec.models.products_pallas import PreparedRows
from jaxspec.models.quantized import Quantized
from scripts.library import hlo, loops, thunks
from scripts.prove import gpu

HIDDEN, UNITS, HEADS, WIDTH, VOCAB = 4096, 14336, 8, 128, 128256
CAPACITY = 32768
"""The number of slots of the cache that attention reads."""
QKV = 6144
INSTRUCTION = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
INSTRUCTION_INPUTS = 16
MAX_BYTES = 1.05
"""The largest quotient of the bytes that layers move and those of their matrices, at 16 rows."""
MAX_LAUNCHES = 6
"""The largest number of launches of a layer: a kernel for each call, and none of XLA's."""
MAX_LAUNCHES_OF_A_ROUND = 250
"""The largest number of launches of a round of plain decoding at 32 layers, with top-k, top-p and noise."""
SUMS = ("dot", "reduce", "convolution", "reduce-window")


class Call(NamedTuple):
    """A call of a layer: a function, the shapes of its arguments, and the inputs of a chain in one iteration."""

    function: Callable
    arguments: tuple
    inputs: int


class Chains(NamedTuple):
    """The instructions of a program's products, and the length of each chain of them in one iteration."""

    instructions: set[str]
    lengths: list[int]


def read_chains(ptx: str) -> Chains:
    """Reads which products of a program add to which: a chain begins where the sum is no earlier product's result."""
    ends: dict[tuple[str, ...], int] = {}
    instructions, lengths = set(), []
    group = r"\{([^}]*)\}"
    for found in re.finditer(rf"((?:mma|wgmma)\.\S+)\s*{group},\s*{group},\s*{group},\s*{group}", ptx):
        result, _, _, added = (tuple(part.replace(" ", "").split(",")) for part in found.groups()[1:])
        instructions.add(found[1])
        chain = ends.pop(added, None)
        if chain is None:
            chain = len(lengths)
            lengths.append(0)
        lengths[chain] += 1
        ends[result] = chain
    return Chains(instructions, lengths)


def calls(chip: str, rows: int) -> dict[str, Call]:
    """Returns the calls of a layer with products, by name, for this number of rows."""
    place = SingleDeviceSharding(gpu.devices(chip, False)[0])

    def array(dtype: str, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    x, scale = array("float32", rows, HIDDEN), array("float32", HIDDEN)
    tile = products.SEGMENTED_TILE.outputs
    prepared = PreparedRows(array("bfloat16", rows, HIDDEN), array("float32", HIDDEN // tile, rows))
    found = {}
    for kind in ("bfloat16", "int8"):

        def matrix(inputs: int, outputs: int, table: bool = False, kind: str = kind) -> Any:
            if kind == "int8":
                return Quantized(array("int8", outputs, inputs), array("float32", outputs))
            return array("bfloat16", *((outputs, inputs) if table else (inputs, outputs)))

        def plain(rows: Any, weight: Any) -> Any:
            return products.multiply(rows, weight, epsilon=1e-5)

        def table(rows: Any, weight: Any) -> Any:
            return products.multiply(rows, weight, transposed=True)

        def gated(rows: Any, weight: Any) -> Any:
            return products.multiply_gated(rows, weight, "silu", epsilon=1e-5)

        def added(rows: Any, weight: Any, x: Any, scale: Any) -> Any:
            return products.multiply_add(rows, weight, x, scale)

        inputs = {form: getattr(products, f"{form}_TILE").inputs for form in ("PLAIN", "GATED", "TABLE", "SEGMENTED")}
        mixed, units = array("bfloat16", rows, HIDDEN), array("bfloat16", rows, UNITS)
        found |= {
            f"qkv, {kind}": Call(plain, (prepared, matrix(HIDDEN, QKV)), inputs["PLAIN"]),
            f"out, {kind}": Call(added, (mixed, matrix(HIDDEN, HIDDEN), x, scale), inputs["SEGMENTED"]),
            f"gate_up, {kind}": Call(gated, (prepared, matrix(HIDDEN, 2 * UNITS)), inputs["GATED"]),
            f"down, {kind}": Call(added, (units, matrix(UNITS, HIDDEN), x, scale), inputs["SEGMENTED"]),
            f"head, {kind}": Call(table, (mixed, matrix(HIDDEN, VOCAB, True)), inputs["TABLE"]),
        }
    return found | expert_calls(rows, array)


def expert_calls(rows: int, array: Callable) -> dict[str, Call]:
    """Returns the calls of the experts of Qwen3-30B-A3B; `array` returns the shape of a dtype and sizes."""
    count, width, units = 128, 2048, 768
    most = min(8 * rows, count)
    used = experts_pallas.Used(array("int32", most), array("int32", 1), array("int32", products.MAX_SEGMENTS + 1))
    of_experts = array("int32", count, rows), array("float32", count, rows)
    found = {}
    for kind in ("bfloat16", "int8"):

        def matrices(inputs: int, outputs: int, kind: str = kind) -> Any:
            if kind == "int8":
                return Quantized(array("int8", count, outputs, inputs), array("float32", count, outputs))
            return array("bfloat16", count, inputs, outputs)

        def hidden(rows: Any, used: Any, weight: Any) -> Any:
            return experts_pallas.hidden_units(rows, used, weight, None, "silu", interpret=False)

        def outputs(hidden: Any, used: Any, has: Any, weights: Any, weight: Any) -> Any:
            return experts_pallas.weighted_outputs(hidden, used, has, weights, weight, interpret=False)

        read = array("bfloat16", rows, width), used, matrices(width, 2 * units)
        written = array("bfloat16", most, rows, units), used, *of_experts, matrices(units, width)
        found |= {
            f"expert units, {kind}": Call(hidden, read, experts_pallas.INPUTS),
            f"expert outputs, {kind}": Call(outputs, written, experts_pallas.INPUTS),
        }
    return found


def look_at_call(chip: str, name: str, rows: int) -> dict[str, Any]:
    """Compiles a call, and returns its line of the table."""
    call = calls(chip, rows)[name]
    row, chains = _compile(call, {"chip": chip, "call": name, "rows": rows}, 1)
    if set(chains.lengths) != {call.inputs // INSTRUCTION_INPUTS}:
        lengths = sorted(set(chains.lengths))
        row["wrong"].append(f"chains of {lengths} products for {call.inputs} inputs of an iteration")
    return row


def look_at_attention(chip: str, rows: int) -> dict[str, Any]:
    """Compiles attention of a window of so many tokens to a text, and returns its line of the table.

    XLA computes two tables for it, which the layers of a network share.
    """
    place = SingleDeviceSharding(gpu.devices(chip, False)[0])

    def array(dtype: str, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def attend(rows: Any, rotation: Any, cache: Any, length: Any, mask: Any, layer: Any) -> Any:
        heads = attention_pieces.ProjectedHeads(rows, rotation)
        count = products.padded_rows(mask.shape[1])
        return attention_pieces.attend_rows(
            heads, cache, layer, length, None, mask, WIDTH**-0.5, None, HEADS, "bfloat16", count
        )

    turn, slots = array("float32", 1, 1, rows, WIDTH // 2), array("uint16", 1, 1, HEADS, CAPACITY, WIDTH)
    arguments = (
        array("float32", products.padded_rows(rows), QKV), (turn, turn), KV(slots, slots), array("int32", 1),
        array("bool", 1, rows, rows), array("int32", 1),
    )  # fmt: skip
    row, chains = _compile(Call(attend, arguments, 0), {"chip": chip, "call": "attention", "rows": rows}, 4)
    # Products with keys, and with values that may not be finite, have the width of a head; those with weights a block.
    lengths = {
        WIDTH // INSTRUCTION_INPUTS,
        2 * WIDTH // INSTRUCTION_INPUTS,
        attention_pieces.BLOCK // INSTRUCTION_INPUTS,
    }
    if not set(chains.lengths) <= lengths:
        row["wrong"].append(f"chains of {sorted(set(chains.lengths))} products")
    return row


def _compile(call: Call, row: dict[str, Any], most: int) -> tuple[dict[str, Any], Chains]:
    """Compiles a call of at most so many launches; returns its line of the table, and its chains of products."""
    with tempfile.TemporaryDirectory() as folder:
        done = jax.jit(call.function).lower(*call.arguments).compile({"xla_dump_to": folder})
        ptx = [path for path in pathlib.Path(folder).glob("*.ptx") if ".version" in path.read_text()]
        listing = next(pathlib.Path(folder).glob("*thunk_sequence.txt")).read_text()
        report = "".join(map(assemble, ptx))
        chains = read_chains("".join(path.read_text() for path in ptx))
    memory = done.memory_analysis()
    assert memory is not None
    row |= {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", report))),
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill stores", report))),
        "chains": len(chains.lengths), "temporary_bytes": memory.temp_size_in_bytes, "wrong": [],
    }  # fmt: skip
    if chains.instructions != {INSTRUCTION}:
        row["wrong"].append(f"instructions {sorted(chains.instructions)}")
    if row["spilled_bytes"]:
        row["wrong"].append(f"{row['spilled_bytes']} bytes of registers are spilled")
    if (count := launches(listing)) > most:
        row["wrong"].append(f"{count} launches")
    return row, chains


def assemble(ptx: pathlib.Path) -> str:
    """Returns what ptxas says about a program."""
    target = re.findall(r"\.target (\w+)", ptx.read_text())[0]
    root = pathlib.Path(__import__("nvidia.cuda_nvcc", fromlist=["cuda_nvcc"]).__path__[0])
    command = [root / "bin" / "ptxas", "-v", f"-arch={target}", "-o", "/dev/null", ptx]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def launches(listing: str) -> int:
    """Returns the number of launches of a program without loops."""
    return sum(not thunks.NO_LAUNCH.fullmatch(thunk.kind) for thunk in thunks.read(listing))


def sums_of_xla(parts: dict[str, list[hlo.Instruction]]) -> Iterator[str]:
    """Yields what sums floating-point numbers in a program, other than Pallas kernels."""
    for instructions in parts.values():
        for one in instructions:
            floating = re.match(r"\(?(f|bf)\d", one.type)
            if (one.op in SUMS and floating) or (one.op == "custom-call" and not hlo.is_kernel(one)):
                yield one.name


def look_at_layers(chip: str, rows: int) -> dict[str, Any]:
    """Compiles layers between embedding and logits, and returns their line of the table."""
    counts, parts, matrices = [], {}, 0
    place = SingleDeviceSharding(gpu.devices(chip, False)[0])
    shape: Any = jax.ShapeDtypeStruct
    window = Window(shape((1, rows), "int32"), shape((1, rows), "int32"), shape((1, rows, rows), "bool"))
    for layers in (2, 3):
        lm = loops.llama(layers).with_execution(attention="pallas", products="pallas", platform="gpu")
        cache = jax.eval_shape(lambda lm=lm: lm.init_cache(1, 2048))
        params = loops.shapes(lm, False)

        def run(params: Any, window: Window, cache: Any, lm: Any = lm) -> Any:
            features, entries = lm.apply(params, window, cache)
            return lm.head(params, features), entries

        arguments = jax.tree.map(lambda a: shape(a.shape, a.dtype, sharding=place), (params, window, cache))
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, str | bool] = {"xla_dump_to": folder, "xla_gpu_enable_command_buffer": ""}
            done = jax.jit(run).lower(*arguments).compile(options)
            counts.append(launches(next(pathlib.Path(folder).glob("*thunk_sequence.txt")).read_text()))
        parts = hlo.computations(done.as_text() or "")
        matrices = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params | {"embed": ()}))
    row = {
        "chip": chip, "call": "layers", "rows": rows, "launches_of_a_layer": counts[1] - counts[0],
        "launches_of_the_rest": 3 * counts[0] - 2 * counts[1],
        "bytes_of_the_matrices": hlo.moved(parts, "ENTRY") / matrices,
        "wrong": [f"XLA sums in {name}" for name in sums_of_xla(parts)],
    }  # fmt: skip
    if row["launches_of_a_layer"] > MAX_LAUNCHES:
        row["wrong"].append(f"a layer is {row['launches_of_a_layer']} launches, at most {MAX_LAUNCHES} are expected")
    if rows <= products.ROW_TILE and row["bytes_of_the_matrices"] > MAX_BYTES:
        row["wrong"].append(f"{row['bytes_of_the_matrices']:.3f} of the bytes of the matrices are moved")
    return row


def look_at_round(chip: str) -> dict[str, Any]:
    """Compiles rounds of plain decoding with layers of these kernels, and returns their line of the table."""
    made = [loops.Case(chip, "none", layers=n, attention="pallas", products="pallas") for n in (2, 3)]
    few, more = (gpu.look(case)[f"launches_{gpu.TEXTS[0]}"] for case in made)
    row = {
        "chip": chip, "call": "round", "rows": 1, "launches_of_a_layer": more - few,
        "launches_of_the_rest": 3 * few - 2 * more,
        f"launches_of_{loops.DEEP}_layers": few + (loops.DEEP - 2) * (more - few), "wrong": [],
    }  # fmt: skip
    if more - few > MAX_LAUNCHES:
        row["wrong"].append(f"a layer is {more - few} launches, at most {MAX_LAUNCHES} are expected")
    if (count := row[f"launches_of_{loops.DEEP}_layers"]) > MAX_LAUNCHES_OF_A_ROUND:
        row["wrong"].append(f"a round is {count} launches, at most {MAX_LAUNCHES_OF_A_ROUND} are expected")
    return row


def shown(row: dict[str, Any]) -> str:
    """Returns a line of the table as text."""
    figures = ", ".join(
        f"{key.replace('_', ' ')} {value:.3f}" if isinstance(value, float) else f"{key.replace('_', ' ')} {value}"
        for key, value in row.items()
        if key not in ("chip", "call", "rows", "wrong")
    )
    words = "; ".join(row["wrong"]) or "all as it should be"
    return f"{row['chip']:4} {row['call']:18} {row['rows']:3} rows: {figures}; {words}"


def main() -> int:
    jax.config.update("jax_platforms", "cpu")  # a compiler needs no device
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default="h100")
    parser.add_argument("--rows", default="16,64")
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for chip in arguments.chips.split(","):
        for rows in map(int, arguments.rows.split(",")):
            looks = [lambda name=name: look_at_call(chip, name, rows) for name in calls(chip, rows)]  # noqa: B023
            attention = lambda: look_at_attention(chip, rows)  # noqa: B023, E731
            for look in (*looks, attention, lambda: look_at_layers(chip, rows)):  # noqa: B023
                lines.append(look())
                print(shown(lines[-1]), flush=True)
        lines.append(look_at_round(chip))
        print(shown(lines[-1]), flush=True)
    if arguments.record:
        packages = {name: importlib.metadata.version(name) for name in gpu.TIER.packages}
        write_record(arguments.record, "gpu-layers", sys.argv, {"lines": lines}, packages)
    return int(any(line["wrong"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
