"""Tests the structure of the package: imports go down, none are circular, functions are short."""

import ast
import functools
import pathlib
import resource
import subprocess
import sys
import warnings

import pytest

from helpers.paths import ROOT

pytestmark = pytest.mark.quick

PACKAGE = ROOT / "jaxspec"

FLOORS = (
    {"errors", "amounts", "version"},
    {"registry", "storage", "confined"},
    {"backend"},
    {"core"},
    {"rules", "schedules", "processors", "decode", "analysis", "text", "kernels"},
    {"models", "grammar"},
    {"checkpoints"},
    {"heads"},
    {"drafters", "testing"},
    {"generation"},
    {"api"},
    {"train"},
    {"tuning"},
    {"jaxspec"},
    {"bench", "evaluation"},
    {"cli"},
)
"""Packages and top modules from the ground up: each imports those of lower floors alone. `jaxspec` is the package
itself, whose names are imported when they are first used."""

MEMBERS = {
    "rules": {"_siblings"},
    "drafters": {"_beam", "_fixed", "_grow", "_level", "_match", "_tapped", "_tree", "_window"},
    "schedules": {"_balance"},
    "processors": set(),
}
"""Packages whose modules know no other of them, and what they share."""

LONG_MODULE = 250
"""Lines of code from which a module is reported."""
LONGEST_FUNCTION = 60
LONG_FUNCTIONS: dict[str, int] = {}
"""Those that are still longer, with their lines: none may grow, and what has become shorter leaves the list."""


def modules() -> dict[str, pathlib.Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if "workers" not in path.parts:  # programs for other environments, which import nothing of jaxspec
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


@functools.cache
def imports(name: str) -> frozenset[str]:
    """The modules that a module imports, inside functions too; those of type checkers also."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & MODULES.keys() or {node.module}
    return frozenset(found)


def room(name: str) -> str:
    """The package or top module that a module is in."""
    return name.split(".")[1] if "." in name else "jaxspec"


def floor(name: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room(name) in rooms)


def test_every_room_has_a_floor():
    rooms = {room(name) for name in MODULES} - {"__main__"}
    assert rooms == set().union(*FLOORS)
    assert sum(map(len, FLOORS)) == len(rooms)


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"jaxspec.__main__"}))
def test_imports_go_down_only(name):
    for other in imports(name):
        if other.split(".")[0] == "jaxspec" and room(other) != room(name):
            assert floor(other) < floor(name), f"{name} imports {other}"


@pytest.mark.parametrize("package", MEMBERS)
def test_members_do_not_know_one_another(package):
    own = [name for name in MODULES if name.startswith(f"jaxspec.{package}.")]
    assert own
    shared = {f"jaxspec.{package}.{name}" for name in MEMBERS[package]}
    for name in own:
        assert {other for other in imports(name) if room(other) == package} <= shared, name


def test_the_core_imports_nothing_but_arrays():
    allowed = {*sys.stdlib_module_names, "jax", "numpy", "chex", "jaxtyping", "jaxspec"}
    for name in MODULES:
        if room(name) == "core":
            assert {other.split(".")[0] for other in imports(name)} <= allowed, name


def test_no_imports_go_in_circles():
    """A module that nothing left imports is taken away, and so on: what remains imports itself by some way."""
    left = {name: set(imports(name)) & MODULES.keys() for name in MODULES if name != "jaxspec"}
    while last := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in last}
    assert not left, sorted(left)


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of what a function does, without those of its arguments and its documentation."""
    first = function.body[1 if ast.get_docstring(function) is not None and len(function.body) > 1 else 0]
    return (function.end_lineno or 0) - first.lineno + 1


def test_no_function_is_long():
    long = {}
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if function and (lines := lines_of(node)) > LONGEST_FUNCTION:
                long[f"{name.partition('.')[2]}.{node.name}"] = lines
    assert long.keys() == LONG_FUNCTIONS.keys()
    assert all(lines <= LONG_FUNCTIONS[name] for name, lines in long.items()), long


def code_lines(source: str) -> int:
    """Counts the lines of a module without documentation, imports, comments and blank lines."""
    skipped = set()
    for node in ast.walk(ast.parse(source)):
        documentation = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and (documentation or isinstance(node, ast.Import | ast.ImportFrom)):
            skipped |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = enumerate(map(str.strip, source.splitlines()), start=1)
    return sum(bool(line) and not line.startswith("#") and number not in skipped for number, line in lines)


@pytest.mark.filterwarnings("default")
def test_long_modules_are_reported():
    """A warning, never a failure: a long module may be the right one, but somebody should look at it."""
    source = '"""Title.\n\nText.\n"""\n\nimport a\n\nX = 1\n"""Documentation."""\n# why\nY = """\nab\n"""\n'
    assert code_lines(source) == 4
    for name, path in MODULES.items():
        if (lines := code_lines(path.read_text())) > LONG_MODULE:
            warnings.warn(f"{name} has {lines} lines of code, more than {LONG_MODULE}", stacklevel=1)


def test_import_is_quick_and_light():
    """`import jaxspec` within two seconds of the processor's time (the least of three), and without Flax."""
    code = "import sys, jaxspec; sys.exit('flax' in sys.modules)"
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 2


def declared() -> set[str]:
    """What the protocols of members declare, but for what arrays have, too."""
    names = set()
    paths = [MODULES[f"jaxspec.core.{name}"] for name in ("networks", "drafter", "rule", "schedule")]
    for node in [node for path in paths for node in ast.parse(path.read_text()).body]:
        if isinstance(node, ast.ClassDef) and (node.name == "Needs" or "Protocol" in map(ast.unparse, node.bases)):
            for part in node.body:
                names |= {part.name} if isinstance(part, ast.FunctionDef) else set()
                names |= {ast.unparse(part.target)} if isinstance(part, ast.AnnAssign) else set()
    return names - {"shape", "dtype"}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_what_members_can_do_is_declared(name):
    """No `getattr` or `hasattr` asks a member for what a protocol declares, nor a function for its own arguments."""
    known = declared()
    assert {"draws", "model", "tree", "propose", "layers", "unembedding"} <= known
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert called != "locals"
        assert called != "inspect.signature" or name == "jaxspec.core.checks", "which names wrong arguments"
        if called in ("getattr", "hasattr") and isinstance(node.args[1], ast.Constant):
            assert node.args[1].value not in known, ast.unparse(node)
