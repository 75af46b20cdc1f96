"""Protocols of the members of a decoder: drafters, rules and schedules.

Members are frozen, hashable dataclasses and are passed as static arguments: equal ones do not retrace. Parameters and
states are pytrees of arrays, passed beside them. Drafters, schedules and coupled rules are batched; other rules are
written for one row.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.draw import Draw, Noise
from jaxspec.core.networks import LanguageModel
from jaxspec.core.records import Advance, Context, Params, Proposal, RoundResult, StopLaw, Verdict
from jaxspec.core.sampling import Sampling
from jaxspec.core.tree import Dynamic, Topology, TreeShape
from jaxspec.errors import InvalidConfig, shown


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
class Rule(Protocol):
    """Decides how much of a proposal is accepted. A pure function for one row, without a random key.

    `noise` distinguishes two kinds: a `CoupledRule` compares tokens that target and drafter drew with the same noise, a
    `WeighingRule` compares laws.

    Attributes:
        noise: the noise that the drafter draws with.
        lossless: whether emitted text follows the target's law exactly.
    """

    @property
    def noise(self) -> Noise: ...

    @property
    def lossless(self) -> bool: ...

    def check(self, shape: TreeShape) -> None:
        """Refuses trees that the rule does not support.

        Raises:
            InvalidConfig: the rule does not support them; the message says which trees it supports.
        """
        ...


def refuse_pruned(rule: Rule, shape: TreeShape) -> None:
    """Refuses dynamic trees; for the `check` of rules that weigh the law their drafts were sampled from.

    A dynamic tree keeps only the likeliest of the sampled tokens, and those are not a sample of the law.

    Raises:
        InvalidConfig: the tree is dynamic.
    """
    if shape.pruned:
        raise InvalidConfig(
            f"{type(rule).__name__} weighs the law its drafts were sampled from, and a dynamic tree keeps only the "
            "likeliest, which are no sample; use a rule whose drafter draws with the target's noise or with none "
            "('coupled', 'deterministic'), or a fixed tree"
        )


@runtime_checkable
class CoupledRule(Rule, Protocol):
    """A rule whose `noise` is `Noise.SHARED`. It is batched, and asks for what it reads of the vocabulary."""

    def __call__(
        self,
        scores: Callable[[Int[Array, "B n"]], Float[Array, "B n V"]],
        noise: Callable[[Int[Array, "B n"]], Float[Array, "B n V"]],
        sampling: Sampling,
        proposal: Proposal,
    ) -> Verdict:
        """Returns the deepest accepted node of every row, and the token after it.

        Args:
            scores: returns the target's tempered log-scores after nodes of each row.
            noise: returns the Gumbel noise of the tokens after nodes of these depths.
            sampling: the rows' settings, without bias.
            proposal: with one tree per row.
        """
        ...


@runtime_checkable
class WeighingRule(Rule, Protocol):
    """A rule that compares laws; its drafts do not share the target's noise.

    It returns the probability that the walk ends at each node, and the law of the token after it; the loop draws both.
    So the code that a proof enumerates is the code that runs.
    """

    def __call__(self, law: Float[Array, "N V"], proposal: Proposal) -> StopLaw:
        """Returns the law of where the walk ends, and of the token after it.

        If the proposal has a law, the children of greedy rows are the most likely tokens, not a sample. Rules need no
        case for them: one that is exact for every draft law accepts a child against a point mass only if it is that
        point, and otherwise emits the point.

        Args:
            law: the target's log-law after every node, truncated as in sampling; a point mass in greedy rows.
            proposal: of the row. Proposed siblings are distinct.
        """
        ...


@runtime_checkable
class Schedule(Protocol):
    """Decides how deep each row may draft, round by round.

    It may use the row's earlier rounds and the draft's law after each node. It must not use the tokens that it decides
    about, which would bias rules that compare laws, nor other rows.

    Attributes:
        widths: widths of target calls to compile, besides those of the decoder. A round runs at the smallest width that
            holds all drafts.
    """

    @property
    def widths(self) -> tuple[int, ...]: ...

    def init(self, batch: int, shape: TreeShape) -> Any:
        """Returns the state before the first round; every leaf has a leading axis of rows."""
        ...

    def limit(self, state: Any) -> Int[Array, "B"]:
        """Returns the depth to which each row may draft in this round; 0 for no draft."""
        ...

    def update(self, state: Any, result: RoundResult) -> Any:
        """Returns the state after a round."""
        ...

    def stop_after(
        self, law: Float[Array, "*b V"], estimate: Float[Array, "*b"] | None = None
    ) -> Bool[Array, "*b"] | None:
        """Returns the nodes below which nothing is drafted, by the draft's log-law after each; None for no such test.

        The law is the one that children are drawn from: tempered, and truncated if the rule reads it. `estimate` is
        passed if the drafter has its own of how much of each law the target shares (`jaxspec.core.draw.Judged`).
        """
        ...


def check_member(kind: str, member: Any, protocol: type) -> None:
    """Checks that a member is a hashable object with all members of its protocol.

    Args:
        kind: "drafter", "rule" or "schedule".
        member: the object.
        protocol: its protocol.

    Raises:
        InvalidConfig: it is not; the message names what is missing.
    """
    expected = f"{kind} must be a registered name or a {kind} object"
    if isinstance(member, type):
        raise InvalidConfig(f"{expected}, got the class {member.__name__}; make an object of it")
    names = _declared(protocol)
    missing = [name for name in names if not hasattr(member, name)]
    if len(missing) == len(names):
        raise InvalidConfig(f"{expected}, got {shown(member)}")
    name = type(member).__name__
    if missing:
        raise InvalidConfig(f"{expected}; {name} has no {', '.join(missing)}, see {protocol.__module__}")
    if protocol is Rule and not callable(member):
        raise InvalidConfig(f"{expected}; {name} cannot be called, see {protocol.__module__}")
    try:
        hash(member)
    except TypeError:
        raise InvalidConfig(
            f"a {kind} is a static argument and must be hashable, {name} is not; make it a frozen dataclass"
        ) from None


def _declared(protocol: type) -> list[str]:
    """Returns the public members that a protocol and its bases declare."""
    bases = [base for base in reversed(protocol.__mro__) if issubclass(base, Protocol) and base is not Protocol]
    return [name for base in bases for name in vars(base) if not name.startswith("_")]
