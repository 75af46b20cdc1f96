"""Compiles functions so that a GPU runs them, loops included, as one command buffer (CUDA graph).

By default XLA:GPU leaves loops out of command buffers: the host reads each loop's condition in every turn, and waits.
"""

import os
from collections.abc import Mapping

import jax

OPTIONS = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
    ),
    "xla_gpu_graph_min_graph_size": "1",  # a program that is one loop is a graph of one node
}
"""XLA's options: the first is its default and loops."""


def options(platform: str, layers_split: bool = False) -> Mapping[str, str]:
    """Returns the compiler options for a platform, none but on a GPU.

    Options that the environment variable XLA_FLAGS names are the user's. Where devices share layers, the loop holds
    collectives, which are not captured.
    """
    given = os.environ.get("XLA_FLAGS", "")
    return {} if platform != "gpu" or layers_split or any(name in given for name in OPTIONS) else OPTIONS


def compile(lowered: jax.stages.Lowered, options: Mapping[str, str]) -> jax.stages.Compiled:
    """Compiles with these options, or without any if XLA refuses one by its name."""
    try:
        return lowered.compile(dict(options))
    except jax.errors.JaxRuntimeError as error:
        if not any(name in str(error) for name in options):
            raise
        return lowered.compile()
