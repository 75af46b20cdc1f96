"""Tests layers for multi-token prediction (MTP) inside models: states against transformers, files, and drafting."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers.families import tokens_of, write_checkpoint
from helpers.paths import GOLDEN_DIR
from jaxspec.core import cache as caches
from jaxspec.core.records import Window
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.heads.eagle_config import EagleConfig
from jaxspec.heads.files import load_heads
from jaxspec.heads.network import init_cache, make_network
from jaxspec.models.layers import look_up

GOLDEN = json.loads((GOLDEN_DIR / "mtp.json").read_text())
CASE = "qwen3.5-mtp"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mtp")
    write_checkpoint(path, CASE, GOLDEN["settings"], GOLDEN["shapes"])
    return path


@pytest.fixture(scope="module")
def target(folder):
    return jaxspec.load(folder, kernels=False, report=lambda note: None)


def chain(size):
    return jnp.tri(size, dtype=bool)[None]


def test_states_are_those_of_transformers(folder, target):
    """Rows that start from the target's features, and three further rows from the head's own states."""
    heads = load_heads(folder, target=target)
    head, rows = make_network(heads.config, heads.params, target.lm.execution), GOLDEN["rows"]
    text = jnp.asarray([tokens_of(CASE)[: len(GOLDEN["states"]) + 1]])
    window = Window(text[:, :rows], jnp.arange(rows)[None], chain(rows))
    features, _ = target.lm.apply(target.params, window, target.lm.init_cache(1, rows))
    cache = init_cache(heads.config, 1, 64, "float32", None)

    def read(states, first, cache):
        size = states.shape[1]
        window = Window(text[:, first : first + size], first + jnp.arange(size)[None], chain(size))
        embeddings = look_up(target.params["embed"], text[:, first + 1 : first + size + 1])
        states, entries = head(head.fuse(states), embeddings, window, cache)
        return states, caches.append_to_cache(cache, entries, None, jnp.full((1,), size))

    found, cache = read(features, 0, cache)
    found = [found]
    for step in range(len(GOLDEN["states"]) - rows):
        states, cache = read(found[-1][:, -1:], rows + step, cache)
        found.append(states)
    found = jnp.concatenate(found, 1)
    np.testing.assert_allclose(found[0], GOLDEN["states"], atol=2e-5)
    logits = target.lm.head(target.params, head.projected(found[:, -len(GOLDEN["logits"]) :]))
    np.testing.assert_allclose(logits[0], GOLDEN["logits"], atol=1e-4)


def test_the_layer_of_the_target_is_its_default_head(folder, target):
    assert target.heads_inside == str(folder)
    options: dict[str, Any] = {"key": jax.random.key(0), "max_new_tokens": 24, "ignore_eos": True}
    tree = jaxspec.branching(2, 1)
    prompts = [[5, 6, 7, 8], [9, 10]]
    out = jaxspec.generate(target, prompts, drafter="eagle", tree=tree, **options)
    own = load_heads(folder, target=target)
    named = jaxspec.generate(target, prompts, drafter="eagle", heads=own, tree=tree, **options)
    plain = jaxspec.generate(target, prompts, drafter="none", **options)
    assert [row.tokens for row in out] == [row.tokens for row in named] == [row.tokens for row in plain]
    assert out.stats.drafted == named.stats.drafted > 0


def test_a_file_of_the_layer_alone(folder, target, tmp_path):
    """With the model's config.json; the layer is saved and read in jaxspec's own layout, too."""
    own = {name: shape for name, shape in GOLDEN["shapes"].items() if name.startswith("mtp.")}
    write_checkpoint(tmp_path / "alone", CASE, GOLDEN["settings"], own)
    heads = load_heads(tmp_path / "alone", target=target)
    jaxspec.save_heads(heads, tmp_path / "saved")
    for each in (heads, load_heads(tmp_path / "saved", target=target)):
        assert each.config == load_heads(folder, target=target).config
        jax.tree.map(np.testing.assert_array_equal, each.params, load_heads(folder, target=target).params)


def test_what_is_missing_is_named(folder, tmp_path):
    shapes = {name: shape for name, shape in GOLDEN["shapes"].items() if name != "mtp.norm.weight"}
    write_checkpoint(tmp_path / "some", CASE, GOLDEN["settings"], shapes)
    with pytest.raises(CheckpointError, match=r"tensors missing: norm\.weight"):
        load_heads(tmp_path / "some")


def test_sizes_that_do_not_fit_together_are_refused(folder):
    decoder = load_heads(folder).config.decoder
    with pytest.raises(InvalidConfig, match="pair_norms is for EAGLE-1 heads"):
        EagleConfig(decoder, 3, pair_norms=True)
    with pytest.raises(InvalidConfig, match="norm_output of an EAGLE-1 head needs pair_norms"):
        EagleConfig(decoder, 1, norm_output=True)
