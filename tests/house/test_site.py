"""Tests that the documentation keeps up with the code: tables of members, pictures, floors, reference, links."""

import json
import os
import re
import runpy
import tomllib
from xml.etree import ElementTree

import pytest

import jaxspec
from helpers.pages import blocks
from helpers.paths import ROOT, TESTS
from house.test_house import FLOORS
from scripts.docs import chart, members, pictures
from scripts.docs.__main__ import PICTURES

pytestmark = pytest.mark.quick

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
README_LINES = 150
CODE_COLUMNS = 100
"""What the site shows of a line of code beside its navigation; the rest would have to be scrolled to."""


def name(path) -> str:
    return str(path.relative_to(ROOT))


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("path", members.pages(), ids=name)
def test_tables_of_members_are_those_of_the_registry(path):
    """`make figures` writes them."""
    text = path.read_text()
    assert text.count("<!-- members:") == len(members.BLOCK.findall(text)) == text.count("<!-- /members -->")
    assert members.rendered(text) == text


def test_every_block_of_members_is_in_the_documentation():
    shown = {match[1] for path in members.pages() for match in members.BLOCK.findall(path.read_text())}
    assert shown == members.BLOCKS.keys()


@pytest.mark.parametrize("kind", members.TABLES)
def test_a_new_member_needs_no_edit_of_a_table(kind, monkeypatch):
    singular, registry, *_ = members.TABLES[kind]
    monkeypatch.setitem(registry, "another", registry[next(iter(registry))])
    assert "\n| `another` | " in members.table(kind), singular
    assert members.reference(kind).count(".. autoclass::") == len(registry)


@pytest.mark.parametrize("path", PICTURES)
def test_pictures_are_those_that_are_drawn(path):
    """`make figures` draws them; each is a file of XML with a title, for readers who cannot see it."""
    drawn = PICTURES[path]()
    assert (ROOT / path).read_text() == drawn
    assert ElementTree.fromstring(drawn).findtext("{http://www.w3.org/2000/svg}title")


def test_a_bar_is_as_long_as_its_value():
    """On one scale in all panels, with the value behind it and the line of plain decoding at 1."""
    one = {"mt-bench": {"prompt-lookup": 2.0}, "humaneval": {"prompt-lookup": 4.0}, "copy": {"eagle": 0.5}}
    other = {"mt-bench": {"prompt-lookup": 1.0}, "humaneval": {"prompt-lookup": 3.0}, "copy": {"eagle": 8.0}}
    drawn = chart.draw([("one", "here", one), ("other", "there", other)])
    bars = re.findall(r'class="bar\d" x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="17"', drawn)
    values = [2.0, 4.0, 0.5, 1.0, 3.0, 8.0]
    assert re.findall(r'class="value"[^>]*>([\d.]+)<', drawn) == [f"{value:.2f}" for value in values]
    longest = float(bars[-1][1])
    assert [float(width) / longest for _, width in bars] == pytest.approx([value / 8 for value in values], rel=1e-4)
    plain = [float(x) for x in re.findall(r'class="plain" d="M([\d.]+)', drawn)]
    assert plain == pytest.approx([float(bars[i][0]) + longest / 8 for i in (0, 3)], rel=1e-4)


def test_the_architecture_names_every_package_on_its_floor():
    assert [set(names) for names in pictures.floors()] == list(FLOORS)


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs/api/jaxspec.md").read_text()
    listed = re.findall(r"^\.\. auto\w+:: (\w+)", page, re.MULTILINE)
    assert sorted(listed) == sorted(public for names in jaxspec._MODULES.values() for public in names)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_and_named_tests_exist(path):
    text = path.read_text()
    for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
        assert os.path.exists(path.parent / link), link
    known = {test.name for test in TESTS.rglob("test_*.py")}
    assert set(re.findall(r"\b(test_\w+\.py)", text)) <= known
    for file in re.findall(r"`((?:jaxspec|tests|scripts)/(?!\w+/my_)[\w/]+\.py)`", text):
        assert (ROOT / file).exists(), file


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS], ids=name)
def test_nobody_is_told_to_install_the_other_project(path):
    """`jaxspec` is another project on the package index: the names to install are its distribution's, or a folder."""
    installed = re.findall(r"pip install ([^`\n]*)", path.read_text())
    assert not [line for line in installed if re.search(r"(?<![\w/.-])jaxspec(?![\w-])", line.split(" @ ")[0])]


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS], ids=name)
def test_there_is_one_address_of_the_repository(path):
    """In pyproject.toml; pages and notebooks have the same."""
    owners = set(re.findall(r"github\.com/([\w.-]+/jaxspec)\b|/github/([\w.-]+/jaxspec)\b", path.read_text()))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    assert {"".join(owner) for owner in owners} <= {project.removeprefix("https://github.com/")}


