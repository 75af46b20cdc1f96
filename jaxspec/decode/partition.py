"""Decoding on a mesh of devices.

`shard_map` over "data" goes around the whole of a method, loop included: every group of devices runs its own loop,
stops on its own, and never waits for another group. Over "model" the same program is partitioned by the compiler,
from the shardings of the parameters (Xu et al. 2021, arXiv:2105.04663).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.core.mesh import DATA, groups, place
from jaxspec.decode.state import State, Weights


@dataclasses.dataclass(frozen=True)
class Partition:
    """How a decoder's arguments lie on a mesh: `Weights` as `shard` lays them, rows over "data", scalars everywhere.

    Attributes:
        mesh: the devices.
        axes: of a state's rows, as `Decoder.row_axes` gives them.
    """

    mesh: Mesh
    axes: State

    def put(self, arguments: tuple) -> tuple:
        """The arguments on the mesh. States are there already."""

        def of(argument: Any, specs: Any) -> Any:
            if isinstance(argument, (Weights, State)):
                return argument
            return jax.tree.map(lambda leaf, spec: place(leaf, NamedSharding(self.mesh, spec)), argument, specs)

        return tuple(map(of, arguments, self.specs(arguments)))

    def over(self, method: Callable, arguments: tuple) -> Callable:
        """A function whose result is a `State`, run by every group of devices on its own rows."""
        return jax.shard_map(
            method,
            mesh=self.mesh,
            in_specs=self.specs(arguments),
            out_specs=self._of_state(),
            axis_names={DATA},
            check_vma=False,
        )

    def specs(self, arguments: tuple) -> tuple:
        """How each argument is spread, by `shard_map`."""

        def of(argument: Any) -> Any:
            if isinstance(argument, Weights):
                return jax.tree.map(lambda _: P(), argument)
            if isinstance(argument, State):
                return self._of_state()
            return jax.tree.map(lambda leaf: P(DATA) if jnp.ndim(leaf) and groups(self.mesh) > 1 else P(), argument)

        return tuple(map(of, arguments))

    def _of_state(self) -> State:
        alone = groups(self.mesh) == 1
        return jax.tree.map(lambda axis: P() if alone or axis < 0 else P(*[None] * axis, DATA), self.axes)
