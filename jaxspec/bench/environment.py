"""On what a benchmark ran: versions, machine, memory."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import re
import sys

import jax

import jaxspec
from jaxspec.core import noise


def describe() -> dict:
    """For JSON; `date` is now, in UTC."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "jaxspec": jaxspec.__version__}
        | {name: _version(name) for name in ("jax", "jaxlib", "flax", "numpy", "reasoning-gym")},
        "noise_version": noise.VERSION,
        "device": {"platform": device.platform, "kind": device.device_kind, "count": jax.device_count()},
        "cpu": {"model": cpu_model(), "cores": os.cpu_count(), "usable_cores": len(_usable_cores())},
        "system": platform.platform(),
    }


def peak_memory() -> int | None:
    """Bytes of main memory that this process had at most; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def cpu_model() -> str:
    """As the system names it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or platform.machine()


def _usable_cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
