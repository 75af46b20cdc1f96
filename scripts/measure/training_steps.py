"""Times training steps of draft heads on a frozen target with the shapes of Llama 3 and random weights.

    python -m scripts.measure.training_steps --record training-steps       # the shapes of 8B, a GPU of 80 GB
    python -m scripts.measure.training_steps --target 1B --record training-steps-1b
    python -m scripts.measure.training_steps --small                       # toy sizes, on any device

A step reads the target's features of a batch and updates the heads: four Medusa heads, or an EAGLE-3 head with five
steps of training-time test, on 32,000 drafted tokens, in bfloat16 with parameters in float32. If a batch does not fit
into the device's memory, half as many rows are tried. The record is written after every kind of heads. MFU is the share
of the time that the products of features and step would take at the device's peak.
"""

import argparse
import concurrent.futures
import functools
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec.backend.chips import chip_of
from jaxspec.bench.measurements import add_record, quartiles, round_significant, write_record
from jaxspec.train import losses
from jaxspec.train.dry_run import count_flops
from jaxspec.train.settings import TrainSettings
from jaxspec.train.step import Trainable, compute_features, init_state, train_step
from scripts.library import loops
from scripts.library.exact import describe
from scripts.measure.rounds import SMALL, random

DRAFTED = 32_000
TARGETS = {"8B": (32, 4096, 14336, 32), "1B": (16, 2048, 8192, 32)}
"""Layers, width, units of the MLP and heads of Llama 3.1 8B and Llama 3.2 1B."""
KINDS: dict[str, tuple[type[TrainSettings], dict[str, Any]]] = {
    "medusa, 4 heads": (jaxspec.MedusaSettings, {"heads": 4, "inputs": "hidden", "loss": "ce"}),
    "eagle3, depth 5": (jaxspec.Eagle3Settings, {"depth": 5}),
}


class Setup(NamedTuple):
    """What is trained.

    Attributes:
        settings: the settings.
        network: the network that gives the features.
        trainee: the heads.
        frozen: the frozen parts of the target.
        heads: the parameters of the heads before training.
    """

    settings: TrainSettings
    network: Any
    trainee: Any
    frozen: losses.FrozenTarget
    heads: Any

    @classmethod
    def of(cls, name: str, target: jaxspec.Model, rows: int, tokens: int, drafted: int) -> "Setup":
        kind, own = KINDS[name]
        settings = kind(batch=rows, row_tokens=tokens, draft_vocab=drafted, precision="bfloat16", warmup=0, **own)
        trainee: Any = settings.trainee(target)
        ids = np.arange(drafted)
        laws = losses.needs_laws(settings, trainee)
        frozen = losses.freeze(trainee, target.lm, target.params, ids, laws, settings.precision)
        return cls(settings, trainee.network(target.lm), trainee, frozen, trainee.init_params(target, ids))

    def batch(self) -> losses.Batch:
        """Returns random tokens, one text in each row; the features are missing."""
        shape = (self.settings.batch, self.settings.row_tokens)
        tokens = jax.random.randint(jax.random.key(0), shape, 0, self.settings.draft_vocab)
        return losses.Batch(tokens, jnp.ones(shape, jnp.int32), jnp.ones(shape, bool), jnp.zeros((*shape, 0)))

    def compile(self, params: Any) -> "Compiled":
        """Compiles the functions that read features and take a step."""
        start, batch = time.perf_counter(), self.batch()
        state = init_state(self.settings, self.trainee, Trainable(self.heads))
        state = jax.tree.map(jnp.copy, state)  # a step donates it, and heads share arrays with the target
        read = jax.jit(functools.partial(compute_features, self.network))
        features = jax.eval_shape(read, params, batch.tokens, batch.segments)
        step = jax.jit(functools.partial(train_step, self.settings, self.trainee, self.network), donate_argnums=1)
        whole = jax.tree.map(lambda a: jax.ShapeDtypeStruct((1, *a.shape), a.dtype), batch._replace(features=features))
        traced = [read.trace(params, batch.tokens, batch.segments), step.trace(self.frozen, state, whole)]
        flops = sum(count_flops(one.jaxpr.jaxpr) for one in traced)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            read_done, step_done = pool.map(lambda one: one.lower().compile(), traced)
        return Compiled(read_done, step_done, state, flops, time.perf_counter() - start)


