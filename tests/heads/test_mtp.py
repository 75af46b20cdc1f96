"""Tests layers for multi-token prediction (MTP) inside models: states against transformers, files, and drafting."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxspec
from helpers.families import random_tensor, split_experts, tokens_of, write_checkpoint
from helpers.hybrid_files import write_gguf
from helpers.narrow import instance
from helpers.paths import GOLDEN_DIR
from helpers.tiers import with_slow
from jaxspec.cli import main
from jaxspec.core import cache as caches
from jaxspec.core.records import Window
from jaxspec.drafters.eagle import Eagle, mtp_tree
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.heads.eagle_config import EagleConfig
from jaxspec.heads.eagle_layouts import mtp_config
from jaxspec.heads.files import load_heads
from jaxspec.heads.find import find_layout
from jaxspec.heads.layouts import LAYOUTS
from jaxspec.heads.network import init_cache, make_network, unflatten
from jaxspec.heads.serving import find_obstacle, list_layouts
from jaxspec.kernels.library import describe_kernels, kernels_available
from jaxspec.models.config import Experts, ModelConfig
from jaxspec.models.layers import look_up
from jaxspec.models.packed import stored_types
from jaxspec.models.rope import Rope
from jaxspec.models.transformer import TransformerLM

CASES = json.loads((GOLDEN_DIR / "mtp.json").read_text())["cases"]
CASE, EXPERTS = CASES
GOLDEN = CASES[CASE]


def write(path, case: str):
    write_checkpoint(path, case, CASES[case]["settings"], CASES[case]["shapes"])
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {case: write(tmp_path_factory.mktemp("mtp"), case) for case in CASES}


@pytest.fixture(scope="module")
def targets(folders):
    return {case: jaxspec.load(path, kernels=False, report=lambda note: None) for case, path in folders.items()}


@pytest.fixture(scope="module")
def folder(folders):
    return folders[CASE]


@pytest.fixture(scope="module")
def target(targets):
    return targets[CASE]


def chain(size):
    return jnp.tri(size, dtype=bool)[None]


@pytest.mark.parametrize("case", CASES)
def test_states_are_those_of_transformers(case, folders, targets):
    """Rows that start from the target's features, and three further rows from the head's own states."""
    golden, target = CASES[case], targets[case]
    heads = load_heads(folders[case], target=target)
    head, rows = make_network(heads.config, heads.params, target.lm.execution), golden["rows"]
    text = jnp.asarray([tokens_of(case)[: len(golden["states"]) + 1]])
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
    for step in range(len(golden["states"]) - rows):
        states, cache = read(found[-1][:, -1:], rows + step, cache)
        found.append(states)
    found = jnp.concatenate(found, 1)
    # With experts, rounding is up to 6e-5 on some processors and versions of JAX.
    np.testing.assert_allclose(found[0], golden["states"], atol=1e-4)
    logits = target.lm.head(target.params, head.projected(found[:, -len(golden["logits"]) :]))
    np.testing.assert_allclose(logits[0], golden["logits"], atol=1e-4)


@pytest.mark.parametrize("case", with_slow([CASE, EXPERTS], {EXPERTS}))
def test_the_layer_of_the_target_is_its_default_head(case, folders, targets):
    folder, target = folders[case], targets[case]
    assert target.heads_inside == str(folder)
    options: dict[str, Any] = {"key": jax.random.key(0), "max_new_tokens": 24, "ignore_eos": True}
    tree = jaxspec.branching(2, 1)
    prompts = [[5, 6, 7, 8], [9, 10]]
    out = jaxspec.generate(target, prompts, drafter="eagle", tree=tree, **options)
    own = load_heads(folder, target=target)
    named = jaxspec.generate(target, prompts, drafter="mtp", tree=tree, **options)
    assert instance(Eagle, jaxspec.Drafting("eagle", heads=own).build_drafter(target)[0]).config == own.config
    plain = jaxspec.generate(target, prompts, drafter="none", **options)
    assert [row.tokens for row in out] == [row.tokens for row in named] == [row.tokens for row in plain]
    assert out.stats.drafted == named.stats.drafted > 0


@pytest.mark.parametrize("case", CASES)
def test_the_block_of_a_gguf_file_is_the_same_layer(case, folders, targets, tmp_path):
    """Norms have 1 added in such files; `inspect` names the layout; the drafter "mtp" takes the block by itself."""
    folder, target = folders[case], targets[case]
    path = write_gguf(tmp_path / "model.gguf", case, golden=CASES[case])
    model = jaxspec.load(path, kernels=False, report=lambda note: None)
    own, other = load_heads(folder, target=target), load_heads(path, target=model)
    assert find_layout(path) == find_layout(folder) == "mtp"
    assert own.config == other.config
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), own.params, other.params)
    drafter, params = jaxspec.Drafting("mtp").build_drafter(model)
    assert instance(Eagle, drafter).config == own.config
    jax.tree.map(np.testing.assert_array_equal, params, other.params)


def test_blocks_of_gguf_files_that_are_not_understood(tmp_path):
    two = {"nextn_predict_layers": 2, "block_count": 6, "attention.recurrent_layers": [True] * 3 + [False] * 3}
    with pytest.raises(CheckpointError, match="has 2 blocks for multi-token prediction, expected 1"):
        load_heads(write_gguf(tmp_path / "two.gguf", CASE, two, golden=GOLDEN))
    more = {"blk.4.nextn.embed_tokens.weight": np.zeros((48, 32))}
    with pytest.raises(CheckpointError, match=r"tensors not expected: blk\.4\.nextn\.embed_tokens\.weight"):
        load_heads(write_gguf(tmp_path / "table.gguf", CASE, tensors=more, golden=GOLDEN))


def test_the_layout_of_deepseek_and_glm_is_named(tmp_path):
    write_checkpoint(tmp_path / "m", CASE, {}, {"model.layers.61.eh_proj.weight": [4, 8]})
    with pytest.raises(CheckpointError, match=r"in the layout of DeepSeek and GLM \(model\.layers\.61\.eh_proj"):
        load_heads(tmp_path / "m")


def test_the_drafter_mtp_needs_the_layer(folder, target):
    bare = dataclasses.replace(target, heads_inside=None)
    with pytest.raises(InvalidConfig, match="needs a target with a layer for multi-token prediction"):
        jaxspec.generate(bare, [5, 6], drafter="mtp", max_new_tokens=2)
    with pytest.raises(InvalidConfig, match="leave heads out"):
        jaxspec.generate(target, [5, 6], drafter="mtp", heads=load_heads(folder, target=target), max_new_tokens=2)


@pytest.mark.parametrize(("vocab", "length"), [(100, 4), (4000, 2), (40_000, 1)])
def test_the_default_chain_is_priced(vocab, length):
    """A call of the layer reads the projection of the whole vocabulary, so a large vocabulary shortens the chain."""
    config = ModelConfig(vocab, 32, 64, 24, 4, 2, 8)
    lm, head = TransformerLM(config), mtp_config(config)
    target = jaxspec.Model(lm, lm.init_params(jax.random.key(0)))
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in head.param_shapes().items()}
    assert mtp_tree(head, params, target).shape.depth == length


def test_the_command_line_knows_the_layer(folder, target, tmp_path, capsys):
    """`inspect` shows it in both formats; `--drafter eagle` does not ask for heads that the target has."""
    for path in (folder, write_gguf(tmp_path / "model.gguf", CASE, golden=GOLDEN)):
        assert main(["inspect", str(path), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["heads"]["layout"] == "mtp"
    for drafter in ("eagle", "mtp"):
        assert main(["generate", "a", "--target", str(folder), "--drafter", drafter]) == 1
        assert "tokenizer" in capsys.readouterr().err
    assert main(["generate", "a", "--target", str(folder), "--drafter", "medusa"]) == 2
    assert "needs --heads" in capsys.readouterr().err


def test_a_file_of_the_layer_alone(folder, target, tmp_path):
    """With the model's config.json; the layer is saved and read in jaxspec's own layout, too."""
    own = {name: shape for name, shape in GOLDEN["shapes"].items() if name.startswith("mtp.")}
    write_checkpoint(tmp_path / "alone", CASE, GOLDEN["settings"], own)
    heads = load_heads(tmp_path / "alone", target=target)
    jaxspec.save_heads(heads, tmp_path / "saved")
    for each in (heads, load_heads(tmp_path / "saved", target=target)):
        assert each.config == load_heads(folder, target=target).config
        jax.tree.map(np.testing.assert_array_equal, each.params, load_heads(folder, target=target).params)


@pytest.mark.parametrize("case", CASES)
def test_an_exported_layer_has_the_tensors_of_the_file(case, folders, targets, tmp_path):
    """In the layout "mtp", which is the only one for such a layer; its norms lose the 1 again."""
    folder, target = folders[case], targets[case]
    heads = load_heads(folder, target=target)
    jaxspec.export_heads(heads, tmp_path / "out")
    own = {name: shape for name, shape in CASES[case]["shapes"].items() if name.startswith("mtp.")}
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: list(array.shape) for name, array in written.items()} == own
    for name, array in written.items():
        np.testing.assert_allclose(array, random_tensor(case, name, own[name]), atol=1e-6)
    again = load_heads(tmp_path / "out", target=target)
    assert again.config == heads.config
    assert list_layouts(heads.config) == ["mtp"]
    with pytest.raises(InvalidConfig, match="layout eagle1 has no norms before the input projection"):
        jaxspec.export_heads(heads, tmp_path / "other", layout="eagle1")
    decoder = dataclasses.replace(heads.config.decoder, qk_norm=False, out_gate=False, rope=Rope(), experts=None)
    plain = EagleConfig(decoder, 1)
    assert find_obstacle(plain, LAYOUTS["mtp"]) == (
        "the layout mtp is for layers for multi-token prediction, but this is an EAGLE-1 head of 1 layer"
    )


def test_experts_of_the_layer_may_have_tensors_of_their_own(folders, targets, tmp_path):
    """The model around the layer has one tensor for all experts of a layer."""
    split_experts(write(tmp_path, EXPERTS), "mtp.")
    target = jaxspec.load(tmp_path, kernels=False, report=lambda note: None)
    single, fused = load_heads(tmp_path, target=target), load_heads(folders[EXPERTS], target=targets[EXPERTS])
    assert single.config == fused.config
    jax.tree.map(np.testing.assert_array_equal, single.params, fused.params)


@pytest.mark.parametrize("kernels", [False, True])
def test_experts_have_the_dtype_of_the_target(folders, kernels):
    """The router and the gate of the shared expert stay in float32."""
    if kernels and not kernels_available():
        pytest.skip(describe_kernels())
    target = jaxspec.load(folders[EXPERTS], dtype="bfloat16", kernels=kernels, report=lambda note: None)
    _, params = jaxspec.Drafting("mtp").build_drafter(target)
    layer = {name: stored_types(leaf)[0] for name, leaf in params["layers"][0].items()}
    assert {name for name, dtype in layer.items() if dtype == "bfloat16"} == {
        "qkv", "out", "experts_gate_up", "experts_down", "shared_gate_up", "shared_down"
    }  # fmt: skip
    assert layer["router"] == layer["shared_gate"] == "float32"


def test_the_default_chain_is_priced_by_the_experts_of_its_tokens(targets):
    """A chain of a model with experts is shorter: each token of the target's call reads experts of its own."""
    experts = Experts(64, 2, 32, shared_width=32)
    config = dataclasses.replace(targets[EXPERTS].lm.config, num_layers=24, recurrent=(), delta=None, experts=experts)
    dense = dataclasses.replace(config, experts=None, intermediate_size=experts.active_width)
    lengths = []
    for each in (config, dense):
        head = mtp_config(each)
        params = jax.eval_shape(TransformerLM(each).init_params, jax.random.key(0))
        params |= {name: jnp.zeros(params[name].shape) for name in ("embed", "head")}
        own = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in head.param_shapes().items()}
        lengths.append(mtp_tree(head, unflatten(own), jaxspec.Model(TransformerLM(each), params)).shape.depth)
    assert lengths == [2, 4]


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
