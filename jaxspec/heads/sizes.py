"""Infers the sizes of draft heads from the tensors of a file. Only the ids of a reduced vocabulary are read."""

import collections
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxspec.checkpoints.base import StoredTensor
from jaxspec.checkpoints.folder import LazyTensor
from jaxspec.errors import CheckpointError
from jaxspec.heads.layouts import Layout

IDS = ("I64", "I32")
"""The types that token ids are stored in."""


class Rows(NamedTuple):
    """The rows of a projection.

    Attributes:
        stored: the number of rows in the file.
        selected: the rows that are read, in this order; None: all.
        tokens: the ids of the reduced vocabulary, ascending, one for each row that is read; None: it is not reduced.
    """

    stored: int
    selected: np.ndarray | None = None
    tokens: np.ndarray | None = None


def infer_sizes(
    layout: Layout, where: str, stored: Mapping[str, StoredTensor], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns keywords of `HeadsConfig` without the vocabulary, and the number of `rows` of a projection.

    If tensors disagree, the most frequent size is returned. Names that the layout does not have are skipped here; they
    are reported when the file's tensors are compared with the expected ones.

    Args:
        layout: the layout of the file, with its prefix.
        where: the file, for messages.
        stored: the tensors of the file.
        settings: the content of config.json.

    Raises:
        CheckpointError: a head or a block has a higher number than there are tensors.
    """
    blocks, projections = set(), set()
    widths, rows = collections.Counter(), collections.Counter()
    has_bias, single = False, layout.prefix + layout.single
    for name, tensor in stored.items():
        kind, *numbers = (layout.parameter(name) or "").split(".")
        if kind == "blocks":
            blocks.add((int(numbers[0]), int(numbers[1])))
            has_bias = has_bias or numbers[2] == "bias"
        if kind == "projections":
            projections.add(int(numbers[0]))
        if tensor.shape and kind != "tokens":
            widths[tensor.shape[-1]] += 1
            rows.update(tensor.shape[:1] if kind == "projections" or name == single else ())
    heads = 1 + max({head for head, _ in blocks} | projections, default=0)
    layers = max((block + 1 for _, block in blocks), default=0)
    if heads * max(layers, 1) > len(stored):
        raise CheckpointError(
            f"{where}: {heads} heads of {layers} blocks and only {len(stored)} tensors, among them "
            f"{max(stored, key=_numbers)}"
        )
    return {
        "hidden_size": widths.most_common(1)[0][0] if widths else 0,
        "rows": rows.most_common(1)[0][0] if rows else 0,
        "num_heads": heads,
        "num_layers": layers,
        "projection": _projection(layout, single in stored, projections, settings),
        "bias": has_bias or layout.requires_bias,
    }


def find_rows(
    layout: Layout, tensors: Mapping[str, LazyTensor], stored: int, settings: Mapping[str, Any]
) -> tuple[int | None, Rows]:
    """Returns the size of the vocabulary, None if the file does not state it, and the rows of a projection.

    Args:
        layout: the layout of the file, with its prefix.
        tensors: the tensors of the file.
        stored: the number of rows of a projection in the file; 0: there is none.
        settings: the content of config.json.

    Raises:
        CheckpointError: the ids of a reduced vocabulary are malformed.
    """
    stated = settings.get(layout.key("vocab_size") or "")
    stated = stated if type(stated) is int and stated > 0 else None
    if not stored:
        return stated, Rows(0)
    if layout.tokens is None:
        return stored, Rows(stored)
    if layout.tokens not in tensors:
        # vLLM takes the first ids if only config.json says that the vocabulary is reduced.
        if stated is not None and stored < stated and settings.get(layout.key("rows") or "") == stored:
            return stated, Rows(stored, None, np.arange(stored))
        return stored, Rows(stored)
    vocab = stored if stored > math.prod(tensors[layout.tokens].stored.shape) else stated
    tokens = read_tokens(layout.tokens, tensors[layout.tokens], vocab)
    order = np.argsort(tokens, kind="stable")
    if stored > tokens.size:
        return vocab, Rows(stored, tokens[order], tokens[order])
    return vocab, Rows(tokens.size, None if (np.diff(order) > 0).all() else order, tokens[order])


def read_tokens(name: str, held: LazyTensor, vocab: int | None) -> np.ndarray:
    """Reads the ids of a reduced vocabulary, in the file's order.

    Raises:
        CheckpointError: the tensor does not hold distinct ids below `vocab`.
    """
    if held.stored.type not in IDS or len(held.stored.shape) != 1:
        raise CheckpointError(
            f"{held.where}: tensor {name} has type {held.stored.type} and shape {list(held.stored.shape)}, expected "
            f"one of {IDS} and one axis"
        )
    tokens = held.read()
    if tokens.size != np.unique(tokens).size or (tokens < 0).any() or (vocab and (tokens >= vocab).any()):
        below = "" if vocab is None else f" to {vocab - 1}"
        raise CheckpointError(f"{held.where}: tensor {name} must hold ids from 0{below}, each once")
    return tokens


def _projection(layout: Layout, has_single: bool, numbers: set[int], settings: Mapping[str, Any]) -> str:
    """Returns `HeadsConfig.projection` for a file; `numbers` are the numbers of its projections."""
    # vLLM also takes the first head's projection as the single one if config.json says so.
    stated = layout.key("has_single_projection")
    if has_single or (numbers <= {0} and stated is not None and settings.get(stated)):
        return "single"
    return "own" if numbers or "shared" not in layout.projections else "shared"


def _numbers(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if re.fullmatch(r"\d{1,4}", part, re.ASCII)]
