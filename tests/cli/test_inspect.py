"""Tests `jaxspec inspect`: every number against the checkpoint, refusals, and that JAX is not imported."""

import json
import math
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from helpers.checkpoints import VOCABULARY, gguf_tensors, hf_tensors, random_params, tiny_config, write_gguf, write_hf
from helpers.families import write_checkpoint
from helpers.logits import GOLDEN
from jaxspec.checkpoints.base import StoredTensor
from jaxspec.checkpoints.source import open_checkpoint, read_headers
from jaxspec.cli import main
from jaxspec.core.records import Window
from jaxspec.models.rope import Rope

pytestmark = pytest.mark.quick

CONFIG = tiny_config()
PARAMS = random_params(CONFIG)


@pytest.fixture
def inspect(capsys):
    """Runs `jaxspec inspect` and gives (status, stdout, stderr)."""

    def call(*words):
        status = main(["inspect", *map(str, words)])
        return status, *capsys.readouterr()

    return call


def whole(path: pathlib.Path, **changes) -> pathlib.Path:
    """A GGUF file with a tokenizer and a chat template."""
    return write_gguf(path / "tiny.gguf", CONFIG, PARAMS, kind="Q8_0", metadata=VOCABULARY | changes)


def test_gguf(inspect, tmp_path):
    path = whole(tmp_path)
    status, out, err = inspect(path, "--json", "--batch", 3, "--length", 100, "--dtype", "bfloat16")
    report = json.loads(out)
    assert (status, err) == (0, "")
    assert report["architecture"] == "llama"
    assert (report["files"], report["file_size_bytes"]) == (1, path.stat().st_size)
    parameters = sum(map(math.prod, CONFIG.param_shapes().values()))
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4}
    sizes |= {"num_kv_heads": 2, "head_dim": 16, "max_position": 128}  # and not what is at its default
    assert report["model"] == sizes | {"parameters": parameters}
    matrices = [a.size for a in gguf_tensors(CONFIG, PARAMS).values() if a.ndim == 2]
    assert report["stored"] == {
        "Q8_0": {"tensors": len(matrices), "bytes": sum(matrices) // 32 * 34},
        "F32": {"tensors": 5, "bytes": 4 * 5 * 64},
    }
    text = report["tokenizer"]
    assert (text["kind"], text["tokens"]) == ("byte-level BPE", 96)
    assert (text["padding_of_the_vocabulary"], text["tokens_without_a_row"]) == (0, 0)
    assert text["special"][:2] == ["<s> (0)", "</s> (1)"]
    assert (text["stop"], text["begins_with"]) == (["</s> (1)"], None)
    assert text["chat_template"] == "{% for m in messages %}"
    memory = report["memory"]
    assert memory["parameters_bytes"] == 2 * parameters + 2 * 5 * 64  # norms stay float32
    assert memory["cache_slots_per_row"] == 512
    assert memory["cache_bytes"] == 2 * 2 * (2 * 3 * 2 * 512 * 16)
    assert memory["logits_per_drafted_token_bytes"] == 4 * 3 * 96
    assert report["refused"] == []


def test_what_is_told_is_what_is_loaded(inspect, tmp_path):
    """The memory against that of a loaded model and its cache."""
    import jaxspec
    from jaxspec.generation.drafting import Drafting
    from jaxspec.generation.memory import fit_capacity

    path = write_gguf(tmp_path / "bare.gguf", CONFIG, PARAMS, metadata={"tokenizer.ggml.tokens": None})
    for dtype in ("float32", "bfloat16"):
        memory = json.loads(inspect(path, "--json", "--batch", 2, "--length", 128, "--dtype", dtype)[1])["memory"]
        model = jaxspec.load(path, dtype=dtype)
        assert memory["parameters_bytes"] == model.bytes
        decoder, weights = Drafting().build(model)
        slots = fit_capacity(decoder, weights, 128, 2, None)
        cache = jax.eval_shape(lambda lm=model.lm, slots=slots: lm.init_cache(2, slots)).stores
        assert memory["cache_slots_per_row"] == slots
        assert memory["cache_bytes"] == sum(leaf.size * leaf.dtype.itemsize for leaf in cache)


def test_memory_of_recurrent_layers(inspect, tmp_path):
    """States do not grow with the text; the entries of a drafted token are told beside them."""
    import jaxspec

    case = GOLDEN["qwen3.5"]
    write_checkpoint(tmp_path / "m", "qwen3.5", case["settings"], case["shapes"])
    for dtype in ("float32", "bfloat16"):
        memory = json.loads(inspect(tmp_path / "m", "--json", "--batch", 2, "--length", 128, "--dtype", dtype)[1])[
            "memory"
        ]
        model = jaxspec.load(tmp_path / "m", dtype=dtype, kernels=False)
        cache = jax.eval_shape(lambda lm=model.lm, memory=memory: lm.init_cache(2, memory["cache_slots_per_row"]))
        token = jnp.zeros((2, 1), jnp.int32)
        window = Window(token, token, jnp.ones((2, 1, 1), bool))
        _, entries = jax.eval_shape(model.lm.apply, model.params, window, cache)
        assert memory["parameters_bytes"] == model.bytes
        assert memory["cache_bytes"] == nbytes(cache.stores)
        assert memory["states_bytes"] == nbytes(cache.stores.recurrent)
        assert memory["states_per_drafted_token_bytes"] == nbytes(entries.recurrent)


def nbytes(arrays) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


def test_hugging_face_directory(inspect, tmp_path):
    config = tiny_config(tie_embeddings=False, rope=Rope(5e5))
    path = write_hf(tmp_path, config, random_params(config), shards=3)
    report = json.loads(inspect(path, "--json")[1])
    assert report["files"] == 3
    assert report["file_size_bytes"] == sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert report["model"]["tie_embeddings"] is False
    assert report["model"]["rope"]["theta"] == 5e5
    held = hf_tensors(config, random_params(config))
    assert report["stored"] == {"F32": {"tensors": len(held), "bytes": sum(a.nbytes for a in held.values())}}
    assert report["tokenizer"] == {"chat_template": None}
    assert report["memory"]["length"] == config.max_position


def test_tensors_by_the_names_of_the_file(tmp_path):
    for path, held in (
        (write_hf(tmp_path / "hf", CONFIG, PARAMS), hf_tensors(CONFIG, PARAMS)),
        (write_gguf(tmp_path / "tiny.gguf", CONFIG, PARAMS), gguf_tensors(CONFIG, PARAMS)),
    ):
        expected = {name: StoredTensor("F32", a.shape, a.nbytes) for name, a in held.items()}
        assert open_checkpoint(path).stored == read_headers(path).stored == expected


def test_text_for_people(inspect, tmp_path):
    status, out, err = inspect(whole(tmp_path))
    assert (status, err) == (0, "")
    for line in ("vocab size +96", "Q8_0 +tensors 15, bytes 71.8 kB", "begins with +none"):
        assert re.search(f"^  {line}$", out, re.MULTILINE)
    assert "\\x1b[2J (92)" in out  # the screen is not cleared
    assert "\x1b" not in out


def test_no_jax(tmp_path):
    """Nor is it imported for a file that is refused."""
    whole(tmp_path)
    write_hf(tmp_path / "hf", CONFIG, PARAMS)
    write_hf(tmp_path / "other", CONFIG, PARAMS, settings={"model_type": "mamba"})
    places = [str(tmp_path / name) for name in ("tiny.gguf", "hf", "other")]
    code = f"""
import sys
from jaxspec.cli import main
print([main(["inspect", place]) for place in {places}], "jax" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout.endswith("\n[0, 0, 1] False\n"), ran.stderr


# --- what is refused ----------------------------------------------------------------------------------------


def test_a_model_that_is_not_read(inspect, tmp_path):
    """Metadata and tensors are shown all the same."""
    path = write_gguf(tmp_path / "rwkv.gguf", CONFIG, PARAMS, architecture="rwkv", metadata={"rwkv.x": float("nan")})
    status, out, err = inspect(path, "--json")
    report = json.loads(out)
    assert status == 1
    assert err.startswith("jaxspec: error:")
    assert "rwkv" in err
    assert report["refused"] == [err.removeprefix("jaxspec: error: ").removesuffix("\n")]
    assert report["settings"]["general.architecture"] == "rwkv"
    assert report["settings"]["rwkv.x"] == "nan"
    assert report["settings"]["tokenizer.ggml.tokens"] == "96 items"
    assert report["stored"]["F32"]["tensors"] == len(gguf_tensors(CONFIG, PARAMS))
    assert report["tensors"]["blk.N.attn_q.weight"] == ["F32 64x64, 2 of them"]
    assert "general.architecture" in inspect(path)[1]


def test_a_directory_that_is_not_read(inspect, tmp_path):
    path = write_hf(tmp_path, CONFIG, PARAMS, settings={"model_type": "mamba", "extra": {"a": list(range(9))}})
    status, out, err = inspect(path, "--json")
    report = json.loads(out)
    assert status == 1
    assert "mamba" in err
    assert report["settings"]["extra"] == {"a": "9 items"}
    assert report["tensors"]["model.layers.N.mlp.up_proj.weight"] == ["F32 96x64, 2 of them"]


def test_a_file_that_is_cut_short(inspect, tmp_path):
    path = whole(tmp_path)
    path.write_bytes(path.read_bytes()[:-64])
    status, out, err = inspect(path)
    assert status == 1
    assert "truncated" in err
    assert "blk.N.ffn_gate.weight" in out
    path.write_bytes(path.read_bytes()[:100])
    status, out, err = inspect(path)
    assert status == 1
    assert "truncated" in err
    assert "file size" in out
    assert "blk" not in out


@pytest.mark.parametrize(
    ("changes", "words", "said"),
    [
        ({"tokenizer.ggml.pre": "unheard-of"}, [], "tokenizer.ggml.pre"),
        ({"tokenizer.chat_template": "{% for"}, [], "chat template"),
        ({}, ["--length", 129], "--length 129 is more than the context of 128"),
    ],
)
def test_what_opens_and_is_refused_later(inspect, tmp_path, changes, words, said):
    status, out, err = inspect(whole(tmp_path, **changes), *words)
    assert status == 1
    assert said in err
    assert "parameters and cache" in out


def test_nothing_there(inspect):
    status, out, err = inspect("./nowhere.gguf")
    assert (status, out) == (1, "")
    assert "no such file" in err


def test_two_vocabularies(inspect, tmp_path):
    """What target and draft have in common, and what is missing for it; models of one vocabulary say so."""
    (tmp_path / "other").mkdir()
    path = whole(tmp_path)
    tokens, kinds = (list(VOCABULARY[f"tokenizer.ggml.{name}"]) for name in ("tokens", "token_type"))
    reverse = {"tokenizer.ggml.tokens": [*tokens[:2], *tokens[:1:-1]]}
    reverse |= {"tokenizer.ggml.token_type": [*kinds[:2], *kinds[:1:-1]]}
    other = whole(tmp_path / "other", **reverse)
    status, out, _ = inspect(path, "--draft-model", path, "--json")
    assert (status, json.loads(out)["draft_model"]["vocabulary"]) == (0, "the target's")
    status, out, _ = inspect(path, "--draft-model", other, "--json")
    section = json.loads(out)["draft_model"]
    common = 96 - kinds[2:].count(3)  # without control tokens of no role
    assert (status, section["common_tokens"], section["share_of_target"]) == (0, common, round(common / 96, 4))
    assert section["end_of_turn"] == "</s> (1) is </s> (1)"
    bare = write_gguf(tmp_path / "bare.gguf", CONFIG, PARAMS)
    status, _, err = inspect(path, "--draft-model", bare)
    assert status
    assert "tokenizer" in err
