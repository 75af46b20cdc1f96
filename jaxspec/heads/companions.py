"""What comes with a preset: its draft model, and heads trained for it. Loaded once for each target."""

import dataclasses
import weakref
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoints.load import load
from jaxspec.checkpoints.presets import PRESETS
from jaxspec.core.protocols import Setting
from jaxspec.heads.files import load_heads
from jaxspec.heads.network import DraftHeads
from jaxspec.models.model import Model

_LOADED: weakref.WeakKeyDictionary[Model, dict[str, Any]] = weakref.WeakKeyDictionary()


def with_companions(setting: Setting, drafter: str) -> Setting:
    """The setting with what the drafter of this name needs and was not given, where the target's preset has it."""
    preset = PRESETS.get(setting.target.preset or "")
    if preset is None:
        return setting
    loaded = _LOADED.setdefault(setting.target, {})
    if drafter == "medusa" and setting.heads is None and preset.heads:
        if "heads" not in loaded:
            loaded["heads"] = load_heads(preset.name, target=setting.target)
        heads: DraftHeads = loaded["heads"]
        return dataclasses.replace(setting, heads=heads)
    if drafter == "model" and setting.draft is None and preset.draft:
        if "draft" not in loaded:
            loaded["draft"] = load(preset.draft, dtype=_dtype(setting.target))
        return dataclasses.replace(setting, draft=loaded["draft"])
    return setting


def _dtype(target: Model) -> str:
    """The dtype that a model of this library was loaded in."""
    rounded = any(leaf.dtype == np.int8 for leaf in jax.tree.leaves(target.params))
    return "int8" if rounded else str(getattr(target.lm, "dtype", "float32"))
