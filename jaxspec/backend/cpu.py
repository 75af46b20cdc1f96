"""Compiler options, thresholds and layouts that were measured on XLA:CPU."""

import functools
import os
import pathlib
import platform
from collections.abc import Set
from typing import Any

EIGEN_ROWS = 64
"""Without AVX-512, Eigen beats YNN, XLA:CPU's default, in float32 matmuls of up to this many rows."""
STREAMED_ROWS = {"int8": 12, "bfloat16": 3, "float32": 1}
"""Up to this many rows, by weight dtype, each row streams the weights once, at memory bandwidth."""
WEIGHTS_FIRST_ROWS = 128
"""Up to this many float32 rows, multiply weights first: XLA:CPU repacks the right operand on every call."""
FUSED_COLUMNS = 4032
"""XLA:CPU fuses the conversion of weights into a matrix-vector product only if the vector is below 16 KB.

A longer vector is multiplied in parts of this many columns; otherwise XLA first writes the weights in float32.
"""
TILE_WEIGHTS = 1 << 19
"""Batches above `STREAMED_ROWS` multiply int8 weights in float32 tiles of at most this many weights."""
INT8_NODE_COST = 0.55
"""Cost of one more token in a target call with int8 weights, in units of a call with one token.

XLA:CPU streams int8 weights once per row in small batches, so that each token adds more than with other dtypes.
"""

_YNN = "xla_cpu_experimental_ynn_fusion_type"
_REDUCTIONS_ONLY = "LIBRARY_FUSION_TYPE_REDUCE"


@functools.cache
def has_avx512() -> bool | None:
    """Returns whether this x86-64 processor has AVX-512; None on other processors and if the system does not say."""
    try:
        return "avx512f" in pathlib.Path("/proc/cpuinfo").read_text() if platform.machine() == "x86_64" else None
    except OSError:
        return None


def decode_options(rows: int, dtypes: Set[str]) -> dict[str, Any] | None:
    """Returns XLA:CPU's compiler options for the decoding loop, or None for the defaults.

    Small float32 matmuls use Eigen instead of YNN on a processor without AVX-512; reductions stay on YNN. A choice in
    the user's `XLA_FLAGS` takes precedence.

    Args:
        rows: rows of each matmul.
        dtypes: dtypes of the weights.
    """
    eigen = rows <= EIGEN_ROWS and not dtypes & {"bfloat16", "int8"} and has_avx512() is False
    return {_YNN: _REDUCTIONS_ONLY} if eigen and _YNN not in os.environ.get("XLA_FLAGS", "") else None


def default_weight_layout(dtype: str) -> str:
    """Returns the faster layout of floating-point matrices on this processor, "out_in" or "in_out".

    Float32 with AVX-512 and bfloat16 are faster as `[out, in]`; other processors were not measured.
    """
    return "out_in" if dtype == "bfloat16" or has_avx512() is True else "in_out"


def kernel_rows(rows: int) -> int:
    """Rounds a number of rows up to one for which the matmul libraries have kernels."""
    return 1 << (rows - 1).bit_length() if rows < 16 else -(-rows // 16) * 16
