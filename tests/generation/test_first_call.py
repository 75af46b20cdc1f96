"""Tests a first call: the presets it finds, its messages while it compiles, and what it keeps for the next process."""

import os
import re
import types
from typing import Any

import jax
import pytest

import jaxspec
from helpers.checkpoints import random_params, tiny_config, write_hf
from helpers.narrow import instance, not_none
from helpers.toy_text import NO_TEMPLATE, TOY
from jaxspec.backend import compilation_cache
from jaxspec.checkpoints import presets
from jaxspec.checkpoints.presets import PRESETS, Preset
from jaxspec.decode.session import clear_executables
from jaxspec.drafters.medusa import Medusa
from jaxspec.drafters.model import ModelDraft
from jaxspec.errors import MissingDraft
from jaxspec.generation.drafting import Drafting
from jaxspec.heads import companions, find
from jaxspec.heads.network import init_params
from jaxspec.models.transformer import TransformerLM

LINES = r"jaxspec: compiling \.\.\.\njaxspec: compiled in [\d.]+ s\n"

# --- what comes with a preset -------------------------------------------------------------------------------


@pytest.fixture
def preset(tmp_path, monkeypatch):
    """A preset "large" with heads of its own and the draft "small"; gives the names of what is loaded."""
    large, small = tiny_config(), tiny_config(num_layers=1)
    places = {
        "large": write_hf(tmp_path / "large-model", large, random_params(large)),
        "small": write_hf(tmp_path / "small-model", small, random_params(small)),
    }
    monkeypatch.setitem(PRESETS, "large", Preset("large", "o/large", 1, "MIT", draft="small"))
    monkeypatch.setitem(PRESETS, "small", Preset("small", "o/small", 1, "MIT"))
    monkeypatch.setattr(presets, "fetch_preset", lambda name, **_: places[name])
    monkeypatch.setattr(find, "SHIPPED_FOLDER", tmp_path)
    config = jaxspec.HeadsConfig(large.hidden_size, large.vocab_size, 3)
    jaxspec.save_heads(jaxspec.DraftHeads(config, init_params(config)), tmp_path / "large" / "medusa")
    loaded = []

    def noted(load):
        def call(*args, **options):
            loaded.append((load.__name__, *args))
            return load(*args, **options)

        return call

    for name in ("load", "load_heads"):
        monkeypatch.setattr(companions, name, noted(getattr(companions, name)))
    return loaded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_preset_s_heads_and_draft_are_found_and_loaded_once(preset, dtype):
    target = jaxspec.load("large", dtype=dtype)
    assert target.preset == "large"
    builds = [(Drafting("medusa").build(target)[0], *Drafting("model").build(target)) for _ in range(2)]
    assert preset == [("load_heads", find.SHIPPED_FOLDER / "large" / "medusa"), ("load", "small")]
    heads, draft, weights = builds[-1]
    assert instance(Medusa, heads.drafter).config.num_heads == 3
    model = instance(TransformerLM, instance(ModelDraft, draft.drafter).model)
    assert (model.depth, model.dtype) == (1, instance(TransformerLM, target.lm).dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(weights.draft)} == {
        leaf.dtype for leaf in jax.tree.leaves(target.params)
    }


def test_what_is_given_comes_before_what_is_found(preset):
    target, draft = jaxspec.load("large"), jaxspec.load("small")
    _, weights = Drafting("model", draft=draft).build(target)
    assert weights.draft is draft.params
    assert not preset


def test_a_preset_drafts_with_its_heads_by_name_alone(preset):
    target = jaxspec.load("large")
    drafted, plain = (
        jaxspec.generate(target, [[1, 2, 3]], drafter=drafter, max_new_tokens=4, verbose=False)
        for drafter in ("medusa", "none")
    )
    assert drafted[0].tokens == plain[0].tokens
    assert drafted.stats.drafted > 0


def test_without_a_preset_heads_and_draft_must_be_given(preset, tmp_path):
    """A model that is read from a folder is no preset, whatever the folder's name; nor is one that has no draft."""
    for target in (jaxspec.load(tmp_path / "large-model"), TOY):
        for drafter in ("medusa", "model"):
            with pytest.raises(MissingDraft):
                jaxspec.stream(target, [[1, 2]], drafter=drafter)
    with pytest.raises(MissingDraft):
        jaxspec.stream(jaxspec.load("small"), [[1, 2]], drafter="model")
    assert not preset


