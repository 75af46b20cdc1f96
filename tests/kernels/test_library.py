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
from jaxspec.kernels import installation, library
from jaxspec.models.kernels import with_kernels, without_kernels
from jaxspec.models.packed import Packed
from jaxspec.models.quantized import Quantized, quantize

pytestmark = pytest.mark.quick


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("g++"), reason="nothing to build them for or with"
)
def test_they_are_built_where_there_is_a_compiler():
    """All other tests of the kernels are skipped without them."""
    assert installation.library_file().exists(), library.describe_kernels()


# --- why they are missing -------------------------------------------------------------------------------------------

ROOT = pathlib.Path(library.__file__).parents[2]
HERE = "import jaxspec.kernels.library as library; print(library.describe_kernels())"
MACHINES = ("x86_64", "AMD64", "arm64", "aarch64", "riscv64", "ppc64le")
RECORDED = "command 'g++' failed: No such file or directory"


def place(root: pathlib.Path, kind: str) -> pathlib.Path:
    """Makes a folder of kernels in a checkout, or in an installation by a wheel with or without a compiled part."""
    folder = root / "jaxspec" / "kernels"
    folder.mkdir(parents=True)
    if kind == "checkout":
        (root / "setup.py").touch()
        (root / "pyproject.toml").touch()
    else:
        info = root / "jaxspec_decoding-9.9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxspec-decoding\nVersion: 9.9\n")
        (info / "WHEEL").write_text(f"Wheel-Version: 1.0\nRoot-Is-Purelib: {str(kind == 'pure wheel').lower()}\n")
    return folder


@pytest.mark.parametrize("kind", ["checkout", "wheel", "pure wheel"])
@pytest.mark.parametrize("beside", ["nothing", "record", "another Python's"])
@pytest.mark.parametrize("elsewhere", [True, False], ids=["installed elsewhere", "nowhere else"])
def test_only_what_was_found_is_given_as_the_reason(tmp_path, monkeypatch, kind, beside, elsewhere):
    folder, site = place(tmp_path / "here", kind), tmp_path / "site"
    found = folder.parent.parent
    if elsewhere:
        installation.library_file(place(site, "wheel")).touch()
    monkeypatch.setattr(sys, "path", [str(found), str(site)])
    other = "_kernels.cpython-399-x86_64-linux-gnu.so"
    if beside == "record":
        (folder / installation.REASON_FILE).write_text(f"{RECORDED}\n")
    elif beside != "nothing":
        (folder / other).touch()
    for machine in MACHINES:
        said = installation.explain_missing(folder, machine, "linux")
        assert "\n" not in said
        if machine not in ("x86_64", "AMD64"):
            assert said == f"they are for x86-64 processors, and this processor is {machine}"
            continue
        assert (RECORDED in said) == (beside == "record"), "a failure is named where one was recorded"
        assert (other in said) == (beside == "another Python's")
        if beside != "nothing":
            continue
        assert ("the checkout" in said) == (kind == "checkout")
        assert (str(site) in said) == ("run Python from another folder" in said) == (kind == "checkout" and elsewhere)
        assert ("from a wheel without kernels" in said) == (kind == "pure wheel")
        assert ("unknown reason" in said) == (kind == "wheel")
        assert "no C++ compiler" not in said
    assert "Windows" in installation.explain_missing(folder, "AMD64", "win32")


@pytest.fixture
def checkout(tmp_path):
    """A copy of this checkout in which no kernels are built."""
    unbuilt = shutil.ignore_patterns("*.so", "shipped", "__pycache__", installation.REASON_FILE)
    shutil.copytree(ROOT / "jaxspec", tmp_path / "jaxspec", ignore=unbuilt)
    for name in ("setup.py", "pyproject.toml"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="nothing to build with")
def test_a_checkout_says_that_it_is_one_and_why_a_build_failed(checkout):
    """Python started in a checkout imports its folder, in place of the package that is installed."""

    def said() -> str:
        return subprocess.run([sys.executable, "-c", HERE], cwd=checkout, capture_output=True, text=True).stdout

    assert f"Python imported the checkout {checkout}, where they are not built" in said()
    assert "run Python from another folder, or" in said() or not library.kernels_available()
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    environment = os.environ | {"CXX": "no-such-compiler", "CC": "no-such-compiler"}
    subprocess.run(build, cwd=checkout, env=environment, capture_output=True, check=True)
    assert "could not be built when jaxspec was installed: there is no C++ compiler (no-such-compiler)" in said()
    for path in (checkout / "jaxspec/kernels/src").glob("*.cpp"):
        path.write_text("#error of the test's own\n")  # nothing takes time to compile
    subprocess.run(build, cwd=checkout, capture_output=True, check=True)
    assert "no C++ compiler" not in said(), "there is one, and it failed"
    assert "could not be built when jaxspec was installed: building with " in said()


def test_they_can_be_turned_off():
    code = "from jaxspec.kernels import library; print(library.kernels_available(), library.describe_kernels())"
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
    with pytest.raises(InvalidConfig, match="do not split layers"):
        library.use_kernels(True, whole_layers=False)


def test_every_processor_has_a_cost_of_drafts(monkeypatch):
    sources = pathlib.Path(library.__file__).parent / "src"
    names = {name for path in sources.glob("*.cpp") for name in re.findall('#define NAME "(.+)"', path.read_text())}
    assert library.TOKEN_COSTS.keys() == names
    monkeypatch.setattr(library, "kernels_available", lambda: True)
    monkeypatch.setattr(library, "describe_kernels", lambda: "AVX2")
    rng = np.random.default_rng(0)
    values = rng.normal(size=(32, 32)).astype("float32")
    rounded = Quantized.quantize(values)
    stored = {"float32": [values], "bfloat16": [values.astype(jnp.bfloat16)], "int8": [rounded, Packed.pack(rounded)]}
    stored["file"] = [blocks_like(rng, "Q4_0", values)]
    assert stored.keys() == set(library.COST_TYPES)
    for name, matrix in ((name, matrix) for name, each in stored.items() for matrix in each):
        cost = library.token_cost({"norm": jnp.ones(8), "matrix": matrix, "empty": 1.0})
        assert cost is library.TOKEN_COSTS["AVX2"][name]
    monkeypatch.setattr(library, "kernels_available", lambda: False)
    least = min(cost.at_once for own in library.TOKEN_COSTS.values() for cost in own.values())
    assert library.token_cost({}).at_once < least


@pytest.mark.skipif(not library.kernels_available(), reason=library.describe_kernels())
def test_a_file_of_results_is_continued_with_the_same_model_alone():
    """Packed floats are the same model; rows that int8 products round make another."""
    lm = transformer()
    floats = jaxspec.Model(lm, lm.init_params(jax.random.key(0)))
    rounded = jaxspec.Model(lm, quantize(floats.params))
    assert fingerprint.describe_weights(with_kernels(floats).params) == fingerprint.describe_weights(floats.params)
    assert fingerprint.describe_weights(with_kernels(rounded).params) != fingerprint.describe_weights(rounded.params)
    for model in (floats, rounded):
        back = without_kernels(with_kernels(model))
        assert fingerprint.describe_weights(back.params) == fingerprint.describe_weights(model.params)
