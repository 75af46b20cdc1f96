"""Compares the fixed-order kernels of a layer with XLA's form on random shapes, as plain operations on a CPU.

    python -m scripts.prove.product_shapes                          # a thousand shapes: half an hour
    python -m scripts.prove.product_shapes --shapes 20 --first 500

A shape is a call of a layer (`jaxspec.models.products_pallas`), a type of weights, a number of rows, and sizes. Two
claims are checked for each of them. The values equal the values of XLA's form up to the rounding of rows to bfloat16.
The last row has the same bits as the same row alone. The exit status is 1 if a claim does not hold.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.measurements import add_record, round_significant, write_record
from jaxspec.models import layers, products_pallas
from jaxspec.models.products_pallas import padded_rows
from jaxspec.models.quantized import Quantized
from jaxspec.models.rows import Fused, Gate, Norm

CALLS = ("plain", "table", "gated", "add", "norm")
KINDS = ("bfloat16", "int8")
EPSILON = 1e-5
LIMIT = 1 / 128
"""The largest difference of a value, relative to the sum of the magnitudes of its terms."""
MEAN_LIMIT = 1 / 256
"""The largest mean difference of the values of a call, relative to the mean of these sums."""
QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # to set up an emitter for each of a thousand fusions takes half of the time
    QUICK["xla_cpu_use_fusion_emitters"] = False

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """One case; `seed` decides everything else.

    Attributes:
        seed: the seed of the shape and of its numbers.
        call: one of `CALLS`.
        kind: the type of the weights, one of `KINDS`.
        rows: the number of rows.
        inputs, outputs: the sizes of the weights; half of the outputs of a gated product.
        bias: whether there is a bias.
        activation: the activation of a gated product.
    """

    seed: int
    call: str
    kind: str
    rows: int
    inputs: int
    outputs: int
    bias: bool
    activation: str

    @classmethod
    def draw(cls, seed: int) -> "Shape":
        """Draws a shape; the sizes are those that the kernels support."""
        rng = np.random.default_rng(seed)
        return cls(
            seed, str(rng.choice(CALLS)), str(rng.choice(KINDS)), int(rng.integers(1, 140)),
            16 * int(rng.integers(1, 24)), 16 * int(rng.integers(1, 9)), bool(rng.random() < 0.3),
            str(rng.choice(["silu", "gelu_tanh"])),
        )  # fmt: skip

    def __str__(self) -> str:
        return f"{self.call}, {self.kind}, {self.rows} rows, {self.inputs} inputs, {self.outputs} outputs"

    def arrays(self) -> Arrays:
        """Draws the numbers: rows `x`, which are not padded, weights, scales of norms, a bias and a residual stream."""
        rng = np.random.default_rng((1, self.seed))

        def normal(*shape: int, scale: float = 1.0) -> Any:
            return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)

        outputs = self.outputs * (2 if self.call == "gated" else 1)
        x, matrix = normal(self.rows, self.inputs, scale=rng.lognormal()), normal(self.inputs, outputs)
        matrix = matrix * self.inputs**-0.5
        stored = matrix.T if self.call == "table" else matrix
        weight: Any = stored.astype(jnp.bfloat16)
        if self.kind == "int8":
            weight = Quantized.quantize(stored, self.call == "table")
        return {
            "x": x, "matrix": matrix, "weight": weight, "scale": 1 + normal(self.inputs, scale=0.2),
            "bias": normal(outputs) if self.bias else None, "residual": normal(self.rows, outputs),
            "following": 1 + normal(outputs, scale=0.2),
        }  # fmt: skip

    def by_kernels(self, arrays: Arrays, interpret: bool = True) -> list[Any]:
        """Returns the results of the kernel, the values first; all of them begin with the rows, which are padded."""
        more = padded_rows(len(arrays["x"])) - len(arrays["x"])
        x, residual = (jnp.pad(arrays[name], ((0, more), (0, 0))) for name in ("x", "residual"))
        weight, scale, bias = arrays["weight"], arrays["scale"], arrays["bias"]
        if self.call == "norm":
            return [products_pallas.normalize(x, scale, EPSILON, interpret=interpret)]
        if self.call == "add":
            out, prepared = products_pallas.multiply_add(
                x, weight, residual, arrays["following"], bias=bias, interpret=interpret
            )
            assert prepared is not None
            return [out, prepared.rows, prepared.squares.T]
        rows = products_pallas.prepare(x, scale, interpret=interpret)
        if self.call == "gated":
            return [
                products_pallas.multiply_gated(
                    rows, weight, self.activation, epsilon=EPSILON, bias=bias, interpret=interpret
                )
            ]
        return [
            products_pallas.multiply(
                rows, weight, epsilon=EPSILON, bias=bias, transposed=self.call == "table", interpret=interpret
            )
        ]

    def by_xla(self, arrays: Arrays) -> tuple[Any, Any]:
        """Returns the values of XLA's form, and the sums of the magnitudes of their terms."""
        x, weight, bias = arrays["x"], arrays["weight"], arrays["bias"]
        magnitudes, norm = jnp.abs(arrays["matrix"]), Norm(arrays["scale"], EPSILON)
        if self.call == "norm":
            return norm(x), jnp.abs(norm(x)) / 1000
        if self.call == "add":
            fused = Fused(None, bias, arrays["residual"][None])
            return layers.matmul(x[None], weight, fused=fused)[0], jnp.abs(x) @ magnitudes
        out = layers.matmul(x[None], weight, self.call == "table", Fused(norm, bias))[0]
        sums = jnp.abs(norm(x)) @ magnitudes
        if self.call != "gated":
            return out, sums
        gated = Gate(self.activation)(out)
        (left, right), (gate, up) = jnp.split(sums, 2, axis=1), jnp.split(jnp.abs(out), 2, axis=1)
        return gated, 1.2 * (left * (up + right / 64) + right * gate) + jnp.abs(gated)  # slopes are below 1.2

    def run(self, arrays: Arrays) -> tuple[list[Any], list[Any], Any, Any]:
        """Returns the kernel's results, the results for the last row alone, and what `by_xla` returns."""
        alone = arrays | {name: arrays[name][-1:] for name in ("x", "residual")}
        return self.by_kernels(arrays), self.by_kernels(alone), *self.by_xla(arrays)

    def compare(self, arrays: Arrays) -> dict[str, Any]:
        """Returns differences as shares of what is allowed, and whether the bits of the last row are those alone.

        The comparison is no part of the program. XLA would otherwise fuse it with the kernels, which are plain
        operations here, and round the fused operations in two ways.
        """
        results = jax.device_get(jax.jit(self.run, compiler_options=QUICK)(arrays))
        together, single, expected, sums = jax.tree.map(np.asarray, results)
        gaps = np.abs(together[0][: self.rows].astype(np.float32) - expected)
        found = {
            "largest": (gaps / (sums * LIMIT + 1e-5)).max(),
            "mean": gaps.mean() / (sums.mean() * MEAN_LIMIT + 1e-6),
            "same_bits": all(np.array_equal(a[self.rows - 1], b[0]) for a, b in zip(together, single)),
            "prepared": True,
        }
        if self.call == "add":
            out, rows, squares = together
            scaled = (out * np.asarray(arrays["following"])).astype(rows.dtype)
            total = np.square(out).sum(1)
            near = np.abs(squares.sum(1) - total) <= 1e-5 * total + 1e-30
            found["prepared"] = np.array_equal(scaled, rows) and bool(near.all())
        return found


