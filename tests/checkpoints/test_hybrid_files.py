"""Tests files of models with Gated DeltaNet: GGUF beside Hugging Face, wrappers with vision tensors, refusals."""

import json

import gguf
import jax
import numpy as np
import pytest

import jaxspec
from helpers.families import tokens_of, write_checkpoint
from helpers.hybrid_files import write_gguf
from helpers.logits import GOLDEN, POSITIONS, logits_in_pieces
from helpers.narrow import instance, not_none
from jaxspec.checkpoints.hf_config import read_config
from jaxspec.checkpoints.load import load
from jaxspec.checkpoints.source import open_checkpoint
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.kernels.library import kernels_available
from jaxspec.models.packed import has_blocks
from jaxspec.models.transformer import TransformerLM

CASES = ("qwen3.5", "qwen3.5-tied")


def test_gguf_files_have_the_logits_of_transformers(tmp_path):
    """Two value heads for each key head, in the other order; the file's order is kept."""
    said = []
    model = load(write_gguf(tmp_path / "model.gguf", "qwen3.5"), report=said.append)
    assert not_none(instance(TransformerLM, model.lm).config.delta).tiled
    found = logits_in_pieces(model, tokens_of("qwen3.5"))[list(POSITIONS)]
    np.testing.assert_allclose(found, GOLDEN["qwen3.5"]["logits"], rtol=0, atol=1e-4)
    assert any("blk.4.nextn.eh_proj.weight" in line for line in said)


@pytest.mark.slow
@pytest.mark.skipif(not kernels_available(), reason="needs the CPU kernels")
def test_blocks_of_gguf_files_are_kept(tmp_path):
    """Two kinds of blocks in one fused matrix; logits are close to those of the same file in float32, and a draft
    changes no token."""
    kinds = gguf.GGMLQuantizationType
    types = dict.fromkeys(("attn_qkv.weight", "attn_q.weight", "ffn_gate.weight"), kinds.Q4_0)
    types |= dict.fromkeys(("attn_gate.weight", "attn_k.weight", "ffn_up.weight", "token_embd.weight"), kinds.Q8_0)
    path = write_gguf(tmp_path / "model.gguf", "qwen3.5", types=types)
    model, exact = (load(path, dtype=dtype, report=lambda note: None) for dtype in ("file", "float32"))
    assert has_blocks(model.params["layers"][0]["qkvz"])
    assert not has_blocks(model.params["layers"][0]["rates"])
    found, expected = (logits_in_pieces(each, tokens_of("qwen3.5")) for each in (model, exact))
    assert np.abs(found - expected).mean() < 0.02 * np.ptp(expected)  # activations are rounded to 8 bits
    texts = [
        jaxspec.generate(model, [[5, 6, 7, 5, 6]], drafter=drafter, max_new_tokens=16, ignore_eos=True)[0].tokens
        for drafter in ("none", "prompt-lookup")
    ]
    assert texts[0] == texts[1]


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
    ("outer", "inner", "said"),
    [
        (True, False, "tie_word_embeddings is True, but False inside text_config"),
        (False, None, "tensors missing: lm_head.weight"),
        (None, True, None),
        (True, None, None),
    ],
)
def test_ties_of_the_output_head_must_agree(tmp_path, outer, inner, said):
    """Two entries of config.json with each other, and with the tensors: this file has no output head."""
    case = "qwen3.5-tied"
    text = {**GOLDEN[case]["settings"], "tie_word_embeddings": inner}
    settings = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": outer}
    settings = {key: value for key, value in settings.items() if value is not None}
    write_checkpoint(tmp_path / "m", case, settings, GOLDEN[case]["shapes"])
    if said is None:
        assert open_checkpoint(tmp_path / "m").config.tie_embeddings
        return
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(tmp_path / "m")


def test_an_output_head_that_the_config_ties_must_be_the_embedding(tmp_path):
    golden = GOLDEN["qwen3.5"]
    write_checkpoint(tmp_path / "m", "qwen3.5", golden["settings"] | {"tie_word_embeddings": True}, golden["shapes"])
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load(tmp_path / "m", kernels=False)


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
