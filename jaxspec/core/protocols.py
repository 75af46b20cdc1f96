"""The four kinds of member: a language model, a drafter, a rule, a schedule.

Members are frozen, hashable dataclasses, passed as static arguments: equal ones do not retrace. Parameters
and states are pytrees of arrays that travel beside them. Everything is batched, save a rule, which is written
for one row.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.draw import Draw, Noise
from jaxspec.core.networks import LanguageModel
from jaxspec.core.records import Advance, Context, Params, Proposal, RoundResult, StopLaw, Verdict
from jaxspec.core.sampling import Sampling
from jaxspec.core.tree import Dynamic, Topology, TreeShape
from jaxspec.errors import InvalidConfig


@dataclasses.dataclass(frozen=True)
class DrafterInputs:
    """What a drafter is built from by name; each takes what it needs.

    Attributes:
        target: the loaded target (`jaxspec.models.model.Model`).
        draft: a loaded draft model, if one was given.
        tree: the wished topology; None for the drafter's own default.
        heads: loaded heads, if some were given (`jaxspec.heads.network.DraftHeads`).
        options: options of the drafter's own, by name. The drafter checks their values.
    """

    target: Any
    draft: Any = None
    tree: Topology | Dynamic | None = None
    heads: Any = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@runtime_checkable
class Drafter(Protocol):
    """Guesses a tree of tokens; is told what became of the guess. Its state is opaque to the loop.

    Attributes:
        draws: whether `propose` draws tokens. Of one that finds them in another way the rounds draw no more noise than
            their verdict needs.
    """

    @property
    def draws(self) -> bool: ...

    @property
    def shape(self) -> TreeShape:
        """The static sizes of every tree it proposes."""
        ...

    @property
    def calls(self) -> int:
        """Calls of a draft model per round, for the cost model; 0 where proposing is free."""
        ...

    def init(self, params: Params, batch: int, capacity: int) -> Any:
        """The state before the first token."""
        ...

    def absorb(self, params: Params, state: Any, advance: Advance) -> Any:
        """Takes note of committed text. A row whose count is 0 must not change."""
        ...

    def propose(self, params: Params, state: Any, context: Context, draw: Draw) -> tuple[Proposal, Any]:
        """A tree below the last committed token, and the state to be handed to `absorb`.

        Children are drawn by `draw`, whose law goes into the proposal; tokens that were found in another way, by
        looking at committed text alone, have the law None.
        """
        ...


@runtime_checkable
class NamedDrafter(Drafter, Protocol):
    """A drafter that can be registered: built from models and options, by name.

    Attributes:
        takes: the fields of `DrafterInputs`, besides the target, and the options that `build` uses.
    """

    takes: ClassVar[frozenset[str]]

    @classmethod
    def build(cls, inputs: DrafterInputs) -> tuple[Self, Params]:
        """Builds the drafter for these models, and its parameters (None if it has none of its own)."""
        ...


@runtime_checkable
class ModelDrafter(Drafter, Protocol):
    """A drafter whose tokens are drawn from a language model's law, which acceptance can be computed from."""

    @property
    def model(self) -> LanguageModel:
        """The model; its parameters are the drafter's, or the target's where the drafter has none."""
        ...


@runtime_checkable
class TreeDrafter(Drafter, Protocol):
    """A drafter whose trees are of a topology that plain decoding can be given, too, to compare at one width."""

    @property
    def tree(self) -> Topology | Dynamic:
        """The topology, or how to choose one every round."""
        ...


@runtime_checkable
class Rule(Protocol):
    """Decides how deep a proposal is kept. One row; a pure function of its arguments, without a random key.

    There are two kinds, told apart by `noise`: a `CoupledRule` shares the target's noise with the drafter and
    compares tokens, a `WeighingRule` compares laws.

    Attributes:
        noise: what the drafter draws with.
        lossless: emitted text follows the target's law exactly. A rule for which it does not has "lossy" in its name.
    """

    @property
    def noise(self) -> Noise: ...

    @property
    def lossless(self) -> bool: ...

    def check(self, shape: TreeShape) -> None:
        """Refuses trees that the rule cannot take.

        Raises:
            InvalidConfig: saying which it takes.
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
    """A rule whose `noise` is `Noise.SHARED`."""

    def __call__(
        self, scores: Float[Array, "N V"], noise: Float[Array, "D1 V"], sampling: Sampling, proposal: Proposal
    ) -> Verdict:
        """Walks down the proposal.

        `scores` are the target's tempered log-scores after every node, `noise[d]` the Gumbel noise of the
        tokens that stand d + 1 below the root, `sampling` the row's settings.
        """
        ...


@runtime_checkable
class WeighingRule(Rule, Protocol):
    """A rule whose drafts nobody else's noise has touched.

    It says exactly where the walk ends with which probability, and the law of the token after every end; the loop
    draws both. So what is enumerated in a proof is what runs.
    """

    def __call__(self, law: Float[Array, "N V"], proposal: Proposal) -> StopLaw:
        """Weighs the proposal.

        `law` is the target's log-law after every node, limited as its tokens are: the law a token is really drawn
        from, a point mass where the row is greedy. Siblings are distinct. Where `proposal.law` is given, the
        children of greedy rows are the likeliest tokens instead of a sample; no rule need know, since one that is
        exact for every draft law keeps a child of a point mass if and only if it is that point.
        """
        ...


@runtime_checkable
class Schedule(Protocol):
    """Decides how deep each row may draft, round by round.

    From the row's own earlier rounds, and from the draft's law after nodes that are kept; never from a token it
    decides on, or rules that weigh laws would be biased, nor from another row.

    Attributes:
        widths: of target calls that it wants compiled, besides the decoder's own: a round of short drafts runs at
            the smallest that holds them all.
    """

    @property
    def widths(self) -> tuple[int, ...]: ...

    def init(self, batch: int, shape: TreeShape) -> Any:
        """The state before the first round; every leaf has a leading axis of rows."""
        ...

    def limit(self, state: Any) -> Int[Array, "B"]:
        """The depth to which each row may draft in this round; 0: not at all."""
        ...

    def update(self, state: Any, result: RoundResult) -> Any:
        """Takes note of a round."""
        ...

    def stop_after(self, law: Float[Array, "*b V"]) -> Bool[Array, "*b"] | None:
        """The nodes, by the draft's log-law after each, below which nothing is to be drafted; None: it does not look.

        What it is shown is the law the children would be drawn from: tempered, and limited where the rule weighs it.
        """
        ...
