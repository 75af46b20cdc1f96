"""Measures trained heads on MT-bench, which they were not trained on.

    python scripts/heads/evaluate.py HEADS [--target T] [--limit 80] [--tokens 128] [--tree TREE | --nodes N]
        [--json OUT]

The target answers the first turn of every question greedily. The script prints the accuracy of each head on these
answers, beside the published accuracy of Medusa, and then tokens per round: greedily, with every text compared with
plain decoding, and at temperature 0.7 with several rules. The tree is TREE, the best tree of N nodes by the acceptance
that was measured after training on other texts, or else the tree of the heads. It measures no time;
`jaxspec bench --drafters medusa --heads HEADS` does.
"""

import argparse
import json
import sys

import jax
import numpy as np

import jaxspec
from jaxspec.bench import tasks
from jaxspec.bench.measurements import add_record, significant, write
from jaxspec.bench.summary import interval
from jaxspec.cli.drafting import parse_tree
from jaxspec.heads.headers import open_heads
from jaxspec.registry import find
from jaxspec.train.card import FIGURES
from jaxspec.train.evaluate import ranks
from jaxspec.train.packing import Text

PUBLISHED = {"top1": (0.560, 0.316, 0.201, 0.147), "top5": (0.780, 0.562, 0.417, 0.340)}
"""The accuracy of Medusa's heads on Vicuna 7B (assets/medusa_acc.csv in Medusa's repository)."""
RULES = ("coupled", "deterministic", "rejection", "traversal", "lossy-typical")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads")
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--limit", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--longest", type=int, default=384)
    trees = parser.add_mutually_exclusive_group()
    trees.add_argument("--tree", type=parse_tree, help="the tree, such as 4x2x1 or mc_sim_7b_63")
    trees.add_argument("--nodes", type=int, help="nodes of a tree fitted to the acceptance saved with the heads")
    parser.add_argument("--rules", nargs="*", default=list(RULES))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json")
    add_record(parser.add_argument)
    given = parser.parse_args()
    target = jaxspec.load(given.target, dtype=given.dtype)
    heads = jaxspec.load_heads(given.heads)
    tree = given.tree or heads.tree or jaxspec.chain(heads.config.num_heads)
    if given.nodes:
        figures = open_heads(given.heads).path / FIGURES
        if not figures.exists():
            parser.error(f"--nodes needs {figures}, which training writes; give --tree")
        measured = json.loads(figures.read_text())["acceptance_by_rank"]
        tree = jaxspec.best_tree(measured, given.nodes, heads.config.num_heads)
    questions = [str(q.turns[0]) for q in tasks.load("mt-bench", given.limit).questions]
    prompts = sorted((target.encode_chat([{"role": "user", "content": q}]) for q in questions), key=len)
    prompts = [prompt for prompt in prompts if len(prompt) <= given.longest]
    keys = jax.random.split(jax.random.key(0), len(prompts))
    capacity = -(-(len(prompts[-1]) + given.tokens + 160) // 128) * 128
    common = {"max_new_tokens": given.tokens, "capacity": capacity, "key": keys, "batch": given.batch}
    print(f"jax {jax.__version__}, {jax.default_backend()}, {given.dtype}, {len(prompts)} questions", flush=True)

    plain = jaxspec.generate(target, prompts, drafter="none", **common)
    texts = [
        Text(np.array(prompt + row.tokens, np.int32), np.arange(len(prompt) + len(row.tokens)) >= len(prompt))
        for prompt, row in zip(prompts, plain)
    ]
    found = ranks(target, heads, texts, 512)
    report: dict = {
        "questions": len(prompts),
        "tokens": given.tokens,
        "dtype": given.dtype,
        "positions": found.positions,
        "top1": found.top1,
        "top5": found.top5,
        "rounds": [],
    }
    for name in ("top1", "top5"):
        shown = " ".join(f"{share:.3f}" for share in report[name])
        print(f"{name} by head: {shown}   (Medusa, Vicuna 7B: {' '.join(map(str, PUBLISHED[name]))})", flush=True)

    failed = 0
    print(f"tree of {tree.shape.nodes} nodes, {tree.shape.depth} deep")
    for temperature, rule in [(0.0, "coupled"), *((0.7, rule) for rule in given.rules)]:
        sampling = jaxspec.Sampling(temperature=temperature)
        member = find("rule", rule)()
        options = {"rule": rule, "sampling": sampling, "tree": tree, **common}
        try:
            member.check(tree.shape)
        except jaxspec.errors.InvalidConfig as error:
            print(f"T {temperature} {rule}: {error}")
            continue
        rows = jaxspec.generate(target, prompts, drafter="medusa", heads=heads, **options)
        stats = rows.stats
        low, high = interval([(row.stats.committed, row.stats.rounds) for row in rows])
        line = f"T {temperature} {rule}: {stats.tokens_per_round:.2f} ({low:.2f} to {high:.2f}) tokens per round"
        if temperature == 0:
            same = sum(a.tokens == b.tokens for a, b in zip(plain, rows))
            line += f", {same} of {len(rows)} texts those of plain decoding"
            report["same_texts"] = same
            failed += same < 0.9 * len(rows)  # the others may be ties, see scripts/prove/identity.py
        print(line, flush=True)
        report["rounds"].append({"temperature": temperature, "rule": rule, "interval": (low, high)} | stats.as_dict())
    if given.json:
        with open(given.json, "w") as file:
            json.dump(report, file)
    if given.record:
        rounds = [
            {name: row[name] for name in ("temperature", "rule")}
            | {"tokens_per_round": significant(row["tokens_per_round"])}
            | {"interval": [significant(end) for end in row["interval"]]}
            for row in report["rounds"]
        ]
        shares = {name: [significant(share, 3) for share in report[name]] for name in ("top1", "top5")}
        values = report | shares | {"nodes": tree.shape.nodes, "depth": tree.shape.depth, "rounds": rounds}
        print(f"written: {write(given.record, 'heads', sys.argv, values)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
