"""The argument `exact` of `load`: on which platforms, and for which types, bits do not depend on the drafter."""

import dataclasses

from jaxspec.backend import exact_products
from jaxspec.core.checks import flag
from jaxspec.errors import InvalidConfig
from jaxspec.kernels.library import describe_kernels
from jaxspec.models.execution import Execution

GPU_WEIGHTS = ("bfloat16", "int8")
"""Types of weights whose products are one chain of sums on a GPU."""
CACHE = "bfloat16"
"""The type of the caches of models with such weights."""


def resolve_exact(execution: Execution, exact: bool | None, dtype: str, head_dim: int, platform: str) -> Execution:
    """Returns how a network runs with the argument `exact` of `load`.

    On a CPU, the kernels are exact. On a GPU, products of XLA are exact with compiler options of their own
    (`jaxspec.backend.exact_products`), and attention runs in Pallas; `Execution.resolve` chooses these forms.

    Args:
        execution: how the network runs without the argument.
        exact: the user's choice; None and False change nothing.
        dtype: the type of the weights, as in `load`.
        head_dim: the width of the network's heads.
        platform: the platform of the devices.

    Raises:
        InvalidConfig: the same bits cannot be promised on this platform or for this type; the message says why.
    """
    if exact is None or not flag("exact", exact):
        return execution
    if platform == "cpu":
        if not execution.kernels:
            raise InvalidConfig(
                f"exact=True needs the CPU kernels on a CPU, and they are not used (kernels: {describe_kernels()})"
            )
        return dataclasses.replace(execution, exact=True)
    if platform != "gpu":
        raise InvalidConfig(f"exact=True is for CPUs and GPUs, the model runs on {platform!r}; leave it out")
    if dtype not in GPU_WEIGHTS:
        raise InvalidConfig(f"exact=True on a GPU needs weights in {' or '.join(GPU_WEIGHTS)}, got {dtype}")
    from jaxspec.models import attention_pallas  # Pallas takes a third of a second to import

    attention_pallas.check_pallas(platform, CACHE, head_dim)
    exact_products.check()
    return dataclasses.replace(execution, exact=True)
