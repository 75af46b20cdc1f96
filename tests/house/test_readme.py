"""The README's example with real weights runs, and its lists are those of the code; all others run in test_docs.py."""

import re

import pytest

from helpers.paths import ROOT, TESTS
from jaxspec.registry import DRAFTERS, RULES, SCHEDULES, find

pytestmark = pytest.mark.quick

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
def test_example_with_real_weights(block, smollm2_path, capsys):
    output, printed = run(block)["output"], capsys.readouterr().out
    assert len(output) == 2
    for row in output:
        assert row.finish_reason in ("stop", "length")
        assert f"{row.text} {row.finish_reason}" in printed
    assert output.timing.tokens_per_s > 0


def test_both_kinds_of_example_are_there():
    assert sorted("smollm2" in block for block in BLOCKS) == [False, False, True]
    assert all("assert " in block for block in BLOCKS if "smollm2" not in block)


@pytest.mark.parametrize(("kind", "members"), [("drafter", DRAFTERS), ("rule", RULES), ("schedule", SCHEDULES)])
def test_tables_are_those_of_the_registry(kind, members):
    table = re.search(rf"^\| {kind} \|.*\n\|[-|]+\n((?:\|.*\n)+)", TEXT, re.MULTILINE).group(1)
    rows = {re.match(r"\| `([\w-]+)`", line).group(1): line for line in table.splitlines()}
    assert rows.keys() == members.keys()
    for name, line in rows.items():
        if kind == "rule":
            assert line.endswith("| yes |") == find(kind, name)().lossless


def test_links_and_named_tests_exist():
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert links
    for path in links:
        assert (ROOT / path).exists(), path
    assert set(re.findall(r"`(test_\w+\.py)`", TEXT)) <= {path.name for path in TESTS.rglob("test_*.py")}


def test_nobody_is_told_to_install_the_other_project():
    for line in TEXT.splitlines():
        assert "pip install jaxspec" not in line or "never" in line
