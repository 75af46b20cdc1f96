"""Compiles the decoder for TPUs without one, and says what the compiled loop does: `make tpu`.

    python scripts/prove/tpu.py [--chips v5e,v6e,v5p] [--layers 32] [--capacity 2048] [--json out.json]

The target has the shapes of Llama-3-8B in bfloat16, with drafters and trees, at batch 1, on one
device and on a mesh of 2 x 2 (`jaxspec.make_mesh`); shapes alone, no weights. The compiler is the one of real TPUs
(package libtpu). What must hold is checked, and makes the exit status 1: one loop for the rounds, nothing sent to or
fetched from the host, no copy of a cache or of a matrix inside the loop or before it, the caches updated in place.
What is printed: the bytes of HBM that a round moves, counted in the compiled program (`jaxspec.testing.hlo`; of two
branches the costlier, of every loop inside one turn: the levels that a draft model drafts one after the other count
once), beside those of the target's matrices, which every round must read; the FLOPs by the compiler's own count; and
the time each would take at the chip's published bandwidth and peak. Nothing is run.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import re
import sys
import time
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import jaxspec
from jaxspec.bench.measurements import add_record, significant, write
from jaxspec.core.protocols import DrafterInputs
from jaxspec.decode.lifecycle import row_axes
from jaxspec.decode.partition import Partition
from jaxspec.decode.state import Request, Weights
from jaxspec.drafters.eagle import Eagle
from jaxspec.drafters.early_exit import EarlyExit
from jaxspec.drafters.medusa import Medusa
from jaxspec.drafters.model import ModelDraft
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.drafters.recycling import Recycling
from jaxspec.heads.eagle_config import EagleConfig
from jaxspec.heads.network import HeadsConfig, unflatten
from jaxspec.models.config import ModelConfig
from jaxspec.models.quantized import quantize
from jaxspec.models.sharding import param_shardings
from jaxspec.models.transformer import TransformerLM
from jaxspec.rules.coupled import Coupled
from jaxspec.testing import hlo


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures of one chip: HBM bytes per second, bfloat16 FLOPs per second, HBM bytes."""

    topology: str
    bandwidth: float
    flops: float
    memory: float


CHIPS = {  # cloud.google.com/tpu/docs, system architecture
    "v5e": Chip("v5e:2x2", 819e9, 197e12, 16e9),
    "v6e": Chip("v6e:2x2", 1640e9, 918e12, 32e9),
    "v5p": Chip("v5p:2x2x1", 2765e9, 459e12, 95e9),
}
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
        "prompt-lookup": (PromptLookup(), None),
        "recycling": (Recycling(), None),
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


def int32(*shape: int) -> Any:
    """Stands for an array of integers of this shape."""
    return jax.ShapeDtypeStruct(shape, "int32")


def compiled(
    decoder: jaxspec.Decoder, weights: Weights, capacity: int, devices: Any, split: bool
) -> tuple[Any, Any, float]:
    """The loop compiled for these devices, the shapes of its state, and the seconds it took."""
    batch, vocab = (2 if split else 1), decoder.target.vocab
    request = Request(
        int32(batch, 64),
        int32(batch),
        int32(batch),
        jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch)),
        int32(batch, 8),
        jax.eval_shape(lambda: jaxspec.Sampling(temperature=1.0).rows(batch, vocab)),
    )
    state = jax.eval_shape(lambda w, r: decoder.init(w, r, capacity), weights, request)
    arguments = (weights, state, int32())
    function = decoder.run
    if split:
        assert isinstance(decoder.target, TransformerLM)
        decoder = dataclasses.replace(decoder, target=dataclasses.replace(decoder.target, shards=2))
        mesh = jaxspec.make_mesh(2, 2, devices)
        partition = Partition(mesh, row_axes(lambda w, r: decoder.init(w, r, capacity), weights, request))
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
    done = jax.jit(function, donate_argnums=1).lower(*placed).compile()
    return done, state, time.perf_counter() - start


