"""Base classes of drafters that draft the tree in their field `tree`."""

from typing import Any

from jaxspec.core.drafter import Needs
from jaxspec.core.records import Advance, Params
from jaxspec.core.topology import Dynamic, Topology
from jaxspec.core.tree import TreeShape


class TreeDrafter:
    """A drafter of a topology, or of a dynamic tree of given sizes."""

    tree: Topology | Dynamic

    @property
    def shape(self) -> TreeShape:
        return self.tree.shape

    @property
    def needs(self) -> Needs:
        return Needs(tree=self.tree)


class Stateless(TreeDrafter):
    """A drafter that remembers nothing between rounds."""

    def init(self, params: Params, batch: int, capacity: int) -> Any:
        return ()

    def absorb(self, params: Params, state: Any, advance: Advance) -> Any:
        return state
