"""Compiles layers with `exact=True` on 2 x 2 devices that are not here: `make gpu` and `make tpu`.

    python -m scripts.prove.mesh_layers --chips h100         # with the compiler for GPUs
    python -m scripts.prove.mesh_layers --chips v5e          # with the compiler for TPUs

Shapes of Llama 3 8B. Two devices share a layer, and two groups of devices have rows of their own. Devices may exchange
floating-point numbers only by gathers, because the hardware chooses the order of the sums of other collectives, and XLA
may not sum anything between the embedding and the logits. A layer must be eight kernels: one for each call, and one
after each of two gathers, which adds the devices' shares. It counts the bytes that a device receives in a layer and in
a round. Nothing is run.
"""

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.backend import exact_products
from jaxspec.bench.measurements import add_record, write_record
from jaxspec.core.mesh import DATA, MODEL, make_mesh, manual_axes
from jaxspec.core.records import KV, Cache, Window
from jaxspec.models.sharding import param_shardings
from scripts.library import collectives, hlo, loops
from scripts.prove import gpu, gpu_layers, tpu, tpu_layers

CAPACITY = 2048
KERNELS_OF_A_LAYER = 8
DRAFTERS = ("none", "prompt-lookup, chain 8")
"""No heads: XLA adds what devices look up in the target's embeddings for a draft, where all summands but one are 0."""


class Layers(NamedTuple):
    """A program of some layers between embedding and logits, and the bytes that a device receives."""

    parts: dict[str, list[hlo.Instruction]]
    kernels: int
    received: int


def platform_of(chip: str) -> str:
    """Returns "gpu" or "tpu"."""
    return "gpu" if chip in gpu.CHIPS else "tpu"


def four(chip: str) -> Any:
    """Returns four devices, as the compiler knows them."""
    if platform_of(chip) == "gpu":
        return gpu.devices(chip, True)
    return topologies.get_topology_desc(tpu.CHIPS[chip].topology, "tpu").devices[:4]


def compile_layers(chip: str, layers: int, rows: int, int8: bool) -> Layers:
    """Compiles a window of this number of tokens in each of two rows, one for each group of devices."""
    mesh = make_mesh(2, 2, four(chip))
    lm = loops.llama(layers).with_execution(
        products="pallas", platform=platform_of(chip), exact=True, shards=mesh.shape[MODEL]
    )
    shape: Any = jax.ShapeDtypeStruct
    window = Window(shape((2, rows), "int32"), shape((2, rows), "int32"), shape((2, rows, rows), "bool"))
    cache, params = jax.eval_shape(lambda: lm.init_cache(2, CAPACITY)), loops.shapes(lm, int8)

    def run(params: Any, window: Window, cache: Any) -> Any:
        features, entries = lm.apply(params, window, cache)
        return lm.head(params, features), entries

    def over_rows(stores: Any, rest: Any) -> Cache:
        return Cache(KV(stores, stores), rest)

    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(P(), P(DATA), over_rows(P(None, DATA), P(DATA))),
        out_specs=(P(DATA), P(None, DATA)), axis_names=manual_axes(mesh), check_vma=False,
    )  # fmt: skip
    heads, by_row = NamedSharding(mesh, P(None, DATA, MODEL)), NamedSharding(mesh, P(DATA))
    places = param_shardings(params, mesh), jax.tree.map(lambda _: by_row, window), over_rows(heads, by_row)
    arguments = jax.tree.map(lambda a, s: shape(a.shape, a.dtype, sharding=s), (params, window, cache), places)
    done = jax.jit(mapped).lower(*arguments).compile(dict(lm.compiler_options))
    parts = hlo.computations(done.as_text() or "")
    return Layers(parts, sum(map(hlo.is_kernel, parts["ENTRY"])), collectives.received(parts))


def sums_over_devices(parts: dict[str, list[hlo.Instruction]], name: str = "ENTRY") -> Iterator[str]:
    """Yields the collectives of floating-point numbers that are not gathers."""
    for one in collectives.found(parts, name):
        kind = collectives.kind(one)
        if kind != collectives.GATHER and hlo.is_floating(one.type):
            yield f"the devices exchange numbers by {kind}: {one.name} = {one.type}"


def look_at_layers(chip: str, rows: int, int8: bool) -> dict[str, Any]:
    """Compiles two and three layers, and returns their line of the table."""
    few, more = (compile_layers(chip, layers, rows, int8) for layers in (2, 3))
    sums = (gpu_layers if platform_of(chip) == "gpu" else tpu_layers).sums_of_xla(more.parts)
    row = {
        "chip": chip, "what": f"{'int8' if int8 else 'bfloat16'} layers, {rows} rows",
        "kernels_of_a_layer": more.kernels - few.kernels, "received_by_a_layer": more.received - few.received,
        "received_by_the_rest": 3 * few.received - 2 * more.received,
        "wrong": [*sums_over_devices(more.parts), *(f"XLA sums in {name}" for name in sums)],
    }  # fmt: skip
    if row["kernels_of_a_layer"] != KERNELS_OF_A_LAYER:
        row["wrong"].append(f"a layer is {row['kernels_of_a_layer']} kernels, expected {KERNELS_OF_A_LAYER}")
    return row


def look_at_round(chip: str, drafter: str) -> dict[str, Any]:
    """Compiles the loop of a drafter, and returns its line of the table."""
    received, wrong = [], []
    for layers in (2, 3):
        case = loops.Case(chip, drafter, mesh=True, batch=2, layers=layers, products="pallas", exact=True)
        options: Any = dict(exact_products.options("pallas"))
        parts = loops.compiled(case, platform_of(chip), four(chip), options).parts
        body = hlo.called(next(one for one in parts["ENTRY"] if one.op == "while"), "body")
        received.append(collectives.received(parts, body))
        wrong = [*sums_over_devices(parts, body)]
    few, more = received
    return {
        "chip": chip, "what": f"a round, {drafter}", "received_by_a_layer": more - few,
        "received_by_the_rest": 3 * few - 2 * more,
        f"received_with_{loops.DEEP}_layers": few + (loops.DEEP - 2) * (more - few), "wrong": wrong,
    }  # fmt: skip


def shown(row: dict[str, Any]) -> str:
    """Returns a line of the table as text."""
    figures = ", ".join(
        f"{key.replace('_', ' ')} {value:,}" for key, value in row.items() if key not in ("chip", "what", "wrong")
    )
    return f"{row['chip']:4} {row['what']}: {figures}; {'; '.join(row['wrong']) or 'all as it should be'}"


def main() -> int:
    jax.config.update("jax_platforms", "cpu")  # a compiler needs no device
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default="h100", help="of one platform")
    parser.add_argument("--rows", default="16,64")
    parser.add_argument("--drafters", default=";".join(DRAFTERS), help="separated by semicolons")
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for chip in arguments.chips.split(","):
        for int8 in (False, True):
            for rows in map(int, arguments.rows.split(",")):
                lines.append(look_at_layers(chip, rows, int8))
                print(shown(lines[-1]), flush=True)
        for drafter in filter(None, arguments.drafters.split(";")):
            lines.append(look_at_round(chip, drafter))
            print(shown(lines[-1]), flush=True)
    if arguments.record:
        platform = platform_of(arguments.chips.split(",")[0])
        names = (gpu if platform == "gpu" else tpu).TIER.packages
        packages = {name: importlib.metadata.version(name) for name in names}
        words = ["python", "-m", "scripts.prove.mesh_layers", *sys.argv[1:]]
        write_record(arguments.record, f"{platform}-mesh-layers", words, {"lines": lines}, packages)
    return int(any(line["wrong"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
