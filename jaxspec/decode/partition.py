"""Decoding on a mesh of devices.

`shard_map` over the axis "data" encloses a whole function, loop included: every group of devices runs its own loop and
never waits for another group. Over the axis "model" the compiler partitions the program by the shardings of the
parameters (Xu et al. 2021, arXiv:2105.04663).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.core.mesh import DATA, count_groups, manual_axes, place
from jaxspec.core.processor import map_rows
from jaxspec.decode.state import State, Weights


@dataclasses.dataclass(frozen=True)
class Partition:
    """The shardings of a decoder's arguments: `Weights` as `shard` placed them, rows over "data", scalars replicated.

    Attributes:
        mesh: the devices.
        axes: the axes of a state's rows, as `lifecycle.row_axes` returns them.
    """

    mesh: Mesh
    axes: State

    def put(self, arguments: tuple) -> tuple:
        """Places arguments on the mesh. Weights and states must be on the mesh already."""

        def of(argument: Any, specs: Any) -> Any:
            if isinstance(argument, (Weights, State)):
                return argument
            return jax.tree.map(lambda leaf, spec: place(leaf, NamedSharding(self.mesh, spec)), argument, specs)

        return tuple(map(of, arguments, self.specs(arguments)))

    def over(self, method: Callable, arguments: tuple) -> Callable:
        """Returns a function that every group of devices runs on its own rows; `method` returns a `State`."""
        return jax.shard_map(
            method,
            mesh=self.mesh,
            in_specs=self.specs(arguments),
            out_specs=self._of_state(),
            axis_names=manual_axes(self.mesh),
            check_vma=False,
        )

    def specs(self, arguments: tuple) -> tuple:
        """Returns the partition specs of the arguments, for `shard_map`."""

        def of(argument: Any) -> Any:
            if isinstance(argument, Weights):
                return jax.tree.map(lambda _: P(), argument)
            if isinstance(argument, State):
                return self._of_state()
            several = count_groups(self.mesh) > 1
            return map_rows(lambda leaf: P(DATA) if jnp.ndim(leaf) and several else P(), argument, shared=lambda _: P())

        return tuple(map(of, arguments))

    def _of_state(self) -> State:
        alone = count_groups(self.mesh) == 1
        return jax.tree.map(lambda axis: P() if alone or axis < 0 else P(*[None] * axis, DATA), self.axes)
