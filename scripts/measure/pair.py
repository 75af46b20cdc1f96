"""Measures a target with a draft model on the first prompts of HumanEval and MT-bench.

    python scripts/measure/pair.py TARGET DRAFT [--limit 20] [--tokens 64] [--batch 10] [--rules R ...] [--json OUT]

Both models read every prompt once; then every configuration continues from these caches, in batches of similar length,
at temperature 0 and 0.8. The script prints acceptance and tokens per round, compares every text with that of plain
decoding with the same key (a difference must be a certified tie), and times a call of each model for one prompt by
width. The speedups follow from these times; `jaxspec bench` measures speedups end to end. Prompts longer than
`--longest` are left out.
"""

import argparse
import functools
import itertools
import json
import resource
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec.analysis.bootstrap import ratio_interval
from jaxspec.bench import tasks
from jaxspec.bench.measurements import add_record, round_significant, write_record
from jaxspec.core.records import Window
from jaxspec.decode.stats import Stats
from jaxspec.generation import inputs
from jaxspec.generation.drafting import Drafting
from jaxspec.registry import RULES, find
from jaxspec.testing import tie_gap

TREES = {
    "chain 2": jaxspec.chain(2),
    "tree 2": jaxspec.branching(2),
    "chain 4": jaxspec.chain(4),
    "tree 2x1": jaxspec.branching(2, 1),
    "chain 8": jaxspec.chain(8),
    "tree 2x1x1x1": jaxspec.branching(2, 1, 1, 1),
    "tree 2x2": jaxspec.branching(2, 2),
    "tree 4x1": jaxspec.branching(4, 1),
}
TIE = 1e-3  # the greatest gap of perturbed scores that is a tie; see scripts/prove/identity.py


def prompt_ids(model: jaxspec.Model, limit: int, longest: int) -> list[list[int]]:
    """Returns the first `limit` prompts of each task that are short enough, sorted by length."""
    chosen = []
    for name in ("humaneval", "mt-bench"):
        texts = [str(question.turns[0]) for question in tasks.load_task(name).questions]
        ids = [model.encode_chat([{"role": "user", "content": text}]) for text in texts]
        chosen += [prompt for prompt in ids if len(prompt) <= longest][:limit]
    return sorted(chosen, key=len)


def milliseconds(model: jaxspec.Model, width: int, prefix: int, repeats: int) -> float:
    """Returns the median time of a call that reads `width` tokens and chooses greedily, in ms."""

    @jax.jit
    def call(params, window, cache):
        features, _ = model.lm.apply(params, window, cache)
        return model.lm.head(params, features).argmax(-1)

    cache = model.lm.init_cache(1, prefix + width)._replace(length=jnp.full((1,), prefix))
    window = Window(jnp.ones((1, width), jnp.int32), prefix + jnp.arange(width)[None], jnp.tri(width, dtype=bool)[None])
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call(model.params, window, cache).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[1:])) * 1e3


class Row(NamedTuple):
    """The tokens and statistics of one configuration on one prompt."""

    tokens: list[int]
    stats: Stats


