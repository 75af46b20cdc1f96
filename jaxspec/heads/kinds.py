"""The kinds of draft heads: one row of `jaxspec.registry.HEADS` each. Nothing here imports JAX.

A kind holds all that the rest of the package knows about its heads: the class of their sizes, their network, the
layouts in which other systems store them, and how files in these layouts are read and written. Kinds with transformer
layers of their own share most of this code; see `jaxspec.heads.layered`.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxspec.checkpoints.folder import LazyTensor
from jaxspec.heads.sizes import HeadSizes
from jaxspec.registry import HEADS, locate

CONFIG_JSON = "config.json"
PICKLE_SUFFIXES = (".pt", ".pth", ".bin")
"""Suffixes of files that `torch.save` writes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout in which another system stores heads. Kinds add fields of their own in subclasses.

    Attributes:
        name: the name that users write.
        drafter: the name of the kind of heads.
        summary: one line for the help of `jaxspec export`.
        readers: the systems that read the layout.
        files: the names that its file of tensors may have; `export_heads` writes the first.
        mark: a regular expression for the names, without the prefix, of the tensors that identify the layout.
        prefix: the beginning of every tensor's name.
        other_prefixes: prefixes that files may have instead.
        in_model: True if the tensors are among the tensors of the target, which was trained with the heads.
        exported: True if `export_heads` writes the layout.
    """

    name: str
    drafter: str
    summary: str
    readers: str
    files: tuple[str, ...]
    mark: str
    prefix: str = ""
    other_prefixes: tuple[str, ...] = ()
    in_model: bool = False
    exported: bool = True


class ForeignHeads(NamedTuple):
    """Heads in a file of another system, with the headers checked.

    Attributes:
        layout: the layout of the file.
        sizes: the fields of the sizes; `vocab_size` is missing if the file does not state it.
        readers: for each parameter, a function that reads the parameter in the dtype of the file.
        notes: what users should know about the file, one sentence each.
    """

    layout: Layout
    sizes: dict[str, Any]
    readers: Mapping[str, Callable[[], np.ndarray]]
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class HeadKind(abc.ABC):
    """A kind of draft heads.

    Attributes:
        title: the name of such heads in messages, in the plural.
        sizes: the class of the sizes of such heads.
        network: the class of their network (`jaxspec.heads.network.HeadNetwork`), as "module:Class".
        layouts: the layouts in which other systems store such heads.
    """

    title: str
    sizes: type[HeadSizes]
    network: str
    layouts: tuple[Layout, ...]

    @abc.abstractmethod
    def open(
        self, where: str, layout: Any, tensors: Mapping[str, LazyTensor], settings: Mapping[str, Any]
    ) -> ForeignHeads:
        """Checks the headers of a file of another system; of the tensors, only token ids are read.

        Args:
            where: the file, for messages.
            layout: the layout of the file, with the prefix of its names.
            tensors: the tensors of the file.
            settings: the content of config.json.

        Raises:
            CheckpointError: a tensor is missing, not expected, or of the wrong type or shape, or sizes are missing.
        """

    @abc.abstractmethod
    def obstacle(self, config: Any, layout: Any) -> str | None:
        """Returns the reason why a layout of this kind cannot hold heads of these sizes; None if it can."""

    def sizes_in(self, config: Any, layout: Any) -> Any:
        """Returns the sizes that heads have in a layout.

        A layout may hold a projection where the heads share the target's projection.
        """
        return config

    @abc.abstractmethod
    def tensors(self, config: Any, params: Mapping[str, Any], layout: Any) -> dict[str, np.ndarray]:
        """Returns the tensors of heads in a layout.

        Args:
            config: the sizes that the heads have in the layout, see `sizes_in`.
            params: the parameters by the names of `HeadSizes.param_shapes`.
            layout: a layout of this kind that can hold the heads.
        """

    @abc.abstractmethod
    def config_json(self, config: Any, layout: Any, base: str | None, depth: int | None) -> dict[str, Any]:
        """Returns the content of config.json.

        Args:
            config: the sizes that the heads have in the layout.
            layout: the layout.
            base: the name of the target, or None.
            depth: the number of layers of the target; None if it is not known, or the target has no taps.

        Raises:
            InvalidConfig: the layout states the taps, and they are not known.
        """

    def advice(self, config: Any) -> str | None:
        """Returns a sentence of advice for heads of sizes that no layout can hold; None if there is no advice."""
        return None


def head_kind(name: str) -> HeadKind:
    """Returns the kind of heads of this name, one of `jaxspec.registry.HEADS`."""
    return locate(HEADS[name])


def kind_of(config: HeadSizes) -> HeadKind:
    """Returns the kind of heads of these sizes."""
    return head_kind(config.drafter)
