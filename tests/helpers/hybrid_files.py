"""GGUF files of tiny random models with Gated DeltaNet or experts, as llama.cpp's converter writes them.

`tests/checkpoints/test_converted.py` compares them with the converter's own files.
"""

import zlib
from typing import Any

import gguf
import numpy as np

from helpers.blocks import raw_weights
from helpers.families import random_tensor
from helpers.logits import GOLDEN
from helpers.narrow import not_none
from jaxspec.checkpoints.base import file_parts, grouped_rows
from jaxspec.checkpoints.hf_config import read_config
from jaxspec.models.config import DeltaSizes

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
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
}
"""The names in GGUF files, by llama.cpp's conversion/qwen.py and src/models/qwen35.cpp."""
NEXTN = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}
"""The names in the block for multi-token prediction."""


def tiled(array, sizes: DeltaSizes, first: int = 0, axis: int = 0):
    """Moves the value heads from `first` on into llama.cpp's order, in which a plain repeat pairs them with keys."""
    head, values = np.split(np.moveaxis(array, axis, 0), [first])
    each = values.reshape(sizes.key_heads, sizes.value_heads // sizes.key_heads, -1, *values.shape[1:])
    return np.moveaxis(np.concatenate([head, each.swapaxes(0, 1).reshape(values.shape)]), 0, axis)


ARCHITECTURES = {
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
}


def in_gguf(name: str, array: np.ndarray, sizes: DeltaSizes | None, grouped: bool = False) -> np.ndarray:
    """Returns a tensor as the converter writes it; `grouped` as in `Architecture`."""
    if sizes is None:
        return array
    if (name in NEXTN and name != "mtp.fc.weight") or (name.endswith("norm.weight") and "linear_attn" not in name):
        array = array + 1
    if not grouped and name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        array = tiled(array, sizes, 2 * sizes.keys)
    if not grouped and name.endswith(("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias")):
        array = tiled(array, sizes)
    if not grouped and name.endswith("out_proj.weight"):
        array = tiled(array, sizes, axis=1)
    array = -np.exp(array) if name.endswith("A_log") else array
    return array[:, 0] if name.endswith("conv1d.weight") else array


def widened(case: str, **sizes: int) -> dict:
    """Returns the settings of a case with other sizes, and the shapes of its tensors."""
    settings = GOLDEN[case]["settings"] | sizes
    config, family = read_config("config.json", settings)
    names, shapes = family.all_names(config, fused=True), {}
    for name, shape in config.param_shapes().items():
        shapes |= {file: list(own) for file, own in file_parts(config, names, name, shape).shapes.items()}
    return {"settings": settings, "shapes": shapes}


def encoded(name: str, array: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Returns a matrix in blocks; in a type that the gguf package cannot write, random weights of the same size."""
    if kind not in (gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K):
        return gguf.quants.quantize(array, kind)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    raw = raw_weights(rng, kind.name, array.size // array.shape[-1], array.shape[-1], float(array.std()))
    return raw.reshape(*array.shape[:-1], -1)


def joined(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors with the projections of attention, and those of experts, in one tensor each."""
    forms = {("attn_q", "attn_k", "attn_v"): "attn_qkv", ("ffn_gate_exps", "ffn_up_exps"): "ffn_gate_up_exps"}
    for name in [name for name in found if name.endswith(("attn_q.weight", "ffn_gate_exps.weight"))]:
        first = name.split(".")[2]
        parts = next(parts for parts in forms if parts[0] == first)
        arrays = [found.pop(name.replace(first, part)) for part in parts]
        found[name.replace(first, forms[parts])] = np.concatenate(arrays, axis=arrays[0].ndim - 2)
    return found


def write_gguf(path, case: str, metadata=None, tensors=None, golden=None, types=None, join: bool = False):
    """Writes the model of a case, with a block for multi-token prediction that is only named, or whole in `golden`.

    Args:
        path: the file.
        case: the name from which the weights follow.
        metadata: changes of the metadata.
        tensors: tensors that are written in place of others.
        golden: the settings and shapes; those of `GOLDEN` by default.
        types: the number formats of matrices whose name in the file has one of these ends.
        join: whether to write several matrices as one tensor, see `joined`.
    """
    golden = golden or GOLDEN[case]
    settings, shapes = golden["settings"], golden["shapes"]
    config, _ = read_config("config.json", settings)
    sizes, experts = config.delta, config.experts
    architecture = ARCHITECTURES[settings["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    entries: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    if settings.get("intermediate_size") is not None:
        entries["feed_forward_length"] = settings["intermediate_size"]
    if sizes is not None:
        entries |= {
            "block_count": config.num_layers + 1,
            "nextn_predict_layers": 1,
            "rope.dimension_count": not_none(config.rope.width),
            "full_attention_interval": 4,
            "ssm.conv_kernel": sizes.taps,
            "ssm.state_size": sizes.key_width,
            "ssm.group_count": sizes.key_heads,
            "ssm.time_step_rank": sizes.value_heads,
            "ssm.inner_size": sizes.values,
        }
    if experts is not None:
        entries |= {
            "expert_count": experts.count,
            "expert_used_count": experts.per_token,
            "expert_feed_forward_length": experts.width,
        }
        if experts.shared_width is not None:
            entries["expert_shared_feed_forward_length"] = experts.shared_width
    if sizes is not None:
        entries["attention.recurrent_layers"] = [*config.recurrent, False]
    if sections := settings.get("rope_parameters", {}).get("mrope_section"):
        entries["rope.dimension_sections"] = [*sections, 0]
    for key, value in (entries | (metadata or {})).items():
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)
        else:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.rope.freq_base", config.rope.theta)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.norm_eps)
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    found, grouped = {}, architecture == "qwen3next"
    for name, shape in shapes.items():
        if name.startswith(("model.layers.", "mtp.layers.0.")):
            layer, part = name.removeprefix("model.layers.").removeprefix("mtp.layers.").split(".", 1)
            layer = config.num_layers if name.startswith("mtp.") else layer
            if part == "mlp.experts.gate_up_proj":
                halves = np.split(random_tensor(case, name, shape), 2, axis=1)
                found |= {f"blk.{layer}.ffn_{kind}_exps.weight": half for kind, half in zip(("gate", "up"), halves)}
                continue
            if part.endswith("in_proj_qkvz.weight"):
                assert sizes is not None
                rows = random_tensor(case, name, shape)[grouped_rows(sizes, "qkvz")]
                halves = rows[: sizes.channels], rows[sizes.channels :]
                found |= {f"blk.{layer}.attn_{kind}.weight": half for kind, half in zip(("qkv", "gate"), halves)}
                continue
            plain = sizes is None and part == "post_attention_layernorm.weight"
            file = f"blk.{layer}.{'ffn_norm.weight' if plain else TENSORS[part]}"
        elif name.startswith("mtp."):
            file = f"blk.{config.num_layers}.{NEXTN[name]}"
        else:
            file = names.get(name, "output.weight")
        found[file] = in_gguf(name, random_tensor(case, name, shape), sizes, grouped)
    if sizes is not None:
        found.setdefault(f"blk.{config.num_layers}.nextn.eh_proj.weight", np.zeros((4, 8), np.float32))
    found = joined(found) if join else found
    for name, array in (found | (tensors or {})).items():
        array = np.ascontiguousarray(array, np.float32)
        kind = next((kind for end, kind in (types or {}).items() if name.endswith(end) and array.ndim > 1), None)
        data = array if kind is None else encoded(name, array, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
