"""The protocols of rules, which decide how much of a draft is accepted.

A rule is a frozen, hashable dataclass, and is passed as a static argument: equal rules do not retrace. Coupled rules
are written for a batch of rows, other rules for one row.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from jaxspec.core.draw import Noise
from jaxspec.core.records import Proposal, StopLaw, Verdict
from jaxspec.core.sampling import Sampling
from jaxspec.core.tree import TreeShape
from jaxspec.errors import InvalidConfig


@runtime_checkable
class Rule(Protocol):
    """Decides how much of a proposal is accepted. A rule is a pure function, without a random key.

    `noise` distinguishes two kinds of rules: a `CoupledRule` compares tokens that target and drafter drew with the same
    noise, and a `WeighingRule` compares laws.

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
            InvalidConfig: the rule does not support these trees; the message says which trees it supports.
        """
        ...


def refuse_pruned(rule: Rule, shape: TreeShape) -> None:
    """Refuses dynamic trees, for the `check` of rules that weigh the law that their drafts were sampled from.

    A dynamic tree keeps only the likeliest of the sampled tokens, and those are not a sample of the law.

    Raises:
        InvalidConfig: the tree is dynamic.
    """
    if shape.pruned:
        raise InvalidConfig(
            f"{type(rule).__name__} needs a sample of the draft's distribution, but a dynamic tree keeps only the most "
            "likely of the sampled tokens; use a fixed tree, or the rule 'coupled' or 'deterministic'"
        )


@runtime_checkable
class CoupledRule(Rule, Protocol):
    """A rule whose `noise` is `Noise.SHARED`. It is batched, and asks for the scores and the noise that it reads."""

    def __call__(
        self,
        scores: Callable[[Int[Array, "B n"]], Float[Array, "B n V"]],
        noise: Callable[[Int[Array, "B n"]], Float[Array, "B n V"]],
        sampling: Sampling,
        proposal: Proposal,
    ) -> Verdict:
        """Returns the deepest accepted node of every row, and the token after it.

        Args:
            scores: a function that returns the target's tempered log-scores after nodes of each row.
            noise: a function that returns the Gumbel noise of the tokens after nodes of these depths.
            sampling: the rows' settings, without bias.
            proposal: the proposal, with one tree per row.
        """
        ...


@runtime_checkable
class WeighingRule(Rule, Protocol):
    """A rule that compares laws; its drafts do not share the target's noise.

    It returns the probability that the walk ends at each node, and the law of the token after it; the loop draws from
    both. So the code whose outcomes a proof enumerates is the code that runs.
    """

    def __call__(self, law: Float[Array, "N V"], proposal: Proposal) -> StopLaw:
        """Returns the law of where the walk ends, and of the token after it.

        If the proposal has a law, the children of greedy rows are the most likely tokens, not a sample. Rules do not
        need a special case for them: if the target's law is a point mass, a rule that is exact for every draft law
        accepts a child only if the child is that point, and otherwise emits the point.

        Args:
            law: the target's log-law after every node, truncated as in sampling; a point mass in greedy rows.
            proposal: the row's proposal. Proposed siblings have distinct tokens.
        """
        ...
