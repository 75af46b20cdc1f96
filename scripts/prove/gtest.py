"""Tests sampled text against its exact law: a pairwise design over rules, vocabularies, settings, drafts and trees.

    python scripts/prove/gtest.py                                # all cells, 10^6 texts each: hours on a CPU
    python scripts/prove/gtest.py --vocab 8 --samples 100000     # a part
    python scripts/prove/gtest.py --cells 0,7,12
    python scripts/prove/gtest.py --keep cells.jsonl             # what was run before is not run again

A cell decodes one prompt under many keys with the compiled `Decoder.generate`, over the rounds per text it states, and
compares how often each text came with its probability, by a G-test. Every two levels of any two factors stand
together in some cell. Logits are those of a language model, 20 with standard deviation 2. It fails (exit status 1)
if the smallest p-value, after Holm, is below 1e-6, or if a text of probability 0 was seen. The bias stated is the total
variation that would have been found at that level with probability 0.999.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.measurements import add_record, round_significant, write_record
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import chain, from_paths
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Weights
from jaxspec.drafters.model import ModelDraft
from jaxspec.registry import RULES, find
from jaxspec.testing import (
    GTest,
    ScriptedDrafter,
    TableLM,
    detectable,
    g_test,
    holm,
    joint_law,
    model_law,
    sample_texts,
)

FACTORS = {
    "rule": [name for name in RULES if find("rule", name)().lossless],
    "vocab": [8, 64, 1024],
    "draft": ["near", "far", "equal", "point"],
    "tree": ["chain", "ragged"],
    "temperature": [0.3, 1.0, 1.5],
    "limit": ["none", "top_k", "top_p", "min_p"],
    "stops": ["no stop", "stop"],
}
TREES = {"chain": chain(3), "ragged": from_paths([(0, 0), (0, 1), (1, 0)])}
LIMITS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
}
PROMPT = [3, 1]
STOP = 2
FAILS = 1e-6


@dataclasses.dataclass(frozen=True)
class Cell:
    """One level of each factor."""

    rule: str
    vocab: int
    draft: str
    tree: str
    temperature: float
    limit: str
    stops: str


def design(seed: int = 0) -> list[Cell]:
    """Cells in which every two levels of any two factors meet: of random candidates always the one with most news."""
    names, rng = list(FACTORS), np.random.default_rng(seed)

    def pairs(cell: Cell) -> set:
        return set(itertools.combinations(dataclasses.asdict(cell).items(), 2))

    possible = [Cell(*levels) for levels in itertools.product(*FACTORS.values())]
    possible = [cell for cell in possible if not (cell.rule == "block" and cell.tree != "chain")]
    assert names == [field.name for field in dataclasses.fields(Cell)]
    left, chosen = set().union(*map(pairs, possible)), []
    while left:
        tried = [possible[i] for i in rng.choice(len(possible), 400, replace=False)]
        best = max(tried, key=lambda cell: len(pairs(cell) & left))
        chosen.append(best)
        left -= pairs(best)
    return sorted(chosen, key=lambda cell: cell.vocab)


def run(cell: Cell, samples: int, seed: int = 0) -> tuple[GTest, float, float]:
    """The G-test of a cell, the rounds per text, and the tokens accepted per round."""
    vocab, length = cell.vocab, {8: 4, 64: 3, 1024: 2}[cell.vocab]
    lm, topology = TableLM(vocab, order=2 if vocab < 1024 else 1), TREES[cell.tree]
    tables = [lm.init_params(key)["table"] for key in jax.random.split(jax.random.key(7), 2)]
    target = {"table": 20 + tables[0]}
    draft = {"near": tables[0] + 0.25 * tables[1], "far": tables[1], "equal": tables[0]}.get(cell.draft)
    sampling = Sampling(temperature=cell.temperature, **LIMITS[cell.limit])
    stops = [STOP] if cell.stops == "stop" else []
    wanted, along = joint_law(model_law(lm, target, PROMPT, sampling), length, stops), None
    if draft is None:  # the likeliest tokens whatever stands before, the same for every key
        mean = np.asarray(target["table"]).reshape(-1, vocab, vocab).mean(0)
        script = np.argsort(-mean, axis=-1)[:, : topology.shape.nodes]
        drafter, params = ScriptedDrafter(topology), jnp.asarray(script, jnp.int32)
    else:
        drafter, params = ModelDraft(lm, topology), {"table": 20 + draft}
        drawn = joint_law(model_law(lm, params, PROMPT, sampling), length, stops)
        with np.errstate(divide="ignore", invalid="ignore"):
            along = np.nan_to_num(drawn / wanted)
        along = None if cell.draft == "equal" else along
    decoder = Decoder(lm, drafter, find("rule", cell.rule)(), chunk=4)
    texts = sample_texts(decoder, Weights(target, params), PROMPT, length, sampling,
                         samples=samples, seed=seed, stops=stops, batch=512 if vocab == 1024 else 1 << 14)  # fmt: skip
    return g_test(texts.counts, wanted, max_cells=256, sort_by=along), texts.rounds, texts.accepted


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--samples", type=int, default=10**6, help="texts per cell (default: 1000000)")
    parser.add_argument("--cells", help="numbers of cells, such as 0,3,5 (default: all)")
    parser.add_argument("--vocab", type=int, choices=FACTORS["vocab"], help="only cells of this vocabulary")
    parser.add_argument("--rule", choices=FACTORS["rule"], help="only cells of this rule")
    parser.add_argument("--seed", type=int, default=0, help="of the keys (default: 0)")
    parser.add_argument("--keep", type=pathlib.Path, help="a file of cells that were run, added to")
    add_record(parser.add_argument)
    args = parser.parse_args()
    numbers = None if args.cells is None else {int(n) for n in args.cells.split(",")}
    cells = [
        (i, cell)
        for i, cell in enumerate(design())
        if (numbers is None or i in numbers) and args.vocab in (None, cell.vocab) and args.rule in (None, cell.rule)
    ]
    print("| cell | " + " | ".join(FACTORS) + " | G cells | rounds per text | accepted per round | p | seconds |")
    print("|" + "---|" * (len(FACTORS) + 6), flush=True)
    kept = [json.loads(line) for line in args.keep.read_text().splitlines()] if args.keep and args.keep.exists() else []
    found = []
    for i, cell in cells:
        about = {"cell": dataclasses.asdict(cell), "samples": args.samples, "seed": args.seed + i}
        done = next((row for row in kept if about.items() <= row.items()), None)
        if done is None:
            start = time.perf_counter()
            test, rounds, accepted = run(cell, args.samples, args.seed + i)
            seconds = time.perf_counter() - start
            done = about | {"test": test, "rounds": rounds, "accepted": accepted, "seconds": seconds}
            if args.keep:
                with args.keep.open("a") as file:
                    file.write(json.dumps(done) + "\n")
        test = GTest(*done["test"])
        found.append(test)
        levels = " | ".join(map(str, about["cell"].values()))
        figures = f"{done['rounds']:.2f} | {done['accepted']:.2f} | {test.p:.3g} | {done['seconds']:.0f}"
        print(f"| {i} | {levels} | {test.cells} | {figures} |", flush=True)
    if not found:
        parser.error("no cell is left")
    least, samples = min(holm(test.p for test in found)), min(test.samples for test in found)
    worst = max(detectable(samples, test.cells) for test in found)
    impossible = sum(test.impossible for test in found)
    print(f"\n{len(found)} cells of {samples} texts: smallest p after Holm {least:.3g}; impossible texts: {impossible}")
    print(f"a bias of {worst:.4f} (total variation) would have been found in any of them with probability 0.999")
    if args.record:
        values = {"cells": len(found), "texts": samples, "least_p": round_significant(least, 3),
                  "impossible": impossible, "detectable_bias": round_significant(worst, 2)}  # fmt: skip
        print(f"written: {write_record(args.record, 'gtest', sys.argv, values)}")
    return int(least < FAILS)


if __name__ == "__main__":
    sys.exit(main())
