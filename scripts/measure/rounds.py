"""Times rounds at the shapes of Llama 3 8B with random weights, on a GPU or TPU: by width, drafter, type and batch.

    python -m scripts.measure.rounds --record rounds     # 16 GB of weights: needs a GPU of 40 GB or more
    python -m scripts.measure.rounds --parts options widths --layers 8
    python -m scripts.measure.rounds --exact both --parts widths drafters batch      # exact=True beside XLA's kernels

No text means anything here, and of random drafts almost none is accepted, so the table gives what a round costs in
rounds of plain decoding: a drafter pays if its rounds commit more tokens than that. Every round has all nodes of the
tree. Prompts have one token, so nothing is prefilled. All programs are compiled together; those of a part run in turns
of 16 rounds. With `--at-once` the cases of a part are compiled and measured in groups, each with plain decoding. With
`--record` the figures are written after each part or group, so that a run that is ended keeps those before. At the end,
on a GPU, it counts what the CUDA driver is asked for in one turn of each program.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import glob
import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec.backend import command_buffer
from jaxspec.bench.equality import first_difference
from jaxspec.bench.measurements import add_record, quartiles, round_significant, write_record
from jaxspec.decode.state import Request, State, Weights
from jaxspec.drafters.none import NoDraft
from jaxspec.models.quantized import quantize
from jaxspec.models.transformer import TransformerLM
from jaxspec.rules.coupled import Coupled
from scripts.library import exact, loops
from scripts.measure.speed import reader

ROUNDS = 16
"""Rounds in one turn."""
CAPACITY = 2048
SMALL = (256, 512, 4, 2)
"""Widths of the residual stream and between, and heads, of a toy model."""
SMALL_DRAFTERS = ("prompt-lookup, chain 8", "eagle (EAGLE-3), chain 4")
PARTS = ("options", "widths", "drafters", "int8", "batch", "sampled", "products")
READ = 1 << 31
"""Bytes that are summed to see how fast memory is read."""
WIDTHS = (2, 4, 8, 16, 32, 64)
WATCHED = ("cuGraphLaunch", "cuLaunchKernel", "cuStreamSynchronize", "cuEventSynchronize", "cuMemcpyDtoHAsync")
"""Calls of the CUDA driver; names that begin so count."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
        name: of its line.
        drafter: a name of `loops.drafters`, or the number of tokens of a window in which nothing is drafted.
        int8: whether the target's matrices are in int8; else in bfloat16.
        rows: the batch.
        temperature: of all rows.
        attention: see `jaxspec.load`.
        products: "xla" to leave the products of an exact target to XLA, though there are Pallas kernels for them.
        captured: whether loops are captured in a command buffer.
        exact: whether the target runs as after `jaxspec.load(..., exact=True)`.
    """

    name: str
    drafter: str | int = 1
    int8: bool = False
    rows: int = 1
    temperature: float = 0.0
    attention: str = "xla"
    products: str = "pallas"
    captured: bool = True
    exact: bool = False

    def made_exact(self) -> "Case":
        """Returns the same case with `exact=True`."""
        return dataclasses.replace(self, name=f"{self.name}, exact", exact=True)

    def made_exact_by_xla(self) -> "Case":
        """Returns the same case with `exact=True` and products of XLA (`jaxspec.backend.exact_products`)."""
        return dataclasses.replace(self, name=f"{self.name}, exact, products by XLA", exact=True, products="xla")


PLAIN = Case("plain")
CHAIN = "prompt-lookup, chain 8"


def parts(names: list[str], widths: Sequence[int], forms: Sequence[bool]) -> dict[str, list[Case]]:
    """Returns the cases of every part; the first is what the others are compared with.

    Args:
        names: the drafters.
        widths: the widths of windows.
        forms: False for the cases with XLA's kernels, True for their exact forms, which come after each of them.
    """
    wide = [Case(f"width {width}", width) for width in widths]
    few = [PLAIN, *wide[2::3]]
    own = {
        "options": [
            PLAIN, Case(CHAIN, CHAIN),
            Case("plain, no loop captured", captured=False),
            Case(f"{CHAIN}, no loop captured", CHAIN, captured=False),
            Case("plain, attention in Pallas", attention="pallas"),
            Case(f"{CHAIN}, attention in Pallas", CHAIN, attention="pallas"),
        ],
        "widths": [PLAIN, *wide],
        "drafters": [PLAIN, *(Case(name, name) for name in names)],
        "int8": [Case("plain", int8=True), *(dataclasses.replace(case, int8=True) for case in wide[2::3])],
        "batch": [
            Case("plain", rows=16), Case("width 8", 8, rows=16), Case(CHAIN, CHAIN, rows=16),
            Case("plain, attention in Pallas", rows=16, attention="pallas"),
            Case("width 8, attention in Pallas", 8, rows=16, attention="pallas"),
        ],
        "sampled": [Case("plain", temperature=0.8), Case(CHAIN, CHAIN, temperature=0.8)],
        "products": [*few, *(case.made_exact_by_xla() for case in few)],
    }  # fmt: skip
    return {name: list(itertools.chain(*(in_forms(case, forms) for case in cases))) for name, cases in own.items()}


def in_forms(case: Case, forms: Sequence[bool]) -> list[Case]:
    """Returns a case in these forms; exactness decides the attention and how loops are compiled."""
    if case.exact:
        return [case] if True in forms else []
    found = [case] if False in forms else []
    if True in forms and case.attention == "xla" and case.captured:
        found.append(case.made_exact())
    return found


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.bfloat16) / math.sqrt(shape[-1])).astype(dtype)


def random(shapes: Any) -> Any:
    """Returns parameters of these shapes: random matrices, vectors of ones, tokens from 0 on."""

    def of(index: int, leaf: Any) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape)
        if leaf.ndim < 2:
            return jnp.ones(leaf.shape, leaf.dtype)
        return normal(jax.random.key(index), leaf.shape, str(leaf.dtype))

    leaves, structure = jax.tree.flatten(shapes)
    return jax.tree.unflatten(structure, [of(index, leaf) for index, leaf in enumerate(leaves)])


class Bench:
    """Holds the weights; every drafter's are made once."""

    def __init__(self, lm: TransformerLM, layers: int):
        self.lm = lm
        self.drafters, self._drafts = loops.drafters(self.lm, layers), {}
        self.params = {False: random(loops.shapes(self.lm))}

    def weights(self, case: Case) -> tuple[Any, Weights]:
        """Returns the drafter and all parameters."""
        if case.int8 not in self.params:
            self.params[case.int8] = quantize(self.params[False])
        target = self.params[case.int8]
        if isinstance(case.drafter, int):
            return NoDraft(jaxspec.chain(case.drafter - 1)), Weights(target)
        drafter: Any
        drafter, shapes = self.drafters[case.drafter]
        if case.drafter not in self._drafts:
            self._drafts[case.drafter] = random(shapes)
        return drafter, Weights(target, self._drafts[case.drafter])

    def lowered(self, case: Case) -> tuple[Callable[[], Callable], Weights, Callable[[], State]]:
        """Returns functions that compile the loop and make the state of prompts of one token, and the weights."""
        target = self.lm.with_execution(attention=case.attention)
        target = exact.apply(target, "int8" if case.int8 else "bfloat16") if case.exact else target
        target = target.with_execution(products="xla") if case.products == "xla" else target
        drafter, weights = self.weights(case)
        decoder = jaxspec.Decoder(target, drafter, Coupled(), widths=())
        rows = case.rows
        request = Request(
            jnp.arange(1, rows + 1, dtype=jnp.int32)[:, None], jnp.ones(rows, jnp.int32), jnp.full(rows, CAPACITY - 80),
            jax.random.split(jax.random.key(0), rows), jnp.full((rows, 1), -1),
            jaxspec.Sampling(temperature=case.temperature).rows(rows, target.vocab),
        )  # fmt: skip
        init = jax.jit(lambda w, r: decoder.init(w, r, CAPACITY))
        run = jax.jit(lambda w, s, rounds: decoder.run(w, s, rounds), donate_argnums=1)
        made = run.lower(weights, jax.eval_shape(init, weights, request), jnp.int32(ROUNDS))
        options = command_buffer.options(jax.default_backend()) if case.captured else {}
        return (
            lambda: command_buffer.compile(made, options, target.compiler_options),
            weights,
            lambda: init(weights, request),
        )


