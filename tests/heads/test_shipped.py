"""Tests the heads that come with the package."""

import json
import re

import jax
import numpy as np
import pytest

import jaxspec
from helpers.paths import GOLDEN_DIR
from jaxspec.checkpoints.presets import PRESETS
from jaxspec.cli.drafting import WITH_HEADS, own_heads
from jaxspec.cli.options import TARGET
from jaxspec.errors import CheckpointError
from jaxspec.heads.find import SHIPPED, every_shipped

GOLDEN = GOLDEN_DIR / "smollm2_greedy.json"
TREE = jaxspec.from_paths([(2,), (1, 0), (0, 0, 0, 0)])


def test_every_folder_is_a_presets_and_a_drafters():
    found = [f"{name}/{drafter}" for name in PRESETS for drafter in WITH_HEADS if own_heads(name, drafter)]
    assert f"{TARGET}/medusa" in found, "the default model has heads"
    assert {path.relative_to(SHIPPED).as_posix() for path in SHIPPED.glob("*/*")} == set(found) == set(every_shipped())
    assert own_heads("some/model", "medusa") is None


@pytest.mark.parametrize("name", every_shipped())
def test_they_are_small_and_whole(name):
    """At most 16 MB; with a tree, a card that has the command, and figures."""
    files = {path.name: path for path in (SHIPPED / name).iterdir()}
    assert sum(path.stat().st_size for path in files.values()) <= 16e6
    preset, drafter = name.split("/")
    assert re.search(rf"jaxspec train {drafter}3? --target {preset}", files["README.md"].read_text())
    heads = jaxspec.load_heads(name)
    assert heads.config.drafter == drafter
    assert heads.tree is not None
    assert heads.tree.shape.depth >= 1
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(heads.params))
    assert "evaluation.json" in files


def test_a_presets_name_alone_is_its_medusa_heads():
    assert jaxspec.load_heads(TARGET).config == jaxspec.load_heads(f"{TARGET}/medusa").config


def test_a_preset_without_heads_is_told():
    with pytest.raises(CheckpointError, match=f"smollm2-360m-instruct come with jaxspec, only {TARGET}/"):
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
