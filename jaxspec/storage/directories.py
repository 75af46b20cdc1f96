"""The directory in which jaxspec keeps files between processes."""

import os
import pathlib


def cache_directory() -> pathlib.Path:
    """Returns the cache directory: $JAXSPEC_CACHE, or $XDG_CACHE_HOME/jaxspec, or ~/.cache/jaxspec."""
    if configured := os.environ.get("JAXSPEC_CACHE"):
        return pathlib.Path(configured).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(shared) if shared else pathlib.Path.home() / ".cache") / "jaxspec"
