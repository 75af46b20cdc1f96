"""The drafter "early-exit": the target's first layers with its final norm and head (LayerSkip, arXiv:2404.16710).

These layers read the target's own cache, and the keys and values of drafted nodes are dropped after each proposal, so
the drafter has no state. A target that was not trained for early exit accepts few of its tokens.
"""

import dataclasses
from typing import Any, ClassVar, Self

from jaxspec.core.checks import index
from jaxspec.core.drafter import DrafterInputs, Needs
from jaxspec.core.draw import Draw
from jaxspec.core.networks import LanguageModel, LayeredTarget, empty_entries
from jaxspec.core.records import Context, Params, Proposal
from jaxspec.core.topology import Dynamic, Topology, chain
from jaxspec.drafters._grow import grow
from jaxspec.drafters._level import count_slots
from jaxspec.drafters._tree import Stateless
from jaxspec.drafters._window import check_tree, model_reader
from jaxspec.errors import InvalidConfig, shown


@dataclasses.dataclass(frozen=True)
class EarlyExit(Stateless):
    """Draws from the target's distribution after its first layers (`exit_layers`).

    Attributes:
        model: the target, limited to its first layers; it shares the target's parameters and cache.
        tree: the topology, or the sizes of a dynamic tree.
    """

    model: LanguageModel
    tree: Topology | Dynamic = chain(4)

    takes: ClassVar[frozenset[str]] = frozenset({"tree", "exit_layers"})
    draws = True

    def __post_init__(self):
        check_tree(self.tree, self.model.vocab)

    @classmethod
    def build(cls, inputs: DrafterInputs) -> tuple[Self, Params]:
        target = inputs.target.lm
        if not isinstance(target, LayeredTarget):
            raise InvalidConfig(
                f"early-exit needs a target that can stop after a layer, but {type(target).__name__} has no "
                "'depth' and 'layers'; see docs/own-model.md"
            )
        total = target.depth
        layers = inputs.options.get("exit_layers", max(1, total // 3))
        number = index(layers)
        if number is None or not 1 <= number < total:
            raise InvalidConfig(
                f"exit_layers must be a whole number from 1 to {total - 1}, because the target has {total} layers; got "
                f"{shown(layers)}"
            )
        model: Any = dataclasses.replace(inputs.target.lm, layers=number)
        return cls(model, inputs.tree or chain(4)), None

    @property
    def needs(self) -> Needs:
        return Needs(model=self.model, tree=self.tree)

    @property
    def calls(self) -> int:
        return self.tree.shape.depth

    def propose(self, params: Params, state: Any, context: Context, draw: Draw) -> tuple[Proposal, Any]:
        entries = empty_entries(self.model, context.params, context.cache, count_slots(self.tree))
        read = model_reader(self.model, context.params, context.cache, context.cache.length)
        return grow(self.tree, context.root, draw, read, entries).proposal, state
