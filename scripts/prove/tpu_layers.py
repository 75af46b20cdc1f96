"""Compiles the fixed-order kernels of a layer for TPUs without one, and says what the program does: `make tpu`.

    python -m scripts.prove.tpu_layers                              # v5e, v6e and v5p, 16 and 64 rows
    python -m scripts.prove.tpu_layers --chips v5e --rows 16,128

Shapes of Llama 3 8B, bfloat16 and int8. It compiles whole layers: each must be six kernels
(`jaxspec.models.products_tpu`), XLA may not sum anything between the embedding and the logits, and the bytes that are
moved may exceed those of the matrices and caches by 5 % at most. Nothing is run.
"""

import argparse
import importlib.metadata
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from jaxspec.bench.measurements import add_record, write_record
from jaxspec.core.records import Window
from scripts.library import hlo, loops
from scripts.prove import tpu

CAPACITY = 2048
KERNELS_OF_A_LAYER = 6
MAX_BYTES = 1.05
"""The largest quotient of the bytes that layers move and those of their matrices and caches, at 16 rows."""
ROWS = 16
SUMS = ("dot", "reduce", "convolution", "reduce-window")


def sums_of_xla(parts: dict[str, list[hlo.Instruction]]) -> Iterator[str]:
    """Yields what sums floating-point numbers in a program, other than Pallas kernels."""
    for instructions in parts.values():
        for one in instructions:
            if one.op in SUMS and re.match(r"\(?(f|bf)\d", one.type):
                yield one.name


def look(chip: str, rows: int, int8: bool) -> dict[str, Any]:
    """Compiles two and three layers between embedding and logits, and returns their line of the table."""
    device = topologies.get_topology_desc(tpu.CHIPS[chip].topology, "tpu").devices[0]
    place = SingleDeviceSharding(device)
    shape: Any = jax.ShapeDtypeStruct
    window = Window(shape((1, rows), "int32"), shape((1, rows), "int32"), shape((1, rows, rows), "bool"))
    counts, seconds, parts, needed, temporary = [], 0.0, {}, 0, 0
    for layers in (2, 3):
        lm = loops.llama(layers).with_execution(attention="pallas", products="pallas", platform="tpu", exact=True)
        cache = jax.eval_shape(lambda lm=lm: lm.init_cache(1, CAPACITY))
        params = loops.shapes(lm, int8)

        def run(params: Any, window: Window, cache: Any, lm: Any = lm) -> Any:
            features, entries = lm.apply(params, window, cache)
            return lm.head(params, features), entries

        arguments = jax.tree.map(lambda a: shape(a.shape, a.dtype, sharding=place), (params, window, cache))
        start = time.perf_counter()
        done = jax.jit(run).lower(*arguments).compile(dict(lm.compiler_options))
        seconds = time.perf_counter() - start
        parts = hlo.computations(done.as_text() or "")
        counts.append(sum(map(hlo.is_kernel, parts["ENTRY"])))
        read = params | {"embed": ()}, cache.stores  # of the embeddings only some rows
        needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(read))
        memory = done.memory_analysis()
        assert memory is not None
        temporary = memory.temp_size_in_bytes
    row = {
        "chip": chip, "dtype": "int8" if int8 else "bfloat16", "rows": rows,
        "kernels_of_a_layer": counts[1] - counts[0], "kernels_of_the_rest": 3 * counts[0] - 2 * counts[1],
        "bytes_moved": hlo.moved(parts, "ENTRY") / needed, "temporary_mb": temporary / 1e6,
        "compile_s": round(seconds, 1), "wrong": [f"XLA sums in {name}" for name in sums_of_xla(parts)],
    }  # fmt: skip
    if row["kernels_of_a_layer"] != KERNELS_OF_A_LAYER:
        row["wrong"].append(f"a layer is {row['kernels_of_a_layer']} kernels, expected {KERNELS_OF_A_LAYER}")
    if rows <= ROWS and row["bytes_moved"] > MAX_BYTES:
        row["wrong"].append(f"{row['bytes_moved']:.3f} of the bytes of matrices and caches are moved")
    return row


def shown(row: dict[str, Any]) -> str:
    """Returns a line of the table as text."""
    words = "; ".join(row["wrong"]) or "all as it should be"
    return (
        f"{row['chip']:4} {row['dtype']:8} {row['rows']:3} rows: {row['kernels_of_a_layer']} kernels a layer and "
        f"{row['kernels_of_the_rest']} beside, {row['bytes_moved']:.3f} of the bytes of matrices and caches, "
        f"temporaries {row['temporary_mb']:.1f} MB, compiled in {row['compile_s']} s; {words}"
    )


def main() -> int:
    jax.config.update("jax_platforms", "cpu")  # a compiler needs no device
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default=",".join(tpu.CHIPS))
    parser.add_argument("--rows", default="16,64")
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for chip in arguments.chips.split(","):
        for int8 in (False, True):
            for rows in map(int, arguments.rows.split(",")):
                lines.append(look(chip, rows, int8))
                print(shown(lines[-1]), flush=True)
    if arguments.record:
        packages = {name: importlib.metadata.version(name) for name in tpu.TIER.packages}
        words = ["python", "-m", "scripts.prove.tpu_layers", *sys.argv[1:]]
        write_record(arguments.record, "tpu-layers", words, {"lines": lines}, packages)
    return int(any(line["wrong"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
