"""Writes DFlash and DSpark heads as the tensors of another system's file."""

from typing import Any

import numpy as np

from jaxspec.core.networks import TappedTarget
from jaxspec.errors import InvalidConfig
from jaxspec.heads.dflash_config import DFlashConfig
from jaxspec.heads.dflash_layouts import DFlashLayout
from jaxspec.heads.eagle_export import file_tensors, projection_of
from jaxspec.heads.network import DraftHeads, flatten
from jaxspec.heads.reduced_vocab import write_ids


def dflash_contents(
    heads: DraftHeads, layout: DFlashLayout, target: Any, base: str | None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns the tensors of a DFlash or DSpark head in a layout, and the content of config.json.

    Args:
        heads: the head.
        layout: a layout that can hold it.
        target: the model that the head drafts for; required if it has default taps, or shares the projection to a
            reduced vocabulary.
        base: the target's name in config.json, or None.

    Raises:
        InvalidConfig: the target is missing.
    """
    config: DFlashConfig = heads.config
    params = flatten(heads.params)
    if config.taps is None and not (target is not None and isinstance(target.lm, TappedTarget)):
        raise InvalidConfig(
            f"the layout {layout.name} states the taps, and this head has the default ones of its target; give the "
            "target (target=..., or --target)"
        )
    taps = config.taps_of(0 if target is None else target.lm.depth)
    tensors = file_tensors(config, params, layout.names_for(config))
    if config.draft_vocab_size is not None:
        if not config.own_projection:
            if target is None:
                raise InvalidConfig(
                    f"the layout {layout.name} holds a projection to a reduced vocabulary, and this head shares the "
                    "target's; give the target (target=..., or --target) for a copy of its rows"
                )
            tensors["lm_head.weight"] = np.asarray(projection_of(target, params["tokens"]))
        tensors |= write_ids(np.asarray(params["tokens"]), config.vocab_size)
    return tensors, layout.config_json(config, base, taps)
