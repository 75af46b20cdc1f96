"""Compares how long rounds of plain decoding compile with fixed-order kernels (`exact=True`) and in XLA's form.

    python -m scripts.prove.compile_exact [--chips h100,v5e] [--layers 32] [--repeats 2]

Shapes of Llama 3 8B in bfloat16, compiled for GPUs and TPUs without one, as by `make gpu` and `make tpu`. Both forms
are compiled in turns. The time contains tracing and lowering. Nothing is run.
"""

import argparse
import functools
import importlib.metadata
import os
import sys
from typing import Any

import jax

from jaxspec.backend import command_buffer
from jaxspec.bench.measurements import add_record, round_significant, write_record
from scripts.library import loops
from scripts.prove import gpu, tpu

FORMS = {"XLA": {}, "fixed order": {"attention": "pallas", "products": "pallas"}}
CAPACITY = 2048


def look(chip: str, layers: int, repeats: int) -> dict[str, Any]:
    """Compiles both forms for a chip, and returns the least number of seconds of each."""
    if chip in gpu.CHIPS:
        compile_loop = functools.partial(gpu.compile_loop, options=command_buffer.options("gpu"))
    else:
        compile_loop = tpu.compile_loop
    least = dict.fromkeys(FORMS, float("inf"))
    for _ in range(repeats):
        for form, execution in FORMS.items():
            case = loops.Case(chip, "none", layers=layers, capacity=CAPACITY, **execution)
            least[form] = min(least[form], compile_loop(case).seconds)
    return {"chip": chip, "seconds": {form: round_significant(seconds) for form, seconds in least.items()}}


def main() -> int:
    jax.config.update("jax_platforms", "cpu")  # a compiler needs no device
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default="h100,v5e")
    parser.add_argument("--layers", type=int, default=loops.DEEP)
    parser.add_argument("--repeats", type=int, default=2)
    add_record(parser.add_argument)
    given = parser.parse_args()
    lines = []
    for chip in given.chips.split(","):
        lines.append(look(chip, given.layers, given.repeats))
        print(chip, *(f"{form}: {seconds} s" for form, seconds in lines[-1]["seconds"].items()), flush=True)
    if given.record:
        packages = {name: importlib.metadata.version(name) for name in (*gpu.TIER.packages, *tpu.TIER.packages)}
        write_record(given.record, "compile-exact", sys.argv, {"layers": given.layers, "lines": lines}, packages)
    return 0


if __name__ == "__main__":
    sys.exit(main())
