"""Layers that the devices of the mesh axis "model" share, as a program that each device runs on its own part.

XLA splits other programs over devices itself, and adds what the devices computed in an order of its choice. Networks
with `exact=True` write down what each device computes: its heads, its units of the MLP, and its share of the inputs of
the last product of a sublayer. All devices then gather these shares, and add them in a fixed order. No other result is
a sum over devices.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxspec.core.mesh import DATA, MODEL
from jaxspec.core.records import KV, Cache, Entries, Params, Window
from jaxspec.core.row_settings import is_abstract
from jaxspec.errors import InvalidConfig
from jaxspec.models.layers import look_up
from jaxspec.models.packed import Matrix
from jaxspec.models.placement import param_specs
from jaxspec.models.split_table import SplitTable

HEADS: Any = P(None, None, MODEL)
"""The partition spec of keys and values `[L, B, H, S, K]`."""
WHOLE: Any = P()
"""The partition spec of arrays that every device has."""


def over_devices(function: Callable, size: int, params: Params, specs: tuple, outs: Any) -> Callable:
    """Returns a function of the parameters and other arguments that each device runs on its part of them.

    Args:
        function: a function of arrays.
        size: the number of devices on the axis "model".
        params: the first argument: parameters, or their shapes.
        specs: partition specs of the other arguments.
        outs: partition specs of the results. Results that are not split must be the same on every device.

    Raises:
        InvalidConfig: no mesh with this number of devices on "model" is in use. Shapes can be computed without a mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty and all(map(is_abstract, jax.tree.leaves(params))):
        mesh = AbstractMesh((1, size), (DATA, MODEL), axis_types=(AxisType.Auto,) * 2)
    if dict(mesh.shape).get(MODEL) != size:
        raise InvalidConfig(
            f"layers with exact=True are split over {size} devices and run on a mesh only; pass it (mesh=...)"
        )
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(param_specs(params, size), *specs),
        out_specs=outs,
        axis_names={MODEL},
        check_vma=False,
    )


def read_window(
    function: Callable,
    size: int,
    params: Params,
    window: Window,
    cache: Cache,
    past: Entries | None,
    added: Float[Array, "B T E"] | None,
) -> tuple[Array, Entries]:
    """Returns the features and the entries of a window; each device computes the entries of its heads."""
    specs = (WHOLE, Cache(KV(HEADS, HEADS), WHOLE), HEADS, WHOLE)
    return over_devices(function, size, params, specs, (WHOLE, HEADS))(params, window, cache, past, added)


def project(function: Callable, size: int, params: Params, features: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
    """Returns the logits of features; each device computes a share of the tokens of the vocabulary."""
    return over_devices(function, size, params, (WHOLE,), WHOLE)(params, features)


def gather(share: Float[Array, "*b E"]) -> Float[Array, "D *b E"]:
    """Returns the arrays of all devices, in the order of the devices."""
    return lax.all_gather(share, MODEL)


def gather_columns(share: Float[Array, "B T V"], size: int) -> Float[Array, "B T W"]:
    """Returns the columns of all devices side by side."""
    return share if size == 1 else lax.all_gather(share, MODEL, axis=2, tiled=True)


def look_up_share(table: Array | Matrix | SplitTable, tokens: Int[Array, "B T"], size: int) -> Float[Array, "B T E"]:
    """Computes `look_up` in a table of which each device has an equal share of the rows."""
    if size == 1:
        return look_up(table, tokens)
    rows = table.shape[0]
    mine = tokens - lax.axis_index(MODEL) * rows
    found = gather(look_up(table, jnp.clip(mine, 0, rows - 1)))
    return jnp.take_along_axis(found, (tokens // rows)[None, ..., None], 0)[0]
