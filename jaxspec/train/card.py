"""Writes the card of trained heads, and the same figures as JSON."""

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.amounts import plural, size
from jaxspec.heads.network import DraftHeads
from jaxspec.models.model import Model
from jaxspec.storage.writing import write_whole
from jaxspec.train import calibration
from jaxspec.train.evaluate import Candidate, Ranks
from jaxspec.train.files import fingerprint, write_json
from jaxspec.train.run import Trained
from jaxspec.version import __version__

CARD_FILE, FIGURES_FILE = "README.md", "evaluation.json"


def collect_figures(ranks: Ranks, trees: Sequence[Candidate], dtype: str) -> dict[str, Any]:
    """Returns the measurements on the held-out texts; trees were measured with the target in `dtype`."""
    return {
        "positions": ranks.positions,
        "top1": ranks.top1,
        "top5": ranks.top5,
        "accepted": ranks.accepted,
        "acceptance_by_rank": np.round(ranks.by_rank(), 5).tolist(),
        "acceptance_by_parent": np.round(ranks.acceptance(), 5).tolist(),
        **tree_figures(trees, dtype),
    }


def tree_figures(trees: Sequence[Candidate], dtype: str) -> dict[str, Any]:
    """Returns the measurements of trees, with the target in `dtype`."""
    return {
        "trees": [
            {
                "nodes": candidate.tree.shape.nodes,
                "parents": candidate.tree.parents,
                "expected_tokens": candidate.expected,
                "tokens_per_round": candidate.tokens_per_round,
                "round_s": candidate.round_s,
            }
            for candidate in trees
        ],
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "dtype": dtype,
    }


def write_card(
    folder: pathlib.Path, trained: Trained, heads: DraftHeads | Model, prompts: Sequence[str], measured: dict[str, Any]
) -> None:
    """Writes the card and the figures.

    Args:
        folder: the folder of the heads or the model.
        trained: the run.
        heads: the heads of the run, with their tree, or its draft model.
        prompts: the files of prompts.
        measured: the figures of the card.

    Raises:
        StorageError: a file cannot be written.
    """
    write_json(folder / FIGURES_FILE, measured)
    values = dataclasses.asdict(trained.settings)
    changed = {
        field.name: values[field.name]
        for field in dataclasses.fields(trained.settings)
        if values[field.name] != field.default
    }
    supervised, count = int(trained.data.rows.mask.sum()), len(measured["top1"])
    texts = "the target’s answers" if trained.settings.distill else "the answers"
    lines = [
        f"# {trained.trainee.about.title} for {trained.target.name}",
        "",
        f"{trained.trainee.about.sizes}, {size(heads.bytes)}. The target decides which drafted "
        "tokens are accepted: with a lossless rule the text is the target's own.",
        "",
        trained.trainee.about.serving,
        "",
        f"Trained by jaxspec {__version__} on {datetime.date.today().isoformat()}: "
        f"{plural(trained.step, 'step')}, {plural(supervised, 'token')} to train on ({texts} to prompts of "
        f"{', '.join(pathlib.Path(p).name for p in prompts)}), {plural(trained.skipped, 'step')} skipped.",
        "",
        "| held-out texts | " + " | ".join(f"token {i + 1}" for i in range(count)) + " |",
        "|---" * (1 + count) + "|",
        "| top-1 | " + " | ".join(f"{share:.3f}" for share in measured["top1"]) + " |",
        "| top-5 | " + " | ".join(f"{share:.3f}" for share in measured["top5"]) + " |",
        "| accepted | " + " | ".join(f"{share:.3f}" for share in measured["accepted"]) + " |",
        "",
        f"On {measured['positions']} positions.",
    ]
    lines += calibration.format_figures(measured)
    if calibration.draw_diagram(measured, folder / calibration.DIAGRAM_FILE):
        lines += ["", f"![The reliability diagram of this table]({calibration.DIAGRAM_FILE})"]
    lines += tree_table(measured)
    lines += ["", f"Settings that differ from the defaults: `{json.dumps(changed)}`.", ""]
    if trained.trainee.joint is not None:
        lines += ["The target was trained as well: text is lossless against the trained target, not the original.", ""]
    lines += [f"sha256 of the parameters: `{fingerprint(heads.params)}`.", ""]
    write_whole(folder / CARD_FILE, lambda file: file.write("\n".join(lines).encode()))


def tree_table(measured: dict[str, Any]) -> list[str]:
    """Returns the lines of a card about trees; none if no tree was measured."""
    trees = measured["trees"]
    if not trees:
        return []
    lines = [
        "",
        f"Trees, on {measured['device']} with JAX {measured['jax']}, target in {measured['dtype']}, greedily:",
        "",
        "| nodes | expected tokens per round | decoded | ms per round | times plain |",
        "|---|---|---|---|---|",
    ]
    plain = next((t for t in trees if t["nodes"] == 1), None)
    for tree in trees:
        ratio = ""
        if plain is not None:
            ratio = f"{tree['tokens_per_round'] / tree['round_s'] / (plain['tokens_per_round'] / plain['round_s']):.2f}"
        lines.append(
            f"| {tree['nodes']} | {tree['expected_tokens']:.2f} | {tree['tokens_per_round']:.2f} | "
            f"{tree['round_s'] * 1e3:.1f} | {ratio} |"
        )
    return lines
