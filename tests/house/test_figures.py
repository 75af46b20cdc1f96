"""Tests that every figure on a page comes from a record: pages are what records render, and prose holds none."""

import json
import re
import subprocess

import pytest

from helpers.paths import ROOT
from jaxspec.bench.measurements import RECORDS_FOLDER, Measurement
from jaxspec.errors import InvalidConfig
from scripts.figures import pages
from scripts.figures.records import read_records

pytestmark = pytest.mark.quick

RECORDS = read_records(ROOT / RECORDS_FOLDER)

MEASURED = re.compile(
    r"\d[\d.,]*\s+(?:ms|milliseconds|tokens/s|tokens (?:a|per) (?:second|round)|GB/s|MiB|GiB)\b"
    r"|\d\.\d+ times\b|\b20\d\d-\d\d-\d\d\b"
)
"""Text that looks like a measurement: a time, a rate, a ratio, the day it was taken."""

EXCEPT: dict[str, int] = {}
"""Pages that still hold such text outside of blocks, with its count, which none may exceed."""


def prose(text: str) -> str:
    """Returns a page without its blocks of figures, its code and its links."""
    text = pages.BLOCK.sub("", text)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.name)
def test_a_page_holds_what_the_records_render(page):
    """`make figures` brings a page up to date."""
    text = page.read_text()
    assert text.count("<!-- figures:") == len(pages.BLOCK.findall(text)) == text.count("<!-- /figures -->")
    assert pages.rendered(text, RECORDS) == text


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.name)
def test_prose_holds_no_figure(page):
    found = MEASURED.findall(prose(page.read_text()))
    assert len(found) <= EXCEPT.get(str(page.relative_to(ROOT)), 0), found


def test_the_check_finds_figures():
    for text in ("a round takes 22.7 ms", "44 tokens/s", "2.24 tokens per round", "1.19 times plain", "on 2026-11-23"):
        assert MEASURED.search(prose(text)), text
        assert not MEASURED.search(prose(f"<!-- figures: x -->\n{text}\n<!-- /figures -->")), text
    assert not MEASURED.search("Python 3.11, 4 tokens, a tree of 64 nodes, twice as fast")


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.file)
def test_a_record_is_whole(record):
    """Its kind has a renderer; its commit is one of the history; it names no folder and no host."""
    assert record.kind in pages.RENDERING
    assert pages.block(record.id, RECORDS)
    assert {"python", "jax", "jaxlib", "jaxspec"} <= record.versions.keys()
    assert {"cpu", "cores", "memory_gib", "flags", "platform", "kind", "devices"} == record.machine.keys()
    text = json.dumps(record.__dict__)
    assert not re.search(r"(?<![\w./-])(/[a-z]|[A-Z]:\\\\|~/)", text)
    assert not record.dirty
    if git("rev-parse", "--is-shallow-repository").stdout.strip() == "false":  # and not outside of a checkout
        assert git("merge-base", "--is-ancestor", record.commit, "HEAD").returncode == 0, record.commit


def git(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)


def test_every_headline_has_its_record_or_is_left_out():
    assert len({record.file for record in RECORDS}) == len(RECORDS)
    found = pages.newest(RECORDS)
    for said, name, _ in pages.HEADLINE:
        assert (said in pages.headline(RECORDS)) == (name in found)


@pytest.mark.parametrize("name", pages.COMPOSED)
def test_a_block_of_several_records_has_a_line_for_each(name):
    assert pages.block(name, []) == "Not measured on this version yet.\n"
    ids = {"headline": [name for _, name, _ in pages.HEADLINE], "results": [name for name, _ in pages.RESULTS],
           "alternatives": [*pages.COMPARED],
           "fastest": [one.id for one in RECORDS if one.id.startswith(pages.AUTO)]}[name]  # fmt: skip
    for one in RECORDS:
        assert ("Not measured" in pages.block(name, [one])) == (one.id not in ids)
    assert "Not measured" not in pages.block(name, RECORDS)


def test_the_table_of_the_fastest_names_the_fastest_drafter_of_each_task():
    """Plain decoding counts, and the choice of `auto` does not."""
    speeds = {"none": (1.0, 1.0), "auto": (3.0, 3.0), "medusa": (0.9, 1.4), "eagle": (0.8, 1.5)}
    methods = {
        name: {"times_plain": first, "tasks": {"one": {"times_plain": first}, "two": {"times_plain": second}}}
        for name, (first, second) in speeds.items()
    }
    record = made_up(id="auto-int8", kind="bench", values={"runs": [{"methods": methods}]})
    row = pages.fastest([record]).splitlines()[2].split(" | ")
    assert row[1:] == ["int8", "plain decoding", "`eagle` 1.50", "plain decoding", "3.00 |"]


def test_the_newest_record_of_an_id_is_taken():
    older, newer = made_up(date="2026-01-01"), made_up(date="2026-01-03")
    assert pages.newest([newer, older])["hunt"] is newer


@pytest.mark.parametrize(("rows", "folded"), [(1, 0), (pages.MANY_ROWS - 1, 0), (pages.MANY_ROWS, 1), (60, 1)])
def test_tables_with_many_rows_are_folded(rows, folded):
    markdown = pages.table(["a", "b"], [["1", "2"]] * rows)
    assert pages.tables(markdown).count("<details>") == pages.tables(markdown).count("</details>") == folded
    assert markdown in pages.tables(markdown)


MACHINE = {
    "cpu": "A CPU",
    "cores": 2,
    "memory_gib": 8,
    "flags": ["avx2"],
    "platform": "cpu",
    "kind": "cpu",
    "devices": 1,
}
VERSIONS = {"python": "3.11.7", "jax": "0.10.2", "jaxlib": "0.10.2", "jaxspec": "0.1.0"}


def made_up(**changes) -> Measurement:
    """A record of a bug hunt."""
    fields = {"id": "hunt", "kind": "mutants", "command": "python hunt.py", "machine": MACHINE, "versions": VERSIONS,
              "commit": "0123456789abcdef", "dirty": False, "date": "2026-01-02",
              "values": {"bugs": 26, "found": 25}}  # fmt: skip
    return Measurement(**fields | changes)


def test_a_block_by_hand():
    page = "before\n<!-- figures: hunt -->\nold\n<!-- /figures -->\nafter\n"
    first, second = (
        made_up(),
        made_up(machine=MACHINE | {"cpu": "Another"}, values={"bugs": 26, "found": 24}, dirty=True),
    )
    made = pages.rendered(page, [first, second])
    assert made.startswith("before\n<!-- figures: hunt -->\n| ")
    assert made.endswith("<!-- /figures -->\nafter\n")
    assert "| 26 | 25 |" in made
    assert "| 26 | 24 |" in made
    assert made.count("<summary>A CPU, 2 cores, AVX2, 8 GiB</summary>") == 1
    assert made.count("\nPython 3.11.7, JAX 0.10.2; 2026-01-02, commit 0123456: `python hunt.py`\n") == 1
    assert "commit 0123456 with changes" in made
    assert pages.rendered(made, [first, second]) == made
    assert "\nNot measured on this version yet (`--record hunt`).\n<!-- /" in pages.rendered(page, [])


@pytest.mark.parametrize(
    ("changes", "said"), [({"id": "a b"}, "id"), ({"date": "today"}, "YYYY-MM-DD"), ({"values": {}}, "no values")]
)
def test_what_is_no_record_is_refused(changes, said):
    with pytest.raises(InvalidConfig, match=said):
        made_up(**changes)
