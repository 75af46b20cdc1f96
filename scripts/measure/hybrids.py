"""Times rounds at the shapes of Qwen3.5 with random weights on a CPU, by the number of nodes, beside the assumed cost.

    python -m scripts.measure.hybrids --record hybrids              # 0.8B and 4B in float32 and bfloat16
    python -m scripts.measure.hybrids --models 0.8B --dtypes float32 --repeats 3

Every round has all nodes of a tree with three children per node. Nothing is drafted, so a round commits one token. The
cases of a model take turns, and a ratio is the median over turns of two times that were measured one after the other.
Times are those of a clock, and those that the process had on its cores, which other programs disturb less.
The layers of the 4B model share the arrays of its first four layers: its program has all layers, and reads as many
bytes, but float32 weights of all layers would not fit into the memory of a small machine.
"""

import argparse
import sys
import time
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec.bench.measurements import add_record, quartiles, round_significant, write_record
from jaxspec.core.theory import assumed_cost
from jaxspec.core.topology import Topology
from jaxspec.decode.session import Session, clear_executables
from jaxspec.drafters.none import NoDraft
from jaxspec.generation.inputs import make_request, row_keys, stop_array
from jaxspec.kernels.library import describe_kernels, kernels_available, token_cost
from jaxspec.models.config import DeltaSizes, ModelConfig
from jaxspec.models.execution import Execution
from jaxspec.models.packed import pack_param
from jaxspec.models.rope import Rope
from jaxspec.models.transformer import TransformerLM
from jaxspec.rules.coupled import Coupled
from scripts.measure.rounds import normal

PERIOD = 4
"""Three layers with Gated DeltaNet are followed by one layer with attention."""
CAPACITY, PROMPT = 512, 100
CHILDREN = 3


def qwen(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, value_heads: int) -> ModelConfig:
    """Returns the sizes of a dense Qwen3.5 model."""
    return ModelConfig(
        vocab_size=248320, hidden_size=hidden, intermediate_size=inner, num_layers=layers, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=256, norm_eps=1e-6, rope=Rope(theta=1e7, width=64), qk_norm=True, out_gate=True,
        delta=DeltaSizes(16, value_heads, 128, 128), recurrent=tuple(i % PERIOD < PERIOD - 1 for i in range(layers)),
    )  # fmt: skip


MODELS = {
    "0.8B": qwen(1024, 3584, 24, 8, 2, 16),
    "4B": qwen(2560, 9216, 32, 16, 4, 32),
}
SHARED = ("4B",)
"""Models whose layers share arrays."""


def tree(nodes: int) -> Topology:
    """Returns a tree of so many nodes, each with `CHILDREN` children, filled level by level."""
    paths: list[tuple[int, ...]] = [()]
    for parent in paths:
        paths += [(*parent, rank) for rank in range(CHILDREN)][: nodes - len(paths)]
        if len(paths) == nodes:
            break
    return jaxspec.from_paths(paths[1:]) if nodes > 1 else jaxspec.chain(0)


def make_model(name: str, dtype: str) -> tuple[jaxspec.Model, int]:
    """Returns a model with random packed weights, and the bytes of weights that one call reads."""
    config = MODELS[name]
    lm = TransformerLM(config, dtype, execution=Execution(kernels=True))
    shapes = jax.eval_shape(lm.init_params, jax.random.key(0))
    if name in SHARED:
        layers = shapes["layers"]
        shapes["layers"] = {i: layers[i] for i in range(PERIOD)}

    def make(path: Any, leaf: Any) -> Any:
        if leaf.ndim < 2:
            return jnp.ones(leaf.shape, leaf.dtype)
        key = jax.random.key(zlib.crc32(str(path).encode()))
        return jax.block_until_ready(pack_param(path[-1].key, normal(key, leaf.shape, str(leaf.dtype))))

    params = jax.tree_util.tree_map_with_path(make, shapes)
    params["layers"] = {i: params["layers"][i % len(params["layers"])] for i in range(config.num_layers)}
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))  # the tied table counts once: a round looks up few rows
    return jaxspec.Model(lm, params), size


def measure(name: str, dtype: str, nodes: list[int], repeats: int, turn: int) -> dict[str, Any]:
    """Times rounds of each number of nodes, and compares each with rounds of one node."""
    model, size = make_model(name, dtype)
    sessions = {}
    for count in nodes:
        decoder = jaxspec.Decoder(model.lm, NoDraft(tree(count)), Coupled(), widths=())
        sampling = jaxspec.Sampling(temperature=0.0)
        request = make_request(
            [list(range(1000, 1000 + PROMPT))], row_keys(None, 1, 1, sampling), sampling.rows(1, model.lm.vocab),
            CAPACITY - PROMPT, stop_array(model, (), True, 1), CAPACITY,
        )  # fmt: skip
        sessions[count] = Session(decoder, jaxspec.Weights(model.params), request, CAPACITY)
        sessions[count].run(1)
    times: dict[int, list[float]] = {count: [] for count in nodes}
    on_cores: dict[int, list[float]] = {count: [] for count in nodes}
    for _ in range(repeats):
        for count, session in sessions.items():
            session.timing.decode_s, before = 0.0, time.process_time()
            session.run(turn)
            on_cores[count].append((time.process_time() - before) / turn * 1e3)
            times[count].append(session.timing.decode_s / turn * 1e3)
    rows, cost = [], token_cost(model.params)
    for count in nodes:
        ratios = [quartiles(np.array(of[count]) / np.array(of[nodes[0]])) for of in (times, on_cores)]
        rows.append({
            "nodes": count, "ms": quartiles(times[count]), "times_one": ratios[0],
            "core_ms": quartiles(on_cores[count]), "core_times_one": ratios[1],
            "assumed": round_significant(assumed_cost(count, cost)),
        })  # fmt: skip
        print(f"{name} {dtype}, {count} nodes: {rows[-1]}", flush=True)
    clear_executables()
    return {"weights_gb": round_significant(size / 1e9), "rounds": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 8, 16, 64], help="the first is compared with")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--turn", type=int, default=2, help="rounds that are timed together")
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    if not kernels_available():
        sys.exit(f"this script measures the CPU kernels, which are not available: {describe_kernels()}")
    print(f"jax {jax.__version__}, {describe_kernels()}")
    values = {
        f"Qwen3.5-{name}, {dtype}": measure(name, dtype, arguments.nodes, arguments.repeats, arguments.turn)
        for name in arguments.models
        for dtype in arguments.dtypes
    }
    if arguments.record:
        print(f"written: {write_record(arguments.record, 'hybrids', sys.argv, values)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
