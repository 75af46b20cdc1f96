"""Tests files of gpt-oss: experts in MXFP4, GGUF beside Hugging Face, texts, meshes, and what is refused."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from helpers.checkpoints import assert_same_params
from helpers.families import random_tensor, tokens_of, write_checkpoint
from helpers.logits import GOLDEN, POSITIONS, logits_in_pieces
from helpers.narrow import not_none
from helpers.tiers import with_slow
from jaxspec.checkpoints.hf_experts import decode_mxfp4
from jaxspec.checkpoints.hf_families import read_config
from jaxspec.checkpoints.load import load, read_params
from jaxspec.checkpoints.source import open_checkpoint
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.kernels.library import kernels_available
from jaxspec.models.kernels import with_kernels
from jaxspec.models.rows import Gate

CASE = "gpt-oss"
SETTINGS, SHAPES = GOLDEN[CASE]["settings"], GOLDEN[CASE]["shapes"]
TENSORS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
}
"""The names in GGUF files, by llama.cpp's conversion/gpt_oss.py."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt-oss")
    write_checkpoint(path, CASE, SETTINGS, SHAPES)
    return path


@pytest.fixture(scope="module")
def target(folder):
    return load(folder)


def write_gguf(path, metadata=None):
    """Writes the model of the case as llama.cpp's converter does."""
    writer = gguf.GGUFWriter(path, CASE)
    entries = {
        "block_count": SETTINGS["num_hidden_layers"],
        "context_length": SETTINGS["max_position_embeddings"],
        "embedding_length": SETTINGS["hidden_size"],
        "feed_forward_length": SETTINGS["intermediate_size"],
        "expert_feed_forward_length": SETTINGS["intermediate_size"],
        "attention.head_count": SETTINGS["num_attention_heads"],
        "attention.head_count_kv": SETTINGS["num_key_value_heads"],
        "attention.key_length": SETTINGS["head_dim"],
        "attention.value_length": SETTINGS["head_dim"],
        "attention.sliding_window": SETTINGS["sliding_window"],
        "expert_count": SETTINGS["num_local_experts"],
        "expert_used_count": SETTINGS["num_experts_per_tok"],
        "rope.scaling.original_context_length": SETTINGS["rope_scaling"]["original_max_position_embeddings"],
    }
    for key, value in (entries | (metadata or {})).items():
        writer.add_uint32(f"{CASE}.{key}", value)
    writer.add_string(f"{CASE}.rope.scaling.type", "yarn")
    writer.add_float32(f"{CASE}.rope.scaling.factor", SETTINGS["rope_scaling"]["factor"])
    writer.add_float32(f"{CASE}.rope.freq_base", SETTINGS["rope_theta"])
    writer.add_float32(f"{CASE}.attention.layer_norm_rms_epsilon", SETTINGS["rms_norm_eps"])
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, shape in SHAPES.items():
        array = random_tensor(CASE, name, shape)
        if not name.startswith("model.layers."):
            writer.add_tensor(names.get(name, "output.weight"), array)
            continue
        layer, part = name.removeprefix("model.layers.").split(".", 1)
        if part.startswith("mlp.experts.gate_up_proj"):
            kind = "bias" if part.endswith("_bias") else "weight"
            array = array if kind == "bias" else array.swapaxes(1, 2)
            for i, half in enumerate(("gate", "up")):
                own = array[:, i::2]
                writer.add_tensor(f"blk.{layer}.ffn_{half}_exps.{kind}", np.ascontiguousarray(own))
        elif part == "mlp.experts.down_proj":
            writer.add_tensor(f"blk.{layer}.ffn_down_exps.weight", np.ascontiguousarray(array.swapaxes(1, 2)))
        else:
            for old, new in TENSORS.items():
                part = part.replace(old, new)
            writer.add_tensor(f"blk.{layer}.{part}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_the_same_model(folder, tmp_path):
    own, other = open_checkpoint(folder), open_checkpoint(write_gguf(tmp_path / "model.gguf"))
    assert own.config == other.config
    assert_same_params(read_params(other), read_params(own))


def test_mxfp4_is_that_of_ggml():
    """In ggml's blocks the exponent comes first, and byte i holds the codes i and i + 16."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 5, 2, 16), np.uint8)
    scales = rng.integers(100, 150, (3, 5, 2), np.uint8)
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
    raw = np.concatenate([scales[..., None], codes[..., :16] | codes[..., 16:] << 4], -1)
    kind = gguf.GGMLQuantizationType.MXFP4
    expected = gguf.quants.dequantize(raw.reshape(3, 5, -1), kind)
    np.testing.assert_array_equal(decode_mxfp4(blocks, scales), expected)


def write_blocks(path):
    """Writes a model whose experts are in MXFP4, and the same model with floats; returns both directories."""
    settings = SETTINGS | {"hidden_size": 64, "intermediate_size": 32}
    shapes: dict[str, list[int]] = {}
    for name, shape in SHAPES.items():
        shapes[name] = [64 if size in (32, 40) else 32 if size == 20 else size for size in shape]
    heads = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
    for name in shapes:
        for kind, rows in heads.items():
            if f"self_attn.{kind}." in name:
                shapes[name] = [rows, *shapes[name][1:]]
        if "embed_tokens" in name or "lm_head" in name:
            shapes[name] = [48, 64]
        elif "o_proj.weight" in name:
            shapes[name] = [64, 64]
    write_checkpoint(path / "floats", CASE, settings, shapes)
    quantized = settings | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    write_checkpoint(path / "blocks", CASE, quantized, {})
    rng, floats = np.random.default_rng(1), load_file(path / "floats" / "model.safetensors")
    packed = {}
    for name, array in list(floats.items()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = array
            continue
        experts, inputs, outputs = array.shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(120, 126, blocks.shape[:3], np.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats[name] = np.ascontiguousarray(decode_mxfp4(blocks, scales).swapaxes(1, 2))
    save_file(floats, path / "floats" / "model.safetensors", metadata={"format": "pt"})
    save_file(packed, path / "blocks" / "model.safetensors", metadata={"format": "pt"})
    return path / "blocks", path / "floats"


def test_experts_in_mxfp4(tmp_path):
    blocks, floats = write_blocks(tmp_path)
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
        load(write_gguf(tmp_path / "model.gguf"), dtype="file")
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
