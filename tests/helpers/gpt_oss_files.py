"""Files of a tiny random model of gpt-oss: experts in MXFP4, and GGUF as llama.cpp's converter writes it.

`tests/checkpoints/test_gpt_oss.py` compares them with the converter's own files.
"""

import json
import pathlib
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

from helpers.families import write_checkpoint
from helpers.logits import GOLDEN
from jaxspec.checkpoints.hf_experts import decode_mxfp4

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
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def entries(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the metadata that describes the architecture, without the prefix of its name."""
    scaling = settings["rope_scaling"]
    return {
        "block_count": settings["num_hidden_layers"],
        "context_length": settings["max_position_embeddings"],
        "embedding_length": settings["hidden_size"],
        "feed_forward_length": settings["intermediate_size"],
        "expert_feed_forward_length": settings["intermediate_size"],
        "attention.head_count": settings["num_attention_heads"],
        "attention.head_count_kv": settings["num_key_value_heads"],
        "attention.key_length": settings["head_dim"],
        "attention.value_length": settings["head_dim"],
        "attention.sliding_window": settings["sliding_window"],
        "attention.layer_norm_rms_epsilon": float(settings["rms_norm_eps"]),
        "expert_count": settings["num_local_experts"],
        "expert_used_count": settings["num_experts_per_tok"],
        "rope.freq_base": float(settings["rope_theta"]),
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(scaling["factor"]),
        "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": float(scaling["beta_fast"]),
        "rope.scaling.yarn_beta_slow": float(scaling["beta_slow"]),
        "vocab_size": settings["vocab_size"],
    }


def packed(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns experts in ggml's MXFP4: the exponent comes first, and byte i holds the codes i and i + 16."""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
    raw = np.concatenate([scales[..., None], codes[..., :16] | codes[..., 16:] << 4], -1)
    return raw.reshape(*raw.shape[:2], -1)


def layer_tensors(tensors: dict[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    """Returns one tensor of a layer by its names in GGUF files; gates and ups stand in alternate rows."""
    array = tensors[part]
    if part.endswith("_scales"):
        return {}
    mxfp4 = part.endswith("_blocks")
    if part.startswith("mlp.experts.") and not part.endswith("_bias"):
        array = packed(array, tensors[part.replace("_blocks", "_scales")]) if mxfp4 else array.swapaxes(1, 2)
    if part.startswith("mlp.experts.gate_up_proj"):
        kind = "bias" if part.endswith("_bias") else "weight"
        return {f"ffn_{half}_exps.{kind}": array[:, i::2] for i, half in enumerate(("gate", "up"))}
    if part.startswith("mlp.experts.down_proj") and not part.endswith("_bias"):
        return {"ffn_down_exps.weight": array}
    for old, new in TENSORS.items():
        part = part.replace(old, new)
    return {part: array}


def write_gguf(path: pathlib.Path, folder: pathlib.Path, changes: dict[str, Any] | None = None) -> pathlib.Path:
    """Writes the model of a directory as llama.cpp's converter does; `changes` replaces entries of the metadata."""
    settings = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, CASE)
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (entries(settings) | (changes or {})).items():
        adders[type(value)](f"{CASE}.{key}", value)
    tensors = load_file(folder / "model.safetensors")
    layers: dict[str, dict[str, np.ndarray]] = {}
    found: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        if name in OUTER:
            found[OUTER[name]] = array
        else:
            layer, part = name.removeprefix("model.layers.").split(".", 1)
            layers.setdefault(layer, {})[part] = array
    for layer, own in layers.items():
        for part in own:
            found |= {f"blk.{layer}.{name}": array for name, array in layer_tensors(own, part).items()}
    for name, array in found.items():
        kind = gguf.GGMLQuantizationType.MXFP4 if array.dtype == np.uint8 else None
        writer.add_tensor(name, np.ascontiguousarray(array), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_blocks(path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
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
    tensors = {}
    for name, array in list(floats.items()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = array
            continue
        experts, inputs, outputs = array.shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(120, 126, blocks.shape[:3], np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats[name] = np.ascontiguousarray(decode_mxfp4(blocks, scales).swapaxes(1, 2))
    save_file(floats, path / "floats" / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, path / "blocks" / "model.safetensors", metadata={"format": "pt"})
    return path / "blocks", path / "floats"
