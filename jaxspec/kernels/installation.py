"""Finds out why this installation does not have compiled kernels. This module does not import JAX."""

import importlib.machinery
import importlib.metadata
import json
import pathlib
import platform
import sys
from collections.abc import Iterator

NAME = "_kernels"
SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
REASON_FILE = "_not_built.txt"
"""The file next to this module in which `setup.py` records why the kernels could not be built."""
DISTRIBUTION = "jaxspec-decoding"
X86_64_NAMES = ("x86_64", "AMD64")
"""The names of x86-64 processors, as `platform.machine` returns them."""
KERNELS_FOLDER = pathlib.Path(__file__).parent
REBUILD_ADVICE = "with a C++ compiler, `pip install --editable .` there builds them"


def library_file(folder: pathlib.Path = KERNELS_FOLDER) -> pathlib.Path:
    """Returns the path at which this Python expects the compiled kernels."""
    return folder / f"{NAME}{SUFFIX}"


def explain_missing(
    folder: pathlib.Path = KERNELS_FOLDER, machine: str | None = None, system: str | None = None
) -> str:
    """Returns the reason why a folder does not contain a compiled library, and what to do about it.

    The reason is always read from this machine; if none is found, the message says that it is unknown.

    Args:
        folder: the folder `jaxspec/kernels` that was imported.
        machine: the processor, as `platform.machine` names it; None for this one.
        system: the operating system, as `sys.platform` names it; None for this one.
    """
    machine, system = machine or platform.machine(), system or sys.platform
    if machine not in X86_64_NAMES:
        return f"they are for x86-64 processors, and this processor is {machine}"
    if system == "win32":
        return "they are not built on Windows, because their sources need GCC or Clang"
    others = sorted(path.name for path in folder.glob(f"{NAME}.*") if path.suffix in (".so", ".pyd", ".dylib"))
    if others:
        return (
            f"they were built for another version of Python: {folder} has {others[0]}, and this Python needs "
            f"{NAME}{SUFFIX}; install jaxspec again"
        )
    if (record := folder / REASON_FILE).is_file():
        reason = " ".join(record.read_text(errors="replace").split())[:300]
        return f"they could not be built when jaxspec was installed: {reason}; fix this and install jaxspec again"
    root = folder.parent.parent
    if (root / "setup.py").is_file() and (root / "pyproject.toml").is_file():
        return _explain_checkout(root)
    if _is_pure(root):
        return "jaxspec was installed from a wheel without kernels; to build them, install it from its sources"
    return f"{folder} does not contain {NAME}{SUFFIX}, for an unknown reason; install jaxspec again"


def _explain_checkout(root: pathlib.Path) -> str:
    """Returns the reason for a checkout, which Python may import instead of an installed package."""
    for folder in _installed():
        if folder.parent.parent.resolve() != root.resolve() and library_file(folder).is_file():
            return (
                f"Python imported the checkout {root}, where they are not built, instead of the package that is "
                f"installed in {folder.parent}; run Python from another folder, or {REBUILD_ADVICE}"
            )
    return f"Python imported the checkout {root}, where they are not built; {REBUILD_ADVICE}"


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
        direct_url = json.loads(distribution.read_text("direct_url.json") or "{}")
        editable, url = direct_url.get("dir_info", {}).get("editable"), direct_url.get("url", "")
    except (ValueError, AttributeError):
        return None
    return pathlib.Path(url.removeprefix("file://")) if editable and url.startswith("file://") else None


def _is_pure(root: pathlib.Path) -> bool:
    """Returns whether the distribution that was installed into a folder is declared as pure Python."""
    for distribution in importlib.metadata.distributions(name=DISTRIBUTION, path=[str(root)]):
        return "root-is-purelib: true" in (distribution.read_text("WHEEL") or "").lower()
    return False
