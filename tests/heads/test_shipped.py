"""Tests the heads that come with the package."""

import json

import jax
import numpy as np
import pytest

import jaxspec
from helpers.paths import GOLDEN_DIR
from jaxspec.checkpoints.presets import PRESETS, SHIPPED
from jaxspec.cli.drafting import own_heads
from jaxspec.cli.options import TARGET
from jaxspec.errors import CheckpointError

GOLDEN = GOLDEN_DIR / "smollm2_greedy.json"
TREE = jaxspec.from_paths([(2,), (1, 0), (0, 0, 0, 0)])
WITH = [name for name, preset in PRESETS.items() if preset.heads]


def test_every_folder_is_a_presets():
    assert TARGET in WITH, "the default model has heads"
    assert {path.name for path in SHIPPED.iterdir()} == set(WITH)
    assert [name for name in PRESETS if own_heads(name)] == WITH
    assert own_heads("some/model") is None


@pytest.mark.parametrize("name", WITH)
def test_they_are_small_and_whole(name):
    """Under 10 MB; with a tree, a card that has the command, and figures."""
    files = {path.name: path for path in (SHIPPED / name).iterdir()}
    assert sum(path.stat().st_size for path in files.values()) < 10e6
    assert "jaxspec train medusa --target " + name in files["README.md"].read_text()
    heads = jaxspec.load_heads(name)
    assert heads.tree is not None
    assert 1 <= heads.tree.shape.depth <= heads.config.num_heads
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(heads.params))
    assert "evaluation.json" in files


def test_a_preset_without_heads_is_told():
    with pytest.raises(CheckpointError, match="no heads for the preset smollm2-360m-instruct come with jaxspec"):
        jaxspec.load_heads("smollm2-360m-instruct")


@pytest.mark.smollm2
def test_they_draft_what_the_target_writes(smollm2):
    """Three of the golden's greedy texts, token for token, in fewer rounds than tokens; found by the preset's name."""
    rows = json.loads(GOLDEN.read_text())["rows"][:3]
    heads = jaxspec.load_heads(TARGET, target=smollm2)
    output = jaxspec.generate(
        smollm2, [row["prompt"] for row in rows], chat=True, drafter="medusa", heads=heads, tree=TREE, max_new_tokens=32
    )
    assert [out.tokens for out in output] == [row["tokens"][:32] for row in rows]
    assert output.stats.tokens_per_round > 1.4
