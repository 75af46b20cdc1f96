"""Writes EAGLE heads as the tensors of another system's file."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array, Int

from jaxspec.checkpoints.base import file_names, file_shapes
from jaxspec.core.networks import TappedTarget, need_members
from jaxspec.errors import InvalidConfig
from jaxspec.heads.eagle_config import EagleConfig, default_taps
from jaxspec.heads.eagle_layouts import EagleLayout
from jaxspec.heads.network import DraftHeads, flatten
from jaxspec.heads.reduced_vocab import write_ids
from jaxspec.models.config import is_table
from jaxspec.models.packed import Matrix


def eagle_contents(
    heads: DraftHeads, layout: EagleLayout, target: Any, base: str | None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns the tensors of an EAGLE head in a layout, and the content of config.json.

    Args:
        heads: the head.
        layout: a layout that can hold it.
        target: the model that the head drafts for; required if its projection must be copied.
        base: the target's name in config.json, or None.

    Raises:
        InvalidConfig: the target is missing.
    """
    config: EagleConfig = heads.config
    params = flatten(heads.params)
    if config.version == 3 and not config.own_projection:
        if target is None:
            raise InvalidConfig(
                f"the layout {layout.name} holds a projection, and this head shares the target's; give the target "
                "(target=..., or --target) for a copy of it"
            )
        config = dataclasses.replace(config, own_projection=True)
        params["head"] = projection_of(target, params.get("tokens"))
    tensors = file_tensors(config, params, layout.names_for(config))
    if config.version == 3 and not (layout.nested and config.draft_vocab_size is None):  # speculators has no such map
        ids = np.asarray(params.get("tokens", np.arange(config.rows)))
        tensors |= write_ids(ids, config.vocab_size)
    depth = target.lm.depth if target is not None and isinstance(target.lm, TappedTarget) else None
    default = depth is not None and config.taps == default_taps(depth)
    return tensors, layout.config_json(config, base, None if default else config.taps)


def file_tensors(config: Any, params: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]) -> dict[str, np.ndarray]:
    """Returns a head's parameters, without token ids, as tensors of these names; matrices are `[out, in]`."""
    tensors = {}
    for ours, shape in config.param_shapes().items():
        if ours == "tokens":
            continue
        parts, kind = file_names(names, ours)
        array = np.asarray(params[ours])
        array = array if array.ndim != 2 or is_table(kind) else array.T
        ends = np.cumsum([rows for rows, *_ in file_shapes(config.decoder, kind, shape, len(parts))])
        tensors |= zip(parts, np.split(array, ends[:-1]), strict=True)
    return tensors


def projection_of(target: Any, ids: Int[Array | np.ndarray, "R"] | None) -> Any:
    """Returns the target's projection, or its rows of these ids.

    Raises:
        InvalidConfig: the target has none to copy.
    """
    need_members(target.lm, ["unembedding"], "for a copy of its projection the target needs")
    rows = target.lm.unembedding(target.params)
    rows = rows if ids is None else rows[ids]
    return rows.astype(np.float32) if isinstance(rows, Matrix) else rows
