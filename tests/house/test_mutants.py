"""Tests that the list of mutants matches the code; `make mutants` applies them."""

import ast

import pytest

from helpers.paths import ROOT
from scripts.prove import mutants

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_line_of_what_is_there(mutant):
    text = (ROOT / "jaxspec" / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    changed = text.replace(mutant.old, mutant.new)
    if mutant.file.endswith(".py"):
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    for test in mutant.tests:
        assert (ROOT / test.partition("::")[0]).exists(), test
