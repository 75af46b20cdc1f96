"""Quantizes the weights of toys."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.quantized import Quantized, quantize


def quantize_by_powers(params: Any) -> Any:
    """Quantizes parameters to int8 with powers of two as scales, so that products with scales are not rounded.

    Elsewhere XLA:CPU may round such a product and the sum after it once (FMA) or twice, in two programs differently,
    because kernels are plain operations here.
    """

    def round_scale(leaf: Any) -> Any:
        if not isinstance(leaf, Quantized):
            return leaf
        return Quantized(leaf.values, jnp.exp2(jnp.round(jnp.log2(leaf.scale))))

    return jax.tree.map(round_scale, quantize(params), is_leaf=lambda leaf: isinstance(leaf, Quantized))