class Reader:
    """Reads every prompt once with both models, and continues from these caches with any configuration."""

    def __init__(self, target: jaxspec.Model, draft: jaxspec.Model, ids: list[list[int]], batch: int, tokens: int):
        self.target, self.draft, self.ids, self.tokens = target, draft, ids, tokens
        self.slots = -(-(max(map(len, ids)) + tokens + 16) // 256) * 256
        self.keys = jax.random.split(jax.random.key(0), len(ids))
        self.batches = [slice(at, at + batch) for at in range(0, len(ids), batch)]
        decoder, weights = self._decoder("model", jaxspec.chain(1), "coupled")
        requests = [self._request(at, jaxspec.Sampling()) for at in self.batches]
        read = jax.jit(lambda weights, request: decoder.prefill(weights, decoder.init(weights, request, self.slots)))
        self.read = [read(weights, request) for request in requests]
        self._compiled = functools.cache(self._compile)

    def __call__(self, sampling: jaxspec.Sampling, drafter: str, tree=None, rule: str = "coupled") -> list[Row]:
        """Continues all prompts, a batch at a time."""
        decoder, weights, run = self._compiled(drafter, tree, rule)
        rows = []
        for at, read in zip(self.batches, self.read):
            tokens, start, length, log = jax.device_get(run(weights, self._request(at, sampling), read))
            for b in range(len(length)):
                emitted = tokens[b, start[b] : length[b]].tolist()
                rows.append(Row(emitted, Stats.from_log(log.part(b), decoder.drafter.calls, len(emitted))))
        return rows

    def _compile(self, drafter: str, tree, rule: str):
        """Returns the decoder, its weights, and its compiled loop, which takes any sampling."""
        decoder, weights = self._decoder(drafter, tree, rule)

        @jax.jit
        def run(weights, request, read):
            state = decoder.init(weights, request, self.slots)._replace(cache=read.cache, absorbed=read.absorbed)
            if drafter == "model":
                state = state._replace(draft=state.draft._replace(cache=read.draft.cache, feature=read.draft.feature))
            state = decoder.run(weights, state)
            return state.tokens, state.start, state.length, state.log

        return decoder, weights, run

    def _decoder(self, drafter: str, tree, rule: str):
        draft = self.draft if drafter == "model" else None
        return Drafting(drafter, rule=rule, tree=tree, draft=draft).build(self.target)

    def _request(self, at: slice, sampling: jaxspec.Sampling):
        ids = self.ids[at]
        settings = inputs.mask_padding(self.target, sampling, len(ids))
        stops = inputs.stop_array(self.target, (), False, len(ids))
        return inputs.make_request(ids, self.keys[at], settings, self.tokens, stops, self.slots)


def differences(target: jaxspec.Model, ids, plain, drafted, keys, sampling) -> tuple[int, list[float]]:
    """Returns the number of rows whose texts differ, and the gap of each."""
    gaps = []
    for row, (a, b) in enumerate(zip(plain, drafted)):
        if a.tokens == b.tokens:
            continue
        at = next(i for i, (x, y) in enumerate(zip(a.tokens, b.tokens)) if x != y)
        text = ids[row] + a.tokens[:at]
        gaps.append(tie_gap(target.lm, target.params, text, (a.tokens[at], b.tokens[at]), keys[row], sampling))
    return len(gaps), gaps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=10, help="prompts decoded together")
    parser.add_argument("--longest", type=int, default=384)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--trees", nargs="+", default=list(TREES)[:6], choices=list(TREES))
    parser.add_argument("--rules", nargs="+", default=["coupled"], choices=list(RULES))
    parser.add_argument("--top-p", type=float, nargs="+", default=[1.0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json")
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    target, draft = (jaxspec.load(name, dtype=arguments.dtype) for name in (arguments.target, arguments.draft))
    ids = prompt_ids(target, arguments.limit, arguments.longest)
    print(f"jax {jax.__version__}, {jax.default_backend()}, {arguments.dtype}, {len(ids)} prompts", flush=True)
    reader = Reader(target, draft, ids, arguments.batch, arguments.tokens)
    rows, failed = [], 0

    def save(**measured) -> None:
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump({"rows": rows, **measured}, file)

    for temperature, top_p in itertools.product(arguments.temperatures, arguments.top_p):
        sampling, where = jaxspec.Sampling(temperature=temperature, top_p=top_p), f"T {temperature} top-p {top_p}"
        plain = reader(sampling, "none")
        for name, rule in itertools.product(arguments.trees, arguments.rules):
            member = find("rule", rule)()
            try:
                member.check(TREES[name].shape)
            except jaxspec.errors.InvalidConfig as error:
                print(f"{where}: {name:13} {rule}: {error}")
                continue
            out = reader(sampling, "model", TREES[name], rule)
            same = rule == "coupled" or (temperature == 0 and member.lossless)
            other, gaps = differences(target, ids, plain, out, reader.keys, sampling) if same else (0, [])
            failed += sum(gap > TIE for gap in gaps)
            stats = Stats.total(row.stats for row in out)
            prompts = [(row.stats.committed, row.stats.rounds) for row in out]
            low, high = ratio_interval(prompts)
            row = {"temperature": temperature, "top_p": top_p, "tree": name, "rule": rule, "gaps": gaps}
            row |= {"same_text": len(ids) - other} if same else {}
            rows.append(row | {"tokens_per_round_95": (low, high), "prompts": prompts} | stats.as_dict())
            save()
            positions = " ".join(f"{share:.2f}" for share in stats.acceptance_by_position)
            print(
                f"{where}: {name:13} {rule}: {stats.tokens_per_round:.2f} ({low:.2f} to {high:.2f}) "
                f"tokens per round, acceptance {stats.acceptance_rate:.2f} (by depth {positions})"
                + (f", same text {len(ids) - other} of {len(ids)}" if same else "")
                + (f", ties with gaps {', '.join(f'{gap:.1e}' for gap in gaps)}" if gaps else ""),
                flush=True,
            )
    widths = sorted({1, *(TREES[name].shape.nodes for name in arguments.trees)})
    times = {width: milliseconds(target, width, 256, 7) for width in widths}
    one = milliseconds(draft, 1, 256, 7)
    print("target: " + ", ".join(f"width {width} {ms:.0f} ms" for width, ms in times.items()))
    print(f"draft: width 1 {one:.0f} ms")
    for row in rows:
        tree = TREES[row["tree"]]
        cost = times[tree.shape.nodes] + tree.shape.depth * one
        row["speedup_from_calls"] = times[1] * row["tokens_per_round"] / cost
        speedup = f"{row['speedup_from_calls']:.2f} times plain, by these times"
        print(f"T {row['temperature']} top-p {row['top_p']}: {row['tree']:13} {row['rule']}: {speedup}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory {peak:.1f} GiB; parameters {(target.bytes + draft.bytes) / 2**30:.1f} GiB")
    save(target_ms=times, draft_ms=one, peak_gib=peak)
    if arguments.record:
        kept = ("temperature", "top_p", "tree", "rule", "tokens_per_round", "tokens_per_round_95", "acceptance_rate",
                "speedup_from_calls")  # fmt: skip
        values = {
            "target_ms": {str(width): round_significant(ms) for width, ms in times.items()},
            "draft_ms": round_significant(one),
            "peak_gib": round_significant(peak, 3),
            "prompts": len(ids),
            "texts": sum(len(ids) for row in rows if "same_text" in row),
            "same_texts": sum(row.get("same_text", 0) for row in rows),
            "rows": [{key: row[key] for key in kept} for row in rows],
        }
        print(f"written: {write_record(arguments.record, 'pair', sys.argv, values)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
