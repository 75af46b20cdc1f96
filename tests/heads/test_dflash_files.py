"""Tests files of DFlash, DSpark and JetSpec heads: layouts read and written bit for bit, and faults refused by name."""

import dataclasses
import json
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxspec
from helpers.dflash_heads import BLOCK, FILES, IDS, LAYERS, MASK, RANK, V, deepspec, second, speculators, zlab
from helpers.head_files import check_every_tensor, check_our_format, check_round_trip, refuse
from helpers.narrow import instance
from helpers.tables import Tables
from jaxspec.errors import InvalidConfig
from jaxspec.heads.dflash_config import DFlashConfig
from jaxspec.heads.dflash_layouts import DFLASH
from jaxspec.heads.export import export_heads
from jaxspec.heads.files import load_heads
from jaxspec.heads.layouts import LAYOUTS
from jaxspec.heads.network import DraftHeads

pytestmark = pytest.mark.quick

TAPS = "target_layer_ids"


def target(**tables) -> jaxspec.Model:
    """A target of which only the tables are read; those of the files, unless others are given."""
    held = deepspec().held
    own = {"embed": held["embed_tokens.weight"], "head": held["lm_head.weight"]} | tables
    return jaxspec.Model(Tables(), {name: jnp.asarray(a) for name, a in own.items()}, name="tables")


@pytest.mark.parametrize("name", FILES)
def test_round_trips_to_the_bit(tmp_path, name):
    file = FILES[name]
    check_round_trip(tmp_path, file, "dflash" if file.layout == "dflash" else "dflash-speculators")


def test_sizes_are_those_of_the_tensors(tmp_path):
    def config(name: str) -> DFlashConfig:
        return instance(DFlashConfig, load_heads(FILES[name].write(tmp_path / name.replace(" ", "-"))).config)

    found = config("z-lab")
    assert (found.block_size, found.mask_token, found.from_anchor, found.max_depth) == (BLOCK, MASK, False, 3)
    assert (found.taps, found.causal, found.decoder.qk_norm, found.decoder.rope.theta) == ((2, 5, 9), (), True, 1e6)
    assert (config("z-lab, causal").causal, config("z-lab, sliding").decoder.window) == ((True, True), 16)
    found = config("JetSpec")
    assert (found.causal, found.from_anchor, found.block_size, found.max_depth) == ((True, True), False, BLOCK, 3)
    assert "a JetSpec head of 2 layers, blocks of 4" in found.summary
    found = config("JetSpec, shifted")
    assert (found.from_anchor, found.block_size, found.max_depth) == (True, BLOCK - 1, 3), "the last row guesses none"
    found = config("DSpark")
    assert (found.from_anchor, found.max_depth, found.markov, found.markov_rank) == (True, 4, "vanilla", RANK)
    assert (found.taps, found.confidence_reads_token, found.own_projection) == ((2, 5, 9), True, True)
    assert "a DSpark head of 2 layers, blocks of 4" in found.summary
    found = config("speculators")
    assert (found.taps, found.from_anchor, found.draft_vocab_size) == ((2, 5, 9), False, len(IDS)), "speculators' + 0"
    assert (found.causal, found.decoder.windowed) == ((True, False), (True, False)), "sliding layers are causal"
    assert config("speculators, DSpark").causal == ()
    without = (
        zlab()
        .changed(told={"dflash_config": {"mask_token_id": MASK}})
        .changed({"fc.weight": np.ones((32, 64), np.float32)})
    )
    found = instance(DFlashConfig, load_heads(without.write(tmp_path / "default")).config)
    assert (found.taps, found.taps_of(36), found.num_taps) == (None, (2, 34), 2)


def test_names_of_other_writers(tmp_path):
    """A prefix, tensors that only training reads, and other statements of the same."""
    file = zlab()
    expected = load_heads(file.write(tmp_path / "plain"))
    others = {
        "prefix": dataclasses.replace(file, held={f"model.{key}": a for key, a in file.held.items()}),
        "training": file.changed({"verifier_norm.weight": np.ones(32, np.float32)}),
        "block inside": zlab(block_size=BLOCK).changed(told={"block_size": None}),
        "not causal": file.changed(told={"is_causal": False, "layer_types": None}),
    }
    for name, other in others.items():
        found = load_heads(other.write(tmp_path / name))
        assert found.config == expected.config, name
        chex.assert_trees_all_equal(found.params, expected.params)


def test_tables_are_shared_if_they_are_the_targets(tmp_path):
    place = deepspec().write(tmp_path / "whole")
    shared = load_heads(place, target=target()).config
    assert (shared.own_embedding, shared.own_projection) == (False, False)
    other = load_heads(place, target=target(head=np.ones((V, 32), np.float32))).config
    assert (other.own_embedding, other.own_projection) == (False, True)
    rows = np.zeros((V, 32), np.float32)
    rows[IDS] = speculators().held["lm_head.weight"]
    reduced = load_heads(speculators().write(tmp_path / "reduced"), target=target(head=rows))
    assert (reduced.config.own_projection, reduced.config.rows) == (False, len(IDS))
    assert "head" not in reduced.params
    with pytest.raises(InvalidConfig, match="share the target's; give the target"):
        export_heads(reduced, tmp_path / "out")
    place = export_heads(reduced, tmp_path / "out", target=target(head=rows))
    np.testing.assert_array_equal(load_file(place / "model.safetensors")["lm_head.weight"], rows[IDS])


