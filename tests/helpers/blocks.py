"""Random matrices in the blocks of GGUF files."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints.gguf_blocks import read_blocks
from jaxspec.models.block_kinds import BLOCK_KINDS
from jaxspec.models.blocks import Blocks

TYPES = gguf.GGMLQuantizationType


def raw_blocks(rng: np.random.Generator, kind: str, outputs: int, inputs: int, halves=None) -> np.ndarray:
    """Random bytes `[O, bytes]`, the rows of a matrix; `halves(size)` draws the float16 numbers, normal by default."""
    block, size = gguf.GGML_QUANT_SIZES[TYPES[kind]]
    raw = rng.integers(0, 256, (outputs * inputs // block, size), dtype=np.uint8)
    start = {"Q6_K": size - 2, "Q2_K": size - 4}.get(kind, 0)
    numbers = 2 if kind == "Q2_K" or BLOCK_KINDS[kind].minimum else 1
    drawn = (halves or rng.standard_normal)((len(raw), numbers)).astype(np.float16)
    raw[:, start : start + 2 * numbers] = drawn.view(np.uint8)
    return raw.reshape(outputs, -1)


def decoded(kind: str, raw: np.ndarray) -> np.ndarray:
    """The weights `[O, I]` that the blocks mean, as the `gguf` package has it."""
    return gguf.quants.dequantize(raw, TYPES[kind])


def raw_weights(rng: np.random.Generator, kind: str, outputs: int, inputs: int, deviation: float) -> np.ndarray:
    """As `raw_blocks`; the weights have about this standard deviation."""
    scale = deviation / decoded(kind, raw_blocks(rng, kind, outputs, inputs)).std()
    return raw_blocks(rng, kind, outputs, inputs, lambda size: rng.normal(size=size) * scale)


def blocks_like(rng: np.random.Generator, kind: str, matrix: np.ndarray) -> Blocks:
    """A random matrix `[O, I]` in blocks, with the shape and the standard deviation of another."""
    outputs, inputs = matrix.shape
    return on_device(read_blocks(kind, raw_weights(rng, kind, outputs, inputs, float(matrix.std()))))


def on_device(matrix: Blocks) -> Blocks:
    return jax.tree.map(jnp.asarray, matrix)
