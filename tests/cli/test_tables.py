"""Tests that every printed table fits a terminal of 60 columns, with no number cut or wrapped."""

import dataclasses
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from helpers.bench_runs import made_up
from helpers.checkpoints import VOCABULARY, random_params, tiny_config, write_gguf, write_hf
from jaxspec.bench import report
from jaxspec.bench.table import Table
from jaxspec.cli import main, show
from jaxspec.cli.acceptance import acceptance_table
from jaxspec.cli.tune import format_table as tune_table
from jaxspec.tuning import acceptance

pytestmark = pytest.mark.quick

WIDTH = 60


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))


def fits(text: str) -> bool:
    return all(cell_len(line) <= WIDTH for line in text.splitlines())


def printed(capsys, part) -> str:
    Console().print(part, highlight=False)
    return capsys.readouterr().out


def whole(shown: str, table: Table) -> bool:
    """Every figure of a row stands on a line, in the order of the columns."""
    lines = shown.splitlines()
    return all(
        any(re.search(rf"(^| ){re.escape(cell)}( |$)", line) for line in lines)
        for row in table.rows
        for cell in row[table.labels :]
    )


def long_names(**changes):
    """A run whose methods have names that take half a line."""
    names = {"none": "none", "model": "model:0-0-0-0,0-1,1-0,2@adaptive"}
    run = made_up()
    rows = tuple(dataclasses.replace(row, method=names[row.method]) for row in run.rows)
    return made_up(rows=rows, methods=tuple(names.values()), call_s={"none": 1.0, names["model"]: 0.25}, **changes)


def test_bench(capsys):
    peers = {"transformers prompt-lookup": {"transformers": "5.23.0", "torch": "2.13.0"}}
    run = long_names(compile_s={"none": 1.0, "model:0-0-0-0,0-1,1-0,2@adaptive": 20.0})
    rows = run.rows + tuple(dataclasses.replace(r, method=next(iter(peers))) for r in run.rows if r.method == "none")
    beside = dataclasses.replace(run, peers=peers, rows=rows, methods=(*run.methods, *peers))
    tables = [report.overall_table(run), report.group_table(run), report.peer_table(beside)]
    for table in tables:
        shown = printed(capsys, table)
        assert fits(shown)
        assert whole(shown, table)
    assert fits(printed(capsys, report.format_other_times(run)))
    assert "transformers 5.23.0, torch 2.13.0" in report.format_versions(beside)


def test_columns_that_do_not_fit_follow_beside_the_same_labels(capsys, monkeypatch):
    table = Table("a title", ("rule", "k", *"abcdef"), [("one", "1", *["0.123456789"] * 6), ("two", "2", *"123456")], 2)
    shown = printed(capsys, table)
    assert [line.split() for line in shown.splitlines() if line.startswith("rule")] == [
        ["rule", "k", *"abcd"], ["rule", "k", *"ef"],
    ]  # fmt: skip
    assert shown.count("two   2") == 2
    monkeypatch.setenv("COLUMNS", "100")
    assert "".join(printed(capsys, table).splitlines()[1].split()) == "rulekabcdef"


def test_acceptance(capsys):
    figures = [
        acceptance.Figure(rule, k, acceptance=0.98765, low=0.91234, high=0.99999, optimum=0.99123)
        for rule in ("coupled", "deterministic") for k in (1, 16)
    ]  # fmt: skip
    table = acceptance_table(figures, "temperature 0.8, top-k 0, top-p 0.95, min-p 0: 12345 positions of 123 texts")
    shown = printed(capsys, table)
    assert fits(shown)
    assert whole(shown, table)


def test_tune():
    measured = {
        "round_s": {str(depth): 1.23456 for depth in range(16)},
        "acceptance_by_depth": [1.0] * 15,
        "speedup_by_depth": [12.345] * 16,
        "best_depth": 15,
    }
    lines = tune_table(measured)
    assert len(lines) == 18
    assert fits("\n".join(lines))


CARD = """# Medusa heads for smollm2-135m-instruct

8 heads in one network of 2 blocks, inputs: recurrent, projection: reduced, 8192 of 49152 tokens drafted, 8.40 MB.

| held-out texts | head 0 | head 1 | head 2 | head 3 | head 4 | head 5 | head 6 | head 7 |
|---|---|---|---|---|---|---|---|---|
| top-1 | 0.531 | 0.472 | 0.443 | 0.421 | 0.400 | 0.390 | 0.380 | 0.370 |

| nodes | expected tokens per round | decoded | ms per round | times plain |
|---|---|---|---|---|
| 64 | 2.53 | 2.48 | 123.4 | 0.62 |

sha256 of the parameters: `0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef`.
"""


def test_the_card_of_trained_heads(capsys):
    show.print_card(CARD)
    shown = capsys.readouterr().out
    assert fits(re.sub(r"`[0-9a-f]{64}`", "", shown))  # a hash is left whole, to be copied
    assert re.search(r"^`[0-9a-f]{64}`\.$", shown, re.MULTILINE)
    figures = re.findall(r"\d\.\d+|\d{2,}", CARD.split("\n\n", 1)[1])
    assert all(re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", shown) for figure in figures)
    assert "|" not in shown


@pytest.mark.parametrize("refused", [False, True])
def test_inspect(capsys, tmp_path, refused):
    config = tiny_config()
    if refused:
        path = write_hf(tmp_path / "m", config, random_params(config), settings={"model_type": "mamba"})
    else:
        path = write_gguf(tmp_path / "m.gguf", config, random_params(config), kind="Q8_0", metadata=VOCABULARY)
    assert main(["inspect", str(path)]) == refused
    shown = capsys.readouterr().out
    assert fits(shown.replace(str(path), "PATH"))
    for number in ("F32 96x64, 2 of them",) if refused else ("512", "96", "</s> (1)"):
        assert number in " ".join(shown.split())
