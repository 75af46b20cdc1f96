"""The members by name, one line each, and those of other packages. Tests, commands and benchmarks take lists from here.

A package adds members through entry points of the groups `jaxspec.drafters`, `jaxspec.rules` and `jaxspec.schedules`;
see docs/own-drafter.md.
"""

import importlib
import importlib.metadata
from collections.abc import Iterator, MutableMapping
from typing import Any

from jaxspec.errors import InvalidConfig, UnknownName


class Members(MutableMapping[str, str]):
    """Where the class of each member is, "module:Class", by the member's name.

    jaxspec's own come first, and keep their names. Other packages are looked for when all names are wanted, or one that
    is not jaxspec's own.
    """

    def __init__(self, group: str, own: dict[str, str]):
        """`group`: of the entry points of other packages."""
        self._group, self._own = group, own

    def _all(self) -> dict[str, str]:
        found = {entry.name: entry.value for entry in importlib.metadata.entry_points(group=self._group)}
        return self._own | {name: value for name, value in found.items() if name not in self._own}

    def __getitem__(self, name: str) -> str:
        return self._own[name] if name in self._own else self._all()[name]

    def __setitem__(self, name: str, place: str) -> None:
        self._own[name] = place

    def __delitem__(self, name: str) -> None:
        del self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def own(self, name: str) -> bool:
        """Whether a member is jaxspec's own."""
        return name in self._own


DRAFTERS = Members(
    "jaxspec.drafters",
    {
        "none": "jaxspec.drafters.none:NoDraft",
        "prompt-lookup": "jaxspec.drafters.prompt_lookup:PromptLookup",
        "early-exit": "jaxspec.drafters.early_exit:EarlyExit",
        "model": "jaxspec.drafters.model:ModelDraft",
        "medusa": "jaxspec.drafters.medusa:Medusa",
    },
)

RULES = Members(
    "jaxspec.rules",
    {
        "coupled": "jaxspec.rules.coupled:Coupled",
        "rejection": "jaxspec.rules.rejection:Rejection",
        "block": "jaxspec.rules.block:Block",
        "traversal": "jaxspec.rules.traversal:Traversal",
        "deterministic": "jaxspec.rules.deterministic:Deterministic",
        "lossy-typical": "jaxspec.rules.typical:Typical",
        "lossy-lenient": "jaxspec.rules.lenient:Lenient",
        "lossy-cascade": "jaxspec.rules.cascade:Cascade",
    },
)

SCHEDULES = Members(
    "jaxspec.schedules",
    {
        "constant": "jaxspec.core.schedule:Constant",
        "plus-minus": "jaxspec.schedules.plus_minus:PlusMinus",
        "confidence": "jaxspec.schedules.confidence:Confidence",
        "adaptive": "jaxspec.schedules.adaptive:Adaptive",
    },
)


def find(kind: str, name: str) -> Any:
    """Gives the class of a member; `kind` is "drafter", "rule" or "schedule".

    Raises:
        UnknownName: naming the nearest.
        InvalidConfig: it is another package's, and cannot be imported.
    """
    members = {"drafter": DRAFTERS, "rule": RULES, "schedule": SCHEDULES}[kind]
    if name not in members:
        raise UnknownName(kind, name, members)
    place = members[name]
    module, _, attribute = place.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        if members.own(name):
            raise
        raise InvalidConfig(f"the {kind} {name!r} cannot be imported from {place}: {error!r:.200}") from error
