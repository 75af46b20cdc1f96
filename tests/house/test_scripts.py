"""Tests that the README of the scripts names every script."""

import re

import pytest

from helpers.paths import ROOT

pytestmark = pytest.mark.quick

SCRIPTS = ROOT / "scripts"


def test_every_script_has_a_line():
    """A name in a table stands below the heading of its folder, or has the folder in front."""
    named, folders = set(), [""]
    for line in (SCRIPTS / "README.md").read_text().splitlines():
        if line.startswith("## "):
            folders = re.findall(r"`(\w+)`", line) or [""]
        elif line.startswith("|"):
            for name in re.findall(r"`([\w/]+\.py)`", line.split("|")[1]):
                named.add(name if "/" in name or not folders[0] else f"{folders[0]}/{name}")
    assert named == {path.relative_to(SCRIPTS).as_posix() for path in SCRIPTS.rglob("*.py")}
