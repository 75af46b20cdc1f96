"""Compares the rows of matrix products on a GPU for several numbers of rows: are the bits the same, and what is a call?

    python -m scripts.measure.products --record products
    python -m scripts.measure.products --small          # toy sizes, on any device

The products have the shapes of Llama 3 8B, in bfloat16. A product has several forms: XLA's, as XLA times it, or in one
chain of sums, or with one of three tiles; and the kernels in Pallas. Each form is compiled for each number of rows. The
first and the last rows of the largest input are multiplied, and compared with the same rows of the largest product.
Forms whose largest products have equal bits are named. At last the calls are timed, in a loop over copies of the
weights that do not fit into the cache of the GPU. The record is written after every form.
"""

import argparse
import concurrent.futures
import importlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.backend import command_buffer
from jaxspec.bench.measurements import add_record, quartiles, round_significant, write_record
from scripts.library.exact import describe

ROWS = (1, 2, 9, 16, 17, 48, 64, 128)
TIMED_ROWS = (1, 16, 64)
TURNS, REPEATS = 10, 5
COPIED_BYTES = 400e6
"""Bytes of the copies of a matrix in a timed loop: several times the cache of an H100 or H200."""
MAX_COPIES = 8
EPSILON = 1e-5

ONE_CHAIN = {
    "xla_gpu_experimental_force_split_k": 1,
    "xla_gpu_cublas_fallback": False,
    "xla_gpu_cudnn_gemm_fusion_level": 0,
}
"""Options of XLA with which a sum over the inputs of a product is not split."""


def tiled(first: int, second: int) -> dict[str, Any]:
    """Returns the options for one tile; below 64 rows the weights are the first operand of the instruction."""
    tile = f"block_m:{first} block_n:{second} block_k:128 num_stages:4 num_warps:4 num_ctas:1"
    return ONE_CHAIN | {"xla_gpu_override_gemm_autotuner": tile}


XLA_FORMS: dict[str, Mapping[str, Any]] = {
    "XLA, one chain, mma 32 x 16": tiled(32, 16),
    "XLA, one chain, mma 32 x 64": tiled(32, 64),
    "XLA, one chain, wgmma 64 x 16": tiled(64, 16),
    "XLA, one chain": ONE_CHAIN,
    "XLA, as timed": {},
}
PALLAS = "Pallas"


class Product(NamedTuple):
    """A product of a layer, or its norm.

    Attributes:
        name: the name of the weights, or "norm".
        inputs: the number of inputs.
        outputs: the number of outputs.
    """

    name: str
    inputs: int
    outputs: int

    def weights(self) -> jax.Array:
        """Returns random weights: `[outputs, inputs]` for the head, `[inputs, outputs]` else, `[inputs]` of a norm."""
        if self.name == "norm":
            return jnp.ones(self.inputs)
        shape = (self.outputs, self.inputs) if self.name == "head" else (self.inputs, self.outputs)
        scale = self.inputs**-0.5
        return (jax.random.normal(jax.random.key(self.outputs), shape, jnp.bfloat16) * scale).astype(jnp.bfloat16)

    def rows(self, count: int) -> jax.Array:
        return jax.random.normal(jax.random.key(0), (count, self.inputs), jnp.bfloat16)

    def by_xla(self, rows: jax.Array, weights: jax.Array) -> jax.Array:
        if self.name == "norm":
            x = rows.astype(jnp.float32)
            return (x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + EPSILON) * weights).astype(jnp.bfloat16)
        contracted = ((1,), (1 if self.name == "head" else 0,))
        return lax.dot_general(rows, weights, (contracted, ((), ())), preferred_element_type=jnp.float32)

    def by_pallas(self, rows: jax.Array, weights: jax.Array) -> jax.Array:
        """Multiplies with `jaxspec.models.products_pallas`, whose kernels also norm the rows or gate the outputs."""
        kernels = importlib.import_module("jaxspec.models.products_pallas")
        count, interpret = len(rows), jax.default_backend() != "gpu"
        rows = jnp.pad(rows, ((0, kernels.padded_rows(count) - count), (0, 0))).astype(jnp.float32)
        ones = jnp.ones(self.inputs)
        if self.name == "norm":
            out = kernels.normalize(rows, weights, EPSILON, interpret=interpret)
        elif self.name in ("out", "down"):
            residual = jnp.zeros((len(rows), self.outputs))
            out = kernels.multiply_add(rows, weights, residual, None, interpret=interpret)[0]
        elif self.name == "gate_up":
            prepared = kernels.prepare(rows, ones, interpret=interpret)
            out = kernels.multiply_gated(prepared, weights, "silu", epsilon=EPSILON, interpret=interpret)
        elif self.name == "head":
            out = kernels.multiply(rows, weights, transposed=True, interpret=interpret)
        else:
            prepared = kernels.prepare(rows, ones, interpret=interpret)
            out = kernels.multiply(prepared, weights, epsilon=EPSILON, interpret=interpret)
        return out[:count]


def products(small: bool) -> list[Product]:
    """Returns the products, those in which a round spends the most time first."""
    width, inner, heads, vocab = (256, 512, 384, 1024) if small else (4096, 14336, 6144, 128256)
    return [
        Product("gate_up", width, 2 * inner), Product("down", inner, width), Product("out", width, width),
        Product("qkv", width, heads), Product("head", width, vocab), Product("norm", width, width),
    ]  # fmt: skip


