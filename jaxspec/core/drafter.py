"""The protocol of drafters, and what some drafters do besides.

A drafter is a frozen, hashable dataclass, and is passed as a static argument: equal drafters do not retrace. Its
parameters and its state are pytrees of arrays, passed beside it. It drafts for a batch of rows.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from jaxtyping import Array, Int

from jaxspec.core.draw import Draw
from jaxspec.core.networks import LanguageModel
from jaxspec.core.records import Advance, Context, Params, Proposal
from jaxspec.core.topology import Dynamic, Topology
from jaxspec.core.tree import TreeShape


@dataclasses.dataclass(frozen=True)
class DrafterInputs:
    """The inputs from which a registered drafter is built; each drafter uses those that it needs.

    Attributes:
        target: the loaded target (`jaxspec.models.model.Model`).
        draft: a loaded draft model, or None.
        tree: the requested topology; None for the drafter's default.
        heads: loaded heads (`jaxspec.heads.network.DraftHeads`), or None.
        options: the drafter's own options, by name; the drafter checks their values.
    """

    target: Any
    draft: Any = None
    tree: Topology | Dynamic | None = None
    heads: Any = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@runtime_checkable
class Drafter(Protocol):
    """Proposes a tree of tokens in every round, and absorbs the committed ones. Its state is opaque to the loop.

    Attributes:
        draws: whether `propose` draws tokens with its `draw`. If it does not, noise is drawn for verification alone.
    """

    @property
    def draws(self) -> bool: ...

    @property
    def shape(self) -> TreeShape:
        """The static sizes of every tree that it proposes."""
        ...

    @property
    def calls(self) -> int:
        """Calls of a draft model per round, for the cost model; 0 if proposing costs nothing."""
        ...

    def init(self, params: Params, batch: int, capacity: int) -> Any:
        """Returns the state before the first token."""
        ...

    def absorb(self, params: Params, state: Any, advance: Advance) -> Any:
        """Returns the state after committed tokens. A row whose count is 0 must not change."""
        ...

    def propose(self, params: Params, state: Any, context: Context, draw: Draw) -> tuple[Proposal, Any]:
        """Proposes a tree below the last committed token; returns it, and the state for `absorb`.

        Children are drawn with `draw`, and the law that it returns is part of the proposal. Tokens may also follow from
        committed text alone; the proposal's law is then None.
        """
        ...


@runtime_checkable
class NamedDrafter(Drafter, Protocol):
    """A drafter that can be registered and built by name.

    Attributes:
        takes: the names that `build` uses: fields of `DrafterInputs` other than the target, and options.
    """

    takes: ClassVar[frozenset[str]]

    @classmethod
    def build(cls, inputs: DrafterInputs) -> tuple[Self, Params]:
        """Returns the drafter for these inputs, and its parameters; None if it has none of its own."""
        ...


@runtime_checkable
class ModelDrafter(Drafter, Protocol):
    """A drafter that draws from the law of a language model, so that its acceptance can be computed."""

    @property
    def model(self) -> LanguageModel:
        """The model; its parameters are the drafter's, or the target's if the drafter has none."""
        ...


@runtime_checkable
class TreeDrafter(Drafter, Protocol):
    """A drafter whose topology plain decoding can use as well, for a comparison at the same width."""

    @property
    def tree(self) -> Topology | Dynamic:
        """The topology, which is fixed or chosen in every round."""
        ...


@runtime_checkable
class TapDrafter(Drafter, Protocol):
    """A drafter that reads the target's residual stream before some layers, as part of the target's features."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers, see `jaxspec.core.networks.TappedTarget`; empty for the target's own features alone."""
        ...


@runtime_checkable
class SpellingDrafter(Drafter, Protocol):
    """A drafter that reads the text in tokens of its own, and takes the prompts in them, too."""

    @property
    def room(self) -> int:
        """The most tokens of its own that it reads of a text, for each slot of the target's cache."""
        ...

    def spell(self, prompt: Any, ids: Sequence[int], variables: Mapping[str, Any]) -> list[int]:
        """Returns a prompt in the drafter's tokens; runs on the host.

        Args:
            prompt: raw text, token ids or chat messages.
            ids: the same in the target's tokens.
            variables: variables of the chat template, such as `tools`.
        """
        ...

    def read_prompt(
        self, state: Any, tokens: Int[Array, "B P"], count: Int[Array, "B"], covered: Int[Array, "B"]
    ) -> Any:
        """Returns the state with `count` tokens of its own appended to each row, before the prompt is absorbed.

        Args:
            tokens: prompts in the drafter's tokens.
            count: their lengths; if more than P, only the first P tokens are given.
            covered: the length of the target's text that the drafter's text then spells; 0 for rows without a prompt.
        """
        ...


@runtime_checkable
class ObservingDrafter(Drafter, Protocol):
    """A drafter that is shown the target's `observed` likeliest tokens after every node of a round (`Advance.seen`).

    It has no law of its own: its proposals are point masses under every rule.
    """

    @property
    def observed(self) -> int: ...


@runtime_checkable
class ChoosingDrafter(Drafter, Protocol):
    """A drafter that chooses in every round how many nodes a row drafts, by what it expects to be accepted."""

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of nodes, root included; target calls of these widths are compiled."""
        ...


@runtime_checkable
class RememberingDrafter(Drafter, Protocol):
    """A drafter that drafts from answers that have ended, too.

    It is given them only under a rule with shared noise. Under others the number of rounds, and with it the text of a
    key, would depend on them.
    """

    def remember(self, params: Params, tokens: Sequence[int]) -> Params:
        """Returns the parameters with the tokens of an answer that has ended; runs on the host."""
        ...
