"""Tensors in files of draft heads: their checks, and the ids of a reduced vocabulary. Nothing here imports JAX."""

from collections.abc import Callable, Mapping

import numpy as np

from jaxspec.checkpoints import folder
from jaxspec.checkpoints.base import check_finite, check_names, check_shape
from jaxspec.checkpoints.folder import LazyTensor
from jaxspec.errors import CheckpointError

ID_TYPES = ("I64", "I32")
"""The types that token ids are stored in."""
OFFSETS, MEMBERS = "d2t", "t2d"
"""The names of the tensors of a reduced vocabulary. The first holds for each row of the projection its token minus the
number of the row. The second holds for each token of the vocabulary whether it has a row."""


def finite_reader(name: str, held: LazyTensor) -> Callable[[], np.ndarray]:
    """Returns a function that reads a tensor, and refuses a tensor that is not finite."""
    return lambda: check_finite(held.where, name, held.read())


def check_tensors(
    where: str, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, LazyTensor], tokens: str | None
) -> None:
    """Refuses a file unless it has exactly these tensors, each of its shape and of a type that can be read.

    Args:
        where: the file, for messages.
        shapes: the expected tensors.
        tensors: the tensors of the file.
        tokens: the name of the tensor that holds the ids of a reduced vocabulary, if any.

    Raises:
        CheckpointError: a tensor is missing, not expected, or of the wrong type or shape.
    """
    check_names(where, shapes, tensors)
    for name, shape in shapes.items():
        check_shape(tensors[name].where, name, tensors[name].stored.shape, shape)
        folder.check_types({name: tensors[name]}, ID_TYPES if name == tokens else folder.FLOAT_TYPES)


def read_ids(
    where: str, tensors: Mapping[str, LazyTensor], vocab: int | None, rows: int | None
) -> tuple[int | None, np.ndarray | None]:
    """Returns the size of the vocabulary, if it is known, and the ids of a reduced vocabulary, ascending.

    Args:
        where: the file, for messages.
        tensors: the tensors of the file.
        vocab: the size of the vocabulary, if config.json or another tensor states it.
        rows: the number of rows of the projection, if there is one.

    Raises:
        CheckpointError: the ids are missing, malformed, or contradict one another.
    """
    members = _vector(where, tensors, MEMBERS, ("BOOL",))
    offsets = _vector(where, tensors, OFFSETS, ID_TYPES)
    vocab = len(members) if members is not None else vocab
    count = rows if rows is not None else None if offsets is None else len(offsets)
    if count is None or vocab is None or count == vocab:
        return vocab, None  # no ids are read then
    if offsets is None:
        raise CheckpointError(
            f"{where}: the head drafts {count} of {vocab} tokens, but the file does not state which: the tensor "
            f"{OFFSETS} is missing"
        )
    if len(offsets) != count:
        raise CheckpointError(f"{where}: tensor {OFFSETS} has {len(offsets)} entries, expected {count}")
    known = None if members is None else np.flatnonzero(members)
    for ids in (np.arange(count) + offsets, offsets):  # some files hold the ids themselves
        sound = ids[0] >= 0 and ids[-1] < vocab and bool((np.diff(ids) > 0).all())
        if sound and known is None and np.array_equal(offsets, np.arange(count)):
            raise CheckpointError(
                f"{where}: tensor {OFFSETS} is 0, 1, 2, ..., expected offsets, which are zeros for the first "
                f"{count} tokens"
            )
        if sound and (known is None or np.array_equal(ids, known)):
            return vocab, ids.astype(np.int32)
    raise CheckpointError(
        f"{where}: tensor {OFFSETS} must stand for {count} ascending ids below {vocab}"
        + ("" if known is None else f", which are the {len(known)} ids of {MEMBERS}")
    )


def _vector(where: str, tensors: Mapping[str, LazyTensor], name: str, types: tuple[str, ...]) -> np.ndarray | None:
    held = tensors.get(name)
    if held is None:
        return None
    if held.stored.type not in types or len(held.stored.shape) != 1 or not held.stored.shape[0]:
        raise CheckpointError(
            f"{where}: tensor {name} has type {held.stored.type} and shape {list(held.stored.shape)}, expected one of "
            f"{types} and one axis"
        )
    return held.read()


def write_ids(ids: np.ndarray, vocab: int) -> dict[str, np.ndarray]:
    """Returns the tensors that `read_ids` reads, for ascending ids."""
    offsets = (ids - np.arange(len(ids))).astype(np.int64)
    return {OFFSETS: offsets, MEMBERS: np.isin(np.arange(vocab), ids)}


def read_tokens(name: str, held: LazyTensor, vocab: int | None) -> np.ndarray:
    """Reads a tensor with the ids of a reduced vocabulary, in the order of the file.

    Raises:
        CheckpointError: the tensor does not hold distinct ids below `vocab`.
    """
    if held.stored.type not in ID_TYPES or len(held.stored.shape) != 1:
        raise CheckpointError(
            f"{held.where}: tensor {name} has type {held.stored.type} and shape {list(held.stored.shape)}, expected "
            f"one of {ID_TYPES} and one axis"
        )
    tokens = held.read()
    if tokens.size != np.unique(tokens).size or (tokens < 0).any() or (vocab and (tokens >= vocab).any()):
        below = "" if vocab is None else f" to {vocab - 1}"
        raise CheckpointError(f"{held.where}: tensor {name} must hold ids from 0{below}, each once")
    return tokens
