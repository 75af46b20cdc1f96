"""Tests that the kernels are there where they can be, that they can be turned off, and what is said of it."""

import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers.blocks import blocks_like
from helpers.toys import transformer
from jaxspec.errors import InvalidConfig
from jaxspec.generation import fingerprint
from jaxspec.kernels import library
from jaxspec.models.kernels import with_kernels, without_kernels
from jaxspec.models.packed import Packed
from jaxspec.models.quantized import Quantized, quantize

pytestmark = pytest.mark.quick


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("g++"), reason="nothing to build them for or with"
)
def test_they_are_built_where_there_is_a_compiler():
    """All other tests of the kernels are skipped without them."""
    assert "not built" not in library.describe()


def test_they_can_be_turned_off():
    code = "from jaxspec.kernels import library; print(library.available(), library.describe())"
    environment = os.environ | {library.VARIABLE: "0"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == f"False none ({library.VARIABLE}=0)\n"


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(library, "_library", lambda: "there was no compiler")
    library._warn.cache_clear()
    with pytest.raises(InvalidConfig, match="not available: none"):
        library.use_kernels(True)
    with pytest.warns(UserWarning, match="there was no compiler"):
        assert not library.use_kernels(None)
    assert not library.use_kernels(None)  # said once
    assert not library.use_kernels(False)
    with pytest.raises(InvalidConfig, match="whole layers"):
        library.use_kernels(True, suited=False)


def test_every_processor_has_a_cost_of_drafts(monkeypatch):
    sources = pathlib.Path(library.__file__).parent / "src"
    names = {name for path in sources.glob("*.cpp") for name in re.findall('#define NAME "(.+)"', path.read_text())}
    assert library.TOKEN_COSTS.keys() == names
    monkeypatch.setattr(library, "available", lambda: True)
    monkeypatch.setattr(library, "describe", lambda: "AVX2")
    rng = np.random.default_rng(0)
    values = rng.normal(size=(32, 32)).astype("float32")
    rounded = Quantized.quantize(values)
    stored = {"float32": [values], "bfloat16": [values.astype(jnp.bfloat16)], "int8": [rounded, Packed.pack(rounded)]}
    stored["file"] = [blocks_like(rng, "Q4_0", values)]
    assert stored.keys() == set(library.TYPES)
    for name, matrix in ((name, matrix) for name, each in stored.items() for matrix in each):
        cost = library.token_cost({"norm": jnp.ones(8), "matrix": matrix, "empty": 1.0})
        assert cost is library.TOKEN_COSTS["AVX2"][name]
    monkeypatch.setattr(library, "available", lambda: False)
    least = min(cost.at_once for own in library.TOKEN_COSTS.values() for cost in own.values())
    assert library.token_cost({}).at_once < least


@pytest.mark.skipif(not library.available(), reason=library.describe())
def test_a_file_of_results_is_continued_with_the_same_model_alone():
    """Packed floats are the same model; rows that int8 products round make another."""
    lm = transformer()
    floats = jaxspec.Model(lm, lm.init_params(jax.random.key(0)))
    rounded = jaxspec.Model(lm, quantize(floats.params))
    assert fingerprint.weights(with_kernels(floats).params) == fingerprint.weights(floats.params)
    assert fingerprint.weights(with_kernels(rounded).params) != fingerprint.weights(rounded.params)
    for model in (floats, rounded):
        back = without_kernels(with_kernels(model))
        assert fingerprint.weights(back.params) == fingerprint.weights(model.params)
