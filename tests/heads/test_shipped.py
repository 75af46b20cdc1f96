"""Tests the heads that come with the package, and the scripts that make and measure them."""

import dataclasses
import json
import re
import shlex
import sys

import jax
import numpy as np
import pytest

import jaxspec
from helpers import trainees
from helpers.paths import GOLDEN_DIR
from helpers.recorded import recorded
from jaxspec.bench import tasks
from jaxspec.checkpoints.presets import PRESETS
from jaxspec.cli import train
from jaxspec.cli.models import find_preset_heads
from jaxspec.cli.options import DEFAULT_TARGET, Parser
from jaxspec.errors import CheckpointError
from jaxspec.heads.find import SHIPPED_FOLDER, list_shipped_heads
from jaxspec.heads.network import flatten, init_params
from jaxspec.registry import DRAFTERS
from scripts.heads import evaluate, ship

GOLDEN = GOLDEN_DIR / "smollm2_greedy.json"
TREE = jaxspec.from_paths([(2,), (1, 0), (0, 0, 0, 0)])


def test_every_folder_is_a_presets_and_a_drafters():
    found = [f"{name}/{drafter}" for name in PRESETS for drafter in DRAFTERS if find_preset_heads(name, drafter)]
    assert f"{DEFAULT_TARGET}/medusa" in found, "the default model has heads"
    assert (
        {path.relative_to(SHIPPED_FOLDER).as_posix() for path in SHIPPED_FOLDER.glob("*/*")}
        == set(found)
        == set(list_shipped_heads())
    )
    assert find_preset_heads("some/model", "medusa") is None


@pytest.mark.parametrize("name", list_shipped_heads())
def test_they_are_small_and_whole(name):
    """At most 16 MB; with a tree, a card that has the command, and figures."""
    files = {path.name: path for path in (SHIPPED_FOLDER / name).iterdir()}
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
    assert jaxspec.load_heads(DEFAULT_TARGET).config == jaxspec.load_heads(f"{DEFAULT_TARGET}/medusa").config


def test_a_preset_without_heads_is_told():
    with pytest.raises(CheckpointError, match=f"come with heads smollm2-360m-instruct, only with {DEFAULT_TARGET}/"):
        jaxspec.load_heads("smollm2-360m-instruct")


@pytest.mark.smollm2
def test_they_draft_what_the_target_writes(smollm2):
    """Three of the golden's greedy texts, token for token, in fewer rounds than tokens; found by the preset's name."""
    rows = json.loads(GOLDEN.read_text())["rows"][:3]
    heads = jaxspec.load_heads(DEFAULT_TARGET, target=smollm2)
    output = jaxspec.generate(
        smollm2, [row["prompt"] for row in rows], chat=True, drafter="medusa", heads=heads, tree=TREE, max_new_tokens=32
    )
    assert [out.tokens for out in output] == [row["tokens"][:32] for row in rows]
    assert output.stats.tokens_per_round > 1.4


# --- the scripts that make and measure them ------------------------------------------------------------------


def tiny_eagle() -> jaxspec.DraftHeads:
    config = jaxspec.EagleConfig(dataclasses.replace(trainees.LM.config, num_layers=1), fc_norm=True, norm_output=True)
    return jaxspec.DraftHeads(config, init_params(config, key=jax.random.key(1)), jaxspec.chain(3))


def test_heads_are_packed_in_bfloat16_with_their_command(tmp_path, monkeypatch):
    heads, out = tiny_eagle(), tmp_path / "shelf" / "eagle"
    place = jaxspec.save_heads(heads, tmp_path / "run" / "heads")
    (place / "README.md").write_text("# Card\n")
    (place / "evaluation.json").write_text("{}\n")
    out.parent.mkdir()
    ship.pack("eagle3", tmp_path / "run", out)
    packed = jaxspec.load_heads(out, dtype=None)
    assert (packed.config, packed.tree) == (heads.config, heads.tree)
    for name, array in flatten(packed.params).items():
        assert array.dtype == ("bfloat16" if array.ndim == 2 else "float32")
        np.testing.assert_allclose(array, flatten(heads.params)[name], rtol=2**-8)
    card = (out / "README.md").read_text()
    assert card.startswith("# Card\n")
    assert "scripts.heads.ship eagle3 FOLDER" in card
    assert f"jaxspec train eagle3 --target {DEFAULT_TARGET} " in card
    monkeypatch.setattr(ship, "LARGEST", 1000)
    with pytest.raises(ValueError, match="draft fewer tokens"):
        ship.pack("eagle3", tmp_path / "run", out)
    assert (out / "README.md").read_text() == card, "what was there stays"


def test_the_settings_are_those_of_train():
    """Every kind that is shipped is one of `jaxspec train`, with options that it has."""
    for kind, settings in ship.SETTINGS.items():
        parser = Parser(prog="train")
        train.add_options(parser)
        words = shlex.split(f"{kind} --prompts p --out o {settings} {ship.COMMON}")
        train.read_settings(parser.parse_options(words))


@pytest.mark.slow
def test_evaluation_of_heads(tmp_path, capsys, monkeypatch):
    """Chains and dynamic trees, each as `generate` has it; a repeated command measures nothing again."""
    monkeypatch.chdir(tmp_path)
    target = trainees.target()
    jaxspec.save(target, tmp_path / "target")
    jaxspec.save_heads(tiny_eagle(), tmp_path / "heads")
    questions = tuple(tasks.Question(str(i), "all", (text,)) for i, text in enumerate(("abc", "de")))
    monkeypatch.setattr(tasks, "load_task", lambda *_: tasks.Task("mt-bench", questions))
    words = [
        "x",
        "heads",
        "--target",
        "target",
        "--tokens",
        "8",
        "--trees",
        "2",
        "dynamic-2x2-4",
        "--temperatures",
        "0",
    ]
    monkeypatch.setattr(sys, "argv", [*words, "--json", "kept.json", "--record", "toy"])
    assert evaluate.main() == 0
    record, shown = recorded("toy")
    chain, dynamic = record.values["rounds"]
    prompts = [target.encode_chat([{"role": "user", "content": str(q.turns[0])}]) for q in questions]
    for row, tree in ((chain, 2), (dynamic, jaxspec.dynamic(2, 2, 4))):
        stats = jaxspec.generate(
            target, prompts, drafter="eagle", heads=tiny_eagle(), tree=tree, max_new_tokens=8
        ).stats
        assert row["tokens_per_round"] == pytest.approx(stats.tokens_per_round, rel=1e-3)
        assert row["same_texts"] == 2
        assert f"{row['tokens_per_round']:.2f}" in shown
    assert (chain["nodes"], dynamic["nodes"]) == (3, 4)
    assert "| EAGLE-3 head (heads) | chain of 2 | 3 |" in shown
    first = json.loads((tmp_path / "kept.json").read_text())
    monkeypatch.setattr(jaxspec, "generate", None)
    assert evaluate.main() == 0
    assert json.loads((tmp_path / "kept.json").read_text()) == first
    capsys.readouterr()
