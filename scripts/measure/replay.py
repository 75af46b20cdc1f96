"""Replays answers of a target, and predicts what drafters without training would gain. NumPy only.

    python -m scripts.measure.replay MODEL.npz ... [--widths measurements/widths@MACHINE.json] [--record ID]

The answers are those that `keep_answers.py` keeps. Three questions, for every task:

1. How often is the next token among the first 1, 2, 4, 8 tokens kept for the last one, and the next two tokens both, by
   what the table is filled with? A cold table is empty before each text; a warm one has seen the task's earlier texts.
2. How often is the next token that which followed a match of so many tokens, and how often is it among the second
   guesses of the law that gave the last one?
3. How many tokens would a round emit, and how fast would a text be, by drafter and by number of nodes? The table learns
   from the nodes of the text alone, since the logits after rejected nodes are not known here. A speed is that of the
   measured widths: what the drafter itself computes is not in it.
"""

import argparse
import collections
import itertools
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.bench.measurements import add_record, round_significant, write_record
from jaxspec.core.theory import assumed_cost
from jaxspec.kernels.library import TOKEN_COSTS
from scripts.library.replayed import KEPT, Drafter, Table, Text, matches, rounds

WIDTHS = (1, 4, 8, 16, 32, 64)
FILLS = {
    "nodes": ("nodes",),
    "prompt": ("pairs",),
    "nodes, prompt": ("nodes", "pairs"),
    "nodes, logits of the prompt": ("nodes", "prompt"),
    "bigrams": ("bigrams",),
    "nodes, bigrams": ("nodes", "bigrams"),
    "nodes, prompt, bigrams": ("nodes", "pairs", "bigrams"),
}


def shares(texts: list[Text], fill: Sequence[str], bigrams: dict, warm: bool) -> dict[str, list[float]]:
    """Returns how often the next token, and the next two, are among the first 1, 2, 4, 8."""
    one, two, places, table = np.zeros(KEPT), np.zeros(KEPT), 0, Table()
    for index, text in enumerate(texts):
        if index == 0 or not warm:
            table = Table(bigrams if "bigrams" in fill else None)
        table.read_prompt(text, fill)
        tokens = text.tokens
        for place in range(text.start - 1, len(tokens) - 1):
            if place >= text.start and "nodes" in fill:
                table.learn(text, place - 1)
            places += 1
            first = rank(table[tokens[place]], tokens[place + 1])
            one[first:] += 1
            if place + 2 < len(tokens):
                two[max(first, rank(table[tokens[place + 1]], tokens[place + 2])) :] += 1
    return {
        name: [round_significant(v) for v in hits[[0, 1, 3, 7]] / places] for name, hits in (("one", one), ("two", two))
    }


def rank(entry: dict[int, float], token: int) -> int:
    """Returns the place of a token by its share; `TOKENS_PER_ENTRY` if it is not there."""
    order = sorted(entry, key=lambda t: -entry[t])
    return order.index(token) if token in entry else KEPT


def by_match(texts: list[Text]) -> list[dict[str, Any]]:
    """Returns how often the next token is that which followed the longest match, the latest of equal ones."""
    hits: dict[int, list[int]] = collections.defaultdict(lambda: [0, 0])
    for text in texts:
        for place in range(text.start - 1, len(text.tokens) - 1):
            found = matches(text.tokens, place)
            match, other = found[0] if found else (0, -1)
            hits[match][0] += 1
            hits[match][1] += bool(found) and text.tokens[other + 1] == text.tokens[place + 1]
    return [{"match": m, "places": n, "right": round_significant(k / n)} for m, (n, k) in sorted(hits.items())]


def by_share(texts: list[Text]) -> list[dict[str, Any]]:
    """Returns how often a kept token is the next one, by its share."""
    hits: dict[int, list[int]] = collections.defaultdict(lambda: [0, 0])
    for text in texts:
        table = Table()
        for place in range(text.start - 1, len(text.tokens) - 1):
            if place >= text.start:
                table.learn(text, place - 1)
            for token, share in table[text.tokens[place]].items():
                hits[min(int(10 * share), 9)][0] += 1
                hits[min(int(10 * share), 9)][1] += token == text.tokens[place + 1]
    return [{"share": k / 10, "places": n, "right": round_significant(r / n)} for k, (n, r) in sorted(hits.items())]


def second_guesses(texts: list[Text]) -> list[float]:
    """Returns how often the next token is the i-th likeliest of the law that gave the last one, that one left out."""
    hits, places = np.zeros(16), 0
    for text in texts:
        for place in range(text.start, len(text.tokens) - 1):
            rest = [t for t in text.ids[place - 1].tolist() if t != text.tokens[place]]
            places += 1
            if text.tokens[place + 1] in rest:
                hits[rest.index(text.tokens[place + 1])] += 1
    return [round_significant(v) for v in hits[:8] / places]


def predicted(found: list[collections.Counter], costs: dict[str, dict[int, float]]) -> dict[str, Any]:
    """Returns tokens per round, and by dtype the median and the least of the speeds, in times of plain decoding."""
    total = sum((collections.Counter(c) for c in found), collections.Counter())
    count = sum(v for k, v in total.items() if k != "tokens")
    out: dict[str, Any] = {"tokens_per_round": round_significant(total["tokens"] / count)}
    for dtype, cost in costs.items():
        speeds = [
            counts["tokens"] / sum(
                n * cost[next(w for w in WIDTHS if w >= width)] for width, n in counts.items() if width != "tokens"
            )
            for counts in found
        ]  # fmt: skip
        out[dtype] = [round_significant(float(np.median(speeds)), 3), round_significant(min(speeds), 3)]
    return out


