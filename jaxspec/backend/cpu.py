"""What is asked of the processor itself: some of its libraries are faster on one than on another."""

import functools
import pathlib
import platform


@functools.cache
def has_avx512() -> bool | None:
    """Whether this x86-64 processor has vectors of 512 bits; None on others, and where the system does not tell."""
    try:
        return "avx512f" in pathlib.Path("/proc/cpuinfo").read_text() if platform.machine() == "x86_64" else None
    except OSError:
        return None
