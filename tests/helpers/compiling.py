"""How the tests compile: most of their programs run for milliseconds, so XLA optimises little.

Importing this module, before anything compiles, sets it for this process and for those that it starts.
"""

import os
from typing import Any

import jax

QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
"""Compiler options of programs that are not worth optimising, where others of the file are."""
AS_USERS_DO: dict[str, Any] = {}
"""Compiler options that undo what is set here."""

_FLAGS = ""
if jax.__version_info__ < (0, 11):  # to set up an emitter for each of a thousand fusions takes half of the time
    _FLAGS = "--xla_cpu_use_fusion_emitters=false"
    AS_USERS_DO["xla_cpu_use_fusion_emitters"] = True
if _FLAGS not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
jax.config.update("jax_disable_most_optimizations", True)


def simulated(devices: int) -> dict[str, str]:
    """Returns the environment of a process that simulates this number of devices."""
    flags = f"--xla_force_host_platform_device_count={devices} {_FLAGS}"
    return os.environ | {"XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
