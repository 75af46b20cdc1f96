"""Keeps what XLA compiled from process to process, in JAX's persistent compilation cache."""

import functools
import os
import tempfile
from typing import Any

import jax

from jaxspec.storage.directories import cache_directory

FOLDER, BYTES = "xla", 2 << 30
"""The folder of the cache directory, and how much it may hold."""


@functools.cache
def keep_compilations() -> None:
    """Has JAX keep what it compiles from now on, unless the user has said where, or that nothing be kept.

    Called before this library compiles, never on import. A directory that cannot be written to is passed over silently.
    """
    config: Any = jax.config
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or config.jax_compilation_cache_dir is not None:
        return
    if not config.jax_enable_compilation_cache:
        return
    try:
        folder = cache_directory() / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError, ValueError):  # read-only, full, or there is no home at all
        return
    if "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ and config.jax_compilation_cache_max_size < 0:
        jax.config.update("jax_compilation_cache_max_size", BYTES)
    jax.config.update("jax_compilation_cache_dir", str(folder))