class Timed:
    """A compiled loop and its state."""

    def __init__(self, run: Callable, weights: Weights, fresh: Callable[[], State]):
        self.run, self.weights, self.fresh = run, weights, fresh
        self.begin()

    def begin(self) -> None:
        """Begins a new text."""
        self.state = self.fresh()
        self.ms: list[float] = []
        self.turn(keep=False)

    def turn(self, keep: bool = True) -> None:
        """Runs some rounds and keeps the milliseconds of one."""
        before = int(self.state.round.max())
        start = time.perf_counter()
        self.state = jax.block_until_ready(self.run(self.weights, self.state, jnp.int32(ROUNDS)))
        seconds = time.perf_counter() - start
        played = int(self.state.round.max()) - before
        if played != ROUNDS:
            raise RuntimeError(f"expected {ROUNDS} rounds in a turn, got {played}: the rows have ended")
        if keep:
            self.ms.append(seconds / ROUNDS * 1e3)

    @property
    def tokens(self) -> list[int]:
        """The tokens of the first row."""
        return np.asarray(self.state.tokens)[0, : int(self.state.length[0])].tolist()


def driver_calls(timed: Timed) -> dict[str, int]:
    """Returns how often the driver was called in one turn, by name; empty where JAX's profiler does not tell."""
    counts: collections.Counter = collections.Counter()
    timed.begin()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            timed.turn(keep=False)
        for path in glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True):
            for plane in jax.profiler.ProfileData.from_file(path).planes:
                for line in plane.lines:
                    for event in line.events:
                        counts.update(name for name in WATCHED if event.name.startswith(name))
    return dict(counts)


