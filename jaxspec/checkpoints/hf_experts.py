"""Reads the experts of gpt-oss in Hugging Face files (arXiv:2508.10925): alternating projections, and MXFP4."""

import functools
from collections.abc import Mapping

import numpy as np

from jaxspec.checkpoints.base import StoredTensor
from jaxspec.checkpoints.folder import LazyTensor
from jaxspec.errors import CheckpointError

BLOCKS, SCALES = "_blocks", "_scales"
"""The ends of the names of the two tensors of a matrix in MXFP4."""
_GATE_UP, _GATE_UP_BIAS, _DOWN = (f".mlp.experts.{name}" for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj"))
_BLOCK_BYTES = 16
_MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
_VALUES = np.array([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], np.float32)
"""The numbers that four bits stand for (E2M1, Open Compute Project's specification of microscaling formats, 2023)."""


def open_experts(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Returns the tensors with those of experts as in other files.

    In the files of gpt-oss, a matrix of experts is `[X, in, out]`, or two tensors in MXFP4: codes
    `[X, out, in / 32, 16]` and scales `[X, out, in / 32]`. Outputs of the gate and up projections alternate. In the
    result a matrix is `[X, out, in]`, and the outputs of the gate projection come first.

    Raises:
        CheckpointError: a tensor in MXFP4 lacks its scales, or their types or shapes do not belong together.
    """
    found = {}
    for name, tensor in tensors.items():
        if name.endswith((_GATE_UP + SCALES, _DOWN + SCALES)):
            if name.removesuffix(SCALES) + BLOCKS not in tensors:
                raise CheckpointError(f"{tensor.where}: tensors missing: {name.removesuffix(SCALES)}{BLOCKS}")
        elif name.endswith((_GATE_UP + BLOCKS, _DOWN + BLOCKS)):
            matrix = name.removesuffix(BLOCKS)
            if matrix + SCALES not in tensors:
                raise CheckpointError(f"{tensor.where}: tensors missing: {matrix}{SCALES}")
            found[matrix] = _unblocked(name, tensor, tensors[matrix + SCALES], name.endswith(_GATE_UP + BLOCKS))
        elif name.endswith((_GATE_UP, _DOWN)) and len(tensor.stored.shape) == 3:
            shape = (tensor.stored.shape[0], *tensor.stored.shape[:0:-1])
            read = functools.partial(_read_transposed, tensor, name.endswith(_GATE_UP))
            found[name] = LazyTensor(tensor.where, StoredTensor(tensor.stored.type, shape, tensor.stored.bytes), read)
        elif name.endswith(_GATE_UP_BIAS):
            found[name] = LazyTensor(tensor.where, tensor.stored, functools.partial(_read_bias, tensor))
        else:
            found[name] = tensor
    return found


def decode_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the numbers of blocks in MXFP4: 32 codes of four bits, of which the low bits come first, and an exponent.

    Args:
        blocks: codes, uint8 `[..., G, 16]`.
        scales: exponents with 127 added, uint8 `[..., G]`.

    Returns:
        The numbers, float32 `[..., 32 G]`.
    """
    values = np.stack([_VALUES[blocks & 15], _VALUES[blocks >> 4]], axis=-1)
    values = values.reshape(*blocks.shape[:-1], 2 * _BLOCK_BYTES)
    with np.errstate(over="ignore"):  # an infinity is found by the checks of weights
        values = np.ldexp(values, scales[..., None].astype(np.int32) - 127)
    return values.reshape(*blocks.shape[:-2], -1)


def _unblocked(name: str, blocks: LazyTensor, scales: LazyTensor, alternating: bool) -> LazyTensor:
    """Returns a matrix in MXFP4 as a tensor of floats."""
    shape = blocks.stored.shape
    fits = len(shape) == 4 and shape[-1] == _BLOCK_BYTES and scales.stored.shape == shape[:-1]
    if not fits or {blocks.stored.type, scales.stored.type} != {"U8"}:
        raise CheckpointError(
            f"{blocks.where}: tensor {name} has type {blocks.stored.type} and shape {list(shape)}, and its scales have "
            f"type {scales.stored.type} and shape {list(scales.stored.shape)}; expected U8 [X, out, in / 32, 16] and "
            "U8 [X, out, in / 32]"
        )

    def read() -> np.ndarray:
        codes, exponents = blocks.read(), scales.read()
        out = np.empty((*shape[:2], 2 * _BLOCK_BYTES * shape[2]), np.float32)
        for expert in range(shape[0]):  # so that memory holds the intermediate results of one expert
            values = decode_mxfp4(codes[expert], exponents[expert])
            out[expert] = _gate_first(values) if alternating else values
        return out

    size = blocks.stored.bytes + scales.stored.bytes
    return LazyTensor(blocks.where, StoredTensor("F32", (*shape[:2], 32 * shape[2]), size), read)


def _gate_first(rows: np.ndarray) -> np.ndarray:
    """Returns rows that alternate between two projections with all rows of the first projection before the others."""
    return np.concatenate([rows[::2], rows[1::2]])


def _read_transposed(tensor: LazyTensor, alternating: bool) -> np.ndarray:
    matrices = tensor.read().swapaxes(1, 2)
    return np.stack([_gate_first(matrix) for matrix in matrices]) if alternating else np.ascontiguousarray(matrices)


def _read_bias(tensor: LazyTensor) -> np.ndarray:
    bias = tensor.read()
    return np.concatenate([bias[..., ::2], bias[..., 1::2]], axis=-1)
