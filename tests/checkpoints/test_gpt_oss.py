"""Tests files of gpt-oss: experts in MXFP4, GGUF beside Hugging Face, texts, meshes, and what is refused."""

import json

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from helpers.checkpoints import assert_same_params
from helpers.converted import digest, read_metadata
from helpers.families import tokens_of, write_checkpoint
from helpers.gpt_oss_files import CASE, SETTINGS, SHAPES, packed, write_blocks, write_gguf
from helpers.logits import GOLDEN, POSITIONS, logits_in_pieces
from helpers.narrow import not_none
from helpers.paths import GOLDEN_DIR
from helpers.tiers import with_slow
from jaxspec.checkpoints.hf_config import read_config
from jaxspec.checkpoints.hf_experts import decode_mxfp4
from jaxspec.checkpoints.load import load, read_params
from jaxspec.checkpoints.source import open_checkpoint
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.kernels.library import kernels_available
from jaxspec.models.kernels import with_kernels
from jaxspec.models.rows import Gate

CONVERTED = json.loads((GOLDEN_DIR / "converted.json").read_text())["gpt-oss"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt-oss")
    write_checkpoint(path, CASE, SETTINGS, SHAPES)
    return path


@pytest.fixture(scope="module")
def target(folder):
    return load(folder)


@pytest.fixture(scope="module")
def folders(folder, tmp_path_factory):
    """Directories by the type of their experts: "mxfp4" and "decoded" are one model."""
    blocks, floats = write_blocks(tmp_path_factory.mktemp("mxfp4"))
    return {"float32": folder, "mxfp4": blocks, "decoded": floats}


@pytest.mark.parametrize("experts", ["float32", "mxfp4"])
def test_files_written_here_are_those_of_the_converter(folders, tmp_path, experts):
    path, golden = write_gguf(tmp_path / "model.gguf", folders[experts]), CONVERTED[experts]
    assert read_metadata(path) == golden["metadata"]
    tensors = {tensor.name: digest(tensor.data) for tensor in gguf.GGUFReader(path).tensors}
    assert tensors.keys() == golden["tensors"].keys()
    for name, (shape, total) in golden["tensors"].items():
        assert tensors[name][0] == shape, name
        np.testing.assert_allclose(tensors[name][1], total, rtol=0, atol=2e-3, err_msg=name)


@pytest.mark.parametrize("experts", ["float32", "mxfp4"])
def test_a_gguf_file_is_the_same_model(folders, tmp_path, experts):
    own = open_checkpoint(folders[experts])
    other = open_checkpoint(write_gguf(tmp_path / "model.gguf", folders[experts]))
    assert own.config == other.config
    assert_same_params(read_params(other), read_params(own))


def test_mxfp4_is_that_of_ggml():
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 5, 2, 16), np.uint8)
    scales = rng.integers(100, 150, (3, 5, 2), np.uint8)
    expected = gguf.quants.dequantize(packed(blocks, scales), gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(decode_mxfp4(blocks, scales), expected)


def test_experts_in_mxfp4(folders):
    blocks, floats = folders["mxfp4"], folders["decoded"]
    own, other = open_checkpoint(blocks), open_checkpoint(floats)
    assert own.config == other.config
    assert_same_params(read_params(own), read_params(other))
    assert any(tensor.type == "U8" for tensor in own.stored.values())
    tensors = load_file(blocks / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    for changed, said in (
        ({key: array for key, array in tensors.items() if key != name}, f"tensors missing: {name}"),
        ({key: array for key, array in tensors.items() if key != name.replace("_blocks", "_scales")}, "_scales"),
        (tensors | {name: tensors[name][..., :8].copy()}, r"expected U8 \[X, out, in / 32, 16\]"),
    ):
        save_file(changed, blocks / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(blocks)


def test_clamped_gates():
    both = np.random.default_rng(2).normal(scale=9, size=(50, 12)).astype(np.float32)
    gate, up = np.split(both.astype(np.float64), 2, axis=1)
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    expected = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    np.testing.assert_allclose(Gate("clamped_silu")(jnp.asarray(both)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", with_slow([0.0, 0.8], {0.8}))
def test_drafts_change_no_text(target, temperature):
    draft = jaxspec.Model(target.lm, jax.tree.map(lambda leaf: leaf * 1.02, target.params))
    tree = jaxspec.from_paths([(0, 0, 0), (0, 1), (1, 0)])
    options = {"key": jax.random.key(3), "max_new_tokens": 30, "ignore_eos": True}
    options["sampling"] = jaxspec.Sampling(temperature=temperature)
    prompts = [tokens_of("a")[:30], tokens_of("b")[:7]]
    out = jaxspec.generate(target, prompts, drafter="model", draft=draft, tree=tree, **options)
    plain = jaxspec.generate(target, prompts, drafter="none", **options)
    assert [row.tokens for row in out] == [row.tokens for row in plain]
    assert out.stats.accepted > 10


@pytest.mark.parametrize("dtype", with_slow(["bfloat16", "int8"], {"int8"}))
def test_other_types(folder, dtype):
    model, tokens = load(folder, dtype=dtype), tokens_of(CASE)
    layer = model.params["layers"][0]
    for name in ("sinks", "router", "router_bias", "experts_gate_up_bias", "experts_down_bias"):
        assert layer[name].dtype == np.float32, name
    found, expected = logits_in_pieces(model, tokens)[list(POSITIONS)], np.asarray(GOLDEN[CASE]["logits"])
    assert np.median(np.abs(found - expected)) < 0.1


def test_a_saved_model_is_the_same(target, tmp_path):
    jaxspec.save(target, tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.lm == target.lm
    jax.tree.map(np.testing.assert_array_equal, again.params, target.params)


@pytest.mark.skipif(not kernels_available(), reason="needs the CPU kernels")
def test_kernels_are_refused_in_one_line(folder, target, tmp_path):
    assert not target.lm.execution.kernels
    with pytest.raises(InvalidConfig, match="kernels=True, but there are no CPU kernels for attention sinks"):
        load(folder, kernels=True)
    with pytest.raises(InvalidConfig, match="there are no CPU kernels for attention sinks"):
        with_kernels(target)
    with pytest.raises(InvalidConfig, match="dtype 'file' needs the CPU kernels, but there are no CPU kernels for"):
        load(write_gguf(tmp_path / "model.gguf", folder), dtype="file")
    with pytest.raises(InvalidConfig, match="exact=True needs the CPU kernels"):
        load(folder, exact=True)
    with pytest.raises(InvalidConfig, match="attention='pallas'"):
        load(folder, attention="pallas")
    with pytest.raises(InvalidConfig, match="is a model of gpt_oss, which cannot be exported"):
        jaxspec.export_model(target, tmp_path / "exported", like=folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"swiglu_limit": 5.0}, r"swiglu_limit is 5\.0, expected 7\.0"),
        ({"swiglu_alpha": 1.0}, r"swiglu_alpha is 1\.0, expected 1\.702"),
        ({"attention_bias": False}, "attention_bias is False, expected True"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is 'gelu_pytorch_tanh', expected 'silu'"),
        ({"experts_per_token": 3}, "experts_per_token is 3, but num_experts_per_tok is 2"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is .*; no other value is supported"),
        ({"layer_types": ["linear_attention"] * 3}, "expected 3 of full_attention and sliding_attention"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False, expected True"),
    ],
)
def test_configs_that_are_not_understood_are_refused(changes, said):
    with pytest.raises(CheckpointError, match=said):
        read_config("config.json", SETTINGS | changes)


def test_defaults():
    """Layers alternate, and rotary positions are scaled, in a config.json that does not say it."""
    bare = {key: value for key, value in SETTINGS.items() if key not in ("rope_scaling", "rope_theta", "layer_types")}
    config, _ = read_config("config.json", bare)
    assert config.windowed == (True, False, True)
    assert config.rope.theta == 150000
    assert config.rope.scale == pytest.approx(0.1 * np.log(32) + 1)
    assert not_none(config.experts).biases
