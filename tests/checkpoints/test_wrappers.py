"""Tests text models inside larger ones: the text part is read, to the bit, and what is left out is named."""

import itertools
import json
import zlib

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.bounds import bounded
from helpers.checkpoints import assert_same_params, random_params, tiny_config, write_gguf
from jaxspec import load
from jaxspec.checkpoints import hf_wrappers
from jaxspec.checkpoints.base import file_names, file_shapes
from jaxspec.checkpoints.hf_config import read_config
from jaxspec.checkpoints.hf_families import FAMILIES
from jaxspec.checkpoints.load import read_params
from jaxspec.checkpoints.source import open_checkpoint
from jaxspec.errors import CheckpointError

pytestmark = pytest.mark.quick

DEFAULT_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "sliding_window": 16,
}  # fmt: skip
TEXTS = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": None, "rope_theta": 1e9},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "phi3": {"rms_norm_eps": 1e-5},
    "gemma3_text": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
}
NAMES = [
    ("language_model.model.", "language_model.lm_head.weight"),
    ("language_model.model.", "lm_head.weight"),
    ("model.language_model.", "lm_head.weight"),
    ("model.language_model.model.", "model.language_model.lm_head.weight"),
    ("language_model.", "lm_head.weight"),
    ("model.text_model.", "lm_head.weight"),
]
"""The prefix and the head's name in wrappers of transformers, by version and kind."""
OTHERS = {
    "vision_tower.encoder.layers.0.self_attn.q_proj.weight": (3, 3),
    "multi_modal_projector.linear.weight": (3, 2),
    "model.audio_tower.embed_positions.weight": (2, 2),
}


def text_tensors(settings: dict) -> dict[str, np.ndarray]:
    """Random tensors of a text model, by the names of its own checkpoints."""
    config, family = read_config("config.json", settings)
    found = {}
    for name, shape in config.param_shapes().items():
        files, kind = file_names(family.all_names(config), name)
        for file, size in zip(files, file_shapes(config, kind, shape, len(files)), strict=True):
            rng = np.random.default_rng(zlib.crc32(file.encode()))
            found[file] = rng.normal(0, 0.1, size).astype(np.float32)
    return found


def write(folder, settings: dict, tensors: dict):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors")
    return folder


def wrapped(tensors: dict, prefix: str, head: str) -> dict:
    others = {name: np.zeros(shape, np.float32) for name, shape in OTHERS.items()}
    named = {
        head if name == "lm_head.weight" else prefix + name.removeprefix("model."): a for name, a in tensors.items()
    }
    return named | others


@pytest.mark.parametrize(("kind", "outside"), itertools.product(TEXTS, (False, True)))
def test_the_text_part_is_that_of_the_text_model(kind, outside, tmp_path):
    """72 wrappers: each family, by each way of naming, with entries of the tokens inside or outside `text_config`."""
    text = DEFAULT_SIZES | TEXTS[kind] | {"model_type": kind, "bos_token_id": 1, "eos_token_id": 2}
    tensors = text_tensors(text)
    alone = open_checkpoint(write(tmp_path / "alone", text, tensors))
    expected = read_params(alone)
    for i, (prefix, head) in enumerate(NAMES):
        top = {"model_type": "wrapper", "vision_config": {"hidden_size": 8}}
        inner = dict(text)
        if outside:
            top |= {
                key: inner.pop(key) for key in ("bos_token_id", "eos_token_id", "tie_word_embeddings") if key in inner
            }
        found = open_checkpoint(write(tmp_path / str(i), top | {"text_config": inner}, wrapped(tensors, prefix, head)))
        assert found.config == alone.config
        assert (found.stop_ids, found.bos_id) == ((2,), 1)
        assert set(found.left_out) == set(OTHERS)
        assert_same_params(read_params(found), expected)


