"""Copies of the target's tables in files of heads, which need no memory of their own."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.core.networks import HeadTarget
from jaxspec.heads.dflash_config import DFlashConfig
from jaxspec.heads.kinds import HeadSizes
from jaxspec.models.layers import look_up

_ROWS, _SAME = 8192, 2**-8
"""Rows that are compared at once, and the largest difference of a copy, relative to the largest value: bfloat16's."""


def share_tables(config: HeadSizes, named: dict[str, Array], target: Any) -> tuple[Any, dict[str, Array]]:
    """Drops the head's own embedding if it is a copy of the target's (`jaxspec.models.model.Model`).

    So it does with the projection of a DFlash head, of the whole vocabulary or a part.

    Args:
        config: sizes of the head.
        named: its parameters by name.
        target: the model that the head drafts for.
    """
    if config.feature_size != config.hidden_size or not isinstance(target.lm, HeadTarget):
        return config, named
    tables = {"embed": ("own_embedding", target.lm.embedding)}
    if isinstance(config, DFlashConfig):
        tables["head"] = ("own_projection", target.lm.unembedding)
    for name, (attribute, table) in tables.items():
        ids = named.get("tokens") if name == "head" else None
        if name in named and _is_copy(named[name], table(target.params), ids):
            config = dataclasses.replace(config, **{attribute: False})  # pyright: ignore[reportArgumentType]
            named = {key: leaf for key, leaf in named.items() if key != name}
    return config, named


def _is_copy(own: Array, table: Any, ids: Array | None) -> bool:
    """Returns whether a table is the target's, or its rows of these ids."""
    if own.shape != (table.shape if ids is None else (len(ids), table.shape[1])):
        return False
    for start in range(0, len(own), _ROWS):
        rows = jnp.arange(start, min(start + _ROWS, len(own)))
        ours, theirs = own[rows].astype(jnp.float32), look_up(table, (rows if ids is None else ids[rows])[None])[0]
        if jnp.abs(ours - theirs).max() > _SAME * jnp.abs(theirs).max():
            return False
    return True
