"""Compiles training runs of large targets for TPUs and GPUs without one, and says what each device will hold.

    python -m scripts.prove.training_scale --record training-scale-tpu
    python -m scripts.prove.training_scale --gpu --record training-scale-gpu    # in the environment of `make gpu`
    python -m scripts.prove.training_scale --on v5e:2x4 --kinds "EAGLE-3"

The targets have the shapes of Llama 3.1 8B and 70B, in shapes alone, without weights; a row of 2,048 tokens for each
device. The step of the heads is compiled as it runs. The features are compiled for a target of few layers and for a
target of twice as many. The temporary arrays of all layers are extrapolated as a line, which the rows with the column
"all layers compiled" confirm. What is not temporary is counted for all layers. The exit status is 1 if a run needs more
than 90 % of the memory of a device.

Compiling takes minutes for each run. `--lines FILE` keeps the finished lines, so that the command can go on later.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import math
import pathlib
import sys
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

import jaxspec
from jaxspec.backend.chips import TPUS
from jaxspec.bench.measurements import add_record, round_significant, write_record
from jaxspec.models.config import ModelConfig
from jaxspec.models.rope import Rope
from jaxspec.models.transformer import TransformerLM
from jaxspec.train import dry_run
from jaxspec.train.settings import TrainSettings

MAX_SHARE = 0.9
"""The largest share of a device's memory that a run may need."""
ROW_TOKENS = 2048
VOCAB, DRAFTED = 128_256, 32_000
FEW_LAYERS = 2
"""The smaller number of layers for which features are compiled, beside twice as many."""
ALL_LAYERS = ("8B", "EAGLE-3, 7 steps", "v5e:2x4")
"""The target, the kind and the devices of the run whose features are compiled for all layers as well."""


class Sizes(NamedTuple):
    """Sizes of a target: width of the residual stream and of the MLP, number of layers and of heads of queries."""

    width: int
    inner: int
    layers: int
    heads: int

    def target(self, layers: int | None = None) -> jaxspec.Model:
        """Returns the shapes of a target, with another number of layers if it is given."""
        config = ModelConfig(
            VOCAB, self.width, self.inner, layers or self.layers, self.heads, 8, 128, rope=Rope(500_000.0),
            tie_embeddings=False,
        )  # fmt: skip
        lm = TransformerLM(config, "bfloat16")
        return jaxspec.Model(lm, dry_run.shapes_of(lm), name=f"{self.width} x {config.num_layers}")


TARGETS = {"8B": Sizes(4096, 14336, 32, 32), "70B": Sizes(8192, 28672, 80, 64)}
KINDS: dict[str, TrainSettings] = {
    "4 Medusa heads, own projections": jaxspec.MedusaSettings(heads=4, inputs="hidden", projection="own"),
    "4 Medusa heads, shared projection": jaxspec.MedusaSettings(heads=4, inputs="hidden"),
    "EAGLE-3, 7 steps": jaxspec.Eagle3Settings(depth=7, draft_vocab=DRAFTED),
    "DSpark": jaxspec.DSparkSettings(),
}
SMALL, LARGE = tuple(("8B", kind) for kind in KINDS), (("70B", "EAGLE-3, 7 steps"),)
RUNS = {
    "v5e:2x4": (8, SMALL), "v5e:4x4": (16, SMALL), "v5p:2x2x2": (8, LARGE), "h100:8": (8, (*SMALL, *LARGE)),
}  # fmt: skip
"""For each topology, the number of its devices, and the runs."""


def compile_program(plan: dry_run.Plan, name: str) -> tuple[dry_run.Program, float]:
    """Returns one of the programs of a run, and the seconds that compiling it took."""
    start = time.perf_counter()
    program = dry_run.compile_program(next(one for one in plan.traced if one.name == name))
    return program, round(time.perf_counter() - start, 1)


def extrapolate(few: float, more: float, layers: int) -> float:
    """Returns bytes for `layers` layers from the bytes for `FEW_LAYERS` layers and for twice as many."""
    return few + (layers - FEW_LAYERS) * (more - few) / FEW_LAYERS


