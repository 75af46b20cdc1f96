"""Tests Hugging Face directories: parameters, settings, refusals, and paths that leave the directory."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.checkpoints import (
    assert_same_params,
    hf_tensors,
    leaves,
    random_params,
    tiny_config,
    write_gguf,
    write_hf,
)
from jaxspec.checkpoints import hub, presets
from jaxspec.checkpoints.base import TokenizerSource
from jaxspec.checkpoints.load import read_params
from jaxspec.checkpoints.source import open_checkpoint, open_source
from jaxspec.errors import CheckpointError, FetchError, InvalidConfig, UnknownName
from jaxspec.models.rope import Rope

pytestmark = pytest.mark.quick

CONFIG = tiny_config()
PARAMS = random_params(CONFIG)
UP = "model.layers.1.mlp.up_proj.weight"
SHARD = "model-00001-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False}, {"head_dim": 8}])
def test_params_are_the_weights(tmp_path, shards, changes):
    config = tiny_config(**changes)
    params = random_params(config, 1)
    checkpoint = open_checkpoint(write_hf(tmp_path, config, params, shards=shards))
    assert checkpoint.config == config
    assert_same_params(read_params(checkpoint), params)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_weights(tmp_path, dtype):
    checkpoint = open_checkpoint(write_hf(tmp_path, CONFIG, PARAMS, dtype=dtype))
    for name, array in leaves(read_params(checkpoint)).items():
        np.testing.assert_array_equal(array, leaves(PARAMS)[name].astype(dtype).astype(np.float32))
    for name, array in leaves(read_params(checkpoint, "bfloat16")).items():
        assert array.dtype == (np.float32 if array.ndim == 1 else ml_dtypes.bfloat16)  # norms stay exact
        np.testing.assert_array_equal(array, leaves(PARAMS)[name].astype(dtype).astype(array.dtype))


# --- config.json --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        ({"head_dim": None}, "head_dim", 16),
        ({"rope_theta": 500000}, "rope", Rope(500000.0)),
        ({"rope_theta": None}, "rope", Rope(10000.0)),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 3e4, "rope_type": "default"}}, "rope", Rope(3e4)),
        ({"rope_scaling": {"rope_type": "default"}}, "rope", Rope(10000.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope", Rope(10000.0, divisors=(2.0,) * 8)),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope", Rope(10000.0, width=8)),
        ({"rms_norm_eps": None}, "norm_eps", 1e-6),
        ({"sliding_window": 64}, "window", None),
        ({"model_type": "mistral", "sliding_window": 64}, "window", 64),
        ({"model_type": "mistral"}, "window", 4096),
        ({"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}, "max_position", 128),
    ],
)
def test_settings_that_may_vary(tmp_path, settings, field, value):
    config = open_checkpoint(write_hf(tmp_path, CONFIG, PARAMS, settings=settings)).config
    assert getattr(config, field) == value


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "gemma3"}, "model_type 'gemma3' is not supported; supported: llama, mistral"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type 'dynamic' are not supported; supported: def"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing, expected a positive number"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor is '4', expected a positive number"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "mscale": []}}, "mscale is .., expected a positive number"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', expected an object"),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rotary embeddings: .*division"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3"}}, "low_freq_factor is missing"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor is 4.0, expected more than 4.0",
        ),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor is .1.0., expected a list of 8"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor is 1.5, expected 0 to 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.1}}, "even width of at least 2, got 1"),
        ({"rope_interleaved": True}, "rope_interleaved is True, expected False"),
        ({"attention_bias": True}, "tensors missing: model.layers.0.self_attn.k_proj.bias"),
        ({"mlp_bias": "x"}, "mlp_bias is 'x', expected true or false"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported; supported: silu"),
        ({"layer_types": ["full_attention"]}, "layer_types is .* expected 2 of full_attention and sliding"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 0},
            "sliding_window is 0, expected a positive",
        ),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, expected None"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is .*'awq'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64', expected a positive whole number"),
        ({"hidden_size": 10**400}, "not JSON: a whole number of 401 digits, expected at most 40"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5, expected a positive whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected at most 4096"),
        ({"num_hidden_layers": 4096}, "4096 layers, but only 20 tensors"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, expected a positive whole number"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_kv_heads"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0, expected a positive number"),
        ({"vocab_size": 95}, r"embed_tokens.weight has shape \[96, 64\], expected \[95, 64\]"),
        ({"tie_word_embeddings": False}, "tensors missing: lm_head.weight"),
        ({"eos_token_id": 96}, "special token id 96, expected 0 .. 95"),
        ({"bos_token_id": "1"}, "special token id '1'"),
    ],
)
def test_settings_that_are_refused(tmp_path, settings, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(write_hf(tmp_path, CONFIG, PARAMS, settings=settings))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("raw", ["", "{", "[]", "1", "[" * 100_000, b"\xff\xfe{"])
def test_a_config_that_is_no_json_object(tmp_path, raw):
    write_hf(tmp_path, CONFIG, PARAMS)
    (tmp_path / "config.json").write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    with pytest.raises(CheckpointError, match=r"config.json: (not JSON|contains a|lists and objects nested deeper)"):
        open_checkpoint(tmp_path)


# --- text ---------------------------------------------------------------------------------------------------


def test_text_settings(tmp_path):
    files = {
        "generation_config.json": {"eos_token_id": [2, 5]},
        "tokenizer.json": {"post_processor": None},
        "tokenizer_config.json": {
            "bos_token": {"content": "<s>", "special": True},
            "eos_token": "</s>",
            "pad_token": None,
            "add_bos_token": True,
            "chat_template": "{{ old }}",
        },
    }
    checkpoint = open_checkpoint(write_hf(tmp_path, CONFIG, PARAMS, files=files))
    assert checkpoint.stop_ids == (2, 5)
    assert (checkpoint.bos_id, checkpoint.add_bos) == (1, True)
    assert checkpoint.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert checkpoint.chat_template == "{{ old }}"
    assert checkpoint.tokenizer == TokenizerSource(json_path=str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ new }}")
    assert open_checkpoint(tmp_path).chat_template == "{{ new }}"


def test_text_settings_that_are_absent(tmp_path):
    checkpoint = open_checkpoint(write_hf(tmp_path, CONFIG, PARAMS, settings={"bos_token_id": None}))
    assert checkpoint.stop_ids == (2,)
    assert (checkpoint.bos_id, checkpoint.add_bos) == (None, False)
    assert (checkpoint.tokenizer, checkpoint.chat_template, checkpoint.special_tokens) == (None, None, {})


def test_one_of_several_chat_templates(tmp_path):
    named = [
        7,
        {"name": ["x"]},
        {"name": "tool_use", "template": "{{ a }}"},
        {"name": "default", "template": "{{ b }}"},
    ]
    files = {"tokenizer_config.json": {"chat_template": named}}
    assert open_checkpoint(write_hf(tmp_path, CONFIG, PARAMS, files=files)).chat_template == "{{ b }}"


@pytest.mark.parametrize(("first", "expected"), [("SpecialToken", True), ("Sequence", False)])
def test_add_bos_from_the_post_processor(tmp_path, first, expected):
    template = {"type": "TemplateProcessing", "single": [{first: {"id": "x"}}, {"Sequence": {"id": "A"}}]}
    steps = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template]}
    files = {"tokenizer.json": {"post_processor": steps}}
    assert open_checkpoint(write_hf(tmp_path, CONFIG, PARAMS, files=files)).add_bos is expected


def test_a_tokenizer_has_one_source():
    for wrong in ({}, {"json_path": "a", "gguf": {}}):
        with pytest.raises(InvalidConfig, match="exactly one"):
            TokenizerSource(**wrong)


# --- tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({UP: None}, f"tensors missing: {UP}"),
        (
            {"model.layers.2.mlp.up_proj.weight": np.ones(2)},
            "tensors not expected: model.layers.2.mlp.up_proj",
        ),
        ({UP: np.ones((64, 96), np.float32)}, r"up_proj.weight has shape \[64, 96\], expected \[96, 64\]"),
        ({UP: np.ones((96, 64), np.int8)}, "up_proj.weight has type I8, expected one of"),
        ({UP: np.full((96, 64), np.nan, np.float32)}, f"tensor {UP} has weights that are not finite"),
        ({UP: np.full((96, 64), np.inf, np.float16)}, f"tensor {UP} has weights that are not finite"),
        ({"lm_head.weight": PARAMS["embed"] + 1}, "lm_head.weight differs from model.embed_tokens.weight"),
    ],
)
def test_tensors_that_are_refused(tmp_path, shards, tensors, words):
    held = {name: array if array is None or array.ndim > 1 else array.astype("f4") for name, array in tensors.items()}
    with pytest.raises(CheckpointError, match=words) as caught:
        read_params(open_checkpoint(write_hf(tmp_path, CONFIG, PARAMS, tensors=held, shards=shards)))
    assert str(tmp_path) in str(caught.value)


def test_tensors_that_repeat_what_is_known(tmp_path):
    again = {
        "lm_head.weight": PARAMS["embed"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, "f4"),
    }
    assert_same_params(read_params(open_checkpoint(write_hf(tmp_path, CONFIG, PARAMS, tensors=again))), PARAMS)


def test_weights_that_are_too_large_for_bfloat16(tmp_path):
    config = tiny_config(tie_embeddings=False)
    params = random_params(config) | {"head": np.full((96, 64), 3.4028e38, np.float32)}
    checkpoint = open_checkpoint(write_hf(tmp_path, config, params))
    assert_same_params(read_params(checkpoint), params)
    with pytest.raises(CheckpointError, match="tensor head has weights that are not finite"):
        read_params(checkpoint, "bfloat16")


def test_every_truncation_is_refused(tmp_path):
    write_hf(tmp_path, CONFIG, PARAMS)
    raw = (tmp_path / "model.safetensors").read_bytes()
    for size in (0, 1, 8, 100, len(raw) // 2, len(raw) - 1):
        (tmp_path / "model.safetensors").write_bytes(raw[:size])
        with pytest.raises(CheckpointError, match=r"model.safetensors: not a valid safetensors file"):
            open_checkpoint(tmp_path)


def test_pickles_are_never_opened(tmp_path):
    write_hf(tmp_path, CONFIG, PARAMS)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin can contain code and are never opened"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"has no safetensors weights: expected model.safetensors"):
        open_checkpoint(tmp_path)


# --- shards and paths ---------------------------------------------------------------------------------------


def change_index(directory, change):
    file = directory / INDEX
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "shard",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "C:model.safetensors",
        "a\0.safetensors",
        "model.bin",
        "..",
        "",
        7,
        None,
    ],
)
def test_shards_are_named_by_plain_file_names(tmp_path, shard):
    write_hf(tmp_path, CONFIG, PARAMS, shards=3)
    change_index(tmp_path, lambda index: index["weight_map"].update({UP: shard}))
    with pytest.raises(CheckpointError, match=r"expected the plain name of a .safetensors file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("shard", ["stray.safetensors", "x" * 5000 + ".safetensors"])
def test_shards_that_are_not_there(tmp_path, shard):
    write_hf(tmp_path, CONFIG, PARAMS, shards=3)
    change_index(tmp_path, lambda index: index["weight_map"].update({UP: shard}))
    with pytest.raises(CheckpointError, match=r"there is no such file|tensors not expected"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("change", [lambda index: index.clear(), lambda index: index.update(weight_map=[])])
def test_an_index_without_tensors(tmp_path, change):
    write_hf(tmp_path, CONFIG, PARAMS, shards=3)
    change_index(tmp_path, change)
    with pytest.raises(CheckpointError, match="weight_map is missing or empty"):
        open_checkpoint(tmp_path)


def test_index_and_shards_hold_the_same_tensors(tmp_path):
    write_hf(tmp_path, CONFIG, PARAMS, shards=3)
    change_index(tmp_path, lambda index: index["weight_map"].update({"ghost": SHARD}))
    with pytest.raises(CheckpointError, match=f"{SHARD}: tensors missing: ghost"):
        open_checkpoint(tmp_path)
    write_hf(tmp_path, CONFIG, PARAMS, shards=3)
    change_index(tmp_path, lambda index: index["weight_map"].pop(next(iter(index["weight_map"]))))
    with pytest.raises(CheckpointError, match=f"{SHARD}: tensors not expected: model.embed_tokens.weight"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_links_may_not_lead_out(tmp_path, name):
    inside = write_hf(tmp_path / "inside", CONFIG, PARAMS, files={"tokenizer.json": {}})
    shutil.move(inside / name, tmp_path / name)
    (inside / name).symlink_to(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name}: leads to .*, expected a file in"):
        open_checkpoint(inside)


def test_the_layout_of_the_hub_cache(tmp_path):
    snapshot = write_hf(tmp_path / "models--a--b" / "snapshots" / "0123", CONFIG, PARAMS, shards=3)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for i, file in enumerate(list(snapshot.iterdir())):
        file.rename(blobs / f"{i:040x}")
        file.symlink_to(f"../../blobs/{i:040x}")
    assert_same_params(read_params(open_checkpoint(snapshot)), PARAMS)


# --- what a user names --------------------------------------------------------------------------------------


def test_open_source_takes_a_preset_a_path_or_a_repository(tmp_path, monkeypatch):
    directory = write_hf(tmp_path / "hf", CONFIG, PARAMS)
    file = write_gguf(tmp_path / "model.gguf", CONFIG, PARAMS)
    asked = []
    monkeypatch.setattr(hub, "fetch_repository", lambda *name, more=(): asked.append(name) or directory)
    monkeypatch.setattr(presets, "fetch_preset", lambda name, report: file)
    assert open_source(directory).source == str(directory)
    assert open_source(str(file)).source == str(file)
    assert open_source("organization/name").source == "organization/name"
    assert open_source("organization/name@v1.0").source == "organization/name@v1.0"
    open_source("organization/name", revision="main")
    assert asked == [("organization/name", None), ("organization/name", "v1.0"), ("organization/name", "main")]
    assert open_source("smollm2-135m-instruct").source == "smollm2-135m-instruct"


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("smollm2-135m", UnknownName, "Did you mean 'smollm2-135m-instruct'"),
        ("a b/c", UnknownName, "unknown model"),
        ("./nowhere", CheckpointError, "no such file or directory"),
        ("models/model.gguf", CheckpointError, "no such file or directory"),
        ("a\0b", InvalidConfig, r"'a\\x00b' contains a NUL character"),
    ],
)
def test_names_of_nothing(source, error, words):
    with pytest.raises(error, match=words):
        open_source(source)


def test_other_files(tmp_path):
    save_file(hf_tensors(CONFIG, PARAMS), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="pass its directory"):
        open_checkpoint(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "x.gguf").touch()
    with pytest.raises(CheckpointError, match=r"x.gguf: cannot be read"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be used: File name too long"):
        open_checkpoint("x" * 5000)


def test_a_repository_that_cannot_be_fetched(monkeypatch):
    import huggingface_hub

    def refuse(name, **options):
        assert not any("bin" in pattern for pattern in options["allow_patterns"])
        raise ConnectionError("no network\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(
        FetchError,
        match=r"a/b: neither a preset nor .*: the Hub cannot be reached, and the files are .* .no network.$",
    ):
        open_source("a/b")
