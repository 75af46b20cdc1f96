"""Tiny random checkpoints in every format that is read, for the tests of the whole library."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import save_file

from jaxspec.models.config import ModelConfig

TYPES = gguf.GGMLQuantizationType


def tiny_config(**changes) -> ModelConfig:
    """Two layers with grouped heads; every row is a multiple of 32, so that it can be quantised."""
    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position": 128,
    }
    return ModelConfig(**sizes | changes)


# Text that GPT-2's spelling of bytes can hold, and special tokens at both ends.
_TOKENS = ["<s>", "</s>", "ab", *map(chr, range(34, 123)), "\x1b[2J"]
VOCABULARY = {
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*_TOKENS, *(f"<{i}>" for i in range(tiny_config().vocab_size - len(_TOKENS)))],
    "tokenizer.ggml.token_type": [3, 3, *[1] * 90, *[3] * (tiny_config().vocab_size - 92)],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.chat_template": "\n  {% for m in messages %}\n{{ m.content }}{% endfor %}",
}
"""A GGUF tokenizer with a chat template, of the size of `tiny_config`."""


def random_params(config: ModelConfig, seed: int = 0, scale: float = 0.1) -> dict:
    """A float32 parameter tree of numpy arrays, as `read_params` gives."""
    rng = np.random.default_rng(seed)
    tree: dict = {"layers": [{} for _ in range(config.num_layers)]}
    for name, shape in config.param_shapes().items():
        array = rng.normal(1.0 if "norm" in name else 0.0, scale, shape).astype(np.float32)
        *layer, leaf = name.split(".")
        (tree["layers"][int(layer[1])] if layer else tree)[leaf] = array
    return tree


def leaves(params: dict) -> dict[str, np.ndarray]:
    """The arrays of a parameter tree by canonical name."""
    flat = {name: value for name, value in params.items() if name != "layers"}
    for i, layer in enumerate(params["layers"]):
        flat |= {f"layers.{i}.{name}": value for name, value in layer.items()}
    return flat


def assert_same_params(got: dict, expected: dict) -> None:
    got, expected = leaves(got), leaves(expected)
    assert got.keys() == expected.keys()
    for name in expected:
        assert got[name].dtype == expected[name].dtype, name
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


def hf_tensors(config: ModelConfig, params: dict) -> dict[str, np.ndarray]:
    """The tensors of a Hugging Face llama: one matrix per projection, [out, in]."""
    width, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["norm"]}
    if "head" in params:
        tensors["lm_head.weight"] = params["head"]
    for i, layer in enumerate(params["layers"]):
        parts = dict(zip("qkv", np.split(layer["qkv"], [width, width + key], axis=1), strict=True))
        named = {f"self_attn.{name}_proj": part for name, part in parts.items()}
        named["mlp.gate_proj"], named["mlp.up_proj"] = np.split(layer["gate_up"], 2, axis=1)
        named |= {"self_attn.o_proj": layer["out"], "mlp.down_proj": layer["down"]}
        named |= {"input_layernorm": layer["attn_norm"], "post_attention_layernorm": layer["mlp_norm"]}
        tensors |= {f"model.layers.{i}.{name}.weight": np.ascontiguousarray(array.T) for name, array in named.items()}
    return tensors


def hf_config(config: ModelConfig, **changes) -> dict:
    """The config.json of a Hugging Face llama; a change to None leaves the entry out."""
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope.theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_position,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {key: value for key, value in (settings | changes).items() if value is not None}


def write_hf(
    directory: pathlib.Path,
    config: ModelConfig,
    params: dict,
    *,
    shards: int = 1,
    dtype=np.float32,
    settings: dict | None = None,
    tensors: dict | None = None,
    files: dict[str, Any] | None = None,
) -> pathlib.Path:
    """Writes a Hugging Face directory and gives its path.

    `settings` changes entries of config.json; `tensors` adds or replaces tensors, or drops them where None;
    `files` adds JSON files (a str is written as it is).
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config(config, **settings or {})))
    for name, content in (files or {}).items():
        (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))
    held = {name: array.astype(dtype) for name, array in hf_tensors(config, params).items()}
    held = {name: array for name, array in (held | (tensors or {})).items() if array is not None}
    if shards == 1:
        save_file(held, directory / "model.safetensors")
        return directory
    index = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(held.items())[i::shards])
        save_file(part, directory / name)
        index |= dict.fromkeys(part, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return directory


def write_bytes(directory: pathlib.Path, config: ModelConfig, params: dict) -> pathlib.Path:
    """A Hugging Face directory whose tokens are bytes, after three special ones."""
    special = ["<unk>", "<s>", "</s>"]
    names = [*special, *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({name: i for i, name in enumerate(names)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(special)
    return write_hf(directory, config, params, files={"tokenizer.json": inner.to_str()})


def gguf_tensors(config: ModelConfig, params: dict) -> dict[str, np.ndarray]:
    """The tensors of a llama GGUF: as Hugging Face's, with the rotary pairs of rows side by side."""
    renamed = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    tensors = {}
    for name, array in hf_tensors(config, params).items():
        if ".q_proj" in name or ".k_proj" in name:
            heads = array.reshape(-1, 2, config.head_dim // 2, array.shape[1])
            array = heads.swapaxes(1, 2).reshape(array.shape)
        for old, new in renamed.items():
            name = name.replace(old, new)
        tensors[name] = array
    return tensors


def write_gguf(
    path: pathlib.Path,
    config: ModelConfig,
    params: dict,
    *,
    kind: str = "F32",
    architecture: str = "llama",
    metadata: dict[str, Any] | None = None,
    tensors: dict | None = None,
    raw: dict[str, tuple[str, np.ndarray]] | None = None,
) -> pathlib.Path:
    """Writes a GGUF file and gives its path; matrices are of type `kind`, norms of F32, and `raw` as they are given.

    `metadata` adds or replaces entries (int -> uint32, float -> float32, bool, str, list), or drops them
    where None; `tensors` does the same with tensors, under their GGUF names.
    """
    entries: dict[str, Any] = {
        "llama.context_length": config.max_position,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.rope.freq_base": float(config.rope.theta),
        "llama.attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(config.vocab_size)],
        "tokenizer.ggml.token_type": [1] * config.vocab_size,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    writer = gguf.GGUFWriter(path, architecture)
    writers: list[tuple[type, Callable[[str, Any], None]]] = [
        (bool, writer.add_bool),
        (int, writer.add_uint32),
        (float, writer.add_float32),
        (str, writer.add_string),
        (list, writer.add_array),
    ]
    for key, value in (entries | (metadata or {})).items():
        for python, add in writers:
            if isinstance(value, python):
                add(key, value)
                break
    for name, array in (gguf_tensors(config, params) | (tensors or {})).items():
        if array is not None:
            given = kind if array.ndim == 2 else "F32"
            given, held = (raw or {}).get(name) or (given, gguf.quants.quantize(array, TYPES[given]))
            writer.add_tensor(name, held, raw_dtype=TYPES[given])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
