"""Meshes of devices: rows of a batch are split over the axis "data", matrices over the axis "model"."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.core.checks import check_arguments, whole
from jaxspec.errors import InvalidConfig, shown

DATA, MODEL = "data", "model"


@check_arguments
def make_mesh(data: int = 1, model: int = 1, devices: Any = None) -> Mesh:
    """Makes a mesh of `data` x `model` devices.

    Args:
        data: the number of groups of devices; each group has rows of its own.
        model: the number of devices over which each matrix of the target is split.
        devices: the devices to use; None for all devices of all processes.

    Raises:
        InvalidConfig: there are fewer than `data` x `model` devices, or `devices` holds other objects.
    """
    data, model = whole("data", data), whole("model", model)
    given = devices
    try:
        devices = list(jax.devices() if given is None else given.flat if isinstance(given, np.ndarray) else given)
    except Exception:  # not iterable
        devices = [given]
    if not all(isinstance(device, jax.Device) for device in devices):
        raise InvalidConfig(f"devices must be a list of jax.Device, got {shown(given)}")
    if len(devices) < data * model:
        raise InvalidConfig(f"a mesh of {data} x {model} needs {data * model} devices, but there are {len(devices)}")
    grid = np.asarray(devices[: data * model]).reshape(data, model)
    return Mesh(grid, (DATA, MODEL), axis_types=(AxisType.Auto,) * 2)


def check_mesh(mesh: Any) -> None:
    """Refuses values that are not meshes with the axes of `make_mesh`.

    Raises:
        InvalidConfig: the value is not a mesh, has other axes, or has axes that are not of the type Auto.
    """
    if not isinstance(mesh, Mesh) or set(mesh.axis_names) != {DATA, MODEL}:
        raise InvalidConfig(f"mesh must have the axes 'data' and 'model', as from jaxspec.make_mesh; got {shown(mesh)}")
    if any(kind is not AxisType.Auto for kind in mesh.axis_types):
        raise InvalidConfig("the axes of the mesh must have AxisType.Auto; make the mesh with jaxspec.make_mesh")


def count_groups(mesh: Mesh | None) -> int:
    """Returns the number of groups of devices with rows of their own."""
    return 1 if mesh is None else mesh.shape[DATA]


def manual_axes(mesh: Mesh) -> set[str]:
    """Returns the axes over which `jax.shard_map` maps the program of a group of devices.

    "model" is one of them only if a group is one device: XLA does not partition Pallas kernels, not even over an axis
    of one device.
    """
    return {DATA, MODEL} if mesh.shape[MODEL] == 1 else {DATA}


def place(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Places an array, which every process holds whole, on the devices of all processes with this sharding."""
    if sharding.is_fully_addressable or getattr(leaf, "sharding", None) == sharding:
        return jax.device_put(leaf, sharding)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = place(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array) and leaf.sharding.device_set == sharding.device_set:
        # One exchange at a time: on CPUs, processes with several exchanges in progress can wait for each other forever.
        return jax.block_until_ready(jax.jit(_same, out_shardings=sharding)(leaf))
    whole = to_host(leaf)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def _same(leaf: jax.Array) -> jax.Array:
    return leaf


def replicate(params: Any, mesh: Mesh) -> Any:
    """Replicates a pytree of arrays on every device of the mesh."""
    return jax.tree.map(lambda leaf: place(leaf, NamedSharding(mesh, P())), params)


def to_host(array: jax.Array | np.ndarray) -> np.ndarray:
    """Returns the whole array on the host, in every process. An array of NumPy is there already."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
