"""Every family of models against transformers: logits of tiny random checkpoints, past windows and contexts.

The figures were made by `scripts/golden/make_families.py`; the text is read in pieces on top of a cache, so that
what is cached and what is new are both compared.
"""

import dataclasses
import functools
import json
import pathlib

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers.checkpoints import assert_same_params, leaves
from helpers.families import LENGTH, POSITIONS, PREFIX, TREE, paths, tokens_of, write_checkpoint
from helpers.logits import GOLDEN, logits_in_pieces
from helpers.paths import GOLDEN_DIR
from helpers.tiers import with_slow
from jaxspec.checkpoints.hf_config import read_config
from jaxspec.checkpoints.hf_families import FAMILIES
from jaxspec.checkpoints.load import load, read_params
from jaxspec.checkpoints.source import open_checkpoint
from jaxspec.core.records import Window
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.kernels.library import describe_kernels, kernels_available
from jaxspec.models.kernels import find_kernel_gap

WHOLE = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
}
"""Whole numbers that are read in every family."""
TOLERANCE = 1e-4


def checkpoint(folder: pathlib.Path, case: str) -> pathlib.Path:
    golden = GOLDEN[case]
    write_checkpoint(folder, case, golden["settings"], golden["shapes"])
    return folder


def test_the_cases_cover_every_family():
    assert {case["settings"]["model_type"] for case in GOLDEN.values()} == set(FAMILIES)


@pytest.mark.parametrize("case", GOLDEN)
def test_whole_numbers_may_be_written_as_floats(case):
    """One at a time, and all at once: 4096.0 is 4096, and 4096.5 is refused."""
    settings = dict(FAMILIES[GOLDEN[case]["settings"]["model_type"]].defaults) | GOLDEN[case]["settings"]
    numbers = {name: float(value) for name, value in settings.items() if type(value) is int}
    numbers = {name: value for name, value in numbers.items() if not name.endswith("_token_id")}
    assert numbers.keys() >= {name for name in WHOLE if settings.get(name, 0) is not None}
    expected = read_config("config.json", settings)
    assert read_config("config.json", settings | numbers) == expected
    for name, value in numbers.items():
        assert read_config("config.json", settings | {name: value}) == expected, name
        if name in WHOLE:
            with pytest.raises(CheckpointError, match=f"{name} is {value + 0.5}"):
                read_config("config.json", settings | {name: value + 0.5})


@pytest.mark.parametrize("case", GOLDEN)
def test_logits_are_those_of_transformers(case, tmp_path):
    context = 256 if case in ("phi3-longrope-long", "phi4-partial-longrope") else None
    model = load(checkpoint(tmp_path, case), context=context)
    found = logits_in_pieces(model, tokens_of(case))[list(POSITIONS)]
    expected = np.asarray(GOLDEN[case]["logits"])
    assert expected.max() - expected.min() > 5  # they say something
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


TREES = json.loads((GOLDEN_DIR / "trees.json").read_text())["cases"]


@pytest.mark.parametrize("case", TREES)
@pytest.mark.parametrize("kernels", with_slow([True, False], {False}))
def test_every_node_of_a_tree_has_the_logits_of_its_path(case, kernels, tmp_path):
    """The text before the tree is committed. The figures were made by `scripts/golden/make_trees.py`."""
    if kernels and not kernels_available():
        pytest.skip(describe_kernels())
    path = checkpoint(tmp_path, case)
    kernels = kernels and find_kernel_gap(open_checkpoint(path).config) is None
    model, text = load(path, kernels=kernels), tokens_of(case)
    nodes = len(TREE)
    mask = np.zeros((nodes, nodes), bool)
    for node, path in enumerate(paths()):
        mask[node, path] = True

    @jax.jit
    def read(params, tokens):
        first = Window(tokens[:, :PREFIX], jnp.arange(PREFIX)[None], jnp.tri(PREFIX, dtype=bool)[None])
        cache = model.lm.init_cache(1, LENGTH)
        _, entries = model.lm.apply(params, first, cache)
        cache = model.lm.commit(cache, entries, None, jnp.full((1,), PREFIX))
        positions = PREFIX - 1 + mask.sum(1)
        window = Window(tokens[:, PREFIX : PREFIX + nodes], jnp.asarray(positions)[None], jnp.asarray(mask)[None])
        features, _ = model.lm.apply(params, window, cache)
        return model.lm.head(params, features)

    found = read(model.params, jnp.asarray([text]))[0]
    np.testing.assert_allclose(found, TREES[case], rtol=0, atol=TOLERANCE)