def findings(parts: dict[str, list[hlo.Instruction]], weights: Any, caches: Any) -> list[str]:
    """What must not be in the program, and is. On a mesh a device holds a half or a quarter of what is large."""
    wrong = []
    loops = sum(one.op == "while" for one in parts["ENTRY"])
    if loops != 1:
        wrong.append(f"{loops} loops at the top, expected the one of the rounds")
    large = {leaf.size // part: "a matrix" for leaf in jax.tree.leaves(weights) for part in (1, 2)}
    large |= {leaf.size // part: "a whole cache" for leaf in jax.tree.leaves(caches) for part in (1, 2, 4)}
    for name, instructions in parts.items():
        for one in instructions:
            if one.op in HOST:
                wrong.append(f"it speaks to the host: {one.op}")
            if "custom_call_target" in one.rest and "host" in one.rest.lower():
                wrong.append(f"it calls the host: {one.rest[:120]}")
            if one.op not in ("copy", "select") or hlo.size(one.type, anywhere=True) < LARGE:
                continue
            shape = re.match(r"\w+\[([\d,]+)\]", one.type)
            if shape and (what := large.get(math.prod(map(int, shape[1].split(","))))):
                where = "before the loop" if name == "ENTRY" else "inside the loop"
                wrong.append(f"a {one.op} of {what} {where}: {one.name} = {one.type}")
    return wrong


def report(
    chip: str, kind: str, name: str, decoder: jaxspec.Decoder, weights: Weights, capacity: int, devices: Any
) -> dict:
    """One line of the table."""
    split = kind != "one device"
    row: dict[str, Any] = {"chip": chip, "mesh": kind, "drafter": name}
    try:
        done, state, seconds = compiled(decoder, weights, capacity, devices, split)
    except jax.errors.JaxRuntimeError as error:
        if "memory" not in str(error).lower():
            raise
        return row | {"fits": False, "why": " ".join(str(error).split())[:200]}
    memory, cost = done.memory_analysis(), done.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    share = 4 if split else 1
    caches = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state.cache.kv,))) // share
    matrices = {name: part for name, part in weights.target.items() if name != "embed"}  # of that a row is read
    read = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(matrices)) // (2 if split else 1)
    parts = hlo.computations(done.as_text())
    wrong = findings(parts, weights, [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 5])
    if memory.alias_size_in_bytes < caches:
        wrong.append(f"{memory.alias_size_in_bytes} bytes are updated in place, the caches have {caches}")
    figures, flops = CHIPS[chip], cost.get("flops", 0.0)
    loop = next(one for one in parts["ENTRY"] if one.op == "while")
    moved = hlo.moved(parts, hlo.called(loop, "body"))
    return row | {
        "fits": True,
        "wrong": wrong,
        "compile_s": round(seconds, 1),
        "weights_gb": read / 1e9,
        "moved_gb": moved / 1e9,
        "gflop": flops / 1e9,
        "cache_mb": caches / 1e6,
        "temporary_mb": memory.temp_size_in_bytes / 1e6,
        "ms_by_bytes": moved / figures.bandwidth * 1e3,
        "ms_by_flops": flops / figures.flops * 1e3,
        "ms_weights_alone": read / figures.bandwidth * 1e3,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--capacity", type=int, default=2048, help="slots of the cache; a small one is moved to VMEM")
    parser.add_argument("--int8", action="store_true", help="the target's matrices in int8")
    parser.add_argument("--drafters", help="only those whose name holds this")
    parser.add_argument("--json", metavar="FILE")
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    jax.config.update("jax_platforms", "cpu")  # the compiler needs no device
    target = llama(arguments.layers)
    rows = []
    for chip in arguments.chips.split(","):
        topology = topologies.get_topology_desc(CHIPS[chip].topology, "tpu")
        for kind in ("one device", "2x2"):
            for name, (drafter, params) in drafters(target, arguments.layers).items():
                if arguments.drafters and arguments.drafters not in name:
                    continue
                decoder = jaxspec.Decoder(target, drafter, Coupled())
                weights = Weights(shapes(target, arguments.int8), params)
                row = report(chip, kind, name, decoder, weights, arguments.capacity, topology.devices)
                rows.append(row)
                print(line(row), flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(
                {"jax": jax.__version__, "layers": arguments.layers, "capacity": arguments.capacity, "rows": rows},
                file,
                indent=1,
            )
    if arguments.record:
        print(f"written: {write(arguments.record, 'tpu', sys.argv, recorded(arguments, rows), libtpu())}")
    return int(any(row.get("wrong") for row in rows))


def recorded(arguments: argparse.Namespace, rows: list[dict]) -> dict:
    """Returns the figures of a record."""
    kept = ("chip", "mesh", "drafter", "weights_gb", "moved_gb", "ms_by_bytes", "ms_weights_alone", "temporary_mb")
    return {
        "layers": arguments.layers,
        "capacity": arguments.capacity,
        "dtype": "int8" if arguments.int8 else "bfloat16",
        "sound": sum(row["fits"] and not row["wrong"] for row in rows),
        "wrong": sum(row["fits"] and bool(row["wrong"]) for row in rows),
        "rows": [
            {
                name: significant(row[name]) if isinstance(row[name], float) else row[name]
                for name in kept
                if name in row
            }
            for row in rows
        ],
    }


def libtpu() -> dict[str, str]:
    return {"libtpu": importlib.metadata.version("libtpu")}


def line(row: dict) -> str:
    head = f"{row['chip']:4} {row['mesh']:10} {row['drafter']:34}"
    if not row["fits"]:
        return f"{head} does not fit: {row['why']}"
    return (
        f"{head} weights {row['weights_gb']:6.2f} GB, moved {row['moved_gb']:6.2f} GB, {row['gflop']:8.1f} GFLOP, "
        f"temporaries {row['temporary_mb']:6.1f} MB (cache {row['cache_mb']:.0f}), "
        f"{row['ms_by_bytes']:.2f} ms by bytes, {row['ms_weights_alone']:.2f} for the weights alone, "
        f"compiled in {row['compile_s']} s; {'; '.join(row['wrong']) or 'all as it should be'}"
    )


if __name__ == "__main__":
    sys.exit(main())
