"""Tests GGUF: round trips, the format against other readers, and malformed files."""

import contextlib
import struct
import subprocess
import sys
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.checkpoints import (
    TYPES,
    assert_same_params,
    gguf_tensors,
    leaves,
    random_params,
    tiny_config,
    write_gguf,
    write_hf,
)
from helpers.narrow import not_none
from jaxspec.checkpoints.gguf_header import parse_header
from jaxspec.checkpoints.load import read_params
from jaxspec.checkpoints.source import open_checkpoint
from jaxspec.errors import CheckpointError, InvalidConfig

pytestmark = pytest.mark.quick

CONFIG = tiny_config()
PARAMS = random_params(CONFIG)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", CONFIG, PARAMS)


# --- what is right ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False}, {"head_dim": 8}, {"num_kv_heads": 4}])
def test_float32_round_trip_is_exact(tmp_path, changes):
    config = tiny_config(**changes)
    params = random_params(config, 1)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", config, params))
    assert checkpoint.config == config
    assert_same_params(read_params(checkpoint), params)


@pytest.mark.parametrize(
    ("kind", "error"), [("F16", 2e-4), ("BF16", 2e-3), ("Q8_0", 2e-3), ("Q5_0", 0.03), ("Q4_1", 0.03)]
)
def test_other_types_give_what_their_blocks_mean(tmp_path, kind, error):
    params = read_params(open_checkpoint(write_gguf(tmp_path / "model.gguf", CONFIG, PARAMS, kind=kind)))
    stored = gguf.quants.dequantize(gguf.quants.quantize(PARAMS["embed"], TYPES[kind]), TYPES[kind])
    np.testing.assert_array_equal(params["embed"], stored)
    for name, array in leaves(PARAMS).items():
        np.testing.assert_allclose(leaves(params)[name], array, atol=error, err_msg=name)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_projections_of_attention_in_one_tensor(tmp_path, kind):
    """Rows of queries and keys are in the order of adjacent pairs, and rows of values are not."""
    config = tiny_config(hidden_size=32)
    params = random_params(config)
    separate = open_checkpoint(write_gguf(tmp_path / "separate.gguf", config, params, kind=kind))
    tensors, changes = gguf_tensors(config, params), {}
    for i in range(config.num_layers):
        names = [f"blk.{i}.attn_{name}.weight" for name in "qkv"]
        changes |= dict.fromkeys(names) | {
            f"blk.{i}.attn_qkv.weight": np.concatenate([tensors[name] for name in names])
        }
    joined = open_checkpoint(write_gguf(tmp_path / "joined.gguf", config, params, kind=kind, tensors=changes))
    assert_same_params(read_params(joined), read_params(separate))
    one, other = (file.native["layers.0.qkv"]() for file in (joined, separate))
    if kind != "F32":
        one, other = one.unpack(), other.unpack()
    np.testing.assert_array_equal(one, other)


def test_gguf_and_hugging_face_give_the_same_params(tmp_path):
    from_gguf = open_checkpoint(write_gguf(tmp_path / "model.gguf", CONFIG, PARAMS))
    from_hf = open_checkpoint(write_hf(tmp_path / "hf", CONFIG, PARAMS))
    assert from_gguf.config == from_hf.config
    assert_same_params(read_params(from_gguf), read_params(from_hf))


def test_params_as_bfloat16_and_progress(tiny):
    seen = []
    params = read_params(open_checkpoint(tiny), "bfloat16", progress=lambda *step: seen.append(step))
    for name, array in leaves(params).items():
        assert array.dtype == (np.float32 if "norm" in name else ml_dtypes.bfloat16)
        np.testing.assert_array_equal(array, leaves(PARAMS)[name].astype(array.dtype))
    names = list(CONFIG.param_shapes())
    assert seen == [(i + 1, len(names), name) for i, name in enumerate(names)]
    assert all(array.flags.c_contiguous for array in leaves(params).values())
    with pytest.raises(InvalidConfig, match="float16"):
        read_params(open_checkpoint(tiny), "float16")