def code(path):
    """Yields the lines of the code blocks of a page, or of a notebook's cells and what they print."""
    if path.suffix == ".ipynb":
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                yield from "".join(cell["source"]).splitlines()
                for output in cell["outputs"]:
                    yield from "".join(output.get("text", ())).splitlines()
    else:
        for block in blocks(name(path)):
            yield from block.text.splitlines()


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS], ids=name)
def test_code_is_as_narrow_as_the_page_of_the_site(path):
    long = [line for line in code(path) if len(line) > CODE_COLUMNS]
    assert not long, "\n".join(long)


NAMED = {
    (place.relative_to(ROOT), page)
    for place in sorted((ROOT / "jaxspec").rglob("*.py"))
    for page in re.findall(r"\bdocs/([\w-]+)\.md\b", place.read_text())
}
"""The pages that docstrings and messages of the package name."""


@pytest.mark.parametrize(("place", "page"), sorted(NAMED), ids=str)
def test_pages_that_the_package_names_exist(place, page):
    assert (ROOT / "docs" / f"{page}.md").exists(), place


@pytest.mark.parametrize(
    ("line", "linked"),
    [
        ("yet, see docs/gpu.md.", "yet, see :doc:`/docs/gpu`."),
        ("kernels (docs/kernels.md); None", "kernels (:doc:`/docs/kernels`); None"),
        ("docs/own-model.md and docs/own-drafter.md", ":doc:`/docs/own-model` and :doc:`/docs/own-drafter`"),
        ("`docs/gpu.md` and my/docs/gpu.md", "`docs/gpu.md` and my/docs/gpu.md"),
        ("docs/api/types.md, mydocs/gpu.md", "docs/api/types.md, mydocs/gpu.md"),
    ],
)
def test_pages_in_docstrings_become_links(line, linked, monkeypatch):
    monkeypatch.setattr(jaxspec, "_MODULES", {})
    lines = [line]
    runpy.run_path(str(ROOT / "docs/conf.py"))["_link_pages"](None, "function", "load", None, None, lines)
    assert lines == [linked]


TOLD = [*PAGES, *NOTEBOOKS, *sorted((ROOT / "jaxspec").rglob("*.py")), *sorted((ROOT / "scripts").rglob("*.py"))]
FOLDER_INSTALL = re.compile(
    r"pip install (?!--editable )(?:-\w+ |--\w+ )*['\"]?\.(?:\[\w+\])?['\"]?(?=[\s`,;]|$)", re.M
)


@pytest.mark.parametrize("path", TOLD, ids=name)
def test_a_checkout_is_installed_as_editable(path):
    """Python that is started in a checkout imports its folder: after another install, without the kernels."""
    assert not FOLDER_INSTALL.findall(path.read_text())


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("pip install .", 1),
        ("run `pip install '.[train]'`, then", 1),
        ('pip install --quiet ".[bench]"', 1),
        ("pip install . # here", 1),
        ("pip install --editable .", 0),
        ("pip install --editable '.[train]'", 0),
        ("pip install grain.", 0),
        ("pip install ./elsewhere", 0),
    ],
)
def test_another_install_of_the_folder_is_seen(said, found):
    assert len(FOLDER_INSTALL.findall(said)) == found
