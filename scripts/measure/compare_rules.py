"""Compares the rules on one draft, in tables and a plot, from the results of `jaxspec acceptance` and `pair.py`.

    jaxspec acceptance ... --json one.json                    # once or several times
    python scripts/measure/pair.py TARGET DRAFT ... --json pair.json
    python scripts/measure/compare_rules.py [one.json ...] [--pair pair.json ...] [--plot OUT.png]

All rules are measured on the same positions (or prompts). The difference from `coupled` has a 95 % interval by
bootstrap over the prompts, which resamples both rules with the same prompts.
"""

import argparse
import itertools
import json
import pathlib
import sys

import numpy as np

from jaxspec.analysis.bootstrap import ratio_difference
from jaxspec.bench.measurements import add_record, write_record

BASE = "coupled"


def one_step(paths: list[pathlib.Path]) -> list[dict]:
    """Returns a row per setting, number of children and rule: its acceptance and the difference from the base's."""
    rows = []
    for run in itertools.chain.from_iterable(json.loads(path.read_text())["runs"] for path in paths):
        prompts = run["prompts"]
        if BASE not in prompts[0]["kept"]:
            continue  # at temperature 0 all rules accept the same tokens
        for figure in run["figures"]:
            child = figure["children"] - 1
            ours, theirs = ([(p["kept"][rule][child], p["count"]) for p in prompts] for rule in (figure["rule"], BASE))
            where = {name: run["sampling"][name] for name in ("temperature", "top_p")}
            on = f"{run['positions']} positions of {len(prompts)}"
            rows.append(where | figure | {"difference": ratio_difference(ours, theirs), "on": on})
    return rows


def rounds(paths: list[pathlib.Path]) -> list[dict]:
    """Returns a row per setting, tree and rule of a pair: its tokens per round and the difference from the base's."""
    rows = [row for path in paths for row in json.loads(path.read_text())["rows"]]
    base = {(r["temperature"], r["top_p"], r["tree"]): r["prompts"] for r in rows if r["rule"] == BASE}
    for row in rows:
        theirs = base.get((row["temperature"], row["top_p"], row["tree"]))
        row["low"], row["high"] = row["tokens_per_round_95"]
        row["difference"] = theirs and ratio_difference(row["prompts"], theirs)
    return rows


def table(rows: list[dict], what: str, value: str, digits: int) -> None:
    """Prints a row per setting and tree, and a column per rule: its value and the difference from the base's."""
    rules = sorted({row["rule"] for row in rows}, key=lambda rule: (rule != BASE, rule))
    best = "optimum" in rows[0]
    headings = ["T, top-p", what, *(f"`{rule}`" for rule in rules), *["optimum"] * best]
    print("| " + " | ".join(headings) + " |\n" + "|---" * len(headings) + "|")
    for where in dict.fromkeys((row["temperature"], row["top_p"], row[what]) for row in rows):
        here = {row["rule"]: row for row in rows if (row["temperature"], row["top_p"], row[what]) == where}
        cells = [shown(here[rule], value, digits) if rule in here else "" for rule in rules]
        if best:
            cells.append(f"{max(row['optimum'] for row in here.values()):.{digits}f}")
        print(f"| {where[0]:g}, {where[1]:g} | {where[2]} | " + " | ".join(cells) + " |")


def shown(row: dict, value: str, digits: int) -> str:
    middle = f"{row[value]:.{digits}f}"
    if not row["difference"] or row["rule"] == BASE:
        return f"{middle} ({row['low']:.{digits}f} to {row['high']:.{digits}f})"
    gap, low, high = (f"{part:+.{digits}f}" for part in row["difference"])
    return f"{middle} ({gap}: {low} to {high})"


def plot(steps: list[dict], path: pathlib.Path) -> None:
    """Plots one-step acceptance by the number of children, with a panel per setting."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = list(dict.fromkeys((row["temperature"], row["top_p"]) for row in steps))
    figure, panels = plt.subplots(
        1, len(settings), figsize=(3.4 * len(settings), 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, setting in zip(panels[0], settings):
        here = [row for row in steps if (row["temperature"], row["top_p"]) == setting]
        for rule in dict.fromkeys(row["rule"] for row in here):
            line = [row for row in here if row["rule"] == rule]
            middle = np.array([row["acceptance"] for row in line])
            ends = np.array([(row["acceptance"] - row["low"], row["high"] - row["acceptance"]) for row in line]).T
            axes.errorbar([row["children"] for row in line], middle, ends, marker="o", capsize=3, label=rule)
        axes.set_title(f"temperature {setting[0]:g}, top-p {setting[1]:g}")
        axes.set_xlabel("children")
        axes.set_xticks(sorted({row["children"] for row in here}))
    panels[0][0].set_ylabel("one-step acceptance")
    panels[0][0].legend()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("acceptance", nargs="*", type=pathlib.Path)
    parser.add_argument("--pair", nargs="+", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path)
    add_record(parser.add_argument)
    args = parser.parse_args()
    if not args.acceptance and (args.plot or not args.pair):
        parser.error(
            "name files of `jaxspec acceptance`, which --plot needs, or --pair with files of scripts/measure/pair.py"
        )
    steps, pairs = one_step(args.acceptance), rounds(args.pair or [])
    if steps:
        print(f"One step, {', '.join(dict.fromkeys(row['on'] for row in steps))} texts.\n")
        table(steps, "children", "acceptance", 3)
        print()
    if pairs:
        table(pairs, "tree", "tokens_per_round", 2)
    if args.plot:
        plot(steps, args.plot)
    if args.record:
        kept = ("temperature", "top_p", "children", "tree", "rule", "acceptance", "optimum", "tokens_per_round", "low",
                "high", "difference", "on")  # fmt: skip
        values = {name: [{key: row[key] for key in kept if key in row} for row in rows]
                  for name, rows in (("steps", steps), ("rounds", pairs))}  # fmt: skip
        print(f"written: {write_record(args.record, 'compare-rules', sys.argv, values)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
