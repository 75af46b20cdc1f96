"""Tests GGUF files as the converter of llama.cpp writes them, beside the Hugging Face files that it read.

The figures were made by `scripts/golden/make_converted.py`: names, shapes and sums of the converter's tensors. Files
with equal tensors are made here, because the converter needs torch.
"""

import json

import gguf
import jax
import numpy as np
import pytest

from helpers.converted import digest, read_metadata
from helpers.families import write_checkpoint
from helpers.hybrid_files import write_gguf
from helpers.narrow import instance
from helpers.paths import GOLDEN_DIR
from jaxspec.checkpoints.load import load
from jaxspec.checkpoints.source import open_checkpoint
from jaxspec.errors import CheckpointError
from jaxspec.heads.files import load_heads
from jaxspec.models.transformer import TransformerLM

CASES = json.loads((GOLDEN_DIR / "converted.json").read_text())["cases"]
FORMS = [(case, form) for case, golden in CASES.items() for form in ("separate", "joined") if form in golden]


@pytest.mark.parametrize(("case", "form"), FORMS)
def test_files_written_here_are_those_of_the_converter(tmp_path, case, form):
    golden = CASES[case]
    path = write_gguf(tmp_path / "model.gguf", case, golden=golden, join=form == "joined")
    assert read_metadata(path) == golden[form]["metadata"]
    tensors = {tensor.name: digest(tensor.data) for tensor in gguf.GGUFReader(path).tensors}
    assert tensors.keys() == golden[form]["tensors"].keys()
    for name, (shape, total) in golden[form]["tensors"].items():
        assert tensors[name][0] == shape, name
        np.testing.assert_allclose(tensors[name][1], total, rtol=0, atol=2e-3, err_msg=name)


@pytest.mark.parametrize(("case", "form"), FORMS)
def test_both_files_are_the_same_model(tmp_path, case, form):
    """All parameters, the layer for multi-token prediction included; heads of values may be in another order."""
    golden = CASES[case]
    write_checkpoint(tmp_path / "m", case, golden["settings"], golden["shapes"])
    path = write_gguf(tmp_path / "model.gguf", case, golden=golden, join=form == "joined")
    folder, file = (load(source, kernels=False, report=lambda note: None) for source in (tmp_path / "m", path))
    sizes = instance(TransformerLM, file.lm).config.delta
    tiled = sizes is not None and sizes.tiled
    for mine, other in zip(folder.params["layers"].values(), file.params["layers"].values()):
        assert mine.keys() == other.keys()
        for name in mine:
            if not (tiled and name in ("qkvz", "rates", "conv", "decay", "decay_bias", "out")):
                np.testing.assert_allclose(other[name], mine[name], atol=1e-6, err_msg=name)
    if "-mtp" in case:
        mine, other = (load_heads(source, target=model) for source, model in ((tmp_path / "m", folder), (path, file)))
        assert mine.config == other.config
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), mine.params, other.params)


def test_layers_whose_kinds_do_not_follow_an_interval(tmp_path):
    case = "qwen3.5-types-mtp"
    path = write_gguf(tmp_path / "model.gguf", case, golden=CASES[case])
    assert open_checkpoint(path).config.recurrent == (True, False, False, True)


@pytest.mark.parametrize("flags", [[True, True, True, False], [1, 1, 1, 0, 0], [True, True, True, False, False, False]])
def test_a_list_of_recurrent_layers_must_have_all_blocks(tmp_path, flags):
    changes = {"attention.recurrent_layers": flags}
    path = write_gguf(tmp_path / "model.gguf", "qwen3.5-mtp", changes, golden=CASES["qwen3.5-mtp"])
    with pytest.raises(CheckpointError, match=r"recurrent_layers is .*, expected a boolean for each of the 5 blocks"):
        open_checkpoint(path)
