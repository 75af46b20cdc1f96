"""Tests that a program has the form of the devices that it is for, whatever JAX's default device is."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxspec
from helpers import hybrids, toys
from helpers.platforms import lowered_text
from jaxspec.backend import layout
from jaxspec.core.networks import LanguageModel
from jaxspec.core.topology import chain
from jaxspec.decode.state import Weights
from jaxspec.drafters._tapped import execution_of
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.generation.drafting import Drafting
from jaxspec.kernels.library import kernels_available
from jaxspec.models.execution import Execution
from jaxspec.models.transformer import TransformerLM

pytestmark = pytest.mark.quick

LOWERED_AS = {"cpu": "cpu", "tpu": "tpu", "gpu": "cuda"}
"""JAX's names of platforms for which programs are lowered."""


def program(target: LanguageModel, platform: str) -> str:
    """The program of a decode loop, lowered for a platform."""
    made = target if isinstance(target, TransformerLM) else toys.transformer(jnp.bfloat16)
    weights = Weights(jax.eval_shape(made.init_params, jax.random.key(0)))
    asked = toys.request([[1, 2, 3, 1, 2]], 8, vocab=target.vocab, temperature=[1.0], top_p=[0.9])
    decoder = toys.decoder(target, PromptLookup(chain(3)))
    traced = jax.jit(lambda w, r: decoder.generate(w, r, 512)).trace(weights, asked)
    return lowered_text(traced, LOWERED_AS[platform])


def test_each_platform_has_its_own_form():
    """On a GPU the cache holds bfloat16 values, and neither attention nor the rule has a loop."""
    target = toys.transformer("bfloat16")
    text = {name: program(target.with_execution(platform=name), name) for name in LOWERED_AS}
    layers, size = target.config.num_layers, target.config.head_dim
    cache = f"tensor<{layers}x1x{target.config.num_kv_heads}x512x{size}x"
    for name, stored in (("cpu", "ui16"), ("tpu", "ui16"), ("gpu", "bf16")):
        kinds = {kind for kind in ("ui16", "bf16") if f"{cache}{kind}>" in text[name]}
        assert kinds == {stored}
    loops = {name: text[name].count("stablehlo.while") for name in text}
    assert loops["gpu"] + layers < min(loops["cpu"], loops["tpu"])
    assert program(target, "cpu") == text["cpu"]  # JAX's default device is a CPU here


@pytest.mark.parametrize("platform", LOWERED_AS)
def test_recurrent_layers_have_the_form_of_the_platform(platform):
    """One program holds the CPU's kernel and XLA's form; a program for another platform has no kernel."""
    target = hybrids.LM.with_execution(kernels=kernels_available(), platform=platform)
    text = program(target, platform)
    assert ("jaxspec_delta" in text) == (platform == "cpu" and kernels_available())


def test_a_mesh_of_cpus_on_a_machine_with_a_gpu_runs_the_program_of_a_cpu(monkeypatch):
    target = toys.transformer("bfloat16")
    model = jaxspec.Model(target, target.init_params(jax.random.key(0)))
    mesh = jaxspec.make_mesh(1, 1)
    here = jaxspec.shard(model, mesh)
    expected = program(here.lm, "cpu")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert layout.default_platform() == "gpu"
    there: Any = jaxspec.shard(model, mesh)
    assert there.lm == here.lm
    assert there.lm.execution.platform == "cpu"
    assert program(there.lm, "cpu") == expected
    assert program(target, "gpu") != expected
    # So do draft models and heads.
    drafting: Any = Drafting("model", draft=model, tree=2).build_drafter(there)[0]
    assert drafting.model.execution.platform == "cpu"
    assert execution_of(there.lm).platform == "cpu"


def test_the_default_device_has_its_platform(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with jax.default_device(jax.devices("cpu")[0]):
        assert layout.default_platform() == "cpu"
        assert Execution().resolve().platform == "cpu"
    assert Execution(platform="tpu").resolve().platform == "tpu"


def test_a_head_runs_whole_layers_beside_a_target_that_devices_share():
    target = toys.transformer().with_execution(shards=2, kernels=True, platform="cpu")
    assert execution_of(target) == Execution(kernels=True, platform="cpu")
    assert dataclasses.replace(target.execution, shards=1).of_head() == execution_of(target)