MATCH = Drafter(copies=4, depth=15)
ROWS = Drafter(rows=1.0)
BOTH = Drafter(rows=0.5, copies=4)
ALL = BOTH._replace(guesses=0.3)
COST = TOKEN_COSTS["AVX-512 with BF16 and VNNI"]["float32"]
PAYING, WIDE = (
    tuple((width - 1, assumed_cost(width, COST)) for width in widths) for widths in ((1, 4, 8, 16), (1, 4, 8, 32))
)
TREES = {
    "copies of one place": (MATCH._replace(copies=1), (8,)),
    "copies": (MATCH, (8, 64)),
    "copies, what pays": (MATCH._replace(costs=PAYING), (16,)),
    "copies, what pays, earlier answers": (MATCH._replace(costs=PAYING, ring=1 << 16), (16,)),
    "rows": (ROWS, (8, 64)),
    "rows, bigrams": (ROWS._replace(bigrams=True), (8,)),
    "rows, copies": (BOTH, (8, 64)),
    "all": (ALL, (8, 16, 32, 64)),
    "all, bigrams": (ALL._replace(bigrams=True), (8, 64)),
    "all, what pays": (ALL._replace(depth=7, costs=WIDE), (32,)),
    "all, what pays, long copies alone": (ALL._replace(depth=7, costs=PAYING, alone=5), (16,)),
}
"""Copies of the places of the longest matches, recycled rows, and second guesses of the root's law. The default of
prompt lookup is "copies, what pays", that of recycling "all, what pays"."""


def load(path: str) -> tuple[dict[str, list[Text]], dict[int, dict[int, float]]]:
    """Returns the texts of each task, and the bigrams; rows of bigrams that were not kept are missing."""
    with np.load(path) as file:
        kept = {name: file[name] for name in file.files}
    texts: dict[str, list[Text]] = collections.defaultdict(list)
    for name in [name.removesuffix("/text") for name in kept if name.endswith("/text")]:
        probs = np.exp(kept[f"{name}/logp"].astype(np.float64))
        text = Text(kept[f"{name}/text"].tolist(), int(kept[f"{name}/start"]), kept[f"{name}/ids"], probs)
        texts[name.split("/")[0]].append(text)
    bigrams = {}
    if "bigrams/tokens" in kept:
        probs = np.exp(kept["bigrams/logp"].astype(np.float64))
        rows = zip(kept["bigrams/tokens"].tolist(), kept["bigrams/ids"].tolist(), probs.tolist())
        bigrams = {token: dict(zip(ids, row)) for token, ids, row in rows}
    return texts, bigrams


def costs_of(path: str | None) -> dict[str, dict[int, float]]:
    """Returns the cost of a round by width, in plain rounds, for each dtype of a record and for free widths."""
    costs: dict[str, dict[int, float]] = {"free": dict.fromkeys(WIDTHS, 1.0)}
    if path:
        for dtype, measured in json.loads(pathlib.Path(path).read_text())["values"].items():
            known = {
                row["width"]: row["times_width_1"] for row in measured["rounds"]
                if (row["capacity"], row["temperature"]) == (512, 0.0)
            }  # fmt: skip
            wider = {w: known[16] + (known[16] - known[8]) / 8 * (w - 16) for w in WIDTHS if w > 16}
            costs[dtype] = {w: round_significant(known.get(w) or wider[w]) for w in WIDTHS}
    return costs


def replayed(texts: list[Text], bigrams: dict[int, dict[int, float]], costs: dict[str, Any]) -> dict[str, Any]:
    """Replays and prints a task's answers."""
    found: dict[str, Any] = {"texts": len(texts), "tokens": sum(len(text.tokens) - text.start for text in texts)}
    found |= {"shares": [], "by_match": by_match(texts), "guesses": second_guesses(texts)}
    for warm in (False, True):
        for name, fill in FILLS.items():
            row = {"fill": name, "warm": warm, **shares(texts, fill, bigrams, warm)}
            found["shares"].append(row)
            print(f"  {'warm' if warm else 'cold'}, {name:28} next {row['one']}, next two {row['two']}", flush=True)
    print(f"  by match {[(row['match'], row['places'], row['right']) for row in found['by_match']]}")
    print(f"  by share {[(row['share'], row['places'], row['right']) for row in by_share(texts)]}")
    print(f"  second guesses {found['guesses']}")
    found["trees"] = []
    for (name, (drafter, sizes)), warm in itertools.product(TREES.items(), (False, True)):
        if warm and not (drafter.rows or drafter.ring):
            continue  # it keeps nothing
        for nodes in sizes:
            row = predicted(rounds(drafter, nodes, texts, bigrams, warm), costs)
            found["trees"].append({"drafter": name, "nodes": nodes, "warm": warm, **row})
            speeds = ", ".join(f"{k} {median:.2f} ({least:.2f})" for k, (median, least) in ((k, row[k]) for k in costs))
            print(f"  {'warm' if warm else 'cold'} {name:50} {nodes:2} nodes: "
                  f"{row['tokens_per_round']:.2f} tokens per round; {speeds}", flush=True)  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kept", nargs="+", help="a file for each model, with its name")
    parser.add_argument("--widths", help="the record of `speed.py widths` of this machine")
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    costs, models = costs_of(arguments.widths), {}
    for path in arguments.kept:
        (tasks, bigrams), name = load(path), pathlib.Path(path).stem
        models[name] = {}
        for task, texts in tasks.items():
            print(f"{name}, {task}: {len(texts)} answers of {sum(len(t.tokens) - t.start for t in texts)} tokens")
            models[name][task] = replayed(texts, bigrams, costs)
    if arguments.record:
        words = ["python", "-m", "scripts.measure.replay", *sys.argv[1:]]
        print(f"written: {write_record(arguments.record, 'replay', words, {'costs': costs, 'models': models})}")


if __name__ == "__main__":
    main()
