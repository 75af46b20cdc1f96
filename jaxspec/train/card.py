"""What is written beside trained heads: a card for people, and the figures for programs."""

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import jaxspec
from jaxspec.heads.network import DraftHeads
from jaxspec.heads.serving import served_by
from jaxspec.storage.writing import write_whole
from jaxspec.train.evaluate import Candidate, Ranks
from jaxspec.train.files import fingerprint, write_json
from jaxspec.train.run import Trained
from jaxspec.train.settings import Settings

CARD, FIGURES = "README.md", "evaluation.json"


def figures(found: Ranks, trees: Sequence[Candidate], dtype: str) -> dict[str, Any]:
    """What was measured on the held-out texts; of trees with the target in `dtype`."""
    return {
        "positions": found.positions,
        "top1": found.top1,
        "top5": found.top5,
        "acceptance_by_rank": np.round(found.acceptance(), 5).tolist(),
        "trees": [
            {
                "nodes": one.tree.shape.nodes,
                "parents": one.tree.parents,
                "expected_tokens": one.expected,
                "tokens_per_round": one.tokens_per_round,
                "round_s": one.round_s,
            }
            for one in trees
        ],
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "dtype": dtype,
    }


def write(
    folder: pathlib.Path,
    trained: Trained,
    heads: DraftHeads,
    settings: Settings,
    prompts: Sequence[str],
    measured: dict,
) -> None:
    """The card and the figures.

    Raises:
        StorageError: they cannot be written.
    """
    write_json(folder / FIGURES, measured)
    changed = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if getattr(settings, field.name) != field.default
    }
    learnt = int(trained.data.rows.mask.sum())
    sizes = heads.config
    blocks = f"{sizes.num_layers} block{'s' * (sizes.num_layers > 1)}"
    own = f" in one network of {blocks}" if sizes.inputs == "recurrent" else f" of {blocks} each"
    lines = [
        f"# Medusa heads for {trained.target.name}",
        "",
        f"{sizes.num_heads} heads{own}, inputs: "
        f"{sizes.inputs}, projection: {sizes.projection}, {sizes.rows} of {sizes.vocab_size} tokens drafted, "
        f"{heads.bytes / 1e6:.1f} MB. They draft, the target decides: by a lossless rule the text is its own.",
        "",
        served_by(sizes, settings.medusa2),
        "",
        f"Trained by jaxspec {jaxspec.__version__} on {datetime.date.today().isoformat()}: {trained.step} steps, "
        f"{learnt} tokens to learn from ({'the target’s' if settings.distill else 'given'} answers to "
        f"prompts of {', '.join(pathlib.Path(p).name for p in prompts)}), {trained.skipped} steps skipped.",
        "",
        "| held-out texts | " + " | ".join(f"head {i}" for i in range(heads.config.num_heads)) + " |",
        "|---" * (1 + heads.config.num_heads) + "|",
        "| top-1 | " + " | ".join(f"{share:.3f}" for share in measured["top1"]) + " |",
        "| top-5 | " + " | ".join(f"{share:.3f}" for share in measured["top5"]) + " |",
        "",
        f"On {measured['positions']} positions.",
    ]
    trees = measured["trees"]
    if trees:
        lines += [
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
    lines += ["", f"Settings besides the defaults: `{json.dumps(changed)}`.", ""]
    if settings.medusa2:
        lines += ["The target was trained, too (Medusa-2): text is lossless against it, not against the original.", ""]
    lines += [f"sha256 of the parameters: `{fingerprint(heads.params)}`.", ""]
    write_whole(folder / CARD, lambda file: file.write("\n".join(lines).encode()))
