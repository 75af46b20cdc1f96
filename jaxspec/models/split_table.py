"""An embedding table that several devices share in training."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.core.mesh import DATA
from jaxspec.models.quantized import Quantized


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitTable:
    """An embedding table inside a program, whose columns are split over the axis "data", as rows of tokens are.

    Each device reads its columns of the embeddings of all tokens, and the devices exchange them for all columns of the
    embeddings of their own tokens. XLA would collect the whole table, or the embeddings of all tokens on every device.

    Attributes:
        values: the table `[V, E]`, an array or a `Quantized`.
        mesh: the devices.
    """

    values: Any
    mesh: Mesh = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, tokens: Any) -> Any:
        if tokens is Ellipsis:
            return self

        def on(spec: P) -> NamedSharding:
            return NamedSharding(self.mesh, spec)

        rows: Any = self.values[jax.lax.with_sharding_constraint(tokens, on(P()))]
        if isinstance(rows, Quantized):
            rows = rows.astype(jnp.float32)
        if rows.shape[-1] % self.mesh.shape[DATA]:  # such columns are not split
            return rows
        columns = jax.lax.with_sharding_constraint(rows, on(P(None, None, DATA)))
        return jax.lax.with_sharding_constraint(columns, on(P(DATA)))
