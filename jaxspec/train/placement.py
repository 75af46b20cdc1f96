"""Where the arrays of training lie on a mesh: one table for the target, the heads, the batches and everything else.

| arrays | between steps | in a step |
|---|---|---|
| target | each matrix split over "model" and "data" | collected over "data", layer by layer |
| heads, moments, gradients | large arrays split over all devices, by shape | heads whole, gradients summed in parts |
| frozen tables, sums, counts | on every device | as they lie |
| rows: batches, features, evaluation | split over "data" | as they lie |

The parameters of the heads need no rule by name, because moments and gradients have the shapes of the parameters.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.amounts import plural, size
from jaxspec.core.mesh import DATA, MODEL, make_mesh, place
from jaxspec.core.networks import LanguageModel
from jaxspec.core.records import Params
from jaxspec.errors import InvalidConfig
from jaxspec.models import sharding
from jaxspec.models.model import Model
from jaxspec.models.transformer import TransformerLM
from jaxspec.train.settings import TrainSettings, parse_mesh

MIN_SPLIT_ELEMENTS = 2**20
"""The smallest number of elements of an array of the heads that is split. Smaller arrays cost little memory."""

MAX_WHOLE_ELEMENTS = 3 * 2**29
"""The largest number of parameters whose gradient each device holds whole in a step, in float32: 6.4 GB.
Heads of a target of 70B parameters have fewer."""

MAX_WEIGHTS_SHARE = 0.5
"""The largest share of a device's memory that the weights take while the target answers, beside caches."""


def default_mesh(settings: TrainSettings, devices: int) -> str:
    """Returns the mesh that an empty setting stands for: rows are split over as many devices as divide them."""
    rows = settings.batch // settings.accumulate
    return f"data={max(count for count in range(1, devices + 1) if rows % count == 0)}"


