"""Tests members from other packages: the drafter of docs/own-drafter.md, installed beside jaxspec."""

import importlib
import re
import sys

import pytest

import jaxspec
from helpers.checkpoints import random_params, tiny_config, write_bytes
from helpers.pages import blocks
from jaxspec.bench.run import find_buildable
from jaxspec.cli import main
from jaxspec.errors import InvalidConfig, UnknownName
from jaxspec.generation.drafting import Drafting
from jaxspec.registry import DRAFTERS, RULES, find

pytestmark = pytest.mark.quick

OWN = list(filter(DRAFTERS.own, DRAFTERS))
CONFIG = tiny_config(vocab_size=264, max_position=512, num_layers=2)
GROUPS = """[jaxspec.drafters]
again = my_drafters:Again
none = my_drafters:Again
broken = my_drafters_that_are_not_there:Again

[jaxspec.rules]
mine = jaxspec.rules.coupled:Coupled
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package with the page's file, as an installer leaves it."""
    code, *_ = blocks("docs/own-drafter.md")
    (tmp_path / "my_drafters.py").write_text(code.text)
    about = tmp_path / "my_drafters-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-drafters\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(GROUPS)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    sys.modules.pop("my_drafters", None)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_bytes(tmp_path_factory.mktemp("tiny"), CONFIG, random_params(CONFIG, 3))


def test_without_the_package_there_are_our_own_alone():
    assert "again" not in DRAFTERS
    assert list(DRAFTERS) == OWN
    with pytest.raises(UnknownName):
        find("drafter", "again")


def test_its_members_are_known_by_name(installed):
    assert find("drafter", "again").__name__ == "Again"
    assert find("drafter", "none").__module__ == "jaxspec.drafters.none", "our own names cannot be taken"
    assert list(DRAFTERS) == [*OWN, "again", "broken"]
    assert len(DRAFTERS) == len(OWN) + 2
    assert find("rule", "mine") is find("rule", "coupled")
    assert "mine" in RULES
    with pytest.raises(InvalidConfig, match="'broken' cannot be imported from my_drafters_that_are_not_there:Again"):
        find("drafter", "broken")


def test_commands_and_the_benchmark_know_them(installed, directory, capsys):
    words = ["generate", "--target", str(directory), "--max-new-tokens", "12", "--no-chat", "aaaa", "-q"]
    assert main([*words, "--drafter", "none"]) == 0
    plain = capsys.readouterr().out
    assert main([*words, "--drafter", "again", "--drafter-option", "times=3"]) == 0
    assert capsys.readouterr().out == plain
    assert main([*words, "--drafter", "again", "--drafter-option", "time=3"]) == 2
    assert "the drafter again has no such option" in capsys.readouterr().err
    assert main(["generate", "--help"]) == 0
    assert re.search(r"\bagain\b", capsys.readouterr().out)
    target = jaxspec.load(directory)
    assert "again" in [method.label for method in find_buildable(target, None)]
    with pytest.raises(InvalidConfig, match="times must be a whole number from 1 to 32, got 0"):
        Drafting("again", drafter_options={"times": 0}).build_drafter(target)
    with pytest.raises(InvalidConfig, match="'again' does not take tree"):
        Drafting("again", tree=3).build_drafter(target)
