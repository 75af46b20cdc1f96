"""Rows and weights for tests of products in Pallas."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.quantized import Quantized

ROW_COUNTS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 100, 128)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)


def stored(matrix: jax.Array, kind: str, transposed: bool = False) -> Any:
    """Returns a matrix `[I, O]`, or `[O, I]` if `transposed`, as a model stores it: "bfloat16" or "int8"."""
    return Quantized.quantize(matrix, transposed) if kind == "int8" else matrix.astype(jnp.bfloat16)


def exact_tiles(rng: np.random.Generator, rows: int, inputs: int, outputs: int, tile: int) -> tuple[Any, Any]:
    """Returns factors whose products have exact sums within each tile of inputs, in any order, but not across tiles."""
    x, weight = rng.integers(-8, 9, (rows, inputs)), rng.integers(-8, 9, (inputs, outputs))
    exponents = np.repeat(rng.integers(-12, 13, inputs // tile), tile)
    return x.astype(np.float64), weight * 2.0 ** exponents[:, None]
