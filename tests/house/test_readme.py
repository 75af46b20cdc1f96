"""Tests that the README's example with real weights runs; all others run in test_docs.py."""

import re

import pytest

from helpers.paths import ROOT

TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def run(block: str) -> dict:
    """Runs one example in a namespace of its own, its lines numbered as in the README."""
    before = TEXT[: TEXT.index(block)].count("\n")
    names: dict = {"__name__": "readme"}
    exec(compile("\n" * before + block, "README.md", "exec"), names)
    return names


@pytest.mark.smollm2
@pytest.mark.parametrize("block", [b for b in BLOCKS if "smollm2" in b], ids=lambda b: f"{len(b)} characters")
@pytest.mark.slow
def test_example_with_real_weights(block, smollm2_path, capsys):
    output, printed = run(block)["output"], capsys.readouterr().out
    assert len(output) == 2
    for row in output:
        assert row.finish_reason in ("stop", "length")
        assert f"{row.text} {row.finish_reason}" in printed
    assert output.timing.tokens_per_s > 0


@pytest.mark.quick
def test_both_kinds_of_example_are_there():
    assert sorted("smollm2" in block for block in BLOCKS) == [False, True]
    assert all("assert " in block for block in BLOCKS if "smollm2" not in block)