def compiled(
    bench: Bench, cases: list[Case], threads: int
) -> tuple[dict[Case, Timed], dict[Case, float], dict[str, str]]:
    """Compiles the loops together.

    Returns:
        The loops, the seconds that each took, and why the others failed, by name.
    """
    waiting, runs, seconds, failures = [], {}, {}, {}

    def compile(made: Callable[[], Callable]) -> tuple[Callable, float]:
        start = time.perf_counter()
        return made(), time.perf_counter() - start

    def failed(case: Case, error: Exception) -> None:
        failures[case.name] = exact.describe(error)
        print(f"{case.name}: NOT MEASURED: {failures[case.name]}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for case in cases:
            start = time.perf_counter()
            try:
                made, weights, fresh = bench.lowered(case)
                waiting.append((case, pool.submit(compile, made), weights, fresh, time.perf_counter() - start))
            except Exception as error:  # the other cases are measured
                failed(case, error)
        for case, future, weights, fresh, lowering in waiting:
            try:
                run, took = future.result()
                runs[case], seconds[case] = Timed(run, weights, fresh), lowering + took
            except Exception as error:
                failed(case, error)
    return runs, seconds, failures


def measured(runs: dict[Case, Timed], first: Case, repeats: int) -> dict[Case, dict[str, Any]]:
    """Returns a line for each loop: milliseconds a round, and in rounds of the first case.

    Texts are compared with the first case's text, those of exact cases with the first exact case's text.
    """
    text = next((case for case in runs if case.exact), None)
    for timed in runs.values():
        timed.begin()
    for _ in range(repeats):
        for timed in runs.values():
            timed.turn()
    rows = {}
    for case, timed in runs.items():
        row: dict[str, Any] = {
            "name": case.name, "dtype": "int8" if case.int8 else "bfloat16", "rows": case.rows,
            "temperature": case.temperature, "ms": quartiles(timed.ms),
            "tokens_per_round": round_significant((len(timed.tokens) - 1) / int(timed.state.round[0])),
        }  # fmt: skip
        if first in runs:
            row["times_plain"] = quartiles(np.array(timed.ms) / np.array(runs[first].ms))
            own, plain = timed.tokens, runs[first if text is None or not case.exact else text].tokens
            row["compared"] = min(len(own), len(plain))
            differs = first_difference(own[: len(plain)], plain[: len(own)])
            row["same"] = row["compared"] if differs is None else differs
        print(row, flush=True)
        rows[case] = row
    return rows


def groups(cases: list[Case], size: int | None) -> list[list[Case]]:
    """Returns the cases in groups of at most `size`; None for one group."""
    size = size or len(cases)
    return [cases[at : at + size] for at in range(0, len(cases), size)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--exact", choices=exact.FORMS, default="off", help="measure exact=True, or both forms")
    parser.add_argument("--small", action="store_true", help="toy sizes and few cases, for any device")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--at-once", type=int, help="cases of a part that are compiled and measured before the next")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="programs that are compiled together")
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    start = time.perf_counter()
    lm = loops.llama(arguments.layers, *(SMALL if arguments.small else ()))
    bench = Bench(lm, arguments.layers)
    names = [name for name in bench.drafters if not name.startswith(("none", "model of another"))]
    names = [name for name in names if not arguments.small or name in SMALL_DRAFTERS]
    forms = exact.FORMS[arguments.exact]
    known = parts(names, WIDTHS[2:3] if arguments.small else WIDTHS, forms)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(bench.params[False]))
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {arguments.layers} layers, {size / 1e9:.1f} GB")
    values: dict[str, Any] = {"layers": arguments.layers, "weights_gb": round_significant(size / 1e9), "parts": {}}
    size = READ >> 6 if arguments.small else READ
    read = reader(size)
    values["read_gb_per_s"] = quartiles([size / read() / 1e9 for _ in range(20)])
    print(f"a sum reads {values['read_gb_per_s']} GB/s", flush=True)

    def save() -> None:
        if arguments.record:
            write_record(arguments.record, "rounds", sys.argv, values)

    runs: dict[Case, Timed] = {}
    took: dict[Case, float] = {}

    def compile_missing(cases: Iterable[Case]) -> None:
        found, seconds, failures = compiled(bench, [case for case in cases if case not in runs], arguments.threads)
        runs.update(found)
        took.update(seconds)
        if failures:
            values["not_measured"] = values.get("not_measured", {}) | failures
        print(f"{len(runs)} programs: {time.perf_counter() - start:.0f} s since the start", flush=True)

    if arguments.at_once is None:
        compile_missing(dict.fromkeys(itertools.chain(*(known[name] for name in arguments.parts))))
    rows: dict[str, dict[Case, dict[str, Any]]] = {}
    for name in arguments.parts:
        rows[name], always = {}, [case for case in known[name] if case.drafter == 1][: len(forms)]
        for group in groups(known[name], arguments.at_once):
            if arguments.at_once is not None:
                compile_missing(group)
            own = {case: runs[case] for case in dict.fromkeys([*always, *group]) if case in runs}
            for case, row in measured(own, known[name][0], arguments.repeats).items():
                rows[name].setdefault(case, row | {"compile_s": round_significant(took[case], 3)})
            values["parts"][name] = list(rows[name].values())
            save()
        print(f"{name}: {time.perf_counter() - start:.0f} s since the start", flush=True)
    if jax.default_backend() == "gpu":  # last: a profiler may slow what comes after
        counts = {case: driver_calls(timed) for case, timed in runs.items()}
        print(list(counts.values()), flush=True)
        for case, row in itertools.chain(*(own.items() for own in rows.values())):
            row["driver_calls"] = counts[case]
    save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
