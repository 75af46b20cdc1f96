"""The protocol of drafters, and what a drafter may need from the decoder.

A drafter is a frozen, hashable dataclass, and is passed as a static argument: equal drafters do not retrace. Its
parameters and its state are pytrees of arrays, passed beside it. It drafts for a batch of rows.

A drafter states what it needs in its field `needs`, and nowhere else: a decoder does not look for other fields or
methods.

A drafter that is registered by name also has a class attribute `takes`, a frozenset of names, and a class method
`build(inputs: DrafterInputs)`, which returns the drafter and its parameters (None if it has no parameters of its own).
`takes` holds the names that `build` reads: names of options, and of the fields of `DrafterInputs` other than the
target.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Int

from jaxspec.core.checks import check_member, flag, whole
from jaxspec.core.draw import Draw
from jaxspec.core.networks import LanguageModel
from jaxspec.core.records import Advance, Context, Params, Proposal
from jaxspec.core.topology import Dynamic, Topology
from jaxspec.core.tree import TreeShape
from jaxspec.errors import InvalidConfig, shown


@dataclasses.dataclass(frozen=True)
class DrafterInputs:
    """The inputs from which a registered drafter is built; each drafter uses the inputs that it needs.

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


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a drafter needs from the decoder, and what measurements may ask about it. By default, it needs nothing.

    Attributes:
        taps: the numbers of the target layers after which the drafter reads the residual stream, as a part of the
            target's features; see `jaxspec.core.networks.TappedTarget`.
        observed: the number of the target's most likely tokens that the drafter is shown after every node of a round
            (`Advance.seen`). A drafter that needs them has no distribution of its own: its proposals are point masses
            under every rule.
        node_count: whether the drafter asks `Draw.count_nodes` how many of its best nodes to propose, and ranks them at
            next to no cost. By default, the schedule "best-width" then answers.
        prompts: the number of tokens of its own vocabulary that the drafter reads for each slot of the target's cache;
            0 for a drafter that reads the target's tokens. A drafter with tokens of its own also has the methods of
            `PromptReader`.
        answers: whether the drafter is given finished answers; it then also has the method of `AnswerReader`.
        history: whether the drafter copies from earlier texts of the same prompt (`Context.history`), if there are any.
        model: the language model from whose distribution the drafter draws; None for other drafters. The model's
            parameters are the drafter's, or the target's if the drafter has none. Measurements read it.
        tree: the topology that the drafter drafts; None if there is no such topology. Measurements read it, to compare
            the drafter with plain decoding at the same width.

    Raises:
        InvalidConfig: a value has another type or is out of range.
    """

    taps: tuple[int, ...] = ()
    observed: int = 0
    node_count: bool = False
    prompts: int = 0
    answers: bool = False
    history: bool = False
    model: LanguageModel | None = None
    tree: Topology | Dynamic | None = None

    def __post_init__(self):
        if not isinstance(self.taps, tuple):
            raise InvalidConfig(f"taps must be a tuple of layer numbers, got {shown(self.taps)}")
        whole("observed", self.observed, 0)
        whole("prompts", self.prompts, 0)
        flag("answers", self.answers)
        flag("history", self.history)
        flag("node_count", self.node_count)


@runtime_checkable
class Drafter(Protocol):
    """Proposes a tree of tokens in every round, and absorbs the committed tokens. Its state is opaque to the loop.

    Attributes:
        draws: whether `propose` draws tokens with its argument `draw`. If it does not, noise is drawn only for
            verification.
    """

    @property
    def draws(self) -> bool: ...

    @property
    def needs(self) -> Needs:
        """What the drafter needs from the decoder; `Needs()` if it needs nothing."""
        ...

    @property
    def shape(self) -> TreeShape:
        """The static sizes of every tree that it proposes."""
        ...

    @property
    def calls(self) -> int:
        """The number of calls of a draft model per round, for the cost model; 0 if proposing costs nothing."""
        ...

    def init(self, params: Params, batch: int, capacity: int) -> Any:
        """Returns the state before the first token."""
        ...

    def absorb(self, params: Params, state: Any, advance: Advance) -> Any:
        """Returns the state after committed tokens. A row whose count is 0 must not change."""
        ...

    def propose(self, params: Params, state: Any, context: Context, draw: Draw) -> tuple[Proposal, Any]:
        """Proposes a tree below the last committed token, and returns it with the state for `absorb`.

        Children are drawn with `draw`, and the law that `draw` returns is part of the proposal. A drafter may also
        derive tokens from committed text alone; the proposal's law is then None.
        """
        ...


class PromptReader(Protocol):
    """The methods of a drafter that reads prompts in tokens of its own (`Needs.prompts`)."""

    def spell(self, prompt: Any, ids: Sequence[int], variables: Mapping[str, Any]) -> list[int]:
        """Returns a prompt in the drafter's tokens; runs on the host.

        Args:
            prompt: raw text, token ids or chat messages.
            ids: the prompt in the target's tokens.
            variables: the variables of the chat template, such as `tools`.
        """
        ...

    def summary(self) -> str:
        """Returns a line that says what the drafter's tokens have in common with the target's."""
        ...

    def read_prompt(
        self, state: Any, tokens: Int[Array, "B P"], count: Int[Array, "B"], covered: Int[Array, "B"]
    ) -> Any:
        """Returns the state with `count` of the drafter's tokens appended to each row, before the prompt is absorbed.

        Args:
            tokens: prompts in the drafter's tokens.
            count: the lengths of these prompts; if a length is more than P, only the first P tokens are given.
            covered: the length of the target's text that the drafter's text then spells; 0 for rows without a prompt.
        """
        ...


class AnswerReader(Protocol):
    """The method of a drafter that also drafts from finished answers (`Needs.answers`)."""

    def remember(self, params: Params, tokens: Sequence[int]) -> Params:
        """Returns the parameters with the tokens of a finished answer added; runs on the host.

        It is called only under a rule with shared noise. Under other rules the number of rounds, and with it the text
        that a key gives, would depend on earlier answers.
        """
        ...


def require_drafter(drafter: Any) -> None:
    """Refuses an object that is not a drafter, or that lacks a method that follows from its needs.

    Raises:
        InvalidConfig: the object is not a drafter, or lacks such a method; the message names what is missing.
    """
    check_member("drafter", drafter, Drafter)
    needs, name = drafter.needs, type(drafter).__name__
    if not isinstance(needs, Needs):
        raise InvalidConfig(f"needs of the drafter {name} must be a jaxspec.core.drafter.Needs, got {shown(needs)}")
    methods = ("spell", "summary", "read_prompt") * bool(needs.prompts) + ("remember",) * needs.answers
    if missing := [method for method in methods if not hasattr(drafter, method)]:
        raise InvalidConfig(
            f"the drafter {name} must have {', '.join(missing)}, because its `needs` ask for prompts or answers; see "
            "jaxspec.core.drafter"
        )