# --- what is said while compiling ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_line_when_compiling_begins_and_one_when_it_ends(capsys):
    prompts = [[1, 2, 3], [2, 3]]
    options = {"drafter": "none", "max_new_tokens": 3, "ignore_eos": True}
    calls = {
        "generate": lambda **more: jaxspec.generate(NO_TEMPLATE, prompts, **options, **more),
        "stream": lambda **more: list(jaxspec.stream(NO_TEMPLATE, prompts, **options, **more)),
        "precompile": lambda **more: jaxspec.precompile(NO_TEMPLATE, prompts, **options, **more),
    }
    for call in calls.values():
        clear_executables()
        call(verbose=False)
        call()  # nothing is left to compile
        assert capsys.readouterr() == ("", "")
        clear_executables()
        call()
        out, err = capsys.readouterr()
        assert out == ""
        assert re.fullmatch(LINES, err)


def test_what_is_compiled_later_is_said_then(capsys):
    """Rows that take turns need one program more, once the first has ended."""
    clear_executables()
    jaxspec.generate(NO_TEMPLATE, [[1, 2], [2, 3]], batch=1, drafter="none", max_new_tokens=3, ignore_eos=True)
    assert re.fullmatch(LINES * 2, capsys.readouterr().err)


def test_a_capacity_that_is_rounded_says_so(capsys):
    options: dict[str, Any] = {"drafter": "none", "max_new_tokens": 2}
    rounded = jaxspec.generate(NO_TEMPLATE, [[1, 2]], capacity=600, **options)
    assert not_none(rounded.session).capacity == 768
    assert "jaxspec: capacity 600 is rounded up to 768 slots, a multiple of 256\n" in capsys.readouterr().err
    jaxspec.generate(NO_TEMPLATE, [[1, 2]], capacity=768, **options)
    jaxspec.generate(NO_TEMPLATE, [[1, 2]], capacity=600, verbose=False, **options)
    assert "rounded" not in capsys.readouterr().err


# --- what is kept -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "settings", "size"),
    [
        ({}, {}, compilation_cache.MAX_CACHE_BYTES),
        ({"JAX_COMPILATION_CACHE_MAX_SIZE": "7"}, {"jax_compilation_cache_max_size": 7}, 7),
        ({"JAX_COMPILATION_CACHE_MAX_SIZE": "-1"}, {}, -1),
        ({}, {"jax_compilation_cache_max_size": 7}, 7),
        ({"JAX_COMPILATION_CACHE_DIR": ""}, {}, None),
        ({}, {"jax_compilation_cache_dir": "/theirs"}, None),
        ({}, {"jax_enable_compilation_cache": False}, None),
        ({"JAXSPEC_CACHE": os.devnull}, {}, None),  # where nothing can be written
        ({"JAXSPEC_CACHE": "~no such user/cache"}, {}, None),
    ],
)
def test_compilations_are_kept_unless_the_user_said_otherwise(
    monkeypatch, tmp_path, capfd, environment, settings, size
):
    """`size` of the cache, None where none is to be set up."""
    for name in [name for name in os.environ if name.startswith("JAX_")]:
        monkeypatch.delenv(name)
    for name, value in ({"JAXSPEC_CACHE": str(tmp_path)} | environment).items():
        monkeypatch.setenv(name, value)
    config = types.SimpleNamespace(
        **{
            "jax_compilation_cache_dir": None,
            "jax_enable_compilation_cache": True,
            "jax_compilation_cache_max_size": -1,
        }
        | settings
    )
    before = dict(vars(config))
    config.update = lambda name, value: setattr(config, name, value)
    monkeypatch.setattr(compilation_cache, "jax", types.SimpleNamespace(config=config))
    compilation_cache.keep_compilations.__wrapped__()
    after = {name: value for name, value in vars(config).items() if name != "update"}
    if size is None:
        assert after == before
    else:
        assert after["jax_compilation_cache_dir"] == str(tmp_path / "xla")
        assert after["jax_compilation_cache_max_size"] == size
    assert capfd.readouterr() == ("", "")