def test_text_settings(tmp_path):
    checkpoint = open_checkpoint(
        write_gguf(
            tmp_path / "model.gguf",
            CONFIG,
            PARAMS,
            metadata={
                "tokenizer.ggml.eot_token_id": 7,
                "tokenizer.ggml.eom_token_id": 2,
                "tokenizer.ggml.unknown_token_id": 0,
                "tokenizer.chat_template": "{{ messages }}",
            },
        )
    )
    assert checkpoint.stop_ids == (2, 7)
    assert (checkpoint.bos_id, checkpoint.add_bos) == (1, False)
    assert checkpoint.chat_template == "{{ messages }}"
    assert checkpoint.special_tokens["bos_token"] == "t1"
    assert checkpoint.special_tokens["eos_token"] == "t2"
    assert checkpoint.special_tokens["unk_token"] == "t0"
    kept = not_none(not_none(checkpoint.tokenizer).gguf)
    assert kept["tokenizer.ggml.tokens"] == [f"t{i}" for i in range(CONFIG.vocab_size)]
    assert set(kept) == {
        *(f"tokenizer.ggml.{name}" for name in ("model", "tokens", "token_type")),
        *(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown")),
        "tokenizer.chat_template",
    }


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"tokenizer.ggml.model": "llama"}, True),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.add_bos_token": True}, True),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, False),
    ],
)
def test_add_bos(tmp_path, metadata, expected):
    path = write_gguf(tmp_path / "model.gguf", CONFIG, PARAMS, metadata=metadata)
    assert open_checkpoint(path).add_bos is expected


def test_a_file_without_tokenizer(tmp_path):
    metadata: dict[str, Any] = {f"tokenizer.ggml.{name}": None for name in ("model", "tokens", "token_type")}
    metadata |= {f"tokenizer.ggml.{name}_token_id": None for name in ("bos", "eos")}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", CONFIG, PARAMS, metadata=metadata))
    assert checkpoint.tokenizer is None
    assert (checkpoint.stop_ids, checkpoint.bos_id, checkpoint.special_tokens) == ((), None, {})


