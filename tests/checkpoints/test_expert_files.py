"""Tests files of models with mixtures of experts: forms of the tensors, GGUF beside Hugging Face, exports, refusals."""

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxspec
from helpers.families import split_experts, tokens_of, write_checkpoint
from helpers.hybrid_files import widened, write_gguf
from helpers.logits import GOLDEN, POSITIONS, logits_in_pieces
from helpers.tiers import with_slow
from jaxspec.checkpoints.hf_config import read_config
from jaxspec.checkpoints.load import load
from jaxspec.checkpoints.source import open_checkpoint
from jaxspec.errors import CheckpointError
from jaxspec.kernels import library
from jaxspec.models.config import Experts

CASES = ("qwen3-moe", "qwen3-moe-dense-layers", "qwen3.5-moe", "qwen3-next")


def write(path, case: str):
    write_checkpoint(path, case, GOLDEN[case]["settings"], GOLDEN[case]["shapes"])
    return path


@pytest.mark.parametrize("case", CASES)
def test_single_and_fused_tensors_saves_and_exports_are_the_same_model(tmp_path, case):
    fused = load(write(tmp_path / "fused", case), kernels=False)
    split_experts(write(tmp_path / "single", case))
    jaxspec.save(fused, tmp_path / "saved")
    jaxspec.export_model(fused, tmp_path / "exported", like=tmp_path / "fused")
    single = any(".experts.3.up_proj." in name for name in load_file(tmp_path / "exported" / "model.safetensors"))
    assert single == (case != "qwen3.5-moe"), "exports have the form of published files"
    for path in ("single", "saved", "exported"):
        again = load(tmp_path / path, kernels=False)
        assert again.lm == fused.lm
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), again.params, fused.params)


@pytest.mark.parametrize("case", with_slow(["qwen3-moe", "qwen3.5-moe"], {"qwen3-moe"}))
def test_gguf_files_have_the_logits_of_transformers(tmp_path, case):
    model = load(write_gguf(tmp_path / "model.gguf", case), report=lambda note: None)
    found = logits_in_pieces(model, tokens_of(case))[list(POSITIONS)]
    np.testing.assert_allclose(found, GOLDEN[case]["logits"], rtol=0, atol=1e-4)


@pytest.mark.skipif(not library.kernels_available(), reason=library.describe_kernels())
def test_blocks_of_experts_are_kept(tmp_path):
    """Q8_0 in experts of 32 inputs; the down projections have 20, which no block has."""
    types = {"_exps.weight": gguf.GGMLQuantizationType.Q8_0}
    golden = widened("qwen3-moe", moe_intermediate_size=32)
    path = write_gguf(tmp_path / "model.gguf", "qwen3-moe", golden=golden, types=types)
    kept, exact = load(path, dtype="file"), load(path, kernels=False)
    for i, layer in exact.params["layers"].items():
        for name in ("experts_gate_up", "experts_down"):
            blocks = kept.params["layers"][i][name]
            assert set(blocks.kinds) == {"Q8_0"}
            np.testing.assert_allclose(blocks.unpack().swapaxes(1, 2), layer[name], atol=1e-6)
    tokens = tokens_of("qwen3-moe")
    found, expected = (logits_in_pieces(model, tokens) for model in (kept, exact))
    assert np.abs(found - expected).mean() < 0.2
    mixed = write_gguf(tmp_path / "mixed.gguf", "qwen3-moe", golden=golden,
                       types={"gate_exps.weight": gguf.GGMLQuantizationType.Q4_0} | types)  # fmt: skip
    with pytest.warns(UserWarning, match=r"projections of several types \(Q4_0, Q8_0\) are rounded to Q8_0"):
        kept, exact = load(mixed, dtype="file"), load(mixed, kernels=False)
    for i, layer in exact.params["layers"].items():
        gate_up = kept.params["layers"][i]["experts_gate_up"]
        assert gate_up.kinds == ("Q8_0",)
        np.testing.assert_allclose(gate_up.unpack().swapaxes(1, 2), layer["experts_gate_up"], atol=0.02)


