"""Tests safetensors files without an index, and numbers of config.json in every spelling that transformers reads."""

import itertools
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.checkpoints import assert_same_params, hf_config, hf_tensors, random_params, tiny_config, write_hf
from jaxspec.checkpoints.hf_config import read_config
from jaxspec.checkpoints.load import read_params
from jaxspec.checkpoints.source import open_checkpoint
from jaxspec.errors import CheckpointError
from jaxspec.models import rope as ropes

pytestmark = pytest.mark.quick
CONFIG = tiny_config()
PARAMS = random_params(CONFIG)


@pytest.fixture
def written(tmp_path):
    """A function that writes the tensors to files, in turn, and returns the directory."""

    def write(*names):
        tensors = list(hf_tensors(CONFIG, PARAMS).items())
        (tmp_path / "config.json").write_text(json.dumps(hf_config(CONFIG)))
        for i, name in enumerate(names):
            save_file(dict(tensors[i :: len(names)]), tmp_path / name)
        return tmp_path

    return write


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return read_params(open_checkpoint(write_hf(tmp_path_factory.mktemp("whole"), CONFIG, PARAMS)))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("stem", ["model", "pytorch_model", "consolidated"])
def test_shards_need_no_index(stem, count, written, expected):
    place = written(*(f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)))
    assert_same_params(read_params(open_checkpoint(place)), expected)


@pytest.mark.parametrize("name", ["consolidated.safetensors", "weights.safetensors"])
def test_one_file_of_another_name(name, written, expected):
    assert_same_params(read_params(open_checkpoint(written(name))), expected)


def test_a_set_beside_another_file(written, expected, tmp_path):
    place = written("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    save_file({"tok_embeddings.weight": np.ones((2, 2), np.float32)}, tmp_path / "consolidated.safetensors")
    assert_same_params(read_params(open_checkpoint(place)), expected)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"], "model-00002-of-00003.*is missing"),
        (["model-00001-of-00002.safetensors", "model-00001-of-00003.safetensors"], "but no model.safetensors.index"),
        (["a.safetensors", "b.safetensors"], "a.safetensors, b.safetensors, but no model.safetensors.index.json"),
        (["model-00001-of-99999.safetensors"], "one of 99999 shards, expected 1 to 4096"),
        (["model-00002-of-00000.safetensors"], "one of 0 shards, expected 1 to 4096"),
    ],
)
def test_files_that_are_no_set(names, words, written):
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(written(*names))


def test_a_tensor_in_two_shards(written, tmp_path):
    place = written("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    save_file(hf_tensors(CONFIG, PARAMS), tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor .* is also in .*00001-of-00002.safetensors"):
        open_checkpoint(place)


def test_names_of_mistrals_own_code_are_explained(written, tmp_path):
    place = written()
    names = ["tok_embeddings.weight", "layers.0.attention.wq.weight", "norm.weight", "output.weight"]
    save_file({name: np.ones((2, 2), np.float32) for name in names}, tmp_path / "consolidated.safetensors")
    with pytest.raises(
        CheckpointError, match=r"consolidated.safetensors: has the tensor names of Mistral's .* own code"
    ):
        open_checkpoint(place)


# --- numbers ------------------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
"""A context of 128 tokens, four times 32."""
SPELLINGS = {
    "factor": [4.0, 4, None],
    "original_max_position_embeddings": [32, 32.0],
    "mscale": [None, 0, 0.0],
    "mscale_all_dim": [None, 0, 0.0],
    "beta_fast": [32, 32.0, None, 0],
    "beta_slow": [1, 1.0, None, 0],
    "attention_factor": [None, ropes.yarn_scale(4.0)],
}


def read(scaling: dict, key: str = "rope_parameters"):
    return read_config("config.json", hf_config(CONFIG) | {key: scaling})[0].rope


def test_every_spelling_of_a_number_is_the_same_rope():
    """Pairs of the settings of YaRN, each as a float, a whole number, null or 0, as transformers reads them."""
    expected, count = read(YARN), 0
    assert expected.scale == ropes.yarn_scale(4.0) > 1
    for one, other in itertools.combinations(SPELLINGS, 2):
        for a, b in itertools.product(SPELLINGS[one], SPELLINGS[other]):
            key = ("rope_parameters", "rope_scaling")[count % 2]
            assert read(YARN | {one: a, other: b}, key) == expected, (one, a, other, b)
            count += 1
    assert count >= 96


def test_the_ratio_of_mscales_counts_if_both_are_set():
    """Of DeepSeek: 0 is no value, so that one of them alone changes nothing."""
    both = read(YARN | {"mscale": 0.5, "mscale_all_dim": 1})
    assert both.scale == ropes.yarn_scale(4.0, 0.5, 1.0) != ropes.yarn_scale(4.0)
    assert read(YARN | {"mscale": 0.5, "mscale_all_dim": 0}).scale == ropes.yarn_scale(4.0)


@pytest.mark.parametrize(
    ("key", "value"),
    itertools.product(
        ["factor", "original_max_position_embeddings", "mscale", "mscale_all_dim", "beta_fast", "attention_factor"],
        ["4", [], {}, True, -1, 1e400, float("nan")],
    ),
)
def test_what_is_no_number_is_named(key, value):
    with pytest.raises(CheckpointError, match=key):
        read(YARN | {key: value})


@pytest.mark.parametrize("value", [32.5, 1, 0, 0.0])
def test_contexts_are_whole(value):
    with pytest.raises(
        CheckpointError, match=r"original_max_position_embeddings is .*, expected a whole number from 2"
    ):
        read(YARN | {"original_max_position_embeddings": value})
