"""Tests files of EAGLE heads: every layout read and written bit for bit, and every fault refused by name."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxspec
from helpers import medusa_files
from helpers.eagle_heads import CASES, drafted_ids, parameters, reference_shapes, write
from helpers.head_files import File, check_every_tensor, check_our_format, check_round_trip, refuse
from helpers.narrow import instance
from helpers.tables import target
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.heads.eagle_config import EagleConfig
from jaxspec.heads.export import export_heads
from jaxspec.heads.files import load_heads
from jaxspec.heads.headers import open_heads

pytestmark = pytest.mark.quick

IDS = "eagle_aux_hidden_state_layer_ids"


def reference(name: str, dtype: Any = np.float32) -> File:
    """A head as EAGLE's own trainer writes it."""
    case, shapes = CASES[name], reference_shapes(CASES[name])
    held = {key: a.astype(dtype) for key, a in parameters(name, shapes).items() if not key.startswith("target.")}
    if case.version == 3:
        ids = drafted_ids(case)
        held |= {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(48), ids)}
    return File(f"eagle{case.version}", held, {**case.entries, "head_dim": 8})


def specforge(**more: Any) -> File:
    """A head of SpecForge with the norms of EAGLE-3.1, without an embedding."""
    file = reference("eagle3")
    norms = {f"fc_norm.{i}.weight": np.full(32, 1 + i, np.float32) for i in range(3)}
    told = {"architectures": ["LlamaForCausalLMEagle3"], "fc_norm": True, "norm_output": True, "rope_theta": 5e5}
    return file.changed({"embed_tokens.weight": None, **norms}, told | more)


def speculators(layers: int = 1, switches: Mapping[str, Any] | None = None, **held: Any) -> File:
    """A head as speculators writes it, of Qwen3's layers with biases."""
    file, rng = reference("eagle3"), np.random.default_rng(0)
    named = {key.replace("midlayer.", "layers.0."): a for key, a in file.held.items()}
    for name, rows in (("q", 32), ("k", 16), ("v", 16)):
        named[f"layers.0.self_attn.{name}_proj.bias"] = rng.normal(size=rows).astype(np.float32)
    named |= {f"layers.0.self_attn.{name}_norm.weight": rng.normal(size=8).astype(np.float32) for name in "qk"}
    for layer in range(1, layers):
        for key, a in list(named.items()):
            if key.startswith("layers.0.") and "hidden_norm" not in key:
                cut = a[:, :32] if a.shape[-1] == 64 else a
                named[key.replace("layers.0.", f"layers.{layer}.")] = np.array(cut[::-1])
    layer = {key: value for key, value in file.told.items() if key != "draft_vocab_size" and value is not None}
    told = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": 20,
        "norm_before_residual": True,
        "target_hidden_size": None,
        IDS: [2, 6, 9],
        "transformer_layer_config": layer | {"model_type": "qwen3", "num_hidden_layers": layers},
    }
    return File("speculators", named, told).changed(held, switches)


FILES = {
    "eagle1": reference("eagle1"),
    "eagle1, two layers": reference("eagle1, two layers"),
    "eagle1, qkv bias": reference("eagle1, qkv bias"),
    "eagle3": reference("eagle3"),
    "eagle3, float16": reference("eagle3", np.float16),
    "eagle3, bfloat16": reference("eagle3", medusa_files.BF16),
    "eagle3, whole vocabulary": reference("eagle3, whole vocabulary"),
    "specforge": specforge(),
    "specforge, other layers": specforge(**{IDS: [3, 7, 8]}),
    "speculators": speculators(),
    "speculators, two layers": speculators(2, {"norm_output": True}),
    "speculators, one norm before": speculators(
        1, {"norm_before_fc": True, "norm_before_residual": False}, **{"input_norm.weight": np.ones(96, np.float32)}
    ),
    "speculators, narrow": speculators(1, {"target_hidden_size": 48, IDS: [4, 9]}),
}


@pytest.mark.parametrize("name", FILES)
def test_round_trips_to_the_bit(tmp_path, name):
    check_round_trip(tmp_path, FILES[name], FILES[name].layout, notes=("norm_output", IDS))