@functools.cache
def sliding_pair(dtype: str, folder: str):
    """A target with sliding and full attention, and a draft that is right often: the target with noise."""
    target = load(checkpoint(pathlib.Path(folder), "gemma3"), dtype=dtype)
    keys = iter(jax.random.split(jax.random.key(1), 200))
    noisy = jax.tree.map(lambda a: a + 0.02 * jax.random.normal(next(keys), a.shape, a.dtype), target.params)
    return target, jaxspec.Model(target.lm, noisy)


OPTIONS = {"key": jax.random.key(3), "max_new_tokens": 40, "capacity": 256, "logprobs": True}
DRAFTERS = {
    "model": {"tree": jaxspec.from_paths([(0, 0, 0), (0, 1), (1, 0)])},
    "early-exit": {"tree": 3, "drafter_options": {"exit_layers": 2}},
}


@pytest.mark.parametrize("drafter", with_slow(DRAFTERS, ("model",)))
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_sliding_attention_and_speculation(drafter, temperature, tmp_path_factory):
    target, draft = sliding_pair("float32", str(tmp_path_factory.getbasetemp() / "sliding32"))
    prompts, sampling = [tokens_of("a")[:30], tokens_of("b")[:7]], jaxspec.Sampling(temperature=temperature)
    options = OPTIONS | DRAFTERS[drafter] | {"sampling": sampling, "ignore_eos": True}
    given = {"draft": draft} if drafter == "model" else {}
    out = jaxspec.generate(target, prompts, drafter=drafter, **given, **options)
    plain = jaxspec.generate(target, prompts, drafter="none", sampling=sampling, ignore_eos=True, **OPTIONS)
    assert [row.tokens for row in out] == [row.tokens for row in plain]
    assert out.stats.drafted > 0
    if drafter == "model":
        assert out.stats.accepted > 10


@pytest.mark.slow
def test_sliding_attention_is_bit_identical_when_widths_match(tmp_path_factory):
    target, draft = sliding_pair("bfloat16", str(tmp_path_factory.getbasetemp() / "sliding16"))
    options = OPTIONS | DRAFTERS["model"] | {"sampling": jaxspec.Sampling(temperature=0.9), "width_matched": True}
    prompts = [tokens_of("a")[:30], tokens_of("b")[:7]]
    out = jaxspec.generate(target, prompts, drafter="model", draft=draft, **options)
    plain = jaxspec.generate(target, prompts, drafter="none", **options)
    assert out.stats.accepted > 10
    assert [row.tokens for row in out] == [row.tokens for row in plain]
    assert [row.logprobs for row in out] == [row.logprobs for row in plain]


def test_trees_larger_than_the_sliding_window_are_refused(tmp_path):
    target = load(checkpoint(tmp_path, "mistral-small-window"))
    with pytest.raises(InvalidConfig, match=r"sliding attention sees only 3"):
        jaxspec.generate(target, [[5, 6, 7]], drafter="model", draft=target, tree=4, max_new_tokens=4)


# --- settings -----------------------------------------------------------------------------------------------


def test_context(tmp_path):
    plain = checkpoint(tmp_path / "llama", "llama-tied")
    assert open_checkpoint(plain).config.max_position == 256
    assert open_checkpoint(plain, context=64).config.max_position == 64
    with pytest.raises(InvalidConfig, match="context is 257, but the model supports at most 256"):
        open_checkpoint(plain, context=257)
    with pytest.raises(InvalidConfig, match="context must be a whole number of tokens from 1, got 0"):
        open_checkpoint(plain, context=0)
    long = checkpoint(tmp_path / "phi3", "phi3-longrope-long")  # original context 32
    short, far = open_checkpoint(long).config, open_checkpoint(long, context=33).config
    assert (short.max_position, far.max_position) == (32, 33)
    assert short.rope.divisors == (1.0, 1.1, 1.3, 1.7)
    assert far.rope.divisors == (1.0, 2.0, 5.0, 11.0)
    assert short.rope.scale == far.rope.scale > 1


@pytest.mark.parametrize("case", ["qwen2", "qwen3", "phi3-window", "gemma3"])
def test_every_tensor_must_be_there(case, tmp_path):
    shapes = GOLDEN[case]["shapes"]
    for name in shapes:
        rest = {key: shape for key, shape in shapes.items() if key != name}
        write_checkpoint(tmp_path, case, GOLDEN[case]["settings"], rest)
        with pytest.raises(CheckpointError, match=f"missing: {name}"):
            open_checkpoint(tmp_path)


