"""Writes draft heads for other systems. `jaxspec.heads.layouts` has the layouts and the systems that read them."""

import dataclasses
import os
import pathlib
from typing import Any

import numpy as np

from jaxspec.core.networks import need_members
from jaxspec.errors import InvalidConfig, UnknownName, shown
from jaxspec.heads.config import HeadsConfig
from jaxspec.heads.files import write
from jaxspec.heads.layouts import CONFIG, EXPORTED, LAYOUTS, Layout, is_transposed
from jaxspec.heads.network import DraftHeads, check_heads, check_target, flatten
from jaxspec.heads.serving import check_layout
from jaxspec.models.model import Model
from jaxspec.models.packed import Matrix


def export_heads(
    heads: DraftHeads,
    directory: str | os.PathLike,
    layout: str = EXPORTED[0],
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
        layout: "v0.1", "legacy" or "vllm".
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
    params = flatten(heads.params)
    config, params = _with_projections(config, params, row, target)
    tensors = {}
    for ours in config.param_shapes():
        array = np.asarray(params[ours])
        array = array.T if is_transposed(ours) else array.astype(np.int64) if ours == "tokens" else array
        tensors[row.tensor(config, ours)] = array
    base = base or (None if target is None else target.name)
    return write(directory, row.files[0], tensors, CONFIG, row.config_json(config, base))


def _with_projections(
    config: HeadsConfig, params: dict[str, Any], layout: Layout, target: Any
) -> tuple[HeadsConfig, dict[str, Any]]:
    """Returns the sizes and parameters of the heads, with projections of a kind that the layout holds."""
    if config.projection in layout.projections:
        return config, params
    if config.projection == "single":
        one = params["projections.0"]
    elif target is None:
        without = " or ".join(name for name in EXPORTED if "shared" in LAYOUTS[name].projections)
        raise InvalidConfig(
            f"the layout {layout.name} holds projections, and these heads share the target's; give the target "
            f"(target=..., or --target) for a copy of it, or use the layout {without}"
        )
    else:
        need_members(target.lm, ["unembedding"], "for a copy of its projection the target needs")
        one = target.lm.unembedding(target.params)
        one = one if config.draft_vocab_size is None else one[params["tokens"]]
        one = one.astype(np.float32) if isinstance(one, Matrix) else one
    config = dataclasses.replace(config, projection=layout.projections[0])
    return config, params | {f"projections.{i}": one for i in range(config.num_projections)}
