"""The drafter "none": plain decoding, or the width-matched reference of other drafters."""

import dataclasses
from typing import Any, ClassVar, Self

import jax.numpy as jnp

from jaxspec.core.drafter import DrafterInputs
from jaxspec.core.draw import Draw
from jaxspec.core.records import Context, Params, Proposal
from jaxspec.core.topology import Dynamic, Topology, chain
from jaxspec.drafters._tree import Stateless


@dataclasses.dataclass(frozen=True)
class NoDraft(Stateless):
    """Proposes nothing: plain decoding.

    With a tree and a `width_matched` decoder, every target call has the width of the tree, as with another drafter on
    the same tree. On a CPU the texts are then bit-identical.
    """

    tree: Topology | Dynamic = chain(0)

    takes: ClassVar[frozenset[str]] = frozenset({"tree"})
    draws = False

    @classmethod
    def build(cls, inputs: DrafterInputs) -> tuple[Self, Params]:
        return cls(inputs.tree or chain(0)), None

    @property
    def calls(self) -> int:
        return 0

    def propose(self, params: Params, state: Any, context: Context, draw: Draw) -> tuple[Proposal, Any]:
        nothing = jnp.full((context.length.shape[0], self.shape.nodes), -1, jnp.int32)
        return Proposal(nothing, self.tree.tree), state
