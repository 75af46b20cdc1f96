"""Tests files of models with mixtures of experts: forms of the tensors, GGUF beside Hugging Face, exports, refusals."""

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from helpers.families import tokens_of, write_checkpoint
from helpers.hybrid_files import write_gguf
from helpers.logits import GOLDEN, POSITIONS, logits_in_pieces
from helpers.tiers import with_slow
from jaxspec.checkpoints.hf_families import read_config
from jaxspec.checkpoints.load import load
from jaxspec.checkpoints.source import open_checkpoint
from jaxspec.errors import CheckpointError
from jaxspec.kernels import library
from jaxspec.models.config import Experts

CASES = ("qwen3-moe", "qwen3-moe-dense-layers", "qwen3.5-moe")


def write(path, case: str):
    write_checkpoint(path, case, GOLDEN[case]["settings"], GOLDEN[case]["shapes"])
    return path


def split_experts(path) -> None:
    """Rewrites the tensors of all experts as tensors of single experts, as published files of Qwen3-MoE have them."""
    tensors = {}
    for name, array in load_file(path / "model.safetensors").items():
        prefix, found, kind = name.partition("mlp.experts.")
        names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for i, matrix in enumerate(array) if found else ():
            for part, half in zip(names, np.split(matrix, len(names))):
                tensors[f"{prefix}mlp.experts.{i}.{part}.weight"] = np.ascontiguousarray(half)
        if not found:
            tensors[name] = array
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


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
    golden = {"settings": GOLDEN["qwen3-moe"]["settings"] | {"moe_intermediate_size": 32}, "shapes": {}}
    for name, shape in GOLDEN["qwen3-moe"]["shapes"].items():
        wide = {20: 32, 40: 64}
        golden["shapes"][name] = [wide.get(size, size) for size in shape] if ".experts." in name else shape
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
    with pytest.raises(CheckpointError, match=r"several types \(Q4_0, Q8_0\).*load the file with dtype 'int8'"):
        load(mixed, dtype="file")


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