def test_the_readers_do_not_import_jax():
    code = "import sys; from jaxspec.checkpoints import gguf, hf, presets, source; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- models that are not read -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.context_length": None}, "llama.context_length is missing"),
        ({"llama.embedding_length": None}, "llama.embedding_length is missing"),
        ({"llama.feed_forward_length": None}, "llama.feed_forward_length is missing"),
        ({"llama.attention.head_count": None}, "llama.attention.head_count is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"llama.attention.head_count": 0}, "num_heads must be a whole number from 1"),
        ({"llama.attention.head_count": True}, "head_count is 'True', expected one number"),
        ({"llama.attention.head_count_kv": [2, 2]}, "head_count_kv is '.2, 2.', expected one number"),
        ({"llama.attention.head_count_kv": 3}, "must be a multiple of num_kv_heads"),
        ({"llama.attention.value_length": 32}, "value_length is 32, expected 16"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8, expected 16"),
        ({"llama.rope.scaling.type": "dynamic"}, "rope.scaling.type is 'dynamic', expected none, linear or yarn"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.factor is missing"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.5}, "factor is 0.5, expected at least 1"),
        ({"llama.rope.freq_base": float("nan")}, "rope_theta must be positive and finite"),
        ({"llama.expert_count": 8}, "expert_count is 8, expected 0"),
        ({"llama.vocab_size": 95}, "vocab_size is 95, expected 96"),
        ({"llama.block_count": 3}, "tensors missing: blk.2.attn_k.weight"),
        ({"llama.block_count": 1}, "tensors not expected: blk.1.attn_k.weight.* and 4 more"),
        ({"llama.block_count": 2**32 - 1}, "4294967295 layers, but only 20 tensors"),
        ({"llama.feed_forward_length": 64}, r"ffn_gate.weight has shape \[96, 64\], expected \[64, 64\]"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "tokens has 2 items, but token_embd.weight has 96 rows"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokens is not an array of strings"),
        ({"tokenizer.ggml.tokens": 0}, "tokens is not an array of strings"),
        ({"tokenizer.ggml.eos_token_id": 96}, "special token id 96, expected 0 .. 95"),
        ({"tokenizer.ggml.eos_token_id": [2]}, r"special token id \[2\], expected 0 .. 95"),
        ({"tokenizer.ggml.bos_token_id": 1.0}, r"special token id 1.0, expected 0 .. 95"),
    ],
)
def test_metadata_that_does_not_fit(tmp_path, metadata, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(write_gguf(tmp_path / "model.gguf", CONFIG, PARAMS, metadata=metadata))
    assert "model.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"blk.1.attn_q.weight": None}, "missing: blk.1.attn_q.weight"),
        ({"token_embd.weight": None}, "missing: token_embd.weight"),
        ({"blk.0.attn_q.bias": np.zeros(64, np.float32)}, "missing: blk.0.attn_k.bias"),
        ({"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}, "not expected: blk.0.attn_q_norm.weight"),
        ({"rope_freqs.weight": np.ones(7, np.float32)}, "7 divisors of rotary frequencies, expected 8"),
        ({"rope_freqs.weight": np.zeros(8, np.float32)}, "divisors of the rotary frequencies must be positive"),
        ({"blk.0.ffn_up.weight": np.zeros((64, 96), np.float32)}, r"ffn_up.weight has shape \[64, 96\], exp"),
        ({"output_norm.weight": np.ones(32, np.float32)}, r"output_norm.weight has shape \[32\], expected"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, tensors, words):
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(write_gguf(tmp_path / "model.gguf", CONFIG, PARAMS, tensors=tensors))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite(tmp_path, bad):
    array = np.ones((96, 64), np.float32)
    array[3, 5] = bad
    path = write_gguf(tmp_path / "model.gguf", CONFIG, PARAMS, tensors={"blk.1.ffn_gate.weight": array})
    checkpoint = open_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"model.gguf: tensor blk.1.ffn_gate.weight has weights that are"):
        read_params(checkpoint)


def test_other_architectures(tmp_path):
    with pytest.raises(CheckpointError, match="'gpt2' is not supported; supported: llama"):
        open_checkpoint(write_gguf(tmp_path / "model.gguf", CONFIG, PARAMS, architecture="gpt2"))


# --- malformed files ----------------------------------------------------------------------------------------


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: int = 4, value: bytes = b"\1\0\0\0") -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


def tensor(name="x", shape=(4,), kind=0, offset=0, dimensions=None) -> bytes:
    dimensions = len(shape) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", dimensions, *shape, kind, offset)


def header(entries=(), tensors=(), data=b"\0" * 64, magic=b"GGUF", version=3, counts=None) -> bytes:
    counts = (len(tensors), len(entries)) if counts is None else counts
    start = magic + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(tensors)
    return start + b"\0" * (-len(start) % 32) + data


HUGE = 2**64 - 1
MALFORMED = {
    "empty": (b"", "truncated"),
    "magic": (header(magic=b"GGML"), "begins with b'GGML'"),
    "magic cut": (b"GGU", "magic number takes 4 bytes"),
    "version 0": (header(version=0), "version 0, expected 2 or 3"),
    "version 1": (header(version=1), "version 1, expected"),
    "version 4": (header(version=4), "version 4, expected"),
    "big endian": (header(version=3 << 24), "big-endian"),
    "header cut": (header()[:20], "metadata entries takes 8 bytes"),
    "tensor count -1": (header(counts=(HUGE, 0)), "number of tensors is 184467"),
    "entry count -1": (header(counts=(0, HUGE)), "metadata entries is 184467"),
    "entry count 1e6": (header(counts=(0, 10**6)), "metadata entries is 1000000"),
    "key length -1": (header([struct.pack("<Q", HUGE)], counts=(0, 1)), "the length of a metadata key is"),
    "key length past the end": (
        header([struct.pack("<Q", 500)], counts=(0, 1)),
        "length of a metadata key is 500",
    ),
    "key empty": (header([entry("")]), "a metadata key '' is empty"),
    "key too long": (header([entry("k" * 65536)]), "too long"),
    "key twice": (header([entry("a"), entry("a")]), "'a' is empty, too long or duplicated"),
    "key not UTF-8": (header([entry(b"\xff\xfe")]), "a metadata key is not UTF-8"),
    "value type": (header([entry("a", 13)]), "a has type 13"),
    "value type -1": (header([entry("a", 2**32 - 1)]), "a has type 4294967295"),
    "value cut": (header([entry("a", 10, b"")], data=b"")[:41], "truncated"),
    "string length -1": (header([entry("a", 8, struct.pack("<Q", HUGE))]), "length of a is 184467"),
    "string not UTF-8": (header([entry("a", 8, text(b"\xc3"))]), "a is not UTF-8"),
    "array item type": (header([entry("a", 9, array(99, 1, b"\0" * 8))]), "a is an array of type 99"),
    "array nested": (header([entry("a", 9, array(9, 1, array(9, 1)))]), "a is an array of type 9"),
    "array count -1": (header([entry("a", 9, array(0, HUGE))]), "number of items of a is 184467"),
    "array count wraps": (header([entry("a", 9, array(10, 2**61))]), "number of items of a is 23058"),
    "array past the end": (header([entry("a", 9, array(4, 100, b"\0" * 8))]), "number of items of a is 100"),
    "array of strings, too many": (header([entry("a", 9, array(8, 2**40))]), "number of items of a is"),
    "alignment 0": (header([entry("general.alignment", 4, b"\0\0\0\0")]), "alignment is 0, expected a power"),
    "alignment 13": (header([entry("general.alignment", 4, b"\x0d\0\0\0")]), "alignment is 13"),
    "alignment text": (header([entry("general.alignment", 8, text("32"))]), "alignment is '32'"),
    "alignment bool": (header([entry("general.alignment", 7, b"\1")]), "alignment is True"),
    "tensor name empty": (header([], [tensor("")]), "a tensor name '' is empty"),
    "tensor name twice": (
        header([], [tensor("x"), tensor("x", offset=32)]),
        "'x' is empty, too long or duplicated",
    ),
    "tensor name length": (header([], [struct.pack("<Q", HUGE) + b"\0" * 32]), "length of a tensor name is"),
    "0 dimensions": (header([], [tensor(shape=())]), "x has 0 dimensions"),
    "5 dimensions": (header([], [tensor(shape=(1,) * 5)]), "x has 5 dimensions"),
    "2^32 dimensions": (header([], [tensor(dimensions=2**32 - 1)]), "x has 4294967295 dimensions"),
    "dimension 0": (header([], [tensor(shape=(4, 0))]), r"shape \[0, 4\]: empty or too large"),
    "elements overflow": (header([], [tensor(shape=(2**32, 2**32))]), "empty or too large"),
    "bytes overflow": (header([], [tensor(shape=(2**61,))]), "ends at byte 92233.*truncated"),
    "type unknown": (header([], [tensor(kind=9999)]), "x has type 9999, which is not supported"),
    "type removed": (header([], [tensor(kind=4)]), "x has type 4, which is not supported"),
    "type of integers": (header([], [tensor(kind=26)]), "x has type 26, which is not supported"),
    "row not whole blocks": (
        header([], [tensor(shape=(16,), kind=8)]),
        "rows of 16, expected a multiple of 32",
    ),
    "offset unaligned": (header([], [tensor(offset=1)]), "offset 1, not a multiple of 32"),
    "offset past the end": (header([], [tensor(offset=1 << 20)]), "truncated"),
    "offset wraps": (header([], [tensor(offset=2**64 - 32)]), "truncated"),
    "overlap": (header([], [tensor("x", (16,)), tensor("y", (16,), offset=32)]), "x and y overlap"),
    "same place": (header([], [tensor("x"), tensor("y")]), "x and y overlap"),
    "data cut": (header([], [tensor(shape=(16,))])[:-1], "x ends at byte 128, but the file ends at 127: truncated"),
    "table cut": (header([], [tensor(), tensor("y", offset=32)])[:90], "truncated"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(tmp_path, name):
    raw, words = MALFORMED[name]
    with pytest.raises(CheckpointError, match=words):
        parse_header(raw, "model.gguf")
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"model.gguf"):
        open_checkpoint(path)


def test_the_handmade_header_is_otherwise_right():
    every = [entry("a"), entry("b", 9, array(8, 2, text("x") + text("y"))), entry("c", 7, b"\1")]
    raw = header(every, [tensor("x", (8, 2)), tensor("y", (4,), offset=64)], data=b"\0" * 80)
    metadata, tensors = parse_header(raw, "made.gguf")
    assert metadata == {"a": 1, "b": ["x", "y"], "c": True}
    assert {name: (found.shape, found.stop - found.start) for name, found in tensors.items()} == {
        "x": ((2, 8), 64),
        "y": ((4,), 16),
    }
    assert parse_header(header(version=2), "made.gguf") == ({}, {})


def try_to_read(path) -> None:
    with contextlib.suppress(CheckpointError):
        read_params(open_checkpoint(path))


def test_every_truncation_of_the_header_is_refused(tiny, tmp_path):
    raw = tiny.read_bytes()
    end = min(found.start for found in parse_header(raw, "tiny")[1].values())
    for size in [*range(0, end, 7), end, len(raw) - 64, len(raw) - 1]:
        with pytest.raises(CheckpointError):
            parse_header(raw[:size], "cut.gguf")


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_give_params_or_a_checkpoint_error(tiny, tmp_path, data):
    raw = bytearray(tiny.read_bytes())
    end = min(found.start for found in parse_header(bytes(raw), "tiny")[1].values())
    where = st.one_of(st.integers(0, end - 1), st.integers(0, 64), st.integers(0, len(raw) - 1))
    for at in data.draw(st.lists(where, min_size=1, max_size=4)):
        raw[at] = data.draw(st.sampled_from((0, 1, 255, raw[at] ^ 1, raw[at] ^ 128)) | st.integers(0, 255))
    path = tmp_path / "changed.gguf"
    path.write_bytes(raw)
    try_to_read(path)
