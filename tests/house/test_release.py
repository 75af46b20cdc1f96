"""Tests of what releases are made with: workflows, the source distribution, the wheel without kernels, the notes."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest
import yaml

from helpers.paths import ROOT
from scripts.prove.wheels import NOT_IN_SOURCE
from scripts.release_notes import notes, versions

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))

pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="a source distribution has no workflows")


def workflow(path) -> dict:
    found = yaml.safe_load(path.read_text())
    found["on"] = found.pop(True, found.get("on"))  # YAML 1.1 reads `on` as a boolean
    return found


def steps(path) -> list[dict]:
    return [step for job in workflow(path)["jobs"].values() for step in job.get("steps", [])]


@pytest.mark.quick
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows(path):
    """Each may do only what it says, ends by itself, and runs what exists."""
    found = workflow(path)
    assert found["on"]
    assert found["permissions"] == {"contents": "read"}
    for name, job in found["jobs"].items():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= found["jobs"].keys(), name
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file(), name
            assert "workflow_call" in workflow(ROOT / job["uses"])["on"]
        else:
            assert job["timeout-minutes"] <= 60, name
            assert job["steps"], name
    for step in steps(path):
        assert ("uses" in step) != ("run" in step), step
        assert "@" in step.get("uses", "@"), "an action has a version"
        assert "${{" not in step.get("run", ""), "what others can name reaches a shell as a variable"
        for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
            assert re.search(rf"^[a-z -]*\b{target}\b[a-z -]*:", MAKEFILE, re.MULTILINE), target
        for script in re.findall(r"\bscripts/[\w/]+\.py", step.get("run", "")):
            assert (ROOT / script).is_file(), script


@pytest.mark.quick
def test_every_supported_python_is_tested_and_has_a_wheel():
    supported = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d", line)}
    tested = workflow(ROOT / ".github/workflows/tests.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert set(tested) == supported
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["build"]
    assert built == [f"cp{version.replace('.', '')}-manylinux_x86_64" for version in sorted(supported)]


@pytest.mark.quick
def test_what_ci_runs_is_what_everybody_runs():
    words = {word for step in steps(ROOT / ".github/workflows/tests.yml") for word in step.get("run", "").split()}
    assert {line.split()[1] for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("make")} <= words


@pytest.mark.quick
@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_of_issues(path):
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert form.keys() == {"name", "description", "labels", "body"}
    names = [part["id"] for part in form["body"]]
    assert len(set(names)) == len(names)
    for part in form["body"]:
        assert part["type"] == "textarea"
        assert part["attributes"]["label"]


@pytest.mark.quick
def test_hooks_before_a_commit():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local", "all hooks come from the package index"
    for hook in local["hooks"]:
        assert hook["language"] == "python"
        assert hook["additional_dependencies"]
    required = [line for line in PROJECT["optional-dependencies"]["lint"] if line.startswith("ruff")]
    assert local["hooks"][0]["additional_dependencies"] == required


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the files that git knows."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a repository")
    place = tmp_path_factory.mktemp("release") / "tree"
    listed = subprocess.run(["git", "ls-files", "--cached"], cwd=ROOT,
                            capture_output=True, text=True, check=True).stdout.split("\n")  # fmt: skip
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, place / name)
    return place


def build(tree, kind: str, out, **environment: str):
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=os.environ | environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return out / ran.stdout.split()[-1]


def test_the_source_distribution_has_every_file(tree, tmp_path):
    with tarfile.open(build(tree, "sdist", tmp_path)) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    everything = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    made = {name for name in everything if ".egg-info/" in name or "__pycache__" in name or name.startswith("build/")}
    missing = {name for name in everything - made - inside if not name.startswith(NOT_IN_SOURCE)}
    assert not missing
    assert not {name for name in inside if name.endswith((".so", "_not_built.txt"))}


def test_a_wheel_without_kernels_is_for_every_platform(tree, tmp_path):
    wheel = build(tree, "wheel", tmp_path, JAXSPEC_KERNELS="0")
    assert wheel.name == f"jaxspec_decoding-{PROJECT['version']}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    package = {path.relative_to(tree).as_posix() for path in (tree / "jaxspec").rglob("*") if path.is_file()}
    assert not {name for name in package - inside if "__pycache__" not in name}
    assert {name.split("/")[0] for name in inside} == {"jaxspec", f"jaxspec_decoding-{PROJECT['version']}.dist-info"}


# --- notes ------------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_the_version_is_the_same_everywhere():
    assert set(versions().values()) == {PROJECT["version"]}


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "jaxspec").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n')
    (tmp_path / "jaxspec/version.py").write_text('__version__ = "0.2.0"\n')
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 0.2.0\n")
    sections = [
        "# Changelog\n",
        "## [0.2.0] - 2027-01-31\n\n### Added\n\n- One.\n- Two.\n",
        "## [0.1.0] - 2026-12-01\n\n- Old.\n",
    ]
    (tmp_path / "CHANGELOG.md").write_text("\n".join(sections))
    return tmp_path


@pytest.mark.quick
def test_notes_are_the_section_of_the_version(repository):
    assert notes("v0.2.0", repository) == "### Added\n\n- One.\n- Two."


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("pyproject.toml", "0.2.0", "0.2.1", "the version in pyproject.toml is 0.2.1"),
        ("pyproject.toml", "[project]", "[project]\nurls.Source = 'https://x/OWNER/jaxspec'", "write the real one"),
        ("jaxspec/version.py", "0.2.0", "0.1.0", "the version in jaxspec/version.py is 0.1.0"),
        ("CITATION.cff", "version: 0.2.0", "", "the version in CITATION.cff is none"),
        ("CHANGELOG.md", "2027-01-31", "unreleased", "write the date"),
        ("CHANGELOG.md", "## [0.2.0]", "## [0.2]", "no section"),
        ("CHANGELOG.md", "### Added\n\n- One.\n- Two.\n", "", "no section"),
    ],
)
def test_what_is_not_ready_is_not_released(repository, name, old, new, said):
    path = repository / name
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(SystemExit, match=re.escape(said)):
        notes("v0.2.0", repository)


@pytest.mark.quick
@pytest.mark.parametrize("tag", ["0.2.0", "v0.2", "v0.2.0rc1", "version"])
def test_only_the_tag_of_the_version_releases(repository, tag):
    with pytest.raises(SystemExit, match="expected v"):
        notes(tag, repository)