def test_exported_settings(tmp_path):
    heads = load_heads(zlab().write(tmp_path / "in"))
    told = json.loads((export_heads(heads, tmp_path / "a", base="some/model") / "config.json").read_text())
    assert told["architectures"] == ["DFlashDraftModel"]
    assert (told["model_type"], told["rope_theta"], told["block_size"]) == ("qwen3", 1e6, BLOCK)
    assert told["dflash_config"] == {"mask_token_id": MASK, TAPS: [1, 4, 8], "causal": False}
    assert (told["layer_types"], told["base_model_name_or_path"]) == (["full_attention"] * LAYERS, "some/model")
    told = json.loads((export_heads(heads, tmp_path / "b", "dflash-speculators") / "config.json").read_text())
    assert (told["aux_hidden_state_layer_ids"], told["sample_from_anchor"]) == ([2, 5, 9], False)
    assert told["speculators_config"]["algorithm"] == told["speculators_model_type"] == "dflash"
    assert told["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    layout: Any = LAYOUTS["dflash"]
    assert DFLASH.config_json(heads.config, layout, None, 12)["num_target_layers"] == 12
    assert "num_target_layers" not in DFLASH.config_json(heads.config, layout, None, None)
    for name, shifted in (("JetSpec", False), ("JetSpec, shifted", True)):
        heads = load_heads(FILES[name].write(tmp_path / name.replace(" ", "-")))
        told = json.loads((export_heads(heads, tmp_path / f"jetspec-{shifted}") / "config.json").read_text())
        assert told["block_size"] == BLOCK
        assert told["dflash_config"] == {
            "mask_token_id": MASK, TAPS: [1, 4, 8], "causal": True, "causal_head": True, "draft_shift": shifted,
        }  # fmt: skip
    default = DraftHeads(dataclasses.replace(heads.config, taps=None), heads.params)
    with pytest.raises(InvalidConfig, match="default taps of its target; give the target"):
        export_heads(default, tmp_path / "c")


# Refusals.

ZLAB, SPARK, SPEC = zlab(), deepspec("vanilla"), speculators()
CONV = "layers.0.attention_conv."
SQUARE = np.ones((32, 32), np.float32)
LAYER = SPEC.told["transformer_layer_config"]
ODD = {
    "DFlash 2": (
        ZLAB.changed({"layers.0.attention_conv.base_kernel": np.ones((2, 2, 32), np.float32)}),
        r"tensors missing: layers\.0\.attention_conv\.kernel_projection",
    ),
    "half a selector": (ZLAB.changed({"candidate_selector.successor_codebook": SQUARE}), "not expected: candidate_sel"),
    "other convolutions": (second(conv_group_size=16), "says conv_group_size 16, but the tensors say 8"),
    "a selector of no size": (second(selector_top_k=None), "selector_top_k is None, expected a whole number"),
    "convolutions unsaid": (zlab(conv_kernel_size=2), "says conv_kernel_size 2, but the tensors say 0"),
    "odd kernels": (second().changed({f"{CONV}base_kernel": np.ones((3, 2, 32), np.float32)}), "expected .2, rows, 32"),
    "Domino": (ZLAB.changed({"prefix_gru.weight_hh_l0": SQUARE}), "does not know, and drafts badly without them"),
    "many": (ZLAB.changed(dict.fromkeys("abcde", SQUARE)), ": a, b, c and 2 more"),
    "a mask of its own": (ZLAB.changed({"mask_embedding": np.ones(32, np.float32)}), "does not know.*mask_embedding"),
    "a kind of speculators": (SPEC.changed(told={"speculators_model_type": "dflash2"}), "'dflash2', expected dflash"),
    "a factor": (zlab(output_multiplier=2.0), "says output_multiplier 2.0, which is not supported"),
    "a cap": (zlab(final_logit_softcapping=30.0), "says final_logit_softcapping 30.0, which is not supported"),
    "windows by another name": (zlab(use_swa=True), "says use_swa True, which is not supported"),
    "a shift that sees ahead": (zlab(draft_shift=True), "says draft_shift, but not that the layers are causal"),
    "a block of one after the shift": (
        zlab(causal_head=True, draft_shift=True).changed(told={"block_size": 1}), "block_size must be a whole number",
    ),
    "no block size": (ZLAB.changed(told={"block_size": None}), "block_size is None, expected a whole number"),
    "a block of one": (ZLAB.changed(told={"block_size": 1}), "block_size must be a whole number from 2"),
    "no mask": (SPEC.changed(told={"mask_token_id": None}), "mask_token_id is None"),
    "a mask beyond the end": (zlab(mask_token_id=V), "mask_token must be a whole number from 0 to 47"),
    "no rotary base": (ZLAB.changed(told={"rope_theta": None}), "does not state rope_theta"),
    "taps of another number": (zlab(target_layer_ids=[1, 4]), "expected 3 layers in ascending order"),
    "taps out of order": (zlab(target_layer_ids=[4, 1, 8]), "expected 3 layers in ascending order"),
    "the embedding tapped": (SPARK.changed(told={TAPS: [-1, 4, 8]}), "names the target's embedding"),
    "the embedding of speculators": (
        SPEC.changed(told={"aux_hidden_state_layer_ids": [0, 4, 8]}), "names the target's embedding",
    ),
    "no taps": (SPEC.changed(told={"aux_hidden_state_layer_ids": None}), "add aux_hidden_state_layer_ids"),
    "too many taps to guess": (zlab(target_layer_ids=None), "reads 3 layers of the target.*add target_layer_ids"),
    "layers of another type": (
        ZLAB.changed(told={"layer_types": ["full_attention", "linear_attention"]}), "layer_types is .*expected full",
    ),
    "too few types": (ZLAB.changed(told={"layer_types": ["full_attention"]}), "for 2 layers"),
    "windows of no size": (
        SPEC.changed(told={"transformer_layer_config": LAYER | {"sliding_window": None}}), "sliding_window is None",
    ),
    "windows of no layer": (
        ZLAB.changed(told={"layer_types": None, "use_sliding_window": True}), "but has no layer_types",
    ),
    "another rank": (SPARK.changed(told={"markov_rank": 8}), "says markov_rank 8, but the tensors say 6"),
    "another kind": (SPARK.changed(told={"markov_head_type": "rnn"}), "'rnn', but the tensors say 'van"),
    "no Markov head": (deepspec().changed(told={"markov_rank": 6}), "says markov_rank 6, but the tensors say 0"),
    "a confidence head unsaid": (
        deepspec("vanilla", 32).changed(told={"enable_confidence_head": False}), "enable_confidence_head False",
    ),
    "a reading unsaid": (
        zlab().changed({key: a for key, a in SPARK.held.items() if "markov" in key}), "sample_from_anchor; add it",
    ),
    "a switch of another type": (SPEC.changed(told={"sample_from_anchor": "yes"}), "sample_from_anchor is 'yes'"),
    "no map": (SPEC.changed({"d2t": None, "t2d": None}), "does not state which: the tensor d2t is missing"),
    "no vocabulary": (ZLAB.changed(told={"vocab_size": None}), "does not state vocab_size"),
    "no whole states": (ZLAB.changed({"fc.weight": np.ones((32, 90), np.float32)}), "a multiple of the width 32"),
    "a layer missing": (ZLAB.changed({"layers.1.mlp.up_proj.weight": None}), r"missing: layers\.1\.mlp\.up_proj"),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_what_does_not_go_together(tmp_path, what):
    refuse(tmp_path, *ODD[what])


@pytest.mark.parametrize("name", ["z-lab", "z-lab, DFlash 2", "DSpark, gated", "speculators, DSpark"])
def test_every_tensor(tmp_path, name):
    check_every_tensor(tmp_path, FILES[name], ("embed_tokens.weight", "lm_head.weight"))


@pytest.mark.parametrize(
    ("name", "changes", "layout", "said"),
    [
        (
            "DSpark",
            {},
            "dflash",
            "confidence head of DSpark; use the layout dflash-speculators",
        ),
        ("DeepSpec's DFlash", {}, "dflash", "the first row of a block does not predict a token"),
        ("speculators", {}, "dflash", "shares the target's embedding and projection, but this head has its own"),
        ("z-lab", {"causal": (True, False)}, "dflash", "causal blocks in all layers or in none"),
        ("z-lab", {"causal": (True, True)}, "dflash-speculators", "causal blocks in all layers with sliding windows"),
        ("z-lab", {"taps": (9, 5, 2)}, "dflash", "taps in ascending order"),
        (
            "z-lab",
            {},
            "eagle3",
            "the layout eagle3 is for EAGLE heads; use the layout dflash or dflash-spec",
        ),
        ("z-lab", {}, "v0.1", "the layout v0.1 is for Medusa heads"),
        ("z-lab, DFlash 2", {}, "dflash-speculators", "cannot hold the convolutions or the selector of this DFlash 2"),
    ],
)
def test_what_a_layout_cannot_hold(tmp_path, name, changes, layout, said):
    heads = load_heads(FILES[name].write(tmp_path / "in"))
    heads = dataclasses.replace(heads, config=dataclasses.replace(heads.config, **changes))
    with pytest.raises(InvalidConfig, match=said):
        export_heads(heads, tmp_path / "out", layout)
    medusa = jaxspec.HeadsConfig(32, 48, 2)
    with pytest.raises(InvalidConfig, match=r"is for DFlash, DSpark or JetSpec heads; use the layout v0\.1"):
        export_heads(DraftHeads(medusa, {}), tmp_path / "out", "dflash")


def test_our_own_format_is_checked(tmp_path):
    check_our_format(tmp_path, FILES["DSpark, rnn"], "dflash")
