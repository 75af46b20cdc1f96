"""Copies of the target's tables in files of heads, which need no memory of their own."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.core.networks import HeadTarget
from jaxspec.heads.sizes import HeadSizes
from jaxspec.models.layers import look_up

_ROWS, _SAME = 8192, 2**-8
"""The number of rows that are compared at once, and the largest difference between a copy and the target's table,
relative to the largest value of these rows. This difference is the rounding error of bfloat16."""


def share_tables(config: HeadSizes, named: Mapping[str, Array], target: Any) -> tuple[Any, dict[str, Array]]:
    """Returns sizes and parameters without the tables that are copies of the target's tables; see `HeadSizes.copies`.

    Args:
        config: the sizes of the heads.
        named: the parameters by name.
        target: the model that the heads draft for (`jaxspec.models.model.Model`).
    """
    named = dict(named)
    if config.feature_size != config.hidden_size or not isinstance(target.lm, HeadTarget):
        return config, named
    for name, (field, method) in config.copies.items():
        ids = named.get("tokens") if name in config.projections else None
        if name in named and _is_copy(named[name], getattr(target.lm, method)(target.params), ids):
            config = dataclasses.replace(config, **{field: False})  # pyright: ignore[reportArgumentType, reportCallIssue, reportType]
            del named[name]
    return config, named


def _is_copy(own: Array, table: Any, ids: Array | None) -> bool:
    """Returns whether a table is a copy of the target's table, or of the rows of the target's table with these ids."""
    if own.shape != (table.shape if ids is None else (len(ids), table.shape[1])):
        return False
    for start in range(0, len(own), _ROWS):
        rows = jnp.arange(start, min(start + _ROWS, len(own)))
        ours, theirs = own[rows].astype(jnp.float32), look_up(table, (rows if ids is None else ids[rows])[None])[0]
        if jnp.abs(ours - theirs).max() > _SAME * jnp.abs(theirs).max():
            return False
    return True
