"""The draft model and the heads that come with a preset. Each is loaded once for each target."""

import dataclasses
import weakref
from typing import Any

from jaxspec.checkpoints.load import load
from jaxspec.checkpoints.presets import PRESETS
from jaxspec.core.drafter import DrafterInputs
from jaxspec.core.networks import TypedTarget
from jaxspec.errors import InvalidConfig
from jaxspec.heads.files import load_heads
from jaxspec.heads.find import find_shipped_heads
from jaxspec.models.model import Model
from jaxspec.models.packed import is_quantized
from jaxspec.models.rounding import round_to_int8
from jaxspec.registry import MTP_DRAFTER, SELF_DRAFTER

_LOADED: weakref.WeakKeyDictionary[Model, dict[str, Any]] = weakref.WeakKeyDictionary()


def with_companions(inputs: DrafterInputs, drafter: str) -> DrafterInputs:
    """Adds the heads or the draft model that a drafter needs, if none are given and the target's preset has them.

    Heads may also be among the target's own files. The draft model of `SELF_DRAFTER` is made from the target.

    Raises:
        InvalidConfig: the drafter is `MTP_DRAFTER`, and the target has no heads inside, or other heads are given; or
            the drafter is `SELF_DRAFTER`, and the target cannot be rounded to int8, or a draft model is given.
    """
    loaded, inside = _LOADED.setdefault(inputs.target, {}), inputs.target.heads_inside
    if drafter == SELF_DRAFTER:
        if inputs.draft is not None:
            raise InvalidConfig(
                f"the drafter {drafter!r} drafts with the target itself; leave draft out, or choose the drafter "
                "'model' for another draft model"
            )
        if SELF_DRAFTER not in loaded:
            loaded[SELF_DRAFTER] = round_to_int8(inputs.target)
        return dataclasses.replace(inputs, draft=loaded[SELF_DRAFTER])
    if drafter == MTP_DRAFTER and inputs.heads is not None:
        raise InvalidConfig(
            f"the drafter {drafter!r} drafts with the layer inside the target; leave heads out, or choose the drafter "
            "'eagle' for other heads"
        )
    if drafter == MTP_DRAFTER and inside is None:
        raise InvalidConfig(
            f"the drafter {drafter!r} needs a target with a layer for multi-token prediction, and the files of "
            f"{inputs.target.name or 'this target'} have none; choose another drafter"
        )
    if drafter in (MTP_DRAFTER, "eagle") and inputs.heads is None and inside is not None:
        if MTP_DRAFTER not in loaded:
            loaded[MTP_DRAFTER] = load_heads(inside, target=inputs.target)
        return dataclasses.replace(inputs, heads=loaded[MTP_DRAFTER])
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


def release(target: Model, drafter: str) -> None:
    """Frees the heads or the draft model that were loaded for a drafter of a target, if it is not used any more."""
    _LOADED.get(target, {}).pop("draft" if drafter == "model" else drafter, None)


def _dtype(target: Model) -> str:
    """Returns the dtype that a model was loaded in."""
    rounded = is_quantized(target.params)
    return "int8" if rounded else target.lm.dtype if isinstance(target.lm, TypedTarget) else "float32"
