"""Compiles functions so that a GPU runs them, including their loops, as one command buffer (CUDA graph).

By default, XLA:GPU leaves loops out of command buffers, so the host waits for the loop's condition in every iteration.
"""

import os
import types
from collections.abc import Mapping
from typing import Any

import jax

OPTIONS = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
    ),
    "xla_gpu_graph_min_graph_size": "1",  # a program that is one loop is a graph of one node
}
"""XLA's options; the first one is XLA's default, extended by WHILE."""


def options(platform: str, layers_split: bool = False) -> Mapping[str, str]:
    """Returns the compiler options for a platform; only a GPU has any.

    If the environment variable XLA_FLAGS sets one of the options, the user's value is kept. If layers are split over
    devices, the loop contains collectives, which XLA cannot capture.
    """
    given = os.environ.get("XLA_FLAGS", "")
    return {} if platform != "gpu" or layers_split or any(name in given for name in OPTIONS) else OPTIONS


def compile(
    lowered: jax.stages.Lowered, options: Mapping[str, str], needed: Mapping[str, Any] = types.MappingProxyType({})
) -> jax.stages.Compiled:
    """Compiles with these options. If XLA does not know one of `options`, it compiles with those of `needed` alone."""
    try:
        return lowered.compile({**options, **needed})
    except jax.errors.JaxRuntimeError as error:
        if not any(name in str(error) for name in options):
            raise
        return lowered.compile(dict(needed))
