"""Compiles the decoder for GPUs without one, and says what the compiled loop does: `make gpu`.

    python -m scripts.prove.gpu                 # programs of two layers, and two of 32
    python -m scripts.prove.gpu --all           # every drafter, GPU, mesh, batch and dtype: hours
    python -m scripts.prove.gpu --chips h100 --drafters medusa --layers 32

As `make tpu` for TPUs: shapes of Llama-3-8B, no weights, the compiler of real GPUs (packages jax-cuda12-pjrt and
nvidia-cuda-nvcc-cu12), which is told what it would read from a driver. What holds for TPUs must hold, and on one device
the whole of `run` must be one command buffer (CUDA graph), so that nothing of a round waits for the host. Beside the
bytes that a round moves, it prints how many kernels and copies a round launches, and how often it would wait for the
host without that command buffer, at texts of 200 and 2000 tokens: of two branches the costlier, one turn of every loop
whose number of turns depends on anything but the text. The choice of kernels is not that of a real GPU, which times
several. Nothing is run.
"""

import functools
import importlib.util
import itertools
import pathlib
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxspec.backend import chips, command_buffer, exact_products
from jaxspec.core.sizes import BLOCK_SLOTS
from jaxspec.models.layers import matmul
from jaxspec.models.quantized import Quantized
from jaxspec.models.rows import rms_norm
from scripts.library import chains, hlo, kernels, loops, thunks, tier
from scripts.library.loops import Case
from scripts.library.tier import Chip

CHIPS = {name: Chip(name, *chips.CHIPS[name]) for name in chips.GPUS}
TEXTS = (200, 2000)  # tokens
SERIAL = 128  # elements: the width of a head; counts of nodes are shorter
TILE_INPUTS, CHAIN_INPUTS = 128, 16  # inputs of a tile (block_k of `exact_products.OPTIONS`), and of one instruction


@functools.cache
def devices(chip: str, mesh: bool) -> Any:
    """One device or four, as the compiler knows them."""
    return chips.describe_topology(f"{chip}:4" if mesh else f"{chip}:1")


