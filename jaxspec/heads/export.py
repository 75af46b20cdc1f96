"""Writes draft heads for other systems. `jaxspec.heads.layouts` has the layouts and the systems that read them."""

import dataclasses
import os
import pathlib
from typing import Any

import numpy as np

from jaxspec.errors import InvalidConfig, UnknownName, shown
from jaxspec.heads.config import HeadsConfig
from jaxspec.heads.dflash_export import dflash_contents
from jaxspec.heads.dflash_layouts import DFlashLayout
from jaxspec.heads.eagle_export import eagle_contents, projection_of
from jaxspec.heads.eagle_layouts import EagleLayout
from jaxspec.heads.files import write
from jaxspec.heads.layouts import CONFIG, EXPORTED, LAYOUTS, Layout, is_transposed
from jaxspec.heads.network import DraftHeads, check_heads, check_target, flatten
from jaxspec.heads.serving import check_layout, layouts_for
from jaxspec.models.model import Model


def export_heads(
    heads: DraftHeads,
    directory: str | os.PathLike,
    layout: str | None = None,
    *,
    target: Any = None,
    base: str | None = None,
) -> pathlib.Path:
    """Writes heads, in their dtype, in a layout that other systems read; `load_heads` reads it, too.

    No layout has a place for heads that read tokens (inputs "path" or "recurrent"); `save_heads` saves those. The
    layouts "v0.1" and "vllm" hold projections: if heads share the target's projection, a copy of it is written.
    Medusa's own code has one block per head, whatever number config.json states, so only other systems read further
    blocks.

    Args:
        heads: the heads to write.
        directory: where the files are written; it must not hold heads yet.
        layout: "v0.1", "legacy" or "vllm" for Medusa heads, "eagle3", "speculators" or "eagle1" for EAGLE heads,
            "dflash" or "dflash-speculators" for DFlash and DSpark heads; None for the first that can hold them.
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
        first = (name for name in EXPORTED if LAYOUTS[name].drafter == heads.config.drafter)
        layout = next((name for name in layouts_for(heads.config)), next(first))
    if not isinstance(layout, str) or layout not in EXPORTED:
        raise UnknownName("layout", layout, EXPORTED)
    config, row = heads.config, LAYOUTS[layout]
    check_layout(config, row)
    if base is not None and not isinstance(base, str):
        raise InvalidConfig(f"base must be the target's name, got {shown(base)}")
    if target is not None:
        if not isinstance(target, Model):
            raise InvalidConfig(f"target must be a Model, as jaxspec.load returns it; got {shown(target)}")
        check_target(config, target)
    base = base or (None if target is None else target.name)
    if isinstance(row, EagleLayout):
        tensors, settings = eagle_contents(heads, row, target, base)
    elif isinstance(row, DFlashLayout):
        tensors, settings = dflash_contents(heads, row, target, base)
    else:
        tensors, settings = _medusa_contents(heads, row, target, base)
    return write(directory, row.files[0], tensors, CONFIG, settings)


def _medusa_contents(
    heads: DraftHeads, layout: Layout, target: Any, base: str | None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns the tensors of Medusa heads in a layout, and the content of config.json."""
    config, params = _with_projections(heads.config, flatten(heads.params), layout, target)
    tensors = {}
    for ours in config.param_shapes():
        array = np.asarray(params[ours])
        array = array.T if is_transposed(ours) else array.astype(np.int64) if ours == "tokens" else array
        tensors[layout.tensor(config, ours)] = array
    return tensors, layout.config_json(config, base)


def _with_projections(
    config: HeadsConfig, params: dict[str, Any], layout: Layout, target: Any
) -> tuple[HeadsConfig, dict[str, Any]]:
    """Returns the sizes and parameters of the heads, with projections of a kind that the layout holds."""
    if config.projection in layout.projections:
        return config, params
    if config.projection == "single":
        one = params["projections.0"]
    elif target is None:
        medusa = ((name, row) for name, row in LAYOUTS.items() if isinstance(row, Layout) and row.exported)
        without = " or ".join(name for name, row in medusa if "shared" in row.projections)
        raise InvalidConfig(
            f"the layout {layout.name} holds projections, and these heads share the target's; give the target "
            f"(target=..., or --target) for a copy of it, or use the layout {without}"
        )
    else:
        one = projection_of(target, params.get("tokens"))
    config = dataclasses.replace(config, projection=layout.projections[0])
    return config, params | {f"projections.{i}": one for i in range(config.num_projections)}
