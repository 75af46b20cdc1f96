"""Measures the time to the first token of SmolLM2-135M by the length of the prompt, beside other systems.

    python scripts/measure/first_token.py
    python scripts/measure/first_token.py --peers transformers:plain,llama.cpp:plain

All systems read the same tokens, by turns. Times exclude compilation; other systems are installed as by
`jaxspec bench --peers`. Prompt and new tokens fit the 2,048 tokens that llama.cpp takes of this file.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jaxspec
from jaxspec.bench.measurements import add_record, quartiles, write_record
from jaxspec.bench.peers import parse_peers
from jaxspec.bench.records import BenchPrompt
from jaxspec.bench.worker import Models, Worker, start_workers
from jaxspec.checkpoints.source import check_path, find_source

MODEL = "smollm2-135m-instruct"
CAPACITY = 2048
SLOTS = 2304
"""Slots of our cache: a prompt of that capacity, and a chunk of reading after it."""


def own(dtype: str) -> Callable[[list[int]], float]:
    """Returns a function that times jaxspec's first token of a prompt, in milliseconds."""
    model = jaxspec.load(MODEL, dtype=dtype)

    def first(tokens: list[int]) -> float:
        timing = jaxspec.generate(model, tokens, drafter="none", max_new_tokens=1, capacity=SLOTS).timing
        return (timing.prefill_s + timing.decode_s) * 1e3

    return first


def other(worker: Worker) -> Callable[[list[int]], float]:
    """Returns the same for another system."""

    def first(tokens: list[int]) -> float:
        prompt = BenchPrompt("prompt", "prompt", str(len(tokens)), 0, tokens, jax.random.key(0))
        return worker.decode(prompt, 2, ignore_eos=True).timing.prefill_s * 1e3

    return first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512, 2032], help="of the prompts, in tokens")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--peers", default="", help="other systems, as for jaxspec bench")
    parser.add_argument("--repeats", type=int, default=5)
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    workers: list[Worker] = []
    if arguments.peers:
        models = Models({"gguf": str(check_path(find_source(MODEL)).absolute())}, None, CAPACITY, ())
        workers = start_workers(parse_peers(arguments.peers, False), models)[0]
    ways = {f"jaxspec, {dtype}": own(dtype) for dtype in arguments.dtypes}
    ways |= {worker.label: other(worker) for worker in workers}
    values: dict[str, Any] = {}
    for length in arguments.lengths:
        tokens = [1000 + i % 4000 for i in range(length)]
        times = {way: [] for way in ways}
        for repeat in range(arguments.repeats + 1):
            for way, first in ways.items():
                taken = first(tokens)
                if repeat:
                    times[way].append(taken)
        for way, taken in times.items():
            low, middle, high = np.percentile(taken, (25, 50, 75))
            print(f"{length:5} tokens, {way:22} {middle:8.1f} ms ({low:.1f} to {high:.1f})", flush=True)
            values.setdefault(way, {})[str(length)] = quartiles(taken)
    versions: dict[str, str] = {}
    for worker in workers:
        versions |= worker.versions
        worker.close()
    if arguments.record:
        print(f"written: {write_record(arguments.record, 'first-token', sys.argv, values, versions)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
