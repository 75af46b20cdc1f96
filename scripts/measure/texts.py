"""Compares the drafters of SmolLM2-135M with plain decoding, on a device for which compiling takes long.

    python -m scripts.measure.texts --dtypes bfloat16 float32 --record texts

As `jaxspec bench`, but all programs are compiled together, for prompts of one size. Every prompt is decoded alone, at
each temperature by the same programs, in turns with plain decoding. Prefill is not counted. A text counts as the same
if it has plain decoding's tokens; of those that differ in float32, the largest gap between the two tokens' scores is
printed, which is that of a tie (`jaxspec.testing.tie_gap`).
"""

import argparse
import collections
import concurrent.futures
import itertools
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import jaxspec
from jaxspec.backend import command_buffer
from jaxspec.bench import tasks
from jaxspec.bench.equality import first_difference
from jaxspec.bench.measurements import add_record, quartiles, round_significant, write_record
from jaxspec.decode.stats import Stats
from jaxspec.generation import inputs
from jaxspec.generation.drafting import Drafting
from jaxspec.testing import tie_gap

MODEL = "smollm2-135m-instruct"
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "prompt-lookup": {},
    "recycling": {},
    "medusa": {"heads": f"{MODEL}/medusa"},
    "eagle": {"heads": f"{MODEL}/eagle"},
}
TASKS = ("mt-bench", "humaneval", "copy")
LONGEST, CAPACITY = 256, 512


class Method:
    """A drafter's two programs: that which reads a prompt, and the rounds."""

    def __init__(self, target: jaxspec.Model, name: str, request: Any, pool: concurrent.futures.Executor):
        self.decoder, self.weights = Drafting(name, **METHODS[name]).build(target)
        decoder, options = self.decoder, command_buffer.options(jax.default_backend())

        def read(weights: Any, request: Any) -> Any:
            return decoder.prefill(weights, decoder.init(weights, request, CAPACITY))

        def lowered(function: Any, *arguments: Any, donate: tuple[int, ...] = ()) -> Any:
            made = jax.jit(function, donate_argnums=donate).lower(*arguments)
            return pool.submit(command_buffer.compile, made, options)

        state = jax.eval_shape(read, self.weights, request)
        self.read = lowered(read, self.weights, request)
        self.run = lowered(lambda w, s: decoder.run(w, s), self.weights, state, donate=(1,))

    def __call__(self, request: Any) -> tuple[list[int], float, Stats]:
        """Returns the text, the seconds of its rounds, and their statistics."""
        state = jax.block_until_ready(self.read.result()(self.weights, request))
        start = time.perf_counter()
        state = jax.block_until_ready(self.run.result()(self.weights, state))
        seconds = time.perf_counter() - start
        tokens = np.asarray(state.tokens)[0, int(state.start[0]) : int(state.length[0])].tolist()
        log = jax.device_get(state.log).part(0)
        return tokens, seconds, Stats.from_log(log, self.decoder.drafter.calls, len(tokens))


def prompts(model: jaxspec.Model, names: Sequence[str], limit: int) -> dict[str, list[list[int]]]:
    """Returns the first prompts of each task that are short enough."""
    found = {}
    for name in names:
        texts = [str(question.turns[0]) for question in tasks.load_task(name).questions]
        ids = [model.encode_chat([{"role": "user", "content": text}]) for text in texts]
        found[name] = [row for row in ids if len(row) <= LONGEST][:limit]
    return found


class Target:
    """The target in one type, with the compiled programs of all drafters."""

    def __init__(self, dtype: str, names: list[str], tokens: int, pool: concurrent.futures.Executor):
        self.dtype, self.model, self.tokens = dtype, jaxspec.load(MODEL, dtype=dtype), tokens
        self.stops = inputs.stop_array(self.model, (), False, 1)
        self.methods = {name: Method(self.model, name, self.request([1, 2], 0.0), pool) for name in names}

    def request(self, ids: list[int], temperature: float) -> Any:
        sampling = inputs.mask_padding(self.model, jaxspec.Sampling(temperature=temperature), 1)
        return inputs.make_request([ids], jax.random.key(len(ids))[None], sampling, self.tokens, self.stops, LONGEST)

    def measured(self, temperature: float, task: str, texts: list[list[int]], repeats: int) -> list[dict[str, Any]]:
        """Returns a line for each drafter."""
        found: dict[str, dict[str, list]] = {name: collections.defaultdict(list) for name in self.methods}
        for ids in texts:
            asked = self.request(ids, temperature)
            outs = [{name: method(asked) for name, method in self.methods.items()} for _ in range(repeats)]
            plain = outs[0]["none"][0]
            for name, kept in found.items():
                tokens, _, stats = outs[0][name]
                own, base = ([len(out[who][0]) / out[who][1] for out in outs] for who in (name, "none"))
                kept["ratio"].append(np.median(np.array(own) / np.array(base)))
                kept["speed"].append(np.median(own))
                kept["stats"].append(stats)
                kept["same"].append(tokens == plain)
                if tokens != plain and self.dtype == "float32":
                    kept["gap"].append(self.gap(ids, tokens, plain, temperature))
        rows = []
        for name, kept in found.items():
            row = {
                "dtype": self.dtype, "temperature": temperature, "task": task, "drafter": name, "prompts": len(texts),
                "times_plain": quartiles(kept["ratio"]), "tokens_per_s": quartiles(kept["speed"]),
                "tokens_per_round": round_significant(Stats.total(kept["stats"]).tokens_per_round),
                "same_texts": sum(kept["same"]),
            }  # fmt: skip
            rows.append(row | ({"largest_gap": round_significant(max(kept["gap"]))} if kept["gap"] else {}))
            print(rows[-1], flush=True)
        return rows

    def gap(self, ids: list[int], tokens: list[int], plain: list[int], temperature: float) -> float:
        """Returns how close the choice was at which two texts of a prompt part."""
        at = first_difference(tokens, plain)
        assert at is not None
        row, pair = jaxspec.Sampling(temperature=temperature), (tokens[at], plain[at])
        text, key = ids + plain[:at], jax.random.key(len(ids))
        return tie_gap(self.model.lm, self.model.params, text, pair, key, row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--limit", type=int, default=4, help="prompts of each task")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--tokens", type=int, default=128, help="of each text")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="programs that are compiled together")
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    if "none" not in arguments.methods:
        parser.error("--methods must name none, with which the others are compared")
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}", flush=True)
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(arguments.threads) as pool:
        targets = [Target(dtype, arguments.methods, arguments.tokens, pool) for dtype in arguments.dtypes]
    for target in targets:
        for method in target.methods.values():
            method(target.request([1, 2, 3], 0.0))
    print(f"all programs: {time.perf_counter() - start:.0f} s", flush=True)
    asked, rows = prompts(targets[0].model, arguments.tasks, arguments.limit), []
    for target in targets:
        for temperature, (task, texts) in itertools.product(arguments.temperatures, asked.items()):
            rows += target.measured(temperature, task, texts, arguments.repeats)
            if arguments.record:
                write_record(arguments.record, "texts", sys.argv, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
