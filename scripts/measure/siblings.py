"""Measures how often the children of a node are accepted by the rank of the node, and what trees gain that know it.

    python -m scripts.measure.siblings [--heads medusa eagle] [--texts 40] [--tokens 96] [--record siblings]

SmolLM2-135M answers questions of MT-bench. On half of the answers, the included heads rank the correct tokens. From the
ranks follow two trees of each size: by the rank of a node alone, and by the ranks of a node and its parent. Both decode
the other half of the questions.
"""

import argparse
import sys
from typing import Any

import numpy as np

import jaxspec
from jaxspec.bench import tasks
from jaxspec.bench.measurements import add_record, round_significant, write_record
from jaxspec.heads.find import find_shipped_heads
from jaxspec.train.evaluate import NUM_PARENTS, rank_tokens
from jaxspec.train.packing import Text

MODEL = "smollm2-135m-instruct"


def answer(target: jaxspec.Model, prompts: list[list[int]], tokens: int, **drafting: Any) -> jaxspec.Output:
    """Answers questions greedily, eight at a time."""
    return jaxspec.generate(target, prompts, max_new_tokens=tokens, batch=8, verbose=False, **drafting)


def compare(target: jaxspec.Model, heads: jaxspec.DraftHeads, texts: list[Text], prompts: list[list[int]],
            given: argparse.Namespace) -> dict[str, Any]:  # fmt: skip
    """Returns the shares by the rank of the parent, and the tokens per round of trees."""
    ranks = rank_tokens(target, heads, texts)
    by_parent, by_rank = ranks.acceptance(), ranks.by_rank()
    found: dict[str, Any] = {
        "positions": ranks.positions,
        "first": [round_significant(float(share)) for share in by_parent[1, :, 0]],
        "any_of_4": [round_significant(float(share)) for share in by_parent[1, :, :4].sum(-1)],
        "trees": [],
    }
    for nodes in given.nodes:
        row: dict[str, Any] = {"nodes": nodes}
        for name, acceptance in (("rank", by_rank), ("parent", by_parent)):
            tree = jaxspec.best_tree(acceptance, nodes, len(by_rank))
            output = answer(target, prompts, given.tokens, drafter=heads.config.drafter, heads=heads, tree=tree)
            row[name] = {
                "expected": round_significant(jaxspec.expected_tokens(tree, by_parent)),
                "tokens_per_round": round_significant(output.stats.tokens_per_round),
            }
        found["trees"].append(row)
        print(heads.name, row, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=["medusa", "eagle"], help="sources of heads, or included heads")
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 64])
    add_record(parser.add_argument)
    given = parser.parse_args()
    target = jaxspec.load(MODEL)
    questions = [str(q.turns[0]) for q in tasks.load_task("mt-bench", given.texts).questions]
    prompts = [target.encode_chat([{"role": "user", "content": text}]) for text in questions]
    learnt, held = prompts[::2], prompts[1::2]
    texts = []
    for prompt, row in zip(learnt, answer(target, learnt, given.tokens, drafter="none")):
        ids = np.array([*prompt, *row.tokens], np.int32)
        texts.append(Text(ids, np.arange(len(ids)) >= len(prompt)))
    values: dict[str, Any] = {"parents": NUM_PARENTS, "texts": len(held), "heads": {}}
    for source in given.heads:
        heads = jaxspec.load_heads(find_shipped_heads(MODEL, source) or source, target=target)
        values["heads"][source] = compare(target, heads, texts, held, given)
    if given.record:
        print(f"written: {write_record(given.record, 'siblings', sys.argv, values)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
