"""Compiler options with which XLA:GPU computes every matrix product as one chain of sums, whatever its number of rows.

By default XLA times several kernels for each product, splits long sums into parts, and chooses the number of parts by
the number of rows. The bits of a row then depend on the other rows. With these options each product is one Triton
kernel with the same tile, and each of its outputs is one chain of the same instruction over all inputs.
"""

import os
from collections.abc import Mapping
from typing import Any

import jax

from jaxspec.errors import InvalidConfig

OPTIONS: Mapping[str, Any] = {
    "xla_gpu_experimental_force_split_k": 1,
    "xla_gpu_cublas_fallback": False,
    "xla_gpu_cudnn_gemm_fusion_level": 0,
    "xla_gpu_override_gemm_autotuner": "block_m:32 block_n:16 block_k:128 num_stages:4 num_warps:4 num_ctas:1",
    "xla_allow_excess_precision": False,
}
"""XLA's options: no sums in parts, no kernels of cuBLAS and cuDNN, one tile, and no rounding left out. A program of the
tile computes 32 outputs of 16 rows; in products of 64 rows or more, 16 outputs of 32 rows."""


PALLAS_OPTIONS: Mapping[str, Any] = {"xla_allow_excess_precision": False}
"""The options for networks whose products run in Pallas: the operations between the kernels are rounded as written."""


def options(products: str) -> Mapping[str, Any]:
    """Returns the compiler options for products in Pallas ("pallas") or by XLA ("xla")."""
    return PALLAS_OPTIONS if products == "pallas" else OPTIONS


def check(options: Mapping[str, Any]) -> None:
    """Checks that this XLA knows the options, by compiling a function of one number.

    Raises:
        InvalidConfig: XLA does not know an option, or the environment variable XLA_FLAGS sets one.
    """
    given = os.environ.get("XLA_FLAGS", "")
    for name in options:
        if name in given:
            raise InvalidConfig(f"exact=True sets XLA's option {name}; remove it from XLA_FLAGS")
    try:
        jax.jit(lambda number: number + 1).lower(1.0).compile(dict(options))
    except jax.errors.JaxRuntimeError as error:
        unknown = next((name for name in options if name in str(error)), None)
        if unknown is None:
            raise
        raise InvalidConfig(
            f"exact=True needs XLA's option {unknown}, which JAX {jax.__version__} does not know"
        ) from None