def look(name: str, kind: str, on: str, devices: int) -> dict[str, Any]:
    """Compiles a run, and returns its line of the record."""
    sizes, settings = TARGETS[name], dataclasses.replace(KINDS[kind], batch=devices, row_tokens=ROW_TOKENS)
    plan = dry_run.plan_run(sizes.target(), settings, on=on)
    assert plan.chip is not None
    one = dry_run.plan_run(sizes.target(), dataclasses.replace(settings, mesh="data=1", batch=1), on=on)
    seconds: dict[str, float] = {}
    step, seconds["step"] = compile_program(plan, "step")
    temporaries: dict[str, float | None] = {"step": step.temporaries}
    exchanged = {"step": step.sum_collectives()}
    found: list[int | None] = []
    for layers in (FEW_LAYERS, 2 * FEW_LAYERS):
        smaller = dry_run.plan_run(sizes.target(layers), settings, on=on)
        features, seconds[f"features, {layers} layers"] = compile_program(smaller, "features")
        found.append(features.temporaries)
        exchanged[f"features, {layers} layers"] = features.sum_collectives()
    few, more = found
    temporaries["features"] = None if few is None or more is None else extrapolate(few, more, sizes.layers)
    if (name, kind, on) == ALL_LAYERS:
        features, seconds["features, all layers"] = compile_program(plan, "features")
        temporaries["features, all layers compiled"] = features.temporaries
    whole = sum(plan.held.values()) + max(math.inf if bytes is None else bytes for bytes in temporaries.values())
    flops = sum(program.flops for program in plan.traced)
    return {
        "target": name, "kind": kind, "on": on, "devices": plan.devices, "rows": devices, "row_tokens": ROW_TOKENS,
        "memory": plan.chip.memory, "held": plan.held, "temporaries": temporaries,
        "share": whole / plan.chip.memory if math.isfinite(whole) else None,
        # The least that the first device held when only rows were split, before temporary arrays.
        "unsplit": sum(one.held.values()),
        "tflop": flops / 1e12, "ideal_ms": flops / plan.chip.flops * 1e3,
        "tokens_per_s": devices * ROW_TOKENS * plan.chip.flops / flops,
        "collectives": exchanged, "not_split": plan.whole, "compile_s": seconds,
    }  # fmt: skip


def describe(line: dict[str, Any]) -> str:
    """Returns a line of the record as text."""
    share = "does not fit" if line["share"] is None else f"{line['share']:.0%}"
    each = ", ".join(
        f"{name} {'refused' if bytes is None else f'{bytes / 1e9:.2f}'}" for name, bytes in line["temporaries"].items()
    )
    held = sum(line["held"].values()) / 1e9
    return (
        f"{line['target']}, {line['kind']}, {line['on']}: {share} of {line['memory'] / 1e9:.0f} GB; held {held:.2f} GB "
        f"(unsplit {line['unsplit'] / 1e9:.2f}), temporary {each}; {line['tflop']:.1f} TFLOP a device, "
        f"{line['ideal_ms']:.0f} ms; compiled in {sum(line['compile_s'].values()):.0f} s"
    )


def rounded(value: Any) -> Any:
    """Returns a float with four digits, and anything else as it is."""
    return round_significant(value) if isinstance(value, float) else value


def select(gpu: bool, on: str, kinds: str) -> Iterable[tuple[str, str, str, int]]:
    """Yields the target, the kind, the topology and the number of devices of each run."""
    for topology, (devices, runs) in RUNS.items():
        if topology.startswith(TPUS) == gpu or on not in ("", topology):
            continue
        yield from ((name, kind, topology, devices) for name, kind in runs if kinds in kind)


def main() -> int:
    jax.config.update("jax_platforms", "cpu")  # a compiler needs no device
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="for GPUs, in the environment of `make gpu`")
    parser.add_argument("--on", default="", choices=["", *RUNS], help="one topology; by default, all")
    parser.add_argument("--kinds", default="", help="only kinds of heads whose name contains this text")
    parser.add_argument("--lines", type=pathlib.Path, help="a file of finished lines, which are not compiled again")
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    done: dict[tuple[str, ...], dict[str, Any]] = {}
    if arguments.lines is not None and arguments.lines.exists():
        rows = map(json.loads, arguments.lines.read_text().splitlines())
        done = {(row["target"], row["kind"], row["on"]): row for row in rows}
    lines = []
    for run in select(arguments.gpu, arguments.on, arguments.kinds):
        line = done.get(run[:3])
        if line is None:
            line = look(*run)
            if arguments.lines is not None:
                with arguments.lines.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        print(describe(line), flush=True)
        lines.append(line)
    if arguments.record:
        packages = ("jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12") if arguments.gpu else ("libtpu",)
        words = ["python", "-m", "scripts.prove.training_scale"]
        words += ["--gpu"] * arguments.gpu
        for name in ("on", "kinds"):
            words += [f"--{name}", given] if (given := getattr(arguments, name)) else []
        versions = {name: importlib.metadata.version(name) for name in packages}
        write_record(arguments.record, "training-scale", words, {"lines": jax.tree.map(rounded, lines)}, versions)
    return int(any(line["share"] is None or line["share"] > MAX_SHARE for line in lines))


if __name__ == "__main__":
    sys.exit(main())
