"""The registry of drafters, rules, schedules, processors and kinds of heads, by name.

Tests, commands and benchmarks use its lists.

Other packages add members through the entry-point groups `jaxspec.drafters`, `jaxspec.rules`, `jaxspec.schedules`,
`jaxspec.processors` and `jaxspec.trainees`; see docs/own-drafter.md.
"""

import importlib
import importlib.metadata
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Any

from jaxspec.errors import InvalidConfig, UnknownName


class Members(MutableMapping[str, str]):
    """A mapping from the name of each member to its class, as "module:Class".

    jaxspec's own members come first, and other packages cannot replace them. Entry points are only read to list all
    names or to look up a name that is not jaxspec's own. A second name of a member is known, but not listed.
    """

    def __init__(self, group: str, own: dict[str, str], second_names: Mapping[str, str] | None = None):
        """Makes a registry of jaxspec's own members and the members of the entry-point group.

        Args:
            group: the entry-point group.
            own: jaxspec's own members.
            second_names: second names of jaxspec's own members, and the names of these members.
        """
        self._group, self._own, self._second_names = group, own, dict(second_names or {})

    def _all(self) -> dict[str, str]:
        found = {entry.name: entry.value for entry in importlib.metadata.entry_points(group=self._group)}
        return self._own | {name: value for name, value in found.items() if name not in self._own}

    def __getitem__(self, name: str) -> str:
        name = self._second_names.get(name, name)
        return self._own[name] if name in self._own else self._all()[name]

    def __setitem__(self, name: str, location: str) -> None:
        self._own[name] = location

    def __delitem__(self, name: str) -> None:
        del self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of all members, and then the second names."""
        return *self, *self._second_names

    def own(self, name: str) -> bool:
        """Returns whether a member is jaxspec's own."""
        return self._second_names.get(name, name) in self._own


MTP_DRAFTER = "mtp"
"""The drafter "eagle" with the layer for multi-token prediction inside the target."""

SELF_DRAFTER = "self-int8"
"""The drafter "model" with the target itself, in int8, as the draft model."""

DRAFTERS = Members(
    "jaxspec.drafters",
    {
        "none": "jaxspec.drafters.none:NoDraft",
        "prompt-lookup": "jaxspec.drafters.prompt_lookup:PromptLookup",
        "recycling": "jaxspec.drafters.recycling:Recycling",
        "early-exit": "jaxspec.drafters.early_exit:EarlyExit",
        "model": "jaxspec.drafters.model:ModelDraft",
        "pard": "jaxspec.drafters.pard:Pard",
        "medusa": "jaxspec.drafters.medusa:Medusa",
        "eagle": "jaxspec.drafters.eagle:Eagle",
        "dflash": "jaxspec.drafters.dflash:DFlash",
    },
    {MTP_DRAFTER: "eagle", SELF_DRAFTER: "model"},
)

DRAFTER = "prompt-lookup"
"""The default drafter."""

AUTO_DRAFTER = "auto"
"""Stands for the fastest drafter of a target on this machine, which is measured once; no drafter has this name."""


class DrafterNames(Collection[str]):
    """The names that a user may choose a drafter by. Like `Members`, they are only read when they are needed."""

    def __contains__(self, name: object) -> bool:
        return name == AUTO_DRAFTER or name in DRAFTERS

    def __iter__(self) -> Iterator[str]:
        return iter((AUTO_DRAFTER, *DRAFTERS.all_names))

    def __len__(self) -> int:
        return 1 + len(DRAFTERS.all_names)


DRAFTER_NAMES = DrafterNames()

FASTEST = "jaxspec.tuning.auto:fastest_drafting"
"""The function that measures what `AUTO_DRAFTER` stands for."""

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
        "best-width": "jaxspec.schedules.best_width:BestWidth",
    },
)

PROCESSORS = Members(
    "jaxspec.processors",
    {
        "logit-bias": "jaxspec.core.bias:LogitBias",
        "repetition": "jaxspec.processors.penalties:RepetitionPenalty",
        "presence": "jaxspec.processors.penalties:PresencePenalty",
        "frequency": "jaxspec.processors.penalties:FrequencyPenalty",
        "no-repeat-ngram": "jaxspec.processors.words:NoRepeatNgram",
        "bad-words": "jaxspec.processors.words:BadWords",
        "min-new-tokens": "jaxspec.processors.minimum:MinNewTokens",
        "allowed-tokens": "jaxspec.processors.masks:AllowedTokens",
        "suppress-tokens": "jaxspec.processors.masks:SuppressTokens",
        "thinking-budget": "jaxspec.processors.budget:ThinkingBudget",
        "grammar": "jaxspec.processors.grammar:Grammar",
        "watermark": "jaxspec.processors.watermark:Watermark",
    },
)

HEADS = {
    "medusa": "jaxspec.heads.medusa_layouts:MEDUSA",
    "dflash": "jaxspec.heads.dflash_layouts:DFLASH",
    "eagle": "jaxspec.heads.eagle_layouts:EAGLE",
}
"""Kinds of draft heads (`jaxspec.heads.kinds.HeadKind`), by the names of their drafters. If layouts of several kinds
match a file, the first kind opens it."""

TRAINEES = Members(
    "jaxspec.trainees",
    {
        "medusa": "jaxspec.train.medusa_settings:MedusaSettings",
        "eagle1": "jaxspec.train.eagle_settings:Eagle1Settings",
        "eagle3": "jaxspec.train.eagle_settings:Eagle3Settings",
        "dflash": "jaxspec.train.dflash_settings:DFlashSettings",
        "dspark": "jaxspec.train.dflash_settings:DSparkSettings",
        "jetspec": "jaxspec.train.dflash_settings:JetSpecSettings",
        "pard": "jaxspec.train.pard_settings:PardSettings",
    },
)
"""Kinds of heads and draft models that can be trained: the classes of their settings
(`jaxspec.train.settings.TrainSettings`)."""


def drafter_takes(name: str) -> frozenset[str]:
    """Returns the names of what a drafter takes; see `jaxspec.core.drafter`. `AUTO_DRAFTER` takes models and heads.

    Raises:
        UnknownName: there is no such drafter.
        InvalidConfig: a drafter of another package cannot be imported.
    """
    return frozenset({"draft", "heads"}) if name == AUTO_DRAFTER else find("drafter", name).takes


def locate(location: str) -> Any:
    """Imports a module and returns an object of it, by a location such as "jaxspec.rules.block:Block"."""
    module, _, name = location.partition(":")
    return getattr(importlib.import_module(module), name)


def find(kind: str, name: str) -> Any:
    """Returns the class of a member.

    Args:
        kind: "drafter", "rule", "schedule", "processor" or "kind of heads".
        name: the name of the member.

    Raises:
        UnknownName: there is no such member; the message suggests a similar name.
        InvalidConfig: a member of another package cannot be imported.
    """
    kinds = {"drafter": DRAFTERS, "rule": RULES, "schedule": SCHEDULES, "processor": PROCESSORS}
    members = (kinds | {"kind of heads": TRAINEES})[kind]
    if name not in members:
        raise UnknownName(kind, name, members)
    location = members[name]
    try:
        return locate(location)
    except Exception as error:
        if members.own(name):
            raise
        raise InvalidConfig(f"the {kind} {name!r} cannot be imported from {location}: {error!r:.200}") from error
