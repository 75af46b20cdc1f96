"""What `make tpu` and `make gpu` share: decoders with the shapes of Llama 3, compiled for devices that are not here.

The target has the shapes of Llama-3-8B in bfloat16 or int8, with drafters and trees, on one device and on a mesh of
2 x 2 (`jaxspec.make_mesh`); shapes alone, no weights. Nothing is run.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

import jaxspec
from jaxspec.bench.measurements import add_record, significant, write
from jaxspec.core.protocols import DrafterInputs
from jaxspec.decode.lifecycle import row_axes
from jaxspec.decode.partition import Partition
from jaxspec.decode.state import Request, State, Weights
from jaxspec.drafters.eagle import Eagle
from jaxspec.drafters.early_exit import EarlyExit
from jaxspec.drafters.medusa import Medusa
from jaxspec.drafters.model import ModelDraft
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.heads.eagle_config import EagleConfig
from jaxspec.heads.network import HeadsConfig, unflatten
from jaxspec.models.config import ModelConfig
from jaxspec.models.quantized import quantize
from jaxspec.models.sharding import param_shardings
from jaxspec.models.transformer import TransformerLM
from jaxspec.rules.coupled import Coupled
from jaxspec.testing import hlo

LARGE = 1_000_000  # bytes; what is smaller may be copied
HOST = ("infeed", "outfeed", "send", "recv", "send-done", "recv-done")


def llama(layers: int, hidden: int = 4096, inner: int = 14336, heads: int = 32, kv_heads: int = 8) -> TransformerLM:
    """Shapes of Llama 3; of the 8B model unless told otherwise."""
    config = ModelConfig(
        vocab_size=128256, hidden_size=hidden, intermediate_size=inner, num_layers=layers, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=hidden // heads, tie_embeddings=False,
    )  # fmt: skip
    return TransformerLM(config, "bfloat16")


def shapes(lm: TransformerLM, int8: bool = False) -> Any:
    params = jax.eval_shape(lm.init_params, jax.random.key(0))
    return jax.eval_shape(quantize, params) if int8 else params


def drafters(target: TransformerLM, layers: int) -> dict[str, tuple[Any, Any]]:
    """Each with the shapes of its parameters."""
    small = llama(max(layers // 2, 1), 2048, 8192, 32, 8)
    config = HeadsConfig(target.config.hidden_size, target.config.vocab_size, 4)
    params = {
        "blocks": {
            i: {0: {"kernel": jax.ShapeDtypeStruct((4096, 4096), "bfloat16"),
                    "bias": jax.ShapeDtypeStruct((4096,), "float32")}} for i in range(4)
        }
    }  # fmt: skip
    tree = jaxspec.named_tree("mc_sim_7b_63")
    model, exit = jaxspec.Model(target, shapes(target)), max(min(4, layers - 1), 1)
    medusa = Medusa(config, target, tree)
    early = DrafterInputs(model, tree=jaxspec.chain(2), options={"exit_layers": exit})
    return {
        "none": (NoDraft(), None),
        "prompt-lookup, chain 8": (PromptLookup(jaxspec.chain(8)), None),
        "model (Llama-3.2-1B), chain 4": (ModelDraft(small, jaxspec.chain(4)), shapes(small)),
        "model (Llama-3.2-1B), tree 4x2x1": (ModelDraft(small, jaxspec.branching(4, 2, 1)), shapes(small)),
        "early-exit of 4 layers, chain 2": EarlyExit.build(early),
        "medusa, 64 nodes": (medusa, {"heads": params}),
        "eagle (EAGLE-3), chain 4": eagle3(target, jaxspec.chain(4)),
        "eagle (EAGLE-3), dynamic of 60 nodes": eagle3(target, jaxspec.dynamic(10, 8, 60)),
    }  # fmt: skip


def eagle3(target: TransformerLM, tree: Any) -> tuple[Eagle, Any]:
    """The published EAGLE-3 head of Llama-3.1-8B-Instruct, and its tree: a layer like the target's, 32,000 tokens."""
    layer = dataclasses.replace(target.config, num_layers=1)
    config = EagleConfig(layer, draft_vocab_size=32000, own_projection=True)
    dtypes = {1: "float32", 2: target.dtype}
    named = {
        name: jax.ShapeDtypeStruct(shape, "int32" if name == "tokens" else dtypes[len(shape)])
        for name, shape in config.param_shapes().items()
    }
    return Eagle(config, target, tree), unflatten(named)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is compiled: one line of the table."""

    chip: str
    drafter: str
    mesh: bool = False
    batch: int = 1
    int8: bool = False
    layers: int = 32
    capacity: int = 2048

    @property
    def named(self) -> dict[str, Any]:
        """What tells it from other lines."""
        kind, dtype = "2x2" if self.mesh else "one device", "int8" if self.int8 else "bfloat16"
        own = {"chip": self.chip, "mesh": kind, "drafter": self.drafter, "batch": self.batch, "dtype": dtype}
        return own | {"layers": self.layers}


class Program(NamedTuple):
    """A compiled loop, with the shapes of its weights and its state."""

    done: jax.stages.Compiled
    parts: dict[str, list[hlo.Instruction]]
    weights: Weights
    state: State
    seconds: float


def int32(*shape: int) -> Any:
    """Stands for an array of integers of this shape."""
    return jax.ShapeDtypeStruct(shape, "int32")


def compiled(case: Case, devices: Any, options: Mapping[str, str] | None = None) -> Program:
    """Compiles the loop for these devices, with these options of the compiler."""
    target, batch = llama(case.layers), case.batch
    drafter, params = drafters(target, case.layers)[case.drafter]
    decoder, weights = jaxspec.Decoder(target, drafter, Coupled()), Weights(shapes(target, case.int8), params)
    request = Request(
        int32(batch, 64),
        int32(batch),
        int32(batch),
        jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch)),
        int32(batch, 8),
        jax.eval_shape(lambda: jaxspec.Sampling(temperature=1.0).rows(batch, target.vocab)),
    )
    state = jax.eval_shape(lambda w, r: decoder.init(w, r, case.capacity), weights, request)
    arguments: tuple = (weights, state, int32())
    function = decoder.run
    if case.mesh:
        decoder = dataclasses.replace(decoder, target=dataclasses.replace(target, shards=2))
        mesh = jaxspec.make_mesh(2, 2, devices)
        partition = Partition(mesh, row_axes(lambda w, r: decoder.init(w, r, case.capacity), weights, request))
        function = partition.over(decoder.run, arguments)
        named = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), partition.specs(arguments))
        named = (named[0]._replace(target=param_shardings(weights.target, mesh)), *named[1:])
        cache = jax.NamedSharding(mesh, jax.P(None, "data", "model"))
        kv = jax.tree.map(lambda _: cache, state.cache.kv)
        named = (named[0], named[1]._replace(cache=named[1].cache._replace(kv=kv)), *named[2:])
    else:
        named = jax.tree.map(lambda _: SingleDeviceSharding(devices[0]), arguments)
    placed = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), arguments, named)
    start = time.perf_counter()
    done = jax.jit(function, donate_argnums=1).lower(*placed).compile(dict(options or {}))
    return Program(done, hlo.computations(done.as_text()), weights, state, time.perf_counter() - start)


def findings(parts: dict[str, list[hlo.Instruction]], weights: Any, caches: Any) -> list[str]:
    """What must not be in the program, and is. On a mesh a device holds a half or a quarter of what is large."""
    wrong = []
    loops = sum(one.op == "while" for one in parts["ENTRY"])
    if loops != 1:
        wrong.append(f"{loops} loops at the top, expected the one of the rounds")
    large = {leaf.size // part: "a matrix" for leaf in jax.tree.leaves(weights) for part in (1, 2)}
    large |= {leaf.size // part: "a whole cache" for leaf in jax.tree.leaves(caches) for part in (1, 2, 4)}
    for name in hlo.reached(parts):
        for one in parts[name]:
            if one.op in HOST:
                wrong.append(f"it speaks to the host: {one.op}")
            if "custom_call_target" in one.rest and "host" in one.rest.lower():
                wrong.append(f"it calls the host: {one.rest[:120]}")
            for op, type in hlo.written(parts, one):
                if hlo.size(type, anywhere=True) >= LARGE and (what := large.get(hlo.elements(type))):
                    where = "before the loop" if name == "ENTRY" else "inside the loop"
                    wrong.append(f"a {op} of {what} {where}: {one.name} = {type}")
    return wrong


def report(case: Case, chip: "Chip", program: Program) -> dict[str, Any]:
    """What every tier says about a program."""
    done, weights, state = program.done, program.weights, program.state
    memory, share = done.memory_analysis(), 4 if case.mesh else 1
    caches = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state.cache.kv,))) // share
    matrices = {name: part for name, part in weights.target.items() if name != "embed"}  # of that a row is read
    read = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(matrices)) // (2 if case.mesh else 1)
    wrong = findings(program.parts, weights, [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 5])
    if memory.alias_size_in_bytes < caches:
        wrong.append(f"{memory.alias_size_in_bytes} bytes are updated in place, the caches have {caches}")
    loop = next(one for one in program.parts["ENTRY"] if one.op == "while")
    moved = hlo.moved(program.parts, hlo.called(loop, "body"))
    return case.named | {
        "fits": True,
        "wrong": wrong,
        "compile_s": round(program.seconds, 1),
        "weights_gb": read / 1e9,
        "moved_gb": moved / 1e9,
        "cache_mb": caches / 1e6,
        "temporary_mb": memory.temp_size_in_bytes / 1e6,
        "ms_by_bytes": moved / chip.bandwidth * 1e3,
        "ms_weights_alone": read / chip.bandwidth * 1e3,
    }


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures of one chip: bytes of memory per second, bfloat16 FLOPs per second, bytes of memory."""

    topology: str
    bandwidth: float
    flops: float
    memory: float


