"""The members by name: one line each. Tests, CLI and benchmark take their lists from here."""

import importlib
from typing import Any

from jaxspec.errors import UnknownName

DRAFTERS = {
    "none": "jaxspec.drafters.none:NoDraft",
    "prompt-lookup": "jaxspec.drafters.prompt_lookup:PromptLookup",
    "early-exit": "jaxspec.drafters.early_exit:EarlyExit",
    "model": "jaxspec.drafters.model:ModelDraft",
    "medusa": "jaxspec.drafters.medusa:Medusa",
}

RULES = {
    "coupled": "jaxspec.rules.coupled:Coupled",
    "rejection": "jaxspec.rules.rejection:Rejection",
    "block": "jaxspec.rules.block:Block",
    "traversal": "jaxspec.rules.traversal:Traversal",
    "deterministic": "jaxspec.rules.deterministic:Deterministic",
    "lossy-typical": "jaxspec.rules.typical:Typical",
    "lossy-lenient": "jaxspec.rules.lenient:Lenient",
    "lossy-cascade": "jaxspec.rules.cascade:Cascade",
}

SCHEDULES = {
    "constant": "jaxspec.core.schedule:Constant",
    "plus-minus": "jaxspec.schedules.plus_minus:PlusMinus",
    "confidence": "jaxspec.schedules.confidence:Confidence",
    "adaptive": "jaxspec.schedules.adaptive:Adaptive",
}


def find(kind: str, name: str) -> Any:
    """The class of a member; `kind` is "drafter", "rule" or "schedule".

    Raises:
        UnknownName: naming the nearest.
    """
    members = {"drafter": DRAFTERS, "rule": RULES, "schedule": SCHEDULES}[kind]
    if name not in members:
        raise UnknownName(kind, name, members)
    module, _, attribute = members[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
