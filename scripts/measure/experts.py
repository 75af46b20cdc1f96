"""Times calls at the layer shapes of Qwen3-30B-A3B with random weights on a CPU, by nodes, beside the assumed cost.

    python -m scripts.measure.experts --record experts              # bfloat16 and int8
    python -m scripts.measure.experts --dtypes bfloat16 --repeats 3

A call reads a chain of random tokens, other ones in every call, on top of a text of 100 tokens. The layers share their
matrices, but not their routers, because the experts of one layer take 1.2 GB in bfloat16. The experts of a layer are
copies of one expert. The vocabulary is small, so that the layers take nearly all of the time. The cases of a dtype take
turns, and a ratio is the median over turns of two times that were measured one after the other. Times are those of a
clock, and those that the process had on its cores, which other programs disturb less.
"""

import argparse
import sys
import time
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.measurements import add_record, quartiles, round_significant, write_record
from jaxspec.core.records import Cache, Window
from jaxspec.core.theory import assumed_cost
from jaxspec.kernels.library import describe_kernels, kernels_available, token_cost
from jaxspec.models.config import EXPERT_MATRICES, Experts, ModelConfig, is_matrix, is_table
from jaxspec.models.execution import Execution
from jaxspec.models.experts import count_reads
from jaxspec.models.packed import pack_param
from jaxspec.models.quantized import Quantized
from jaxspec.models.transformer import TransformerLM
from scripts.measure.rounds import normal

LAYERS, VOCAB, TEXT = 4, 1024, 100
OWN = ("router",)
"""Parameters that each layer has to itself."""
CONFIG = ModelConfig(
    vocab_size=VOCAB, hidden_size=2048, intermediate_size=6144, num_layers=LAYERS, num_heads=32, num_kv_heads=4,
    head_dim=128, norm_eps=1e-6, qk_norm=True, experts=Experts(128, 8, 768),
)  # fmt: skip


def make_params(lm: TransformerLM, dtype: str) -> Any:
    """Returns random packed weights, of which the layers share all but the routers."""
    shapes: Any = jax.eval_shape(lm.init_params, jax.random.key(0))

    def make(path: Any, leaf: Any) -> Any:
        if leaf.ndim < 2:
            return jnp.ones(leaf.shape, leaf.dtype)
        key, name = jax.random.key(zlib.crc32(str(path).encode())), path[-1].key
        experts = leaf.shape[0] if name in EXPERT_MATRICES else 1
        shape = (1, *leaf.shape[1:]) if name in EXPERT_MATRICES else leaf.shape
        matrix = normal(key, shape, str(leaf.dtype))
        rounded = dtype == "int8" and is_matrix(name, leaf.ndim)
        packed = pack_param(name, Quantized.quantize(matrix, is_table(name)) if rounded else matrix)
        # The experts are copies of one, because random numbers for all of them would take most of the time.
        return jax.tree.map(lambda a: jnp.repeat(a, experts, 0), packed) if experts > 1 else packed

    layers = shapes.pop("layers")
    params = jax.tree_util.tree_map_with_path(make, shapes)
    first = jax.tree_util.tree_map_with_path(make, layers[0])
    own = {i: jax.tree_util.tree_map_with_path(make, {i: {n: layers[i][n] for n in OWN}})[i] for i in range(LAYERS)}
    return params | {"layers": {i: first | own[i] for i in range(LAYERS)}}


def measure(dtype: str, nodes: list[int], repeats: int, turn: int) -> dict[str, Any]:
    """Times calls of each number of nodes, and compares each with calls of one node."""
    lm = TransformerLM(CONFIG, "bfloat16" if dtype == "int8" else dtype, execution=Execution(kernels=True))
    params, rng = make_params(lm, dtype), np.random.default_rng(0)

    @jax.jit
    def call(params: Any, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        count = tokens.shape[1]
        positions = cache.length[:, None] + jnp.arange(count)
        features, entries = lm.apply(params, Window(tokens, positions, jnp.tri(count, dtype=bool)[None]), cache)
        return lm.head(params, features), lm.commit(cache, entries, None, jnp.full((1,), count))

    def tokens(count: int) -> jax.Array:
        return jnp.asarray(rng.integers(0, VOCAB, (1, count)), jnp.int32)

    _, cache = call(params, tokens(TEXT), lm.init_cache(1, 512))
    jax.block_until_ready([call(params, tokens(count), cache)[0] for count in nodes])  # compiles
    times: dict[int, list[float]] = {count: [] for count in nodes}
    on_cores: dict[int, list[float]] = {count: [] for count in nodes}
    for _ in range(repeats):
        for count in nodes:
            inputs = [tokens(count) for _ in range(turn)]
            start, before = time.perf_counter(), time.process_time()
            for each in inputs:
                jax.block_until_ready(call(params, each, cache)[0])
            times[count].append((time.perf_counter() - start) / turn * 1e3)
            on_cores[count].append((time.process_time() - before) / turn * 1e3)
    rows, cost, reads = [], token_cost(params), count_reads(lm, params)
    for count in nodes:
        ratios = [quartiles(np.array(of[count]) / np.array(of[nodes[0]])) for of in (times, on_cores)]
        rows.append({
            "nodes": count, "ms": quartiles(times[count]), "times_one": ratios[0],
            "core_ms": quartiles(on_cores[count]), "core_times_one": ratios[1],
            "assumed": round_significant(assumed_cost(count, cost, 1, reads)),
        })  # fmt: skip
        print(f"{dtype}, {count} nodes: {rows[-1]}", flush=True)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"][0]))
    return {"weights_gb": round_significant(size / 1e9), "rounds": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16", "int8"), default=["bfloat16", "int8"])
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 8, 16, 64], help="the first is compared with")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--turn", type=int, default=4, help="calls that are timed together")
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    if not kernels_available():
        sys.exit(f"this script measures the CPU kernels, which are not available: {describe_kernels()}")
    print(f"jax {jax.__version__}, {describe_kernels()}")
    values = {
        f"{LAYERS} layers of Qwen3-30B-A3B, {dtype}": measure(dtype, arguments.nodes, arguments.repeats, arguments.turn)
        for dtype in arguments.dtypes
    }
    if arguments.record:
        print(f"written: {write_record(arguments.record, 'experts', sys.argv, values)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