def answer_mesh(lm: TransformerLM, devices: Sequence[Any], memory: float) -> Mesh:
    """Returns a mesh on which a target answers prompts: with as few devices for each matrix as its weights allow.

    Args:
        lm: the network.
        devices: the devices.
        memory: bytes of memory of each device.

    Raises:
        InvalidConfig: the weights do not fit, however they are divided.
    """
    shapes = jax.eval_shape(lm.init_params, jax.random.key(0))
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    for count in range(1, len(devices) + 1):
        if len(devices) % count or weights / count > MAX_WEIGHTS_SHARE * memory:
            continue
        mesh = make_mesh(len(devices) // count, count, devices)
        with contextlib.suppress(InvalidConfig):
            sharding.check_divisible(lm.config, mesh, "the target")
            return mesh
    raise InvalidConfig(
        f"the target has {size(weights)} of weights, which do not fit on {plural(len(devices), 'device')} of "
        f"{size(memory)} beside the caches of its answers; use more devices"
    )


def differentiate(loss: Callable[..., Any], params: Any, dtypes: Any, rows: Any, constants: Any) -> tuple[Any, Any]:
    """Computes `Placement.differentiate` on one device."""

    def compute(params: Any) -> tuple[Any, Any]:
        return loss(jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), params, dtypes), rows, constants)

    return jax.value_and_grad(compute, has_aux=True)(params)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The places of all arrays on a mesh with the axes "data" and "model"; static and hashable.

    Attributes:
        mesh: the devices.
    """

    mesh: Mesh

    @classmethod
    def of(cls, settings: TrainSettings, devices: Any = None) -> "Placement":
        """Returns the placement on the first devices of all; `devices` replaces the devices of this process.

        Raises:
            InvalidConfig: there are fewer devices than the mesh has.
        """
        return cls(make_mesh(*parse_mesh(settings.mesh), devices))

    @property
    def whole(self) -> NamedSharding:
        """The sharding of arrays that every device holds."""
        return NamedSharding(self.mesh, P())

    @property
    def rows(self) -> NamedSharding:
        """The sharding of rows `[B, ...]`."""
        return NamedSharding(self.mesh, P(DATA))

    @property
    def parts(self) -> NamedSharding:
        """The sharding of the parts of a batch, `[A, B, ...]`."""
        return NamedSharding(self.mesh, P(None, DATA))

    def split(self, tree: Any) -> Any:
        """Returns the shardings of the heads, or of a whole `TrainState`, between steps.

        The first dimension that all devices divide is split. Small arrays, and arrays without such a dimension, are on
        every device.
        """
        return jax.tree.map(self._split_by_shape, tree)

    @staticmethod
    def is_large(leaf: Any) -> bool:
        """Returns whether an array of the heads is worth splitting."""
        return leaf.size >= MIN_SPLIT_ELEMENTS

    def _split_axis(self, leaf: Any) -> int:
        """Returns the axis of an array of the heads that is split; `WHOLE` if every device has the whole array."""
        count = self.mesh.size
        if count == 1 or not self.is_large(leaf):
            return WHOLE
        return next((axis for axis, length in enumerate(leaf.shape) if length % count == 0), WHOLE)

    def _split_by_shape(self, leaf: Any) -> NamedSharding:
        return NamedSharding(self.mesh, _spec(self._split_axis(leaf)))

    @property
    def devices(self) -> str:
        """A description of the devices, which decide the order of sums over devices."""
        sizes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        kind = self.mesh.devices.flat[0].device_kind
        processes = len({device.process_index for device in self.mesh.devices.flat})
        return f"{kind}, {sizes}" + (f", in {processes} processes" if processes > 1 else "")

    def describe(self, state: Any) -> Any:
        """Returns the shapes, dtypes and shardings of a state between steps."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            state,
            self.split(state),
        )

    def put(self, tree: Any, shardings: Any) -> Any:
        """Places arrays; `shardings` is one sharding, or a pytree of shardings."""
        if isinstance(shardings, NamedSharding):
            return jax.tree.map(lambda leaf: place(leaf, shardings), tree)
        return jax.tree.map(place, tree, shardings)

    def target(self, model: Model) -> Model:
        """Places the target, without kernels; networks other than `TransformerLM` are on every device."""
        if self.mesh.size == 1 and sharding.mesh_of(model.params) is None:
            return model
        return sharding.place_model(model, self.mesh, spread=True)

    # Inside a program.

    def collect_target(self, lm: LanguageModel, params: Params) -> Params:
        """Returns the target's parameters as its layers read them."""
        if self.mesh.shape[DATA] == 1 or not isinstance(lm, TransformerLM):
            return params
        return sharding.collect(params, self.mesh)

    def collect_heads(self, params: Params) -> Params:
        """Returns parameters that are split by shape as an evaluation reads them: whole."""
        return params if self.mesh.size == 1 else lax.with_sharding_constraint(params, self.whole)

    def holds_gradients(self, params: Any) -> bool:
        """Returns whether each device holds the whole gradient of its own rows in a step; see `differentiate`."""
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        return self.mesh.size > 1 and size <= MAX_WHOLE_ELEMENTS

    def settings_of_a_device(self, settings: TrainSettings, params: Any) -> TrainSettings:
        """Returns the settings of the loss in `differentiate`, of a device that has no rows but its own."""
        return dataclasses.replace(settings, mesh="") if self.holds_gradients(params) else settings

    def differentiate(
        self, loss: Callable[..., Any], params: Any, dtypes: Any, rows: Any, constants: Any
    ) -> tuple[Any, Any]:
        """Returns the value and the gradient of a loss that is a sum over rows.

        Each device computes the loss of its own rows. It collects each parameter once, and the devices add up its
        gradient once, in float32, so that each device receives its part of the sum. XLA's own partitioner would add up
        the gradient of each product of a matrix; heads that guess several tokens multiply by it several times. It is
        left to XLA if the gradient of a device's own rows would take too much memory (`holds_gradients`).

        Args:
            loss: a function from whole parameters, rows and constants to a value and other sums over rows.
            params: parameters that are split by shape.
            dtypes: for each parameter, the dtype that `loss` reads.
            rows: arrays `[B, ...]`.
            constants: arrays that every device holds.

        Returns:
            The value and the other sums, and the gradient, which is split like the parameters.
        """
        if self.mesh.size == 1:
            return differentiate(loss, params, dtypes, rows, constants)
        if not self.holds_gradients(params):

            def loss_of_parts(params: Any, rows: Any, constants: Any) -> Any:
                return loss(jax.tree.map(self._collect_in_xla, params), rows, constants)

            return differentiate(loss_of_parts, params, dtypes, rows, constants)
        axes = jax.tree.map(self._split_axis, params)
        specs = jax.tree.map(_spec, axes)

        def compute_locally(params: Any, rows: Any, constants: Any) -> tuple[Any, Any]:
            def local_loss(params: Any) -> tuple[Any, Any]:
                whole = jax.tree.map(functools.partial(_collect, self.mesh.shape[MODEL]), axes, params, dtypes)
                return loss(whole, rows, constants)

            values, gradients = jax.value_and_grad(local_loss, has_aux=True)(params)
            return lax.psum(values, DATA), gradients

        mapped = jax.shard_map(
            compute_locally, mesh=self.mesh, in_specs=(specs, P(DATA), P()), out_specs=(P(), specs), check_vma=False
        )
        return mapped(params, rows, constants)

    def _collect_in_xla(self, leaf: jax.Array) -> jax.Array:
        split = self._split_by_shape(leaf)
        return leaf if split == self.whole else _collect_and_split(self.whole, split, leaf)

    def keep(self, tree: Any) -> Any:
        """Returns heads, gradients or a whole state as they lie between steps."""
        if self.mesh.size == 1:
            return tree
        return jax.tree.map(lambda leaf: lax.with_sharding_constraint(leaf, self._split_by_shape(leaf)), tree)

    def keep_rows(self, tree: Any) -> Any:
        """Returns rows `[B, ...]` split over "data"."""
        return tree if self.mesh.size == 1 else lax.with_sharding_constraint(tree, self.rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _collect_and_split(whole: NamedSharding, split: NamedSharding, leaf: jax.Array) -> jax.Array:
    """Returns an array with one sharding, whose gradient has another.

    Without the second constraint, each device would hold the sum of all devices' gradients, and not its part of it.
    """
    return lax.with_sharding_constraint(leaf, whole)


def _forward(whole: NamedSharding, split: NamedSharding, leaf: jax.Array) -> tuple[jax.Array, None]:
    return lax.with_sharding_constraint(leaf, whole), None


def _backward(whole: NamedSharding, split: NamedSharding, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (lax.with_sharding_constraint(gradient, split),)


_collect_and_split.defvjp(_forward, _backward)

WHOLE = -1
"""The axis of arrays that are not split. None would not be a leaf of a pytree."""


def _spec(axis: int) -> P:
    """Returns the partition of an array of which an axis is split over all devices."""
    return P() if axis == WHOLE else P(*[None] * axis, (DATA, MODEL))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 3))
def _collect(model: int, axis: int, leaf: jax.Array, dtype: Any) -> jax.Array:
    """Returns the whole array of which a device has a part. The devices add up its gradient in float32.

    Devices of the axis "model", of which there are `model`, have the same rows.
    """
    leaf = leaf.astype(dtype)
    return leaf if axis == WHOLE else lax.all_gather(leaf, (DATA, MODEL), axis=axis, tiled=True)


def _collect_forward(model: int, axis: int, leaf: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    return _collect(model, axis, leaf, dtype), jnp.zeros(0, leaf.dtype)


def _add_up(model: int, axis: int, dtype: Any, empty: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    total = gradient.astype(jnp.float32)
    if axis == WHOLE:
        total = lax.psum(total, DATA)
    else:
        total = lax.psum_scatter(total, (DATA, MODEL), scatter_dimension=axis, tiled=True) / model
    return (total.astype(empty.dtype),)


_collect.defvjp(_collect_forward, _add_up)
