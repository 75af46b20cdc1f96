"""Checks of the tensors in a file of draft heads. Nothing here imports JAX."""

from collections.abc import Callable, Mapping

import numpy as np

from jaxspec.checkpoints import folder
from jaxspec.checkpoints.base import check_finite, check_names, check_shape
from jaxspec.checkpoints.folder import LazyTensor
from jaxspec.heads.reduced_vocab import ID_TYPES


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
        folder.check_types({name: tensors[name]}, ID_TYPES if name == tokens else folder.FLOATS)
