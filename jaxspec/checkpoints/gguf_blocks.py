"""Reads the quantized blocks of GGUF files: splits them into scales and codes, following ggml's layouts."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from jaxspec.checkpoints.base import StoredTensor, check_finite, join_arrays
from jaxspec.checkpoints.gguf_header import Tensor, decode, raw_rows, type_name
from jaxspec.errors import CheckpointError
from jaxspec.models.block_kinds import BLOCK_KINDS, Split

if TYPE_CHECKING:
    from jaxspec.models.blocks import Blocks

_ROWS_AT_ONCE = 2048  # rows that are split at a time, so that memory never holds the codes of a whole matrix
_FLOAT_TYPES = ("F32", "F16", "BF16")
ROUNDED = "Q8_0"
"""The type that matrices of other types are rounded to."""


def read_native(where: str, name: str, data: Any, tensor: Tensor, order: Callable[[np.ndarray], np.ndarray]) -> Any:
    """Reads a tensor without converting its numbers.

    Types without a kernel are rounded to Q8_0, with a warning.

    Args:
        where: the file, for messages.
        name: name of the tensor.
        data: the file's memory map.
        tensor: the tensor's entry.
        order: reorders the rows to the order of the model.

    Returns:
        An array `[X, O, I]`, `[O, I]` or `[O]` in float32 or bfloat16 if the tensor has a float type; `Blocks`
        otherwise.

    Raises:
        CheckpointError: a weight is not finite.
    """
    kind = type_name(tensor)
    if kind in BLOCK_KINDS and len(tensor.shape) > 1:
        raw = raw_rows(data, tensor)
        if not is_finite(kind, raw):
            raise CheckpointError(f"{where}: tensor {name} has weights that are not finite (NaN or infinity)")
        return read_blocks(kind, order(raw))
    array = order(check_finite(where, name, decode(data, tensor)))
    if kind in _FLOAT_TYPES or array.ndim == 1:
        return array.astype(ml_dtypes.bfloat16) if kind == "BF16" else array
    warnings.warn(
        f"{where}: tensors of type {kind} are rounded to {ROUNDED}; the kernels support {', '.join(BLOCK_KINDS)}",
        stacklevel=2,
    )
    return _round(array)


def native_bytes(tensor: StoredTensor) -> int:
    """Returns the memory of a tensor that `read_native` reads, in bytes."""
    if tensor.type in _FLOAT_TYPES or len(tensor.shape) == 1:
        return math.prod(tensor.shape) * (2 if tensor.type == "BF16" else 4)
    *experts, outputs, inputs = tensor.shape
    return math.prod(experts) * BLOCK_KINDS.get(tensor.type, BLOCK_KINDS[ROUNDED]).bytes(outputs, inputs)


def join(matrices: list[Any], transpose: bool) -> Any:
    """Concatenates results of `read_native` along their rows; the result is an array if any of them is an array."""
    from jaxspec.models.blocks import Blocks  # imports JAX

    if all(isinstance(matrix, Blocks) for matrix in matrices):
        stacked = Blocks.stack(matrices)
        if len(stacked.parts) == 1 or stacked.parts[0].ndim < 4:
            return stacked
        warnings.warn(
            f"experts with gate and up projections of several types ({', '.join(stacked.kinds)}) are rounded to "
            f"{ROUNDED}; the kernel multiplies by one type",
            stacklevel=2,
        )
        return Blocks.stack([_round_experts(matrix) for matrix in matrices])
    return join_arrays(
        [np.asarray(matrix.unpack()) if isinstance(matrix, Blocks) else matrix for matrix in matrices], transpose
    )


def _round_experts(matrices: "Blocks") -> "Blocks":
    """Rounds the matrices of experts to `ROUNDED`, one after the other."""
    if matrices.kinds == (ROUNDED,):
        return matrices
    rounded = []
    for i in range(len(matrices.parts[0])):
        one = dataclasses.replace(matrices, parts=tuple(part[i] for part in matrices.parts))
        rounded.append(_round(np.asarray(one.unpack())))
    return dataclasses.replace(rounded[0], parts=(np.stack([one.parts[0] for one in rounded]),))


def _round(array: np.ndarray) -> "Blocks":
    import gguf

    return read_blocks(ROUNDED, gguf.quants.quantize(array, gguf.GGMLQuantizationType[ROUNDED]))


def rotation_halves(array: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders the rows of a query or key matrix from adjacent pairs (0, 1), (2, 3), ... of each head to halves.

    The conversion to GGUF interleaves the rows because llama.cpp rotates adjacent entries; this library rotates halves.
    """
    return array.reshape(-1, head_dim // 2, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def read_blocks(kind: str, raw: np.ndarray) -> "Blocks":
    """Packs a matrix without decoding it.

    Args:
        kind: the type of its blocks, a key of `BLOCK_KINDS`.
        raw: the rows of the matrix in the file, uint8 `[O, bytes]`, or `[X, O, bytes]` for X experts.
    """
    from jaxspec.models.blocks import Blocks  # imports JAX

    if raw.ndim == 3:  # a matrix for each expert
        experts = [read_blocks(kind, one) for one in raw]
        return Blocks((np.stack([one.parts[0] for one in experts]),), (kind,), experts[0].outputs, experts[0].inputs)
    parts = [
        Blocks.pack(kind, split(kind, raw[start : start + _ROWS_AT_ONCE]))
        for start in range(0, len(raw), _ROWS_AT_ONCE)
    ]
    packed = np.concatenate([part.parts[0] for part in parts])
    return Blocks((packed,), (kind,), (len(raw),), parts[0].inputs)


def is_finite(kind: str, raw: np.ndarray) -> bool:
    """Returns whether all weights of a matrix are finite; arguments as in `read_blocks`."""
    return all(np.isfinite(array).all() for array in _halves(kind, _blocks(kind, raw)))


def split(kind: str, raw: np.ndarray) -> Split:
    """Splits a matrix into codes, scales and minimums; arguments as in `read_blocks`."""
    blocks = _blocks(kind, raw)
    take = {"Q4_K": _split_k, "Q5_K": _split_k, "Q6_K": _split_q6_k}.get(kind, _split_plain)
    codes, *whole = [np.ascontiguousarray(array).reshape(len(raw), -1) for array in take(kind, blocks)]
    halves = [array.reshape(len(raw), -1) for array in _halves(kind, blocks)]
    if len(whole) == 2:  # these types subtract their minimum
        halves[1] = -halves[1]
    return Split(codes, tuple(halves), tuple(whole))


def _blocks(kind: str, raw: np.ndarray) -> np.ndarray:
    """Returns the blocks as `[*, bytes]`."""
    import gguf

    return raw.reshape(-1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1])


