"""Measures the trees of existing heads again, and writes the fastest one and the figures to their folder.

    python -m scripts.heads.fit HEADS [--target T] [--dtype D] [--prompts N]

The acceptance is that of the heads' own figures; the prompts are ordinary questions. Run it after the cost of a round
has changed.
"""

import argparse
import json
import pathlib

import numpy as np

import jaxspec
from jaxspec.heads.files import set_tree
from jaxspec.heads.find import SHIPPED_FOLDER
from jaxspec.train import card, evaluate
from jaxspec.train.files import write_json
from scripts.measure.speed import MODEL, ORDINARY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="?", type=pathlib.Path, default=SHIPPED_FOLDER / MODEL / "medusa")
    parser.add_argument("--target", default=MODEL)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=len(ORDINARY))
    given = parser.parse_args()
    target, heads = jaxspec.load(given.target, dtype=given.dtype), jaxspec.load_heads(given.heads)
    measured = json.loads((given.heads / card.FIGURES_FILE).read_text())
    acceptance = np.asarray(measured.get("acceptance_by_parent", measured["acceptance_by_rank"]))
    chat = [[{"role": "user", "content": text}] for text in ORDINARY[: given.prompts]]
    prompts = [target.encode_chat(messages) for messages in chat]
    trees = evaluate.measure_trees(target, heads, acceptance, prompts)
    tree = max((one for one in trees if one.tree.shape.depth), key=lambda one: one.tokens_per_s).tree
    new = measured | card.tree_figures(trees, given.dtype)
    old_table, table = ("\n".join(card.tree_table(each)) for each in (measured, new))
    text = (given.heads / card.CARD_FILE).read_text().replace(old_table, table)
    set_tree(given.heads, tree)
    write_json(given.heads / card.FIGURES_FILE, new)
    (given.heads / card.CARD_FILE).write_text(text)
    print(table)


if __name__ == "__main__":
    main()
