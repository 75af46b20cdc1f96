"""What the headers of a file of draft heads say."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxspec.checkpoints.base import StoredTensor
from jaxspec.core.sizes import INT32
from jaxspec.core.topology import Topology
from jaxspec.errors import InvalidConfig, ShapeMismatch
from jaxspec.heads.kinds import HeadKind
from jaxspec.heads.network import check_target, vocabulary
from jaxspec.heads.sizes import HeadSizes


@dataclasses.dataclass(frozen=True)
class HeadFile:
    """Draft heads in files, with the headers checked and no weight read.

    Attributes:
        path: the file or directory.
        layout: the name of the layout; "jaxspec" for jaxspec's own.
        kind: the kind of heads.
        sizes: the fields of the sizes (`kind.sizes`), without `vocab_size` if the files do not state it.
        readers: a function for each name of `param_shapes` of the sizes, which reads that parameter in the dtype of the
            file.
        stored: the tensors of the heads, by their names in the file.
        settings: the content of config.json, or of heads.json.
        tree: the topology that the heads draft best on, if it is known.
        notes: what users should know about the heads, one sentence each.
    """

    path: pathlib.Path
    layout: str
    kind: HeadKind
    sizes: Mapping[str, Any]
    readers: Mapping[str, Callable[[], np.ndarray]] = dataclasses.field(repr=False)
    stored: Mapping[str, StoredTensor] = dataclasses.field(repr=False)
    settings: Mapping[str, Any] = dataclasses.field(repr=False)
    tree: Topology | None = None
    notes: tuple[str, ...] = ()

    def config(self, target: Any = None) -> HeadSizes:
        """Returns the sizes; the vocabulary is the target's if the files do not state its size.

        Raises:
            InvalidConfig: the files do not state the size of the vocabulary, and there is no target.
            ShapeMismatch: the heads do not fit the target.
        """
        sizes = dict(self.sizes)
        if self._lacks_vocabulary:
            if target is None:
                raise InvalidConfig(
                    f"{self.path}: neither the tensors nor config.json state the size of the vocabulary; give the "
                    "target (target=..., or --target)"
                )
            sizes["vocab_size"] = vocabulary(target)
        try:
            config = self.kind.sizes(**sizes)
            if target is not None:
                check_target(config, target)
        except (InvalidConfig, ShapeMismatch) as error:
            raise type(error)(f"{self.path}: {error}") from None
        return config

    def config_of_any_vocabulary(self) -> HeadSizes:
        """Returns the sizes without a target; a vocabulary of unknown size is assumed to be as large as possible."""
        unknown: dict[str, Any] = {"vocab_size": INT32} if self._lacks_vocabulary else {}
        return self.kind.sizes(**unknown | dict(self.sizes))

    @property
    def _lacks_vocabulary(self) -> bool:
        return "decoder" not in self.sizes and "vocab_size" not in self.sizes