def _halves(kind: str, blocks: np.ndarray) -> list[np.ndarray]:
    """Returns the float16 numbers of each block: its scale and, if there is one, its minimum."""
    start = blocks.shape[1] - 2 if kind == "Q6_K" else 0
    return [
        blocks[:, at : at + 2].copy().view(np.float16)
        for at in range(start, start + 2 + 2 * BLOCK_KINDS[kind].minimum, 2)
    ]


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Returns the low nibbles of the last axis, then the high nibbles."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _split_plain(kind: str, blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    rest = blocks[:, 2 + 2 * BLOCK_KINDS[kind].minimum :]
    if kind == "Q8_0":
        return (rest ^ np.uint8(128),)
    codes = _nibbles(rest[:, -16:])
    if BLOCK_KINDS[kind].bits == 5:
        codes |= np.unpackbits(rest[:, :4], axis=1, bitorder="little") << 4
    return (codes,)


def _split_k(kind: str, blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    # 8 scales and 8 minimums of 6 bits in three groups of 4 bytes: see get_scale_min_k4 in ggml-quants.c.
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    factors = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    steps = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    codes = _nibbles(blocks[:, -128:].reshape(-1, 4, 32))
    if kind == "Q5_K":
        high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
        codes |= high.reshape(codes.shape) << 4
    return codes, factors, steps


def _split_q6_k(kind: str, blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return low | high.reshape(low.shape) << 4, blocks[:, 192:208]