def test_sizes_are_those_of_the_tensors(tmp_path):
    config = instance(EagleConfig, load_heads(specforge().write(tmp_path / "a")).config)
    assert (config.fc_norm, config.norm_output, config.norm_before_residual) == (True, True, False)
    assert (config.decoder.num_heads, config.decoder.num_kv_heads, config.decoder.head_dim) == (4, 2, 8)
    assert (config.taps, config.taps_of(32), config.draft_vocab_size) == (None, (2, 16, 29), 20)
    assert config.decoder.rope.theta == 5e5
    config = load_heads(speculators(2).write(tmp_path / "b")).config
    assert (config.decoder.num_layers, config.decoder.qk_norm, config.decoder.qkv_bias) == (2, True, True)
    assert (config.taps, config.norm_before_residual, config.own_embedding) == ((2, 6, 9), True, True)
    assert load_heads(specforge(**{IDS: [1, 5, 8]}).write(tmp_path / "c")).config.taps == (2, 6, 9), "outputs of layers"
    config = load_heads(FILES["speculators, narrow"].write(tmp_path / "d")).config
    assert (config.feature_size, config.taps) == (48, (4, 9))


def test_an_embedding_is_shared_if_it_is_the_targets(tmp_path):
    model = target("eagle3")
    place = write(tmp_path / "same", "eagle3")
    assert not load_heads(place, target=model).config.own_embedding
    assert load_heads(place).config.own_embedding
    changed = reference("eagle3").changed({"embed_tokens.weight": reference("eagle1").held["embed_tokens.weight"]})
    assert load_heads(changed.write(tmp_path / "other"), target=model).config.own_embedding


def test_a_missing_projection_is_the_targets(tmp_path):
    model = target("eagle3")
    heads = load_heads(specforge().changed({"lm_head.weight": None}).write(tmp_path / "in"), target=model)
    assert not heads.config.own_projection
    with pytest.raises(InvalidConfig, match="share the target's; give the target"):
        export_heads(heads, tmp_path / "out")
    rows = load_file(export_heads(heads, tmp_path / "out", target=model) / "model.safetensors")["lm_head.weight"]
    np.testing.assert_array_equal(rows, np.asarray(model.params["head"])[drafted_ids(CASES["eagle3"])])