PUBLISHED = {
    # google/gemma-3-4b-it and -12b-it, llava-hf/llava-1.5-7b-hf, mistralai/Mistral-Small-3.1-24B-Instruct-2503
    "gemma-3-4b": (
        {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
         "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        {"vocab_size": 262208, "num_heads": 8, "num_kv_heads": 4, "head_dim": 256, "tie_embeddings": True,
         "max_position": 131072, "window": 1024, "norm_eps": 1e-6, "query_scale": None},
    ),
    "gemma-3-12b": (
        {"hidden_size": 3840, "intermediate_size": 15360, "model_type": "gemma3_text", "num_attention_heads": 16,
         "num_hidden_layers": 48, "num_key_value_heads": 8, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
         "sliding_window": 1024},
        {"vocab_size": 262208, "num_heads": 16, "num_kv_heads": 8, "head_dim": 256, "num_layers": 48},
    ),
    "gemma-3-27b": (
        {"head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
         "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
         "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        {"head_dim": 128, "num_heads": 32, "query_scale": 168**-0.5},
    ),
    "llava-1.5-7b": (
        {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064},
        {"hidden_size": 4096, "intermediate_size": 11008, "num_layers": 32, "num_heads": 32, "num_kv_heads": 32,
         "head_dim": 128, "vocab_size": 32064, "tie_embeddings": False},
    ),
    "mistral-small-3.1": (
        {"head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 32768,
         "max_position_embeddings": 131072, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40,
         "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": None,
         "vocab_size": 131072},
        {"head_dim": 128, "window": None, "num_layers": 40, "vocab_size": 131072, "max_position": 131072},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_leave_out_what_transformers_assumes(name):
    text, expected = PUBLISHED[name]
    settings = hf_wrappers.text_settings({"model_type": "any", "text_config": text})
    config, _ = read_config("config.json", settings)
    assert {key: getattr(config, key) for key in expected} == expected
    if name.startswith("gemma"):  # global layers are scaled, those with a window are not
        assert config.rope.theta == 1e6
        assert set(config.rope.divisors) == {8.0}
        assert config.window_rope is not None
        assert (config.window_rope.theta, config.window_rope.divisors) == (1e4, ())
        assert [config.window_of(i) for i in range(6)] == [1024] * 5 + [None]


def test_sizes_are_known_of_every_family():
    assert hf_wrappers.DEFAULT_SIZES.keys() == FAMILIES.keys()


def test_many_prefixes_take_little_time():
    """A header of anyone may name tens of thousands of parts with an embedding."""
    names = [f"part{i}.{hf_wrappers.EMBED}" for i in range(50_000)]
    with bounded():
        assert hf_wrappers.text_names(names) == ({name: name for name in names}, ())


def test_a_flat_config_over_prefixed_tensors_is_read(tmp_path):
    text = DEFAULT_SIZES | TEXTS["gemma3_text"] | {"model_type": "gemma3_text"}
    tensors = text_tensors(text)
    alone = read_params(open_checkpoint(write(tmp_path / "alone", text, tensors)))
    found = open_checkpoint(write(tmp_path / "flat", text, wrapped(tensors, *NAMES[0])))
    assert_same_params(read_params(found), alone)


def test_what_is_left_out_is_said_once(tmp_path):
    text = DEFAULT_SIZES | TEXTS["llama"] | {"model_type": "llama"}
    place = write(tmp_path / "w", {"model_type": "llava", "text_config": text}, wrapped(text_tensors(text), *NAMES[2]))
    said = []
    load(place, report=said.append, kernels=False)
    assert len(said) == 1
    assert "only the text model is loaded; 3 tensors of other parts are left out: model.audio_tower" in said[0]
    with pytest.warns(UserWarning, match="3 tensors of other parts are left out"):
        load(place, kernels=False)


def test_other_text_models_are_named(tmp_path):
    place = write(tmp_path / "w", {"model_type": "qwen9_vl", "text_config": {"model_type": "qwen9"}}, {"a": np.ones(1)})
    with pytest.raises(CheckpointError, match="model_type 'qwen9_vl' with a text model 'qwen9' is not supported"):
        open_checkpoint(place)
    for odd in ([], "x", 3, {"model_type": {}}, {"model_type": None}):
        (place / "config.json").write_text(json.dumps({"model_type": "x", "text_config": odd}))
        with pytest.raises(CheckpointError, match=r"model_type 'x'.* is not supported"):
            open_checkpoint(place)


def test_encoders_in_a_gguf_file_are_left_out(tmp_path):
    config = tiny_config()
    params = random_params(config)
    plain = open_checkpoint(write_gguf(tmp_path / "plain.gguf", config, params))
    more = {f"v.blk.0.attn_{k}.weight": np.zeros((4, 4), np.float32) for k in "qkv"}
    more |= {
        "mm.input_projection.weight": np.zeros((4, 2), np.float32),
        "mm.soft_emb_norm.weight": np.ones(3, np.float32),
    }
    found = open_checkpoint(write_gguf(tmp_path / "more.gguf", config, params, tensors=more))
    assert set(found.left_out) == set(more)
    assert_same_params(read_params(found), read_params(plain))
