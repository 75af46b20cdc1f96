"""Sets up JAX's persistent compilation cache, so that a program compiles once per machine and not per process."""

import functools
import os
import tempfile
from typing import Any

import jax

from jaxspec.storage.directories import cache_directory

CACHE_FOLDER, MAX_CACHE_BYTES = "xla", 2 << 30
"""The subdirectory of jaxspec's cache directory, and its maximum size in bytes."""


@functools.cache
def keep_compilations() -> None:
    """Enables JAX's persistent compilation cache, unless the user has configured or disabled it.

    jaxspec calls this function before it compiles, never on import. If the directory is not writable, nothing changes.
    """
    config: Any = jax.config
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or config.jax_compilation_cache_dir is not None:
        return
    if not config.jax_enable_compilation_cache:
        return
    try:
        folder = cache_directory() / CACHE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError, ValueError):  # read-only, full, or no home directory
        return
    if "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ and config.jax_compilation_cache_max_size < 0:
        jax.config.update("jax_compilation_cache_max_size", MAX_CACHE_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(folder))