def test_other_names_and_pickles(tmp_path):
    """NeMo's prefix, old rotary frequencies, absolute ids, and files of torch.save in directories of their own."""
    file = reference("eagle3")
    expected = load_heads(file.write(tmp_path / "plain"))
    named = File("eagle3", {f"model.{key}": a for key, a in file.held.items()}, file.told)
    frequencies = file.changed({"midlayer.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)})
    absolute = file.changed({"d2t": drafted_ids(CASES["eagle3"])})
    for place, other in (("named", named), ("frequencies", frequencies), ("absolute", absolute)):
        chex.assert_trees_all_equal(load_heads(other.write(tmp_path / place)).params, expected.params)
    torch = tmp_path / "torch"
    torch.mkdir()
    medusa_files.write_torch(torch / "pytorch_model.bin", dict(file.held))
    (torch / "config.json").write_text(json.dumps(dict(file.told)))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: is a pickle.*--allow-pickle"):
        load_heads(torch)
    for source in (torch, torch / "pytorch_model.bin"):
        chex.assert_trees_all_equal(load_heads(source, allow_pickle=True).params, expected.params)


@pytest.mark.parametrize(
    ("file", "word"),
    [
        (reference("eagle3").changed(told={"rope_theta": None}), "has no rope_theta; 10000 is used"),
        (reference("eagle3").changed(told={"num_hidden_layers": 40}), "num_hidden_layers 40, but the tensors say 1"),
        (reference("eagle3").changed(told={"head_dim": 80}), "head_dim 80, but the tensors say 8"),
        (reference("eagle3").changed(told={"draft_vocab_size": 32000}), "32000, but the tensors say 20"),
        (reference("eagle3").changed(told={"tie_word_embeddings": True}), "ties the projection to the embedding"),
        (specforge(norm_output=False, **{IDS: [3, 7, 8]}), r"set the drafter's option taps to [4, 8, 9]"),
        (specforge(), "if SpecForge trained this head before September 2026"),
        (reference("eagle1").changed(told={"rope_theta": None, "rope_parameters": {"rope_theta": 7.0}}), None),
    ],
)  # fmt: skip
def test_what_users_should_know(tmp_path, file, word):
    found = open_heads(file.write(tmp_path))
    assert [word in note for note in found.notes] == ([True] if word else [])


def test_exported_settings(tmp_path):
    heads = load_heads(specforge().write(tmp_path / "in"))
    told = json.loads((export_heads(heads, tmp_path / "a", base="some/model") / "config.json").read_text())
    assert told["architectures"] == ["LlamaForCausalLMEagle3"]
    assert told["rope_theta"] == told["rope_parameters"]["rope_theta"] == 5e5
    assert (told["draft_vocab_size"], told["tie_word_embeddings"], told["head_dim"]) == (20, False, 8)
    assert IDS not in told
    assert told["base_model_name_or_path"] == "some/model"
    told = json.loads((export_heads(heads, tmp_path / "b", "speculators", base="m") / "config.json").read_text())
    assert told["transformer_layer_config"]["num_key_value_heads"] == 2
    assert told["speculators_config"]["verifier"]["name_or_path"] == "m"
    assert (told["fc_norm"], told["norm_output"], told["norm_before_residual"], told["norm_before_fc"]) == (
        True, True, False, False,
    )  # fmt: skip
    default = dataclasses.replace(heads.config, taps=(2, 6, 9))
    heads = dataclasses.replace(heads, config=default)
    told = json.loads((export_heads(heads, tmp_path / "c", target=target("eagle3")) / "config.json").read_text())
    assert IDS not in told, "they are the default ones of a target of 12 layers"


# Refusals.

SQUARE, LONG = np.ones((32, 32), np.float32), np.arange(20)
THREE, ONE, SPEC = reference("eagle3"), reference("eagle1"), speculators()
ODD: dict[str, tuple[File, str]] = {
    "no map": (THREE.changed({"d2t": None, "t2d": None}), "does not state which: the tensor d2t is missing"),
    "a map of other tokens": (THREE.changed({"t2d": np.arange(48) < 20}), "which are the 20 ids of t2d"),
    "a map of too few": (THREE.changed({"d2t": LONG[:19]}), "d2t has 19 entries, expected 20"),
    "a map that falls": (THREE.changed({"d2t": LONG[::-1].copy()}), "must stand for 20 ascending ids below 48"),
    "a map beyond the end": (THREE.changed({"d2t": LONG + 29, "t2d": None}), "must stand for 20 ascending"),
    "a map that counts": (THREE.changed({"d2t": LONG, "t2d": None}), "is 0, 1, 2, .*zeros for the first 20"),
    "a map of floats": (THREE.changed({"d2t": LONG.astype(np.float32)}), "tensor d2t has type F32"),
    "members of another type": (THREE.changed({"t2d": np.zeros(48, np.int64)}), "tensor t2d has type I64"),
    "taps missing": (
        speculators(1, {IDS: None}, **{"fc.weight": np.ones((32, 128), np.float32)}),
        "reads 4 layers of the target, but config.json does not state which",
    ),
    "taps of another number": (SPEC.changed(told={IDS: [2, 6]}), "expected 3 layers in ascending order"),
    "taps out of order": (SPEC.changed(told={IDS: [6, 2, 9]}), "expected 3 layers in ascending order"),
    "the embedding tapped": (SPEC.changed(told={IDS: [0, 2, 9]}), "names the target's embedding"),
    "taps of no layers": (SPEC.changed(told={IDS: "all"}), "expected a list of layers"),
    "no whole states": (THREE.changed({"fc.weight": np.ones((32, 90), np.float32)}), "a multiple of the width 32"),
    "a switch unsaid": (SPEC.changed(told={"norm_before_residual": None}), "true in vLLM and false in speculators"),
    "a switch of another type": (SPEC.changed(told={"norm_output": "yes"}), "norm_output is 'yes'"),
    "a norm that is not there": (THREE.changed(told={"fc_norm": True}), "says fc_norm True, but the file lacks"),
    "a norm that is": (specforge(fc_norm=False), "says fc_norm False, but the file has"),
    "both norms": (
        specforge().changed({"input_norm.weight": np.ones(96, np.float32)}), "fc_norm and norm_before_fc cannot both",
    ),
    "one norm too few": (specforge().changed({"fc_norm.1.weight": None}), r"missing: fc_norm\.1\.weight"),
    "heads that do not divide": (THREE.changed(told={"num_attention_heads": 5, "head_dim": None}), "heads is 5"),
    "no heads": (THREE.changed(told={"num_attention_heads": None, "head_dim": None}), "num_attention_heads is None"),
    "no whole heads": (THREE.changed(told={"num_attention_heads": 1}), "expected multiples of the head width 32"),
    "an activation": (THREE.changed(told={"hidden_act": "relu"}), "activation 'relu' is not supported"),
    "scaled positions": (THREE.changed(told={"rope_scaling": {"type": "dynamic"}}), "type 'dynamic' are not supported"),
    "sizes of another type": (THREE.changed(told={"max_position_embeddings": "x"}), "max_position_embeddings is 'x'"),
    "layers of another type": (SPEC.changed(told={"transformer_layer_config": [1]}), "is .1., expected an object"),
    "no vocabulary": (
        ONE.changed({"embed_tokens.weight": None}, {"vocab_size": None}), "does not state vocab_size",
    ),
    "an EAGLE-1 head with a norm": (ONE.changed({"norm.weight": np.ones(32, np.float32)}), r"expected: norm\.weight"),
    "an EAGLE-1 head with taps": (ONE.changed({"fc.weight": np.ones((32, 96), np.float32)}), r"expected \[32, 64\]"),
    "a second layer": (THREE.changed({"midlayer.1.x": SQUARE}), r"not expected: midlayer\.1\.x"),
    "no layer": (
        THREE.changed({"midlayer.self_attn.q_proj.weight": None}), r"missing: midlayer\.self_attn\.q_proj\.weight",
    ),
    "the first converter's": (
        File("", {"fusion_fc.weight": SQUARE, "transformer.mlp.up_proj.weight": SQUARE}, {}), "holds no draft",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_what_does_not_go_together(tmp_path, what):
    refuse(tmp_path, *ODD[what])


@pytest.mark.parametrize("name", ["eagle1", "specforge", "speculators, two layers"])
def test_every_tensor(tmp_path, name):
    optional = ("embed_tokens.weight", "lm_head.weight", "fc.bias", "layers.0.self_attn.q_norm.weight")
    check_every_tensor(tmp_path, FILES[name], optional, extensible=("embed_tokens.weight",))


@pytest.mark.parametrize(
    ("changes", "layout", "said"),
    [
        (
            {"norm_before_residual": True},
            "eagle3",
            "without norm_before_residual; use the layout spec",
        ),
        ({"taps": (9, 6, 2)}, "speculators", "taps in ascending order"),
        ({"taps": (1, 6, 9)}, "eagle3", r"SGLang reads the taps \(1, 6, 9\)"),
        ({"fc_bias": True}, "speculators", "cannot hold the bias of the input projection"),
        ({}, "eagle1", "is for EAGLE-1 heads, but this is an EAGLE-3 head"),
        ({}, "v0.1", "the layout v0.1 is for Medusa heads; use the layout eagle3 or speculators"),
    ],
)
def test_what_a_layout_cannot_hold(tmp_path, changes, layout, said):
    heads = load_heads(specforge().write(tmp_path / "in"))
    heads = dataclasses.replace(heads, config=dataclasses.replace(heads.config, **changes))
    with pytest.raises(InvalidConfig, match=said):
        export_heads(heads, tmp_path / "out", layout)
    medusa = jaxspec.HeadsConfig(32, 48, 2)
    with pytest.raises(InvalidConfig, match=r"is for EAGLE heads; use the layout v0\.1"):
        export_heads(jaxspec.DraftHeads(medusa, {}), tmp_path / "out", "eagle3")


def test_our_own_format_is_checked(tmp_path):
    check_our_format(tmp_path, specforge(), "eagle")
