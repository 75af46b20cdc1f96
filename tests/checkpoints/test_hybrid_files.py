"""Tests files of models with Gated DeltaNet: GGUF beside Hugging Face, wrappers with vision tensors, refusals."""

import json

import gguf
import jax
import numpy as np
import pytest

import jaxspec
from helpers.families import random_tensor, tokens_of, write_checkpoint
from helpers.logits import GOLDEN, POSITIONS, logits_in_pieces
from helpers.narrow import instance, not_none
from jaxspec.checkpoints.hf_families import read_config
from jaxspec.checkpoints.load import load
from jaxspec.checkpoints.source import open_checkpoint
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.models.config import DeltaSizes
from jaxspec.models.transformer import TransformerLM

CASES = ("qwen3.5", "qwen3.5-tied")
TENSORS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}
"""The names in GGUF files, by llama.cpp's conversion/qwen.py and src/models/qwen35.cpp."""


def tiled(array, sizes: DeltaSizes, first: int = 0, axis: int = 0):
    """Moves the value heads from `first` on into llama.cpp's order, in which a plain repeat pairs them with keys."""
    head, values = np.split(np.moveaxis(array, axis, 0), [first])
    each = values.reshape(sizes.key_heads, sizes.value_heads // sizes.key_heads, -1, *values.shape[1:])
    return np.moveaxis(np.concatenate([head, each.swapaxes(0, 1).reshape(values.shape)]), 0, axis)


def in_gguf(name: str, array: np.ndarray, sizes: DeltaSizes) -> np.ndarray:
    """Returns a tensor as the converter writes it."""
    if name.endswith("norm.weight") and "linear_attn" not in name:
        array = array + 1
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        array = tiled(array, sizes, 2 * sizes.keys)
    if name.endswith(("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias")):
        array = tiled(array, sizes)
    if name.endswith("out_proj.weight"):
        array = tiled(array, sizes, axis=1)
    array = -np.exp(array) if name.endswith("A_log") else array
    return array[:, 0] if name.endswith("conv1d.weight") else array


def write_gguf(path, case: str, metadata=None, tensors=None):
    """Writes the model of a case, with a block for multi-token prediction that is only named."""
    settings, shapes = GOLDEN[case]["settings"], GOLDEN[case]["shapes"]
    config, _ = read_config("config.json", settings)
    sizes = not_none(config.delta)
    writer = gguf.GGUFWriter(path, "qwen35")
    entries = {
        "context_length": 256,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers + 1,
        "nextn_predict_layers": 1,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.rope.width,
        "full_attention_interval": 4,
        "ssm.conv_kernel": sizes.taps,
        "ssm.state_size": sizes.key_width,
        "ssm.group_count": sizes.key_heads,
        "ssm.time_step_rank": sizes.value_heads,
        "ssm.inner_size": sizes.values,
    }
    for key, value in (entries | (metadata or {})).items():
        writer.add_uint32(f"qwen35.{key}", value)
    writer.add_float32("qwen35.rope.freq_base", 1e7)
    writer.add_float32("qwen35.attention.layer_norm_rms_epsilon", 1e-6)
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    found = {}
    for name, shape in shapes.items():
        if name.startswith("model.layers."):
            layer, part = name.removeprefix("model.layers.").split(".", 1)
            file = f"blk.{layer}.{TENSORS[part]}"
        else:
            file = names.get(name, "output.weight")
        found[file] = in_gguf(name, random_tensor(case, name, shape), sizes)
    found[f"blk.{config.num_layers}.nextn.eh_proj.weight"] = np.zeros((4, 8), np.float32)
    for name, array in (found | (tensors or {})).items():
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_files_have_the_logits_of_transformers(tmp_path):
    """Two value heads for each key head, in the other order; the file's order is kept."""
    said = []
    model = load(write_gguf(tmp_path / "model.gguf", "qwen3.5"), report=said.append)
    assert not_none(instance(TransformerLM, model.lm).config.delta).tiled
    found = logits_in_pieces(model, tokens_of("qwen3.5"))[list(POSITIONS)]
    np.testing.assert_allclose(found, GOLDEN["qwen3.5"]["logits"], rtol=0, atol=1e-4)
    assert any("blk.4.nextn.eh_proj.weight" in line for line in said)


def test_factors_of_decays_must_be_negative(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "qwen3.5", tensors={"blk.0.ssm_a": np.ones(4)})
    with pytest.raises(CheckpointError, match=r"blk\.0\.ssm_a has factors of decays that are not negative"):
        load(path, report=lambda note: None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_small_matrices_that_steer_the_state_stay_in_float32(tmp_path, dtype):
    write_checkpoint(tmp_path / "m", CASES[0], GOLDEN[CASES[0]]["settings"], GOLDEN[CASES[0]]["shapes"])
    model = load(tmp_path / "m", dtype=dtype, kernels=False)
    layer = model.params["layers"][0]
    for name in ("rates", "conv", "decay", "decay_bias", "gate_norm"):
        assert layer[name].dtype == np.float32, name
    assert str(jax.tree.leaves(layer["qkvz"])[0].dtype) == dtype


def test_wrappers_with_vision_tensors(tmp_path):
    """The text model of a multimodal checkpoint is opened; its MTP and vision tensors are named and left out."""
    settings, shapes = GOLDEN["qwen3.5"]["settings"], GOLDEN["qwen3.5"]["shapes"]
    outer = {"model_type": "qwen3_5", "text_config": settings, "vision_config": {"depth": 1}}
    named = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: shape
        for name, shape in shapes.items()
    }
    more = {"model.visual.blocks.0.attn.proj.weight": [4, 4], "mtp.fc.weight": [32, 64]}
    write_checkpoint(tmp_path / "m", "qwen3.5", outer, named | more)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert set(checkpoint.left_out) == set(more)
    assert checkpoint.config == read_config("config.json", settings)[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is False, expected True"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid', expected 'silu' or 'swish'"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16'"),
        ({"linear_num_value_heads": 3}, r"value_heads \(3\) must be a multiple of key_heads \(2\)"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0, expected a positive whole number"),
        ({"layer_types": ["linear_attention"] * 3}, "expected 4 of full_attention and linear_attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "expected 4 of full_attention and linear_attention"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0, expected a whole number from 1"),
        ({"model_type": "qwen4_exp"}, "model_type 'qwen4_exp' is not supported"),
    ],
)
def test_configs_that_are_not_understood_are_refused(changes, said):
    with pytest.raises((CheckpointError, InvalidConfig), match=said):
        read_config("config.json", GOLDEN["qwen3.5"]["settings"] | changes)


@pytest.mark.parametrize("case", CASES)
def test_saved_and_exported_models_are_the_same(tmp_path, case):
    write_checkpoint(tmp_path / "m", case, GOLDEN[case]["settings"], GOLDEN[case]["shapes"])
    model = load(tmp_path / "m", kernels=False)
    jaxspec.save(model, tmp_path / "saved")
    jaxspec.export_model(model, tmp_path / "exported", like=tmp_path / "m")
    for path in ("saved", "exported"):
        again = load(tmp_path / path, kernels=False)
        assert again.lm == model.lm
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), again.params, model.params)
    assert "linear_num_value_heads" in json.loads((tmp_path / "exported" / "config.json").read_text())