def test_nothing_is_initialised_in_silence(tmp_path):
    """Every number of every tensor is in the parameters, once."""
    for case in GOLDEN:
        folder = checkpoint(tmp_path / case, case)
        params = read_params(open_checkpoint(folder))
        read = sum(leaf.size for leaf in jax.tree.leaves(params))
        assert read == sum(int(np.prod(shape)) for shape in GOLDEN[case]["shapes"].values()), case


# --- the same models as GGUF files --------------------------------------------------------------------------

PLAIN_GEMMA = {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6}  # what a GGUF file of it implies
AS_GGUF = {
    "llama-tied": ("llama", {}, None),
    "llama-mqa-llama3": ("llama", {}, None),
    "llama-linear": ("llama", {}, None),
    "qwen2": ("qwen2", {}, None),
    "qwen2-yarn": ("qwen2", {}, None),
    "qwen3": ("qwen3", {}, None),
    "phi3-window": ("phi3", {}, None),
    "phi3-longrope-long": ("phi3", {}, 256),
    "phi3-longrope-short": ("phi3", {}, None),
    "phi4-partial-longrope": ("phi3", {}, 256),
    "gemma3": ("gemma3", PLAIN_GEMMA, None),
}
PARTS = {  # parameter kind -> the gguf package's own kinds of tensor
    "embed": ["TOKEN_EMBD"],
    "attn_norm": ["ATTN_NORM"],
    "qkv": ["ATTN_Q", "ATTN_K", "ATTN_V"],
    "qkv_bias": ["ATTN_Q", "ATTN_K", "ATTN_V"],
    "q_norm": ["ATTN_Q_NORM"],
    "k_norm": ["ATTN_K_NORM"],
    "out": ["ATTN_OUT"],
    "post_attn_norm": ["ATTN_POST_NORM"],
    "mlp_norm": ["FFN_NORM"],
    "gate_up": ["FFN_GATE", "FFN_UP"],
    "down": ["FFN_DOWN"],
    "post_mlp_norm": ["FFN_POST_NORM"],
    "norm": ["OUTPUT_NORM"],
    "head": ["OUTPUT"],
}


def write_as_gguf(path: pathlib.Path, architecture: str, config, params: dict, settings: dict) -> pathlib.Path:
    """Writes parameters as the gguf package names and llama.cpp's converter lays them out."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.rope.width or config.head_dim)
    if config.window:
        writer.add_sliding_window(config.window)
    scaling = settings.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(settings["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(config.rope.scale)
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.asarray(scaling[f"{name}_factor"], np.float32))
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", np.asarray(config.rope.divisors, np.float32))
    fused = {"qkv": ["ATTN_QKV"], "gate_up": ["FFN_UP"]} if architecture == "phi3" else {}
    for name, array in leaves(params).items():
        *layer, kind = name.split(".")
        parts = (PARTS | fused)[kind]
        if array.ndim == 2 and kind not in ("embed", "head"):
            array = array.T
        heads = config.num_heads * config.head_dim, (config.num_heads + config.num_kv_heads) * config.head_dim
        pieces = np.split(array, heads if len(parts) == 3 else len(parts))
        for part, piece in zip(parts, pieces, strict=True):
            if architecture == "llama" and part in ("ATTN_Q", "ATTN_K"):  # neighbours rotate, not halves
                piece = piece.reshape(-1, 2, config.head_dim // 2, piece.shape[-1]).swapaxes(1, 2)
                piece = piece.reshape(-1, piece.shape[-1])
            stem = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[part]].format(bid=layer[1] if layer else None)
            writer.add_tensor(f"{stem}.{'bias' if kind.endswith('_bias') else 'weight'}", np.ascontiguousarray(piece))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("case", AS_GGUF)
def test_a_gguf_file_is_the_same_model(case, tmp_path):
    architecture, changes, context = AS_GGUF[case]
    settings = GOLDEN[case]["settings"] | changes
    write_checkpoint(tmp_path / "hf", case, settings, GOLDEN[case]["shapes"])
    hf = open_checkpoint(tmp_path / "hf", context)
    params = read_params(hf)
    path = write_as_gguf(tmp_path / "model.gguf", architecture, hf.config, params, settings)
    found = open_checkpoint(path, context)
    for ours, theirs in ((found.config.rope, hf.config.rope), (found.config.window_rope, hf.config.window_rope)):
        if theirs is not None:
            assert ours is not None
            np.testing.assert_allclose(ours.divisors, theirs.divisors, rtol=1e-6)
            assert (ours.theta, ours.width) == (theirs.theta, theirs.width)
            assert ours.scale == pytest.approx(theirs.scale, rel=1e-6)
    same_rope = dataclasses.replace(found.config, rope=hf.config.rope, window_rope=hf.config.window_rope)
    assert same_rope == hf.config
    assert_same_params(read_params(found), params)
