"""Tests the notebooks: each is committed with its outputs, and runs from top to bottom."""

import copy
import json
import re
import subprocess
import sys
import tomllib

import nbformat
import pytest

from helpers.paths import ROOT
from scripts import run_notebooks as script

SLOW = {"one_round", "json_with_a_tree", "train_medusa", "train_eagle"}
"""They compile or train for minutes: they run in the slow tier."""
LARGEST = 200_000
"""Bytes of a notebook, pictures included."""
RULES = ("reportMissingImports", "reportUndefinedVariable", "reportAttributeAccessIssue", "reportCallIssue")
"""Rules of pyright: every module, name, attribute and argument that a notebook uses must exist."""
STALE = """
import jaxspec
from jaxspec.testing import no_such_name
settings = jaxspec.MedusaSettings(no_such_setting=1)
jaxspec.generate(jaxspec.load("smollm2-135m-instruct"), "ab", no_such_option=1)
jaxspec.load("smollm2-135m-instruct").no_such_attribute
no_such_variable
"""
"""Code of a notebook that was not changed when names were: each line but the first has one error."""


@pytest.fixture(params=script.NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


def pictures(cell) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


def shape(cell) -> str:
    """What a cell shows, without its numbers, which a machine may round differently."""
    return re.sub(r"-?\d[\d.]*(e[-+]\d+)?", "#", " ".join(script.text_of(cell).split()))


def test_there_are_notebooks():
    assert "one_round" in [path.stem for path in script.NOTEBOOKS]


def test_it_is_committed_with_its_pictures_and_outputs(path):
    """Of one run from top to bottom, without a word of the machine that ran it."""
    notebook = nbformat.read(path, as_version=4)
    cells = script.code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run `make notebooks`"
    for cell in cells:
        assert pictures(cell) == cell.source.count("plt.show()")
        assert ("print(" in cell.source) <= bool(cell.outputs)
        assert not any(output.get("name") == "stderr" or output.output_type == "error" for output in cell.outputs)
        assert "execution" not in cell.metadata, "times differ from run to run"
    assert sum(map(pictures, cells)) >= 1
    assert script.paths_in(notebook) == []
    assert path.stat().st_size < LARGEST


def test_paths_of_a_machine_are_found():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print(1)")])
    (cell,) = notebook.cells
    for text, found in (
        ("see /home/someone/x.py:3", ["/home/someone/x.py:3"]),
        ("kept in /tmp/run-1", ["/tmp/run-1"]),
        (str(ROOT), [str(ROOT)]),
        ("0.5 and/or 3/4, https://example.org/home/x", []),
    ):
        cell.outputs = [nbformat.v4.new_output("stream", text=text)]
        assert set(found) <= set(script.paths_in(notebook))
        assert bool(found) == bool(script.paths_in(notebook))


def find_unknown_names(folder, codes: dict[str, str]) -> dict[str, list[str]]:
    """Returns the errors of pyright under `RULES`, by name of the code."""
    for name, code in codes.items():
        (folder / f"{name}.py").write_text(re.sub(r"^( *)%.*$", r"\1pass", code, flags=re.MULTILINE))
    config = {"extraPaths": [str(ROOT)], "typeCheckingMode": "off"} | dict.fromkeys(RULES, "error")
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "--project", folder]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    errors: dict[str, list[str]] = {name: [] for name in codes}
    for found in json.loads(ran.stdout)["generalDiagnostics"]:
        name = re.split(r"[/\\]", found["file"])[-1].removesuffix(".py")
        errors[name].append(f"line {found['range']['start']['line'] + 1}: {found['message']}")
    return errors


def test_every_name_and_argument_exists(tmp_path):
    """Also of the notebooks that only the slow tier runs; a renamed option is found without running anything."""
    pytest.importorskip("pyright", reason="pyright is not installed: the names in notebooks were not checked")
    notebooks = {path.stem: nbformat.read(path, as_version=4) for path in script.NOTEBOOKS}
    codes = {
        name: "\n\n".join(cell.source for cell in script.code_cells(notebook)) for name, notebook in notebooks.items()
    }
    errors = find_unknown_names(tmp_path, codes | {"stale": STALE})
    stale = " ".join(errors.pop("stale"))
    for name in ("no_such_name", "no_such_setting", "no_such_option", "no_such_attribute", "no_such_variable"):
        assert name in stale
    assert errors == {name: [] for name in codes}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem in SLOW), id=path.stem) for path in script.NOTEBOOKS],
)
def test_it_runs_and_shows_what_is_committed(path, request):
    committed = nbformat.read(path, as_version=4)
    if "smollm2" in path.read_text():
        request.getfixturevalue("smollm2_path")  # skipped where there are no weights
    assert any("assert " in cell.source for cell in script.code_cells(committed))
    notebook = copy.deepcopy(committed)
    for cell in script.code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    script.execute(notebook)
    for ran, saved in zip(script.code_cells(notebook), script.code_cells(committed), strict=True):
        assert ran.execution_count == saved.execution_count
        assert pictures(ran) == pictures(saved)
        assert shape(ran) == shape(saved), "run `make notebooks`"


def test_it_opens_in_colab_and_installs_what_is_missing(path):
    """The link names this file, and the first cell installs from the repository without touching a checkout."""
    first, install, *rest = nbformat.read(path, as_version=4).cells
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    repository = project["urls"]["Repository"]
    assert first.source.startswith("# ")
    colab = repository.replace("https://github.com", "https://colab.research.google.com/github")
    assert f"]({colab}/blob/main/notebooks/{path.name})" in first.source
    assert 'find_spec("jaxspec") is None' in install.source
    assert f"{project['name']}[train] @ git+{repository}" in install.source
    assert install.outputs == []
    assert not any("pip install" in cell.source for cell in rest)
