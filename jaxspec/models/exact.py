"""The argument `exact` of `load`: on which platforms, and for which networks, bits do not depend on the drafter."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxspec.backend import exact_products
from jaxspec.core.checks import flag
from jaxspec.errors import InvalidConfig
from jaxspec.kernels.library import describe_kernels
from jaxspec.models.config import ModelConfig
from jaxspec.models.execution import PALLAS_PLATFORMS, Execution

WEIGHTS = ("bfloat16", "int8")
"""Types of weights whose products are one chain of sums on these platforms."""
CACHE = "bfloat16"
"""The type of the caches of models with such weights."""


def resolve_exact(
    execution: Execution,
    exact: bool | None,
    dtype: str,
    config: ModelConfig,
    platform: str,
    report: Callable[[str], Any] | None = None,
) -> Execution:
    """Returns how a network runs with the argument `exact` of `load`.

    On a CPU, the kernels are exact. On a TPU, attention and the products of a layer run in Pallas. On a GPU, attention
    runs in Pallas, and the products do so if there are kernels for the network's sizes (`find_gap`). Otherwise they are
    products of XLA with compiler options of their own (`jaxspec.backend.exact_products`). The choice is the field
    `products` of the result.

    Args:
        execution: how the network runs without the argument.
        exact: the user's choice; None and False change nothing.
        dtype: the type of the weights, as in `load`.
        config: the network's configuration.
        platform: the platform of the devices.
        report: called with a line of text if products are left to XLA.

    Raises:
        InvalidConfig: the same bits cannot be promised on this platform or for this network; the message says why.
    """
    if exact is None or not flag("exact", exact):
        return execution
    if platform == "cpu":
        if not execution.kernels:
            raise InvalidConfig(
                f"exact=True needs the CPU kernels on a CPU, and they are not used (kernels: {describe_kernels()})"
            )
        return dataclasses.replace(execution, exact=True)
    if platform not in PALLAS_PLATFORMS:
        raise InvalidConfig(f"exact=True is for CPUs, GPUs and TPUs, the model runs on {platform!r}; leave it out")
    where = f"on a {platform.upper()}"
    if dtype not in WEIGHTS:
        raise InvalidConfig(f"exact=True {where} needs weights in {' or '.join(WEIGHTS)}, got {dtype}")
    if config.recurrent:
        raise InvalidConfig(f"exact=True {where} is for networks without recurrent layers, which have no kernel there")
    if config.experts is not None:
        raise InvalidConfig(f"exact=True {where} is for networks without experts, which have no exact products there")
    from jaxspec.models import attention_pallas  # Pallas takes a third of a second to import

    attention_pallas.check_pallas(platform, CACHE, config.head_dim)
    gap = find_gap(config, platform, execution.shards)
    if gap is not None and (platform == "tpu" or execution.shards > 1):
        where = f"with layers split over {execution.shards} devices" if execution.shards > 1 else where
        raise InvalidConfig(f"exact=True {where} runs the products in Pallas, but {gap.split(';')[0]}; leave it out")
    if gap is not None and report is not None:
        report(f"exact=True leaves the products to XLA: {gap}")
    products = "xla" if gap else "pallas"
    found = dataclasses.replace(execution, exact=True, products=products)
    exact_products.check(exact_products.options(products))
    return found


def check_shared(execution: Execution, config: ModelConfig, platform: str, shards: int) -> None:
    """Raises InvalidConfig if so many devices cannot share the layers of an exact network."""
    if not execution.exact or shards == 1:
        return
    if platform not in PALLAS_PLATFORMS or execution.products != "pallas":
        products = "on a CPU" if platform == "cpu" else "with products by XLA"
        raise InvalidConfig(f"exact=True {products} is for layers on one device, got {shards}; load it without exact")
    if (gap := find_gap(config, platform, shards)) is not None:
        raise InvalidConfig(f"the model was loaded with exact=True, and {gap.split(';')[0]}; use another mesh")


def find_gap(config: ModelConfig, platform: str = "gpu", shards: int = 1) -> str | None:
    """Returns why there are no products in Pallas for a network of these sizes, in one line; None if there are."""
    from jaxspec.models.layer_calls_pallas import check_sizes  # a third of a second

    try:
        check_sizes(config, platform, shards)
    except InvalidConfig as error:
        return str(error)
    return None


def describe_exact(execution: Execution) -> str | None:
    """Returns in which form a network with `exact=True` runs; None for another network."""
    if not execution.exact:
        return None
    resolved = execution.resolve()
    if resolved.platform not in PALLAS_PLATFORMS:
        return "exact"
    return "exact, products in Pallas" if resolved.products == "pallas" else "exact, products by XLA"
