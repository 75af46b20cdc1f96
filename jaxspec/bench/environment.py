"""Describes what a benchmark runs on: versions, machine, memory, commit."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
import sys

import jax

import jaxspec
from jaxspec.core import noise

INSTRUCTION_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "sve",
)
"""Instruction sets that decide how fast matrix products are, as Linux names them."""


def describe_environment() -> dict:
    """Returns the versions and the machine for JSON. `date` is the current time in UTC."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {name: _version(name) for name in ("flax", "numpy", "reasoning-gym")} | read_versions(),
        "noise_version": noise.NOISE_VERSION,
        "device": {"platform": device.platform, "kind": device.device_kind, "count": jax.device_count()},
        "cpu": {"model": cpu_model(), "cores": os.cpu_count(), "usable_cores": len(_usable_cores())},
        "system": platform.platform(),
    }


def read_versions() -> dict[str, str]:
    """Returns the versions of Python, JAX, jaxlib and jaxspec, which decide what is compiled."""
    own = {"python": platform.python_version(), "jaxspec": jaxspec.__version__}
    return own | {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}


def describe_machine() -> dict:
    """Returns the properties that decide how fast this machine is, without the name of the host."""
    device = jax.devices()[0]
    return {
        "cpu": cpu_model(),
        "cores": len(_usable_cores()),
        "memory_gib": memory_gib(),
        "flags": [flag for flag in INSTRUCTION_FLAGS if flag in _cpu_flags()],
        "platform": device.platform,
        "kind": device.device_kind,
        "devices": jax.device_count(),
    }


def find_commit() -> tuple[str | None, bool]:
    """Returns the commit of the checkout that jaxspec is imported from, and whether package or scripts differ from it.

    The commit is None if jaxspec is installed outside of a checkout, or if git is missing.
    """
    root = pathlib.Path(jaxspec.__file__).parents[1]

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout

    try:
        if pathlib.Path(git("rev-parse", "--show-toplevel").strip()).resolve() != root.resolve():
            return None, False
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "jaxspec", "scripts", "pyproject.toml")
        return git("rev-parse", "HEAD").strip(), bool(changed.strip())
    except (OSError, subprocess.CalledProcessError):
        return None, False


def peak_memory() -> int | None:
    """Returns the peak main memory of this process in bytes; None if the system does not report it."""
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def memory_gib() -> int | None:
    """Returns the main memory in GiB, rounded; None if the system does not report it."""
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30)
    except (AttributeError, OSError, ValueError):
        return None


def cpu_model() -> str:
    """Returns the CPU's name, as the system reports it."""
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _cpu_flags() -> set[str]:
    return set((_cpu_info("flags") or _cpu_info("Features") or "").split())


def _cpu_info(name: str) -> str | None:
    """Returns the value of the first line named `name` in Linux's description of its CPUs; None if there is none."""
    try:
        line = re.search(rf"^{name}\s*:\s*(.+)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return line.group(1) if line else None


def _usable_cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