class Compiled(NamedTuple):
    """The functions that read features and take a step, the state before the first step, and figures of both.

    Attributes:
        flops: the operations of the products of both functions.
        seconds: the time of compiling them.
    """

    read: Callable
    step: Callable
    state: Any
    flops: float
    seconds: float


def measure(setup: Setup, params: Any, repeats: int, compiled: Compiled) -> dict[str, Any]:
    """Times the reading of features and the steps of one kind."""
    read, step, state, flops, seconds = compiled
    batch, reads, steps, loss = setup.batch(), [], [], jnp.nan
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        features = jax.block_until_ready(read(params, batch.tokens, batch.segments))
        middle = time.perf_counter()
        whole = jax.tree.map(lambda a: a[None], batch._replace(features=features))
        state, report = jax.block_until_ready(step(setup.frozen, state, whole))
        if repeat:
            reads.append((middle - start) * 1e3)
            steps.append((time.perf_counter() - middle) * 1e3)
            loss = float(report.loss)
    if not np.isfinite(loss):
        raise RuntimeError(f"the loss is {loss}")
    whole_s = np.median(np.add(reads, steps)) / 1e3
    rows, tokens = setup.settings.batch, setup.settings.row_tokens
    chip = chip_of(jax.devices()[0])
    return {
        "rows": rows, "row_tokens": tokens, "compile_s": round_significant(seconds, 3),
        "features_ms": quartiles(reads), "step_ms": quartiles(steps), "steps_per_s": round_significant(1 / whole_s),
        "tokens_per_s": round_significant(rows * tokens / whole_s), "tflop": round_significant(flops / 1e12),
        "mfu": None if chip is None else round_significant(flops / whole_s / chip.flops),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="toy sizes, for any device")
    parser.add_argument("--target", choices=TARGETS, default="8B", help="whose shapes")
    parser.add_argument("--rows", type=int, default=8, help="of a batch, if they fit")
    parser.add_argument("--row-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=10)
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    sizes, rows, tokens, drafted = TARGETS[arguments.target], arguments.rows, arguments.row_tokens, DRAFTED
    if arguments.small:
        sizes, rows, tokens, drafted = (4, *SMALL), 2, 32, 256
    lm, layers = loops.llama(*sizes), sizes[0]
    target = jaxspec.Model(lm, random(loops.shapes(lm)))
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {layers} layers", flush=True)
    lines: list[dict[str, Any]] = []

    def begin(name: str, rows: int, pool: concurrent.futures.Executor) -> tuple[Setup, concurrent.futures.Future]:
        setup = Setup.of(name, target, rows, tokens, drafted)
        return setup, pool.submit(setup.compile, target.params)

    with concurrent.futures.ThreadPoolExecutor(len(KINDS)) as pool:
        begun = {name: begin(name, rows, pool) for name in KINDS}
        for name, (setup, compiled) in begun.items():
            line: dict[str, Any] = {"kind": name, "too_large": []}
            while True:
                try:
                    line |= measure(setup, target.params, arguments.repeats, compiled.result())
                    break
                except Exception as error:  # the other kinds are measured
                    if "RESOURCE_EXHAUSTED" not in str(error):
                        line["failed"] = describe(error)
                        break
                    line["too_large"].append(setup.settings.batch)
                    if setup.settings.batch == 1:
                        break
                    setup, compiled = begin(name, setup.settings.batch // 2, pool)
            print(line, flush=True)
            lines.append(line)
            if arguments.record:
                values = {"target": arguments.target, "layers": layers, "drafted": drafted, "lines": lines}
                write_record(arguments.record, "training-steps", sys.argv, values)
    return 0


if __name__ == "__main__":
    sys.exit(main())