@pytest.mark.skipif(not library.kernels_available(), reason=library.describe_kernels())
@pytest.mark.parametrize("case", with_slow(["qwen3.5", "qwen3-moe", "qwen3.5-moe"], {"qwen3.5", "qwen3-moe"}))
def test_blocks_of_256_inputs_are_kept_in_recurrent_layers_and_experts(tmp_path, case):
    """Q4_K, and Q6_K in the down projections of experts, as in files of the type Q4_K_M."""
    kinds = gguf.GGMLQuantizationType
    names = ("_exps", "attn_qkv", "attn_gate", "attn_q", "ffn_gate", "ffn_up")
    types = {"_down_exps.weight": kinds.Q6_K} | {f"{name}.weight": kinds.Q4_K for name in names}
    sizes = {} if case == "qwen3.5" else {"moe_intermediate_size": 256}
    path = write_gguf(tmp_path / "model.gguf", case, golden=widened(case, hidden_size=256, **sizes), types=types)
    kept, exact = load(path, dtype="file", report=print), load(path, kernels=False, report=print)
    matrices = {"qwen3.5": ("qkvz", "gate_up"), "qwen3-moe": ("experts_gate_up", "experts_down")}
    for name in matrices.get(case, ("qkvz", "experts_gate_up", "experts_down")):
        blocks = kept.params["layers"][0][name]
        assert blocks.kinds[0] == ("Q6_K" if name == "experts_down" else "Q4_K")
        np.testing.assert_allclose(blocks.unpack().swapaxes(-1, -2), exact.params["layers"][0][name], atol=1e-5)
    found, expected = (logits_in_pieces(model, tokens_of(case)) for model in (kept, exact))
    assert np.abs(found - expected).mean() < 0.05 * np.ptp(expected)  # activations are rounded to 8 bits


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_local_experts": 5}, "num_experts is 6 but num_local_experts is 5"),
        ({"num_experts_per_tok": 7}, r"per_token \(7\) must be at most count \(6\)"),
        ({"mlp_only_layers": [2]}, r"mlp_only_layers is \[2\], expected numbers of layers from 0"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers is '0'"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0, expected a positive whole number"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes', expected true or false"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size is -1, expected a positive whole number"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
    ],
)
def test_configs_that_are_not_understood_are_refused(changes, said):
    with pytest.raises(CheckpointError, match=said):
        read_config("config.json", GOLDEN["qwen3-moe"]["settings"] | changes)


def test_newer_names_and_layers_without_experts():
    settings = GOLDEN["qwen3-moe"]["settings"]
    newer = {"num_local_experts": 6} | {name: value for name, value in settings.items() if name != "num_experts"}
    assert read_config("config.json", newer) == read_config("config.json", settings)
    config, _ = read_config("config.json", GOLDEN["qwen3-moe-dense-layers"]["settings"])
    assert config.sparse == (False, True, False, False)
    assert config.experts == Experts(6, 2, 20, normalise=False)
    dense, _ = read_config("config.json", settings | {"mlp_only_layers": [0, 1]})
    assert dense.experts is None
    for changes in ({"norm_topk_prob": False}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}):
        with pytest.raises(CheckpointError, match=f"{next(iter(changes))} is .*; no other value is supported"):
            read_config("config.json", GOLDEN["qwen3.5-moe"]["settings"] | changes)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"expert_gating_func": 2}, "expert_gating_func is 2, expected 1"),
        ({"leading_dense_block_count": 1}, "leading_dense_block_count is 1, expected 0"),
        ({"expert_used_count": 9}, r"per_token \(9\) must be at most count \(6\)"),
    ],
)
def test_metadata_that_is_not_understood_is_refused(tmp_path, metadata, said):
    path = write_gguf(tmp_path / "model.gguf", "qwen3-moe", metadata)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(path)
