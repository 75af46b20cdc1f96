"""Writes draft heads for other systems. `jaxspec.heads.layouts` lists the layouts and the systems that read them."""

import os
import pathlib
from typing import Any

import numpy as np
from jaxtyping import Array, Int

from jaxspec.core.networks import TappedTarget, need_members
from jaxspec.errors import InvalidConfig, UnknownName, shown
from jaxspec.heads.files import write_head_files
from jaxspec.heads.kinds import CONFIG_JSON, Layout, kind_of
from jaxspec.heads.layouts import EXPORT_LAYOUTS, LAYOUTS
from jaxspec.heads.network import DraftHeads, check_heads, check_target, flatten
from jaxspec.heads.serving import check_layout, describe_serving, list_layouts
from jaxspec.heads.sizes import HeadSizes
from jaxspec.models.model import Model
from jaxspec.models.packed import Matrix


def export_heads(
    heads: DraftHeads,
    directory: str | os.PathLike,
    layout: str | None = None,
    *,
    target: Any = None,
    base: str | None = None,
) -> pathlib.Path:
    """Writes heads, in their dtype, in a layout that other systems read; `load_heads` also reads it.

    No layout can hold Medusa heads that read tokens (inputs "path" or "recurrent"); save them with `save_heads`. If a
    layout holds projections and the heads share the target's projection, a copy of the target's projection is written.
    Medusa's own code has one block per head, whatever number config.json states, so only other systems read further
    blocks.

    Args:
        heads: the heads to write.
        directory: where the files are written; it must not hold heads yet.
        layout: "v0.1", "legacy" or "vllm" for Medusa heads, "eagle3", "speculators" or "eagle1" for EAGLE heads, "mtp"
            for layers for multi-token prediction, "dflash" or "dflash-speculators" for DFlash, DSpark and JetSpec
            heads; None for the first layout that can hold the heads.
        target: the model that the heads draft for; required if its projection must be copied.
        base: the name that other systems have for the target; None: the name of `target`.

    Returns:
        The path of the directory.

    Raises:
        UnknownName: there is no layout of this name.
        InvalidConfig: the layout cannot hold these heads; the message says which layouts can.
        ShapeMismatch: the heads do not fit the target.
        CheckpointError: the directory holds heads already, or cannot be written.
    """
    check_heads(heads)
    if layout is None:
        possible = [name for name in EXPORT_LAYOUTS if LAYOUTS[name].drafter == heads.config.drafter]
        if not possible:
            raise InvalidConfig(describe_serving(heads.config))
        layout = [*list_layouts(heads.config), *possible][0]
    if not isinstance(layout, str) or layout not in EXPORT_LAYOUTS:
        raise UnknownName("layout", layout, EXPORT_LAYOUTS)
    config, row = heads.config, LAYOUTS[layout]
    check_layout(config, row)
    if base is not None and not isinstance(base, str):
        raise InvalidConfig(f"base must be the target's name, got {shown(base)}")
    if target is not None:
        if not isinstance(target, Model):
            raise InvalidConfig(f"target must be a Model, as jaxspec.load returns it; got {shown(target)}")
        check_target(config, target)
    base = base or (None if target is None else target.name)
    kind = kind_of(config)
    depth = target.lm.depth if target is not None and isinstance(target.lm, TappedTarget) else None
    params, config = flatten(heads.params), kind.sizes_in(config, row)
    if missing := [name for name in config.projections if name not in params]:
        first = params.get(config.projections[0])  # all heads of some layouts have a copy of a single projection
        table = _copy_projection(heads.config, row, target, params.get("tokens")) if first is None else first
        params |= dict.fromkeys(missing, table)
    settings = kind.config_json(config, row, base, depth)
    return write_head_files(directory, row.files[0], kind.tensors(config, params, row), CONFIG_JSON, settings)


def _copy_projection(config: HeadSizes, layout: Layout, target: Any, ids: Any) -> Any:
    """Returns a copy of the target's projection for heads that share it, in a layout that holds a projection.

    Raises:
        InvalidConfig: the target is missing.
    """
    if target is not None:
        return projection_of(target, ids)
    kind = kind_of(config)
    others = [name for name in list_layouts(config) if kind.sizes_in(config, LAYOUTS[name]) == config]
    raise InvalidConfig(
        f"the layout {layout.name} holds a projection, but these heads share the target's; give the target "
        "(target=..., or --target) for a copy of it" + (f", or use the layout {' or '.join(others)}" if others else "")
    )


def projection_of(target: Any, ids: Int[Array | np.ndarray, "R"] | None) -> Any:
    """Returns the target's projection, or its rows of these ids.

    Raises:
        InvalidConfig: the target has no projection to copy.
    """
    need_members(target.lm, ["unembedding"], "for a copy of its projection the target needs")
    rows = target.lm.unembedding(target.params)
    rows = rows if ids is None else rows[ids]
    return rows.astype(np.float32) if isinstance(rows, Matrix) else rows
