"""Looks up rules and schedules by name, checks members passed as objects; the protocol of drafters that remember."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxspec.core.draw import Noise
from jaxspec.core.protocols import Drafter, ObservingDrafter, Rule, Schedule
from jaxspec.core.records import Params, Proposal
from jaxspec.core.tree import chain
from jaxspec.errors import InvalidConfig, shown
from jaxspec.registry import find


@runtime_checkable
class RememberingDrafter(Drafter, Protocol):
    """A drafter that drafts from answers that have ended, too.

    It is given them only under a rule with shared noise. Under others the number of rounds, and with it the text of a
    key, would depend on them.
    """

    def remember(self, params: Params, tokens: Sequence[int]) -> Params:
        """Returns the parameters with the tokens of an answer that has ended; runs on the host."""
        ...


def check_member(kind: str, member: Any, protocol: type) -> None:
    """Checks that a member is a hashable object with all members of its protocol.

    Args:
        kind: "drafter", "rule" or "schedule".
        member: the object.
        protocol: its protocol, see `jaxspec.core.protocols`.

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


def make_rule(rule: str | Rule) -> Rule:
    """Returns the rule of this name, or the rule itself.

    Raises:
        JaxspecError: there is no rule of this name, or it is not a rule.
    """
    if isinstance(rule, str):
        return find("rule", rule)()
    check_member("rule", rule, Rule)
    return rule


def make_schedule(schedule: str | Schedule) -> Schedule:
    """Returns the schedule of this name, or the schedule itself.

    Raises:
        JaxspecError: there is no schedule of this name, or it is not a schedule.
    """
    if isinstance(schedule, str):
        return find("schedule", schedule)()
    check_member("schedule", schedule, Schedule)
    return schedule


def check_law(rule: Any, drafter: Drafter, vocab: int) -> None:
    """Checks that a rule verifies the drafts of a drafter that proposes tokens without a law.

    The rule is traced for such a proposal, but not compiled.

    Raises:
        InvalidConfig: the rule needs the law of the drafted tokens.
    """
    depth = drafter.shape.depth
    law = drafter.draws and not isinstance(drafter, ObservingDrafter)
    if law or depth == 0 or rule.noise is not Noise.FRESH:
        return
    proposal = Proposal(jnp.zeros(depth + 1, jnp.int32), chain(depth).tree)
    jax.eval_shape(lambda law: rule(law, proposal).node_probs, jax.ShapeDtypeStruct((depth + 1, vocab), jnp.float32))


def _declared(protocol: type) -> list[str]:
    """Returns the public members that a protocol and its bases declare."""
    bases = [base for base in reversed(protocol.__mro__) if issubclass(base, Protocol) and base is not Protocol]
    return [name for base in bases for name in vars(base) if not name.startswith("_")]
