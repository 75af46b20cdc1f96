"""Where this library keeps files between processes."""

import os
import pathlib


def cache_directory() -> pathlib.Path:
    """Gives the directory of fetched files: $JAXSPEC_CACHE, else $XDG_CACHE_HOME/jaxspec, else ~/.cache/jaxspec."""
    if own := os.environ.get("JAXSPEC_CACHE"):
        return pathlib.Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(shared) if shared else pathlib.Path.home() / ".cache") / "jaxspec"