def turns(tokens: int, loop: hlo.Instruction) -> int:
    """The turns of a loop at a text of so many tokens; see the module."""
    return -(-tokens // BLOCK_SLOTS) - 1 if re.search(r'op_name="[^"]*/blocks/', loop.rest) else 1


def iterations(tokens: int, program: loops.Program, loop: hlo.Instruction) -> int:
    """Returns the number of iterations of an inner loop at a text of so many tokens."""
    return max(turns(tokens, loop), program.experts_read(loop))


def compile_loop(case: Case, options: Mapping[str, Any]) -> loops.Program:
    """Compiles the loop of a case with these options of the compiler."""
    return loops.compiled(case, "gpu", devices(case.chip, case.mesh), options)


def look(case: Case) -> dict[str, Any]:
    """Compiles a case, and returns its line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        options = {**command_buffer.options("gpu", layers_split=case.mesh)}
        options |= exact_products.OPTIONS if case.exact else {}
        program = compile_loop(case, {**options, "xla_dump_to": folder})
        before, *after = (
            thunks.read(path.read_text())
            for name in ("", "_after_thunk_passes")
            for path in pathlib.Path(folder).glob(f"*jit_run*thunk_sequence{name}.txt")
        )
    row = tier.report(case, CHIPS[case.chip], program)
    captured = thunks.of_a_round(after[0] if after else before, program.parts, lambda _: 1)[1]
    row["captured"] = captured
    for tokens in TEXTS:
        cost = thunks.of_a_round(before, program.parts, functools.partial(iterations, tokens, program))[0]
        row |= {f"launches_{tokens}": cost.launches, f"waits_{tokens}": cost.waits}
    if not captured and not case.mesh:
        row["wrong"].append("the loop is not one command buffer, so every round waits for the host")
    name, most = next(iter(hlo.serial_sums(program.parts)), ("", 0))
    if most >= SERIAL:
        row["wrong"].append(f"one thread sums {most} elements for each result of {name}")
    if row["launches_2000"] > row["launches_200"]:
        row["wrong"].append("a loop over the text launches more for a longer one")
    if case.width:
        difference = tier.compare_with_plain(case, program, functools.partial(compile_loop, options=options))
        row |= {"kernels": difference.kernels, "same_kernels": difference.same}
        row["wrong"] += [f"a kernel before the logits depends on the drafter: {one}" for one in difference.rounding]
    return row


ROWS = (2, 3, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 128)
"""Rows of products that `exact=True` must sum alike: on both sides of each multiple of a tile."""
MATRICES = ((4096, 6144), (14336, 4096))
"""Inputs and outputs of products: the heads of a layer of Llama 3 8B, and the last product of its MLP."""


def product(
    chip: str,
    rows: int,
    matrix: tuple[int, int],
    int8: bool = False,
    options: Mapping[str, Any] = exact_products.OPTIONS,
) -> tuple[chains.Products, list[str]]:
    """Compiles a product of the library, and returns its chains of sums and its kernels."""
    place = SingleDeviceSharding(devices(chip, False)[0])
    inputs, outputs = matrix

    def array(dtype: str, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    whole = Quantized(array("int8", outputs, inputs), array("float32", outputs))
    weight = whole if int8 else array("bfloat16", inputs, outputs)
    with tempfile.TemporaryDirectory() as folder:
        lowered = jax.jit(lambda x, weight: matmul(x, weight)).lower(array("float32", 1, rows, inputs), weight)
        done = lowered.compile({**options, "xla_dump_to": folder})
        found = chains.read("".join(path.read_text() for path in sorted(pathlib.Path(folder).glob("*.ptx"))))
    return found, [one.name for one in hlo.computations(done.as_text() or "")["ENTRY"] if one.op in kernels.KERNEL_OPS]


def inexact(chip: str, options: Mapping[str, Any] = exact_products.OPTIONS, rows: Sequence[int] = ROWS) -> list[str]:
    """Returns in which products the sum of an output depends on the number of rows, or is split into parts."""
    wrong = []
    for matrix, int8 in itertools.product(MATRICES, (False, True)):
        expected = None
        for count in rows:
            found, launched = product(chip, count, matrix, int8, options)
            expected = expected or found.instructions
            step = found.lengths[-1] if found.lengths else 0
            whole = found.one_chain_each and found.instructions == expected and step * CHAIN_INPUTS == TILE_INPUTS
            if not whole or len(launched) > 1:
                name = f"{'int8' if int8 else 'bfloat16'} {matrix[0]} x {matrix[1]} at {count} rows"
                sums = f"{', '.join(sorted(found.instructions))} in chains of {sorted(set(found.lengths))}"
                wrong.append(f"{name}: {sums}, kernels {', '.join(launched)}")
    return wrong


def norm(chip: str, rows: int) -> tuple[str, ...]:
    """Compiles a norm of the library, and returns the steps of its sum."""
    place = SingleDeviceSharding(devices(chip, False)[0])
    x, scale = (jax.ShapeDtypeStruct(shape, "float32", sharding=place) for shape in ((rows, 4096), (4096,)))
    with tempfile.TemporaryDirectory() as folder:
        normed = jax.jit(lambda x, scale: rms_norm(x, scale, 1e-5).astype("bfloat16"))
        normed.lower(x, scale).compile({**exact_products.OPTIONS, "xla_dump_to": folder})
        texts = [path.read_text() for path in sorted(pathlib.Path(folder).glob("*.ptx"))]
    return chains.steps_of_norm(next(text for text in texts if "rsqrt" in text))


def shown(row: dict[str, Any]) -> str:
    launches, waits = (" and ".join(str(row[f"{what}_{n}"]) for n in TEXTS) for what in ("launches", "waits"))
    return f"{launches} launches, {waits} waits {'saved by' if row['captured'] else 'without'} a command buffer"


FIGURES = (
    "captured",
    "kernels",
    "same_kernels",
    *(f"{what}_{tokens}" for what in ("launches", "waits") for tokens in TEXTS),
)
TIER = tier.Tier("gpu", look, lambda layers: 2048, shown, FIGURES, ("jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12"))


def main() -> int:
    parser = tier.parser(__doc__, CHIPS)
    arguments = parser.parse_args()
    if not importlib.util.find_spec("nvidia.cuda_nvcc"):  # XLA would end with an error of nvlink, or at a null pointer
        parser.error("the package nvidia-cuda-nvcc-cu12, which has ptxas, is not installed; run `make gpu`")
    status = TIER.run(arguments)
    for chip in arguments.chips.split(",") * (arguments.drafters is None):
        wrong = inexact(chip)
        print(f"{chip:4} products with exact=True: {'; '.join(wrong) or 'one chain of one instruction at all rows'}")
        orders = {norm(chip, rows) for rows in ROWS}
        print(f"{chip:4} norms with exact=True: {len(orders)} orders of the sum at {len(ROWS)} numbers of rows")
        status |= bool(wrong) or len(orders) > 1
    return status


if __name__ == "__main__":
    sys.exit(main())
