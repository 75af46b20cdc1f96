"""Tests of GGUF files whose blocks are kept: dtype "file"."""

import warnings

import ml_dtypes
import numpy as np
import pytest

import jaxspec
from helpers.blocks import decoded, raw_blocks, raw_weights
from helpers.checkpoints import VOCABULARY, random_params, tiny_config, write_gguf, write_hf
from jaxspec.checkpoints.load import read_params
from jaxspec.checkpoints.source import open_checkpoint
from jaxspec.cli.inspect_model import memory_section
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.generation import fingerprint
from jaxspec.kernels import library
from jaxspec.models.blocks import Blocks
from jaxspec.models.kernels import with_kernels, without_kernels

pytestmark = pytest.mark.quick
needs_kernels = pytest.mark.skipif(not library.kernels_available(), reason=library.describe_kernels())

CONFIG = tiny_config(hidden_size=256, intermediate_size=256)
PARAMS = random_params(CONFIG)
KINDS = {
    "token_embd.weight": "Q6_K",
    "blk.0.attn_q.weight": "Q4_K",
    "blk.0.attn_k.weight": "Q4_K",
    "blk.0.attn_v.weight": "Q6_K",
    "blk.0.ffn_down.weight": "Q5_K",
    "blk.1.attn_q.weight": "Q5_0",
    "blk.1.attn_v.weight": "Q4_0",
}  # the others are Q8_0


def shapes() -> dict[str, tuple[int, int]]:
    rows = {"attn_q": 64, "attn_k": 32, "attn_v": 32, "ffn_down": 256, "token_embd": 96}
    return {name: (rows[name.split(".")[-2]], 256) for name in KINDS}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A file with matrices of all types, as models of several K-types have them."""
    rng = np.random.default_rng(0)
    raw = {name: (KINDS[name], raw_weights(rng, KINDS[name], *shape, 0.1)) for name, shape in shapes().items()}
    place = tmp_path_factory.mktemp("gguf") / "mixed.gguf"
    return write_gguf(place, CONFIG, PARAMS, kind="Q8_0", raw=raw, metadata=VOCABULARY)


@pytest.mark.slow
def test_all_weights_are_those_of_the_file(mixed):
    checkpoint = open_checkpoint(mixed)
    floats = read_params(checkpoint)
    own = read_params(checkpoint, "file")
    assert own["layers"][0]["qkv"].kinds == ("Q4_K", "Q6_K")
    assert own["layers"][1]["qkv"].kinds == ("Q5_0", "Q8_0", "Q4_0")
    np.testing.assert_array_equal(own["norm"], floats["norm"])
    np.testing.assert_array_equal(own["embed"].unpack(), floats["embed"])
    for there, here in zip(floats["layers"], own["layers"], strict=True):
        for name, array in there.items():
            got = here[name]
            np.testing.assert_array_equal(got.unpack().T if array.ndim == 2 else got, array, err_msg=name)


@pytest.mark.parametrize(("kind", "dtype"), [("F32", np.float32), ("F16", np.float32), ("BF16", ml_dtypes.bfloat16)])
def test_float_types_stay_what_they_are(tmp_path, kind, dtype):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", CONFIG, PARAMS, kind=kind))
    floats, own = read_params(checkpoint), read_params(checkpoint, "file")
    assert own["embed"].dtype == own["layers"][0]["qkv"].dtype == dtype
    np.testing.assert_array_equal(own["layers"][1]["down"].astype(np.float32), floats["layers"][1]["down"])


def test_types_without_a_kernel_are_rounded_and_named(tmp_path):
    rng = np.random.default_rng(1)
    raw = raw_blocks(rng, "Q2_K", 256, 256, lambda size: np.full(size, 0.01))
    given = {"blk.1.ffn_down.weight": ("Q2_K", raw)}
    place = write_gguf(tmp_path / "model.gguf", CONFIG, PARAMS, kind="Q8_0", raw=given)
    with pytest.warns(UserWarning, match=r"model.gguf: tensors of type Q2_K are rounded to Q8_0"):
        own = read_params(open_checkpoint(place), "file")
    got = own["layers"][1]["down"]
    assert isinstance(got, Blocks)
    assert got.kinds == ("Q8_0",)
    exact = decoded("Q2_K", raw)
    assert abs(got.unpack() - exact).max() < abs(exact).max() / 200


def test_a_scale_that_is_no_number_is_refused(tmp_path):
    raw = raw_blocks(np.random.default_rng(2), "Q4_K", 256, 256)
    raw[7, 2:4] = np.array([np.inf], np.float16).view(np.uint8)
    place = write_gguf(tmp_path / "model.gguf", CONFIG, PARAMS, raw={"blk.0.ffn_down.weight": ("Q4_K", raw)})
    with pytest.raises(CheckpointError, match=r"tensor blk.0.ffn_down.weight has weights that are not finite"):
        read_params(open_checkpoint(place), "file")


def test_other_sources_are_refused(tmp_path):
    place = write_hf(tmp_path / "hf", CONFIG, PARAMS)
    with pytest.raises(InvalidConfig, match="needs a GGUF file, whose blocks it keeps"):
        read_params(open_checkpoint(place), "file")


@needs_kernels
def test_the_model_decodes_and_is_its_own(mixed, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = jaxspec.load(mixed, dtype="file")
    assert "M parameters, Q4_0, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0, float32" in repr(model)
    stored = open_checkpoint(mixed).stored.values()
    assert model.bytes == memory_section(CONFIG, "file", 1, 64, stored)["parameters_bytes"]
    prompts = [[5, 6, 7, 8, 5, 6], [9, 10]]
    plain = jaxspec.generate(model, prompts, max_new_tokens=24, drafter="none", logprobs=1)
    drafted = jaxspec.generate(model, prompts, max_new_tokens=24, drafter="prompt-lookup", tree=3, logprobs=1)
    assert [(row.tokens, row.logprobs) for row in drafted] == [(row.tokens, row.logprobs) for row in plain]
    assert with_kernels(model) is model
    sums = [fingerprint.describe_weights(jaxspec.load(mixed, dtype=dtype).params) for dtype in ("float32", "int8")]
    assert fingerprint.describe_weights(model.params) not in sums
    with pytest.raises(InvalidConfig, match="keep its GGUF file"):
        jaxspec.save(model, tmp_path / "saved")
    with pytest.raises(InvalidConfig, match="needs the CPU kernels"):
        without_kernels(model)


def test_without_the_kernels_it_is_refused(mixed, monkeypatch):
    with pytest.raises(InvalidConfig, match="choose another dtype, such as int8"):
        jaxspec.load(mixed, dtype="file", kernels=False)
    monkeypatch.setenv(library.VARIABLE, "0")
    with pytest.raises(InvalidConfig, match=r"kernels: none \(JAXSPEC_KERNELS=0\)"):
        jaxspec.load(mixed, dtype="file")
