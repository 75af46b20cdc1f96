"""Tests that the suite executes the shapes in annotations."""

import jax.numpy as jnp
import jaxtyping
import pytest

from helpers.paths import ROOT
from helpers.shapes import PACKAGES
from jaxspec.rules._siblings import excess
from jaxspec.testing import TableLM

pytestmark = pytest.mark.quick


def test_a_wrong_shape_is_caught():
    law = jnp.zeros((2, 5))
    assert excess(law, law).shape == (2, 5)
    with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'draft'"):
        excess(law, jnp.zeros((2, 1)))  # would be broadcast
    with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'draft'"):
        excess(law, jnp.zeros((2, 5), int))


def test_a_wrong_result_is_caught():
    lm = TableLM(4, order=1)
    assert lm.logits({"table": jnp.zeros((4, 4))}, [1]).shape == (4,)
    with pytest.raises(jaxtyping.TypeCheckError, match=r"the return value of .*TableLM\.logits"):
        lm.logits({"table": jnp.zeros((4, 4, 1))}, [1])


def test_every_module_with_shapes_is_checked():
    files = [path for path in (ROOT / "jaxspec").rglob("*.py") if '[Array, "' in path.read_text()]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files}
    assert len(modules) > 40
    assert {name for name in modules if not name.startswith(PACKAGES)} == set()
