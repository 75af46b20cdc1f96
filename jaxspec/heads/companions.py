"""The draft model and the heads that come with a preset. Each is loaded once for each target."""

import dataclasses
import weakref
from typing import Any

from jaxspec.checkpoints.load import load
from jaxspec.checkpoints.presets import PRESETS
from jaxspec.core.drafter import DrafterInputs
from jaxspec.core.networks import TypedTarget
from jaxspec.heads.files import load_heads
from jaxspec.heads.find import find_shipped_heads
from jaxspec.models.model import Model
from jaxspec.models.packed import is_quantized

_LOADED: weakref.WeakKeyDictionary[Model, dict[str, Any]] = weakref.WeakKeyDictionary()


def with_companions(inputs: DrafterInputs, drafter: str) -> DrafterInputs:
    """Adds the heads or the draft model that a drafter needs, if none are given and the target's preset has them.

    Heads may also be among the target's own files.
    """
    loaded = _LOADED.setdefault(inputs.target, {})
    if drafter == "eagle" and inputs.heads is None and inputs.target.heads_inside is not None:
        if drafter not in loaded:
            loaded[drafter] = load_heads(inputs.target.heads_inside, target=inputs.target)
        return dataclasses.replace(inputs, heads=loaded[drafter])
    preset = PRESETS.get(inputs.target.preset or "")
    if preset is None:
        return inputs
    if inputs.heads is None and (folder := find_shipped_heads(preset.name, drafter)):
        if drafter not in loaded:
            loaded[drafter] = load_heads(folder, target=inputs.target)
        return dataclasses.replace(inputs, heads=loaded[drafter])
    if drafter == "model" and inputs.draft is None and preset.draft:
        if "draft" not in loaded:
            loaded["draft"] = load(preset.draft, dtype=_dtype(inputs.target))
        return dataclasses.replace(inputs, draft=loaded["draft"])
    return inputs


def _dtype(target: Model) -> str:
    """Returns the dtype that a model was loaded in."""
    rounded = is_quantized(target.params)
    return "int8" if rounded else target.lm.dtype if isinstance(target.lm, TypedTarget) else "float32"
