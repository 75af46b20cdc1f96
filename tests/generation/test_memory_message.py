"""Tests that the error of a text past the context says how a model with LongRoPE is loaded for longer texts."""

import pytest

import jaxspec
from helpers.checkpoints import random_params, tiny_config, write_hf
from jaxspec.errors import CapacityError

pytestmark = pytest.mark.quick

LONG = {
    "model_type": "phi3",
    "original_max_position_embeddings": 32,
    "max_position_embeddings": 128,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0 + i / 10 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
    },
}


def load(place, settings, **options):
    config = tiny_config(tie_embeddings=False)
    params = random_params(config)
    fused = {}
    for i, layer in enumerate(params["layers"]):
        fused |= {f"model.layers.{i}.self_attn.{name}_proj.weight": None for name in "qkv"}
        fused |= {f"model.layers.{i}.mlp.{name}_proj.weight": None for name in ("gate", "up")}
        fused[f"model.layers.{i}.self_attn.qkv_proj.weight"] = layer["qkv"].T.copy()
        fused[f"model.layers.{i}.mlp.gate_up_proj.weight"] = layer["gate_up"].T.copy()
    tensors = fused if settings else None
    return jaxspec.load(write_hf(place, config, params, settings=settings, tensors=tensors), kernels=False, **options)


def test_a_longer_context_is_named(tmp_path):
    short = load(tmp_path / "long", LONG)
    with pytest.raises(CapacityError, match=r"context is 32; .*LongRoPE.*load\(..., context=54\) \(--context 54\)"):
        jaxspec.generate(short, [[1, 2, 3, 4]], max_new_tokens=50, drafter="none")
    assert load(tmp_path / "again", LONG, context=54).lm.context == 54


def test_other_models_have_one_context(tmp_path):
    with pytest.raises(CapacityError, match="the model's context is 128") as error:
        jaxspec.generate(load(tmp_path / "plain", {}), [[1]], max_new_tokens=128, drafter="none")
    assert "LongRoPE" not in str(error.value)
