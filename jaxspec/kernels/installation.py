"""Finds out why this installation has no compiled kernels. This module does not import JAX."""

import importlib.machinery
import importlib.metadata
import json
import pathlib
import platform
import sys
from collections.abc import Iterator

NAME = "_kernels"
SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
RECORD = "_not_built.txt"
"""The file, beside this module, in which `setup.py` writes why the kernels could not be built."""
DISTRIBUTION = "jaxspec-decoding"
MACHINES = ("x86_64", "AMD64")
"""The names of x86-64 processors, as `platform.machine` returns them."""
FOLDER = pathlib.Path(__file__).parent
REBUILD = "with a C++ compiler, `pip install --editable .` there builds them"


def library_file(folder: pathlib.Path = FOLDER) -> pathlib.Path:
    """Returns the path at which this Python expects the compiled kernels."""
    return folder / f"{NAME}{SUFFIX}"


def why_missing(folder: pathlib.Path = FOLDER, machine: str | None = None, system: str | None = None) -> str:
    """Returns why there is no compiled library in a folder, and what to do about it.

    Only causes that are read from this machine are stated; if none is found, the message says so.

    Args:
        folder: the folder `jaxspec/kernels` that was imported.
        machine: the processor, as `platform.machine` names it; None for this one.
        system: the operating system, as `sys.platform` names it; None for this one.
    """
    machine, system = machine or platform.machine(), system or sys.platform
    if machine not in MACHINES:
        return f"they are for x86-64 processors, and this is {machine}"
    if system == "win32":
        return "they are not built on Windows, as their sources are for GCC and Clang"
    others = sorted(path.name for path in folder.glob(f"{NAME}.*") if path.suffix in (".so", ".pyd", ".dylib"))
    if others:
        return f"they were built for another Python: {folder} has {others[0]}, and this Python needs {NAME}{SUFFIX}"
    if (record := folder / RECORD).is_file():
        reason = " ".join(record.read_text(errors="replace").split())[:300]
        return f"they could not be built when jaxspec was installed: {reason}; correct this and install jaxspec again"
    root = folder.parent.parent
    if (root / "setup.py").is_file() and (root / "pyproject.toml").is_file():
        return _of_checkout(root)
    if _is_pure(root):
        return "jaxspec was installed from a wheel without kernels; to build them, install it from its sources"
    return f"{folder} has no {NAME}{SUFFIX}, for a reason that is not known; install jaxspec again"


def _of_checkout(root: pathlib.Path) -> str:
    """Returns the reason for a checkout, which may stand in front of an installed package."""
    for place in _installed():
        if place.parent.parent.resolve() != root.resolve() and library_file(place).is_file():
            return (
                f"Python imported the checkout {root}, where they are not built, in place of the package that is "
                f"installed in {place.parent}; run Python from another folder, or {REBUILD}"
            )
    return f"Python imported the checkout {root}, where they are not built; {REBUILD}"


def _installed() -> Iterator[pathlib.Path]:
    """Yields the folder `jaxspec/kernels` of every installed distribution of jaxspec."""
    for distribution in importlib.metadata.distributions(name=DISTRIBUTION):
        yield pathlib.Path(str(distribution.locate_file("jaxspec"))) / "kernels"
        source = _direct_url(distribution)
        if source is not None:
            yield source / "jaxspec" / "kernels"


def _direct_url(distribution: importlib.metadata.Distribution) -> pathlib.Path | None:
    """Returns the checkout of an editable installation."""
    try:
        found = json.loads(distribution.read_text("direct_url.json") or "{}")
        editable, url = found.get("dir_info", {}).get("editable"), found.get("url", "")
    except (ValueError, AttributeError):
        return None
    return pathlib.Path(url.removeprefix("file://")) if editable and url.startswith("file://") else None


def _is_pure(root: pathlib.Path) -> bool:
    """Returns whether the distribution that was installed into a folder says that it has no compiled part."""
    for distribution in importlib.metadata.distributions(name=DISTRIBUTION, path=[str(root)]):
        return "root-is-purelib: true" in (distribution.read_text("WHEEL") or "").lower()
    return False