def check(seed: int) -> tuple[Shape, dict[str, Any], list[str]]:
    """Compares one shape. Returns it with what was found and what is wrong."""
    shape = Shape.draw(seed)
    found = shape.compare(shape.arrays())
    wrong = []
    if not found["largest"] <= 1:
        wrong.append(f"a value differs from XLA's form by {found['largest']:.2f} of what rounding explains")
    if not found["mean"] < 1:
        wrong.append(f"values differ from XLA's form by {found['mean']:.2f} of the mean that rounding explains")
    if not found["same_bits"]:
        wrong.append("the last row has other bits than alone")
    if not found["prepared"]:
        wrong.append("the rows for the next product are not the scaled rows and their squares")
    return shape, found, wrong


def checks(first: int, count: int) -> Iterator[tuple[Shape, Mapping[str, Any], list[str]]]:
    for seed in range(first, first + count):
        yield check(seed)
        if seed % 50 == 49:
            jax.clear_caches()  # a program for each shape


def main() -> int:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first shape")
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    lines = {call: {"shapes": 0, "wrong": 0, "largest": 0.0, "mean": 0.0, "same_bits": 0} for call in CALLS}
    for done, (shape, found, wrong) in enumerate(checks(arguments.first, arguments.shapes), 1):
        line = lines[shape.call]
        line["shapes"] += 1
        line["wrong"] += bool(wrong)
        line["same_bits"] += int(found["same_bits"])
        for name in ("largest", "mean"):
            line[name] = round_significant(max(line[name], float(found[name])), 3)
        if wrong:
            print(f"seed {shape.seed}: {shape}: {'; '.join(wrong)}", flush=True)
        if done % 50 == 0 or done == arguments.shapes:
            print(f"{done} shapes", flush=True)
            if arguments.record:
                write_record(arguments.record, "product-shapes", sys.argv, {"first": arguments.first, "calls": lines})
    wrong = sum(line["wrong"] for line in lines.values())
    print(f"{arguments.shapes} shapes compared, {wrong} wrong")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
