"""Tests that with `exact=True`, simulated meshes of GPUs and TPUs have the bits of one device."""

import json
import subprocess
import sys
from typing import Any

import pytest

from helpers.compiling import simulated
from helpers.paths import TESTS

pytestmark = pytest.mark.mesh

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
from helpers import exact_meshes
print(json.dumps(getattr(exact_meshes, sys.argv[2])(eval(sys.argv[3]))))
"""


def check(function: str, *cases: tuple) -> None:
    """Compares meshes with one device; the cases are arguments of a function of `helpers.exact_meshes`."""
    words: list[Any] = [sys.executable, "-c", PROGRAM, str(TESTS), function, repr(cases)]
    done = subprocess.run(words, env=simulated(8), capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.slow
def test_logits_and_entries_have_the_bits_of_one_device():
    check("logits_on_meshes", ("bfloat16", (1, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "tpu bfloat16", "tpu int8"])
def test_logits_and_entries_on_other_meshes_have_the_bits_of_one_device(kind):
    check("logits_on_meshes", *((kind, mesh) for mesh in ((1, 2), (2, 1), (2, 4), (1, 8))))


CASES = [
    ("bfloat16", "none", (1, 2)), ("bfloat16", "prompt-lookup", (2, 4)), ("bfloat16", "eagle", (1, 8)),
    ("int8", "none", (2, 4)), ("int8", "prompt-lookup", (1, 8)), ("int8", "eagle", (4, 2)),
    ("bfloat16", "early-exit", (2, 2)), ("bfloat16", "model", (2, 2)),
    ("tpu bfloat16", "none", (1, 8)), ("tpu bfloat16", "prompt-lookup", (2, 2)), ("tpu bfloat16", "eagle", (1, 4)),
    ("tpu int8", "prompt-lookup", (2, 4)),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "tpu bfloat16", "tpu int8"])
def test_texts_of_devices_that_share_layers_have_the_bits_of_one_device(kind):
    check("texts_on_meshes", *(case for case in CASES if case[0] == kind))


@pytest.mark.slow
def test_texts_of_groups_that_share_no_layer_have_the_bits_of_one_device():
    cases = ("bfloat16", "prompt-lookup", (4, 1)), ("int8", "eagle", (2, 1)), ("tpu int8", "prompt-lookup", (2, 1))
    check("texts_on_meshes", *cases)
