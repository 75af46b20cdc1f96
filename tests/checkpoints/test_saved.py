"""Tests jaxspec's own checkpoints: `load` reads exactly what `save` writes."""

import errno
import gc
import json
import os
import resource

import chex
import jax
import pytest

from helpers.checkpoints import random_params, tiny_config, write_gguf
from helpers.damage import damaged
from helpers.narrow import instance
from jaxspec import load, save
from jaxspec.checkpoints import saved
from jaxspec.checkpoints.source import open_checkpoint
from jaxspec.errors import CheckpointError, InvalidConfig, JaxspecError
from jaxspec.models.model import Model
from jaxspec.models.rope import Rope
from jaxspec.models.transformer import TransformerLM
from jaxspec.testing import TableLM

pytestmark = pytest.mark.quick

CONFIG = tiny_config(
    window=8,
    windowed=(True, False),
    window_rope=Rope(500.0),
    rope=Rope(1e4, divisors=(2.0,) * 8, scale=1.5),
    qkv_bias=True,
    qk_norm=True,
    tie_embeddings=False,
)
LM = TransformerLM(CONFIG, "bfloat16")


def assert_same(got, expected):
    chex.assert_trees_all_equal(got, expected, strict=True)


def test_a_model_comes_back(tmp_path):
    model = Model(LM, LM.init_params(jax.random.key(0)), stop_ids=(3, 5))
    path = save(model, tmp_path / "model")
    back = load(path, dtype="bfloat16", kernels=False)
    assert back.lm == LM
    assert back.stop_ids == (3, 5)
    assert_same(back.params, model.params)
    fast = load(path, dtype="bfloat16")  # packed for the kernels, where there are any
    assert_same(load(save(fast, tmp_path / "fast"), dtype="bfloat16", kernels=False).params, model.params)


def test_text_comes_back(tmp_path):
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": [0.0] * 96,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0]['content'] }}",
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * 93],
    }
    config = tiny_config()
    model = load(write_gguf(tmp_path / "model.gguf", config, random_params(config), metadata=metadata))
    back = load(save(model, tmp_path / "saved"))
    assert_same(back.params, model.params)
    text = "t5t7"
    assert back.encode(text) == model.encode(text)
    assert back.encode(text)[0] == 1
    chat = [{"role": "user", "content": "t9"}]
    assert back.encode_chat(chat) == model.encode_chat(chat)
    assert (back.stop_ids, back.lm) == (model.stop_ids, model.lm)


def test_relative_places_are_places(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = Model(LM, LM.init_params(jax.random.key(0)))
    save(model, "model")
    assert_same(load("model", dtype="bfloat16", kernels=False).params, model.params)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")  # of Orbax, which gives up
def test_a_full_disk_is_an_error_in_one_line(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=f"model: cannot be written: {os.strerror(errno.EFBIG)}$"):
            save(Model(LM, LM.init_params(jax.random.key(0))), tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    gc.collect()  # what Orbax left warns now, not in another test
    assert not list(tmp_path.iterdir())


def assert_mutants_end_in_a_line(folder, mutants):
    """Each loads, or is refused by an error of ours."""
    model = Model(LM, LM.init_params(jax.random.key(0)), stop_ids=(3, 5))
    place, refused = save(model, folder / "model"), []
    for what in damaged(place, mutants, seed=0):
        try:
            load(place, dtype="bfloat16", kernels=False)
        except JaxspecError as error:
            refused.append(f"{what}: {error}")
    assert len(refused) > mutants // 4
    assert not any("\n" in why for why in refused)


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
def test_mutants_end_in_a_line(tmp_path):
    assert_mutants_end_in_a_line(tmp_path, 30)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
def test_300_mutants_end_in_a_line(tmp_path):
    assert_mutants_end_in_a_line(tmp_path, 300)


def test_only_transformers_and_only_new_places(tmp_path):
    toy = TableLM(8)
    with pytest.raises(InvalidConfig, match="only a TransformerLM can be saved, got TableLM"):
        save(Model(toy, toy.init_params(jax.random.key(0))), tmp_path / "toy")
    with pytest.raises(CheckpointError, match="already exists"):
        save(Model(LM, LM.init_params(jax.random.key(0))), tmp_path)


def test_what_is_damaged_is_refused(tmp_path):
    place = save(Model(LM, LM.init_params(jax.random.key(0))), tmp_path / "model")
    good = json.loads((place / "jaxspec.json").read_text())

    def with_manifest(content, words):
        (place / "jaxspec.json").write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(CheckpointError, match=words):
            load(place)

    with_manifest("{", "jaxspec.json: not JSON")
    with_manifest([], "jaxspec.json: contains a list, expected an object")
    with_manifest(good | {"version": 2}, "expected format jaxspec, version 1")
    with_manifest(good | {"config": good["config"] | {"hidden_size": 32}}, "has shape .* expected")
    with_manifest(good | {"config": good["config"] | {"num_layers": 1, "windowed": [True]}}, "not expected: layers.1")
    with_manifest(good | {"config": {"hidden_size": 32}}, "not a valid manifest: KeyError")
    with_manifest(good | {"stop_ids": [96]}, "special token id 96")
    (place / "jaxspec.json").write_text(json.dumps(good))
    for name in ("manifest.ocdbt", "_METADATA"):
        (place / "params" / name).rename(tmp_path / name)
        with pytest.raises(CheckpointError, match=f"has no file {name}: not a valid Orbax checkpoint"):
            load(place)
        (tmp_path / name).rename(place / "params" / name)
    assert instance(TransformerLM, load(place).lm).config == CONFIG


def test_every_file_of_the_parameters_has_a_checksum(tmp_path):
    """A flipped bit is found before Orbax reads the file. A model that was saved without checksums is read, too."""
    place = save(Model(LM, LM.init_params(jax.random.key(0))), tmp_path / "model")
    manifest = json.loads((place / "jaxspec.json").read_text())
    files = [file for file in (place / "params").rglob("*") if file.is_file()]
    assert {file.relative_to(place / "params").as_posix() for file in files} == manifest["sha256"].keys()
    for file in files:
        good = file.read_bytes()
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=f"{file.name}: is damaged: its sha256 differs from jaxspec.json"):
            load(place)
        file.unlink()
        with pytest.raises(CheckpointError, match="has no file "):
            load(place)
        file.write_bytes(good)
    assert instance(TransformerLM, load(place).lm).config == CONFIG
    for value, words in ((5, "sha256 is 5, expected"), ({"no": "x"}, "has no file no, which the manifest lists")):
        (place / "jaxspec.json").write_text(json.dumps(manifest | {"sha256": value}))
        with pytest.raises(CheckpointError, match=words):
            load(place)
    del manifest["sha256"]
    (place / "jaxspec.json").write_text(json.dumps(manifest))
    assert instance(TransformerLM, load(place).lm).config == CONFIG


def test_large_files_are_checked_before_the_first_weight(tmp_path, monkeypatch):
    """So that what asks for the headers alone, such as `jaxspec inspect`, reads no weights."""
    place = save(Model(LM, LM.init_params(jax.random.key(0))), tmp_path / "model")
    largest = max((place / "params").rglob("*"), key=lambda file: file.stat().st_size)
    monkeypatch.setattr(saved, "_MAX_SMALL_BYTES", largest.stat().st_size - 1)
    good = largest.read_bytes()
    largest.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    checkpoint = open_checkpoint(place)
    assert checkpoint.config == CONFIG
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.tensors["embed"]()