@dataclasses.dataclass(frozen=True)
class Tier:
    """A kind of devices.

    Attributes:
        kind: of its records.
        look: compiles a case, and returns its line of the table.
        shown: what a line shows beside what both tiers do.
        kept: what a record keeps of a line beside what both tiers do.
        packages: those that compile, whose versions are recorded.
    """

    kind: str
    look: Callable[[Case], dict[str, Any]]
    shown: Callable[[dict[str, Any]], str]
    kept: tuple[str, ...]
    packages: tuple[str, ...]

    def run(self, cases: Iterable[Case], arguments: argparse.Namespace) -> int:
        """Compiles the cases, prints and writes the table, and returns the exit status."""
        jax.config.update("jax_platforms", "cpu")  # the compiler needs no device
        rows = []
        for case in cases:
            if arguments.drafters and arguments.drafters not in case.drafter:
                continue
            try:
                row = self.look(case)
            except jax.errors.JaxRuntimeError as error:
                if "memory" not in str(error).lower():
                    raise
                row = case.named | {"fits": False, "why": " ".join(str(error).split())[:200]}
            rows.append(row)
            print(self.line(row), flush=True)
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump({"jax": jax.__version__, "rows": rows}, file, indent=1)
        if arguments.record:
            versions = {name: importlib.metadata.version(name) for name in self.packages}
            words = ["python", "-m", f"scripts.prove.{self.kind}", *sys.argv[1:]]
            print(f"written: {write(arguments.record, self.kind, words, self.recorded(rows), versions)}")
        return int(any(row.get("wrong") for row in rows))

    def line(self, row: dict[str, Any]) -> str:
        head = " ".join((f"{row['chip']:4} {row['mesh']:10} {row['drafter']:36}", f"x{row['batch']:<2}", row["dtype"]))
        if not row["fits"]:
            return f"{head} does not fit: {row['why']}"
        return (
            f"{head} weights {row['weights_gb']:6.2f} GB, moved {row['moved_gb']:6.2f} GB, {self.shown(row)}, "
            f"temporaries {row['temporary_mb']:6.1f} MB (cache {row['cache_mb']:.0f}), {row['ms_by_bytes']:.2f} ms by "
            f"bytes, {row['ms_weights_alone']:.2f} for the weights alone, compiled in {row['compile_s']} s; "
            f"{'; '.join(row['wrong']) or 'all as it should be'}"
        )

    def recorded(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns the figures of a record."""
        names = ("chip", "mesh", "drafter", "batch", "dtype", "layers", "weights_gb", "moved_gb", "ms_by_bytes",
                 "ms_weights_alone", "temporary_mb", *self.kept)  # fmt: skip
        return {
            "sound": sum(row["fits"] and not row["wrong"] for row in rows),
            "wrong": sum(row["fits"] and bool(row["wrong"]) for row in rows),
            "rows": [
                {
                    name: significant(row[name]) if isinstance(row[name], float) else row[name]
                    for name in names
                    if name in row
                }
                for row in rows
            ],
        }


def parser(about: str | None, chips: Iterable[str]) -> argparse.ArgumentParser:
    """Returns a parser of what both tiers ask for."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--chips", default=",".join(chips))
    made.add_argument("--drafters", help="only those whose name holds this")
    made.add_argument("--json", metavar="FILE")
    add_record(made.add_argument)
    return made