class Form(NamedTuple):
    """A product in one form.

    Attributes:
        product: the product.
        name: the name of the form.
        call: the function of rows and weights.
        options: options of the compiler.
    """

    product: Product
    name: str
    call: Callable[[jax.Array, jax.Array], jax.Array]
    options: Mapping[str, Any]

    def lowered(self, count: int) -> jax.stages.Lowered:
        return jax.jit(self.call).lower(*self.arguments(count))

    def arguments(self, count: int) -> tuple[Any, Any]:
        """Returns the shapes of the arguments."""
        return jax.eval_shape(lambda: self.product.rows(count)), jax.eval_shape(self.product.weights)

    def loop(self, rows: jax.Array, copies: list[jax.Array]) -> jax.Array:
        """Multiplies by every copy of the weights in turn; each product needs the one before."""

        def turn(_: Any, rows: jax.Array) -> jax.Array:
            for weights in copies:
                out = self.call(rows, weights)
                rows = rows + (out[:1, :1] * 0).astype(rows.dtype)
            return rows

        return lax.fori_loop(0, TURNS, turn, rows)


def forms(product: Product) -> list[Form]:
    """Returns the forms of a product; a norm is no product, and has no tiles."""
    own = {name: options for name, options in XLA_FORMS.items() if product.name != "norm" or not options}
    made = [Form(product, name, product.by_xla, options) for name, options in own.items()]
    return [*made[:1], Form(product, PALLAS, product.by_pallas, {}), *made[1:]]


class Bench:
    """Compiles and compares the forms.

    Attributes:
        pool: compiles.
        rows: the numbers of rows.
        lines: a line of the record for each form.
    """

    def __init__(self, pool: concurrent.futures.Executor, rows: tuple[int, ...]):
        self.pool, self.rows, self.lines = pool, rows, {}

    def compile(self, form: Form) -> dict[int, concurrent.futures.Future]:
        """Begins to compile a form for all numbers of rows."""

        def made(count: int) -> Callable:
            return form.lowered(count).compile(dict(form.options))

        return {count: self.pool.submit(made, count) for count in reversed(self.rows)}

    def compare(
        self, product: Product, waiting: Sequence[tuple[Form, Mapping[int, concurrent.futures.Future]]]
    ) -> None:
        """Compares the rows of all forms of a product, which are given with their compiled programs."""
        weights, most = product.weights(), self.rows[-1]
        rows, whole = product.rows(most), {}
        for form, compiled in waiting:
            line: dict[str, Any] = {"product": product.name, "form": form.name, "same": [], "other": []}
            self.lines[product.name, form.name] = line
            try:
                whole[form.name] = reference = np.asarray(compiled[most].result()(rows, weights))
                for count in self.rows:
                    run = compiled[count].result()
                    same = all(
                        equal_bits(np.asarray(run(rows[at : at + count], weights)), reference[at : at + count])
                        for at in (0, most - count)
                    )
                    line["same" if same else "other"].append(count)
            except Exception as error:  # the other forms are compared
                line["failed"] = describe(error)
            line["bits_of"] = [
                name for name, out in whole.items() if name != form.name and form.name in whole
                and equal_bits(out, whole[form.name])
            ]  # fmt: skip
            print(line, flush=True)

    def time(self, form: Form, options: Mapping[str, Any]) -> None:
        """Times the calls of a form."""
        line = self.lines[form.product.name, form.name]
        weights = form.product.weights()
        copies = [weights + 0 for _ in range(int(np.clip(COPIED_BYTES // weights.nbytes, 2, MAX_COPIES)))]
        line["us"], line["gb_per_s"] = {}, {}
        for count in (count for count in TIMED_ROWS if count in self.rows):
            rows, taken = form.product.rows(count), []
            try:
                run = jax.jit(form.loop).lower(rows, copies).compile({**options, **form.options})
                jax.block_until_ready(run(rows, copies))
                for _ in range(REPEATS):
                    start = time.perf_counter()
                    jax.block_until_ready(run(rows, copies))
                    taken.append((time.perf_counter() - start) / TURNS / len(copies) * 1e6)
            except Exception as error:  # the other forms are timed
                line["failed"] = describe(error)
                break
            line["us"][str(count)] = quartiles(taken)
            line["gb_per_s"][str(count)] = round_significant(weights.nbytes / np.median(taken) / 1e3)
        print(line, flush=True)


def equal_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="toy sizes, for any device")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="programs that are compiled together")
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    start = time.perf_counter()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}", flush=True)
    rows = (1, 9, 16, 32) if arguments.small else ROWS
    chosen = products(arguments.small)
    with concurrent.futures.ThreadPoolExecutor(arguments.threads) as pool:
        bench = Bench(pool, rows)

        def save() -> None:
            if arguments.record:
                values = {"rows": list(rows), "lines": list(bench.lines.values())}
                write_record(arguments.record, "products", sys.argv, values)

        waiting = [[(form, bench.compile(form)) for form in forms(product)] for product in chosen]
        for product, compiled in zip(chosen, waiting):
            bench.compare(product, compiled)
            print(f"{product.name}: {time.perf_counter() - start:.0f} s since the start", flush=True)
            save()
        options = command_buffer.options(jax.default_backend())
        for form in itertools.chain(*map(forms, chosen[:4])):
            if "failed" not in bench.lines[form.product.name, form.name]:
                bench.time(form, options)
                save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
