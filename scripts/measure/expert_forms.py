"""Times the forms of a mixture of experts on a GPU, and compares the bits of their rows for several numbers of rows.

    python -m scripts.measure.expert_forms --record expert-forms
    python -m scripts.measure.expert_forms --small                   # toy sizes, on any device

The layer has the shapes of Qwen3-30B-A3B; its experts take 1.2 GB in bfloat16, more than the cache of a GPU holds. The
forms are those of `jaxspec.models.experts`. For each form and number of rows, the first row is compared with the first
row of the largest call, and all rows with those of the loop. The forms of a number of rows take turns, and a ratio is
the median over turns of the time of the loop by that of the form. The record is written after every number of rows.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.backend import command_buffer
from jaxspec.bench.measurements import add_record, quartiles, round_significant, write_record
from jaxspec.models import experts
from jaxspec.models.config import Experts
from jaxspec.models.quantized import Quantized
from scripts.library.exact import describe

ROWS = (1, 2, 8, 16, 32, 64, 128)
REPEATS, TURNS = 7, 10
LOOP, KERNELS, GROUPS = "loop", "kernels", "products of groups"


def make_layer(small: bool, dtype: str, count: int) -> tuple[Any, ...]:
    """Returns how the layer is computed, and random arrays: rows, logits of the router, and matrices."""
    sizes, width = (Experts(16, 4, 32), 64) if small else (Experts(128, 8, 768), 2048)
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (sizes.count, width, 2 * sizes.width), (sizes.count, sizes.width, width)
    matrices = [
        (jax.random.normal(key, shape, jnp.bfloat16) * shape[1] ** -0.5).astype(jnp.bfloat16)
        for key, shape in zip(keys, shapes)
    ]
    stored = [jax.jit(Quantized.quantize)(a) for a in matrices] if dtype == "int8" else matrices
    rows = jax.random.normal(keys[2], (count, width))
    return experts._How(sizes, "silu", 1), rows, jax.random.normal(keys[3], (count, sizes.count)), *stored


def forms(how: Any, interpret: bool) -> dict[str, Callable]:
    """Returns the forms by name, the loop first."""
    kernels = functools.partial(experts._with_pallas, how, interpret=interpret)
    loop, grouped = (functools.partial(form, how) for form in (experts._with_loop, experts._grouped))
    return {LOOP: loop, KERNELS: kernels, GROUPS: grouped}


def repeated(form: Callable) -> Callable:
    """Returns a function that computes the layer several times, each time after the time before."""

    def run(rows: jax.Array, logits: jax.Array, gate_up: Any, down: Any) -> jax.Array:
        def turn(_: Any, rows: jax.Array) -> jax.Array:
            return rows + form(rows, logits, gate_up, down) * 0

        return jax.lax.fori_loop(0, TURNS, turn, rows)

    return run


class Bench:
    """Compares and times the forms.

    Attributes:
        lines: a line of the record for each dtype, number of rows and form.
        first_rows: the first row of the largest call of each dtype and form.
    """

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.first_rows: dict[tuple[str, str], bytes] = {}

    def measure(self, layer: tuple[Any, ...], dtype: str) -> None:
        """Compares and times all forms of a layer that have this number of rows and dtype."""
        how, rows, logits, *matrices = layer
        inputs, found = (rows, logits, *matrices), {}
        for name, form in forms(how, jax.default_backend() != "gpu").items():
            if name == GROUPS and dtype == "int8":  # this form reads arrays only
                continue
            line: dict[str, Any] = {"dtype": dtype, "rows": len(rows), "form": name}
            self.lines.append(line)
            try:
                out = np.asarray(jax.jit(form)(*inputs))
                options: dict[str, str | bool] = {**command_buffer.options(jax.default_backend())}
                program = jax.jit(repeated(form)).lower(*inputs).compile(options)
                jax.block_until_ready(program(*inputs))
            except Exception as error:  # the other forms are measured
                line["failed"] = describe(error)
                continue
            found[name] = line, out, program
            line["same_first_row"] = self.first_rows.setdefault((dtype, name), out[0].tobytes()) == out[0].tobytes()
        taken: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(REPEATS):
            for name, (_, _, program) in found.items():
                start = time.perf_counter()
                jax.block_until_ready(program(*inputs))
                taken[name].append((time.perf_counter() - start) / TURNS * 1e6)
        for name, (line, out, _) in found.items():
            line["us"] = quartiles(taken[name])
            if LOOP in found:
                line["difference"] = round_significant(float(np.abs(out - found[LOOP][1]).max()))
                line["times_as_fast"] = quartiles(np.array(taken[LOOP]) / np.array(taken[name]))
            print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="toy sizes, for any device")
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "int8"), default=["bfloat16", "int8"])
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}", flush=True)
    counts, bench = (1, 16, 64) if arguments.small else ROWS, Bench()
    for dtype in arguments.dtypes:
        how, rows, logits, *matrices = make_layer(arguments.small, dtype, counts[-1])
        for count in reversed(counts):
            bench.measure((how, rows[:count], logits[:count], *matrices), dtype)
            if arguments.record:
                write_record(arguments.record, "expert-forms", sys.argv, {"lines": bench.lines})
    return 0


if __name__ == "__main__":
    sys.exit(main())
