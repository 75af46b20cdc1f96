"""The calls of a transformer's layer as Pallas kernels for a TPU, whose rows do not depend on other rows.

See `jaxspec.models.layer_calls` for the list, and `jaxspec.models.products_tpu` for the kernels and their order of
sums. Rows stay padded and side by side (`[M, E]`) from the embedding to the last norm.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxspec.core.records import KV, Cache
from jaxspec.errors import InvalidConfig
from jaxspec.models import products_tpu as products
from jaxspec.models import shared_layers
from jaxspec.models.attention import attend_split
from jaxspec.models.config import Experts
from jaxspec.models.execution import Execution
from jaxspec.models.experts import NO_EXPERTS, ExpertParams
from jaxspec.models.layer_calls_pallas import pad_rows, split_rows
from jaxspec.models.packed import Matrix
from jaxspec.models.products_pallas import stored_values
from jaxspec.models.rows import Linear, Norm
from jaxspec.models.split_table import SplitTable


class TpuInput(NamedTuple):
    """The residual stream, padded rows `[M, E]`, of B rows and T tokens, and the norm that the next product applies."""

    x: Float[Array, "M E"]
    norm: Norm | None
    batch: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class TpuCalls:
    """The calls as Pallas kernels."""

    execution: Execution

    def embed(self, table: Array | Matrix | SplitTable, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        return shared_layers.look_up_share(table, tokens, self.execution.shards)

    def begin(self, x: Float[Array, "B T E"], norm: Norm | None) -> TpuInput:
        return TpuInput(pad_rows(x), norm, *x.shape[:2])

    def residual(self, read: TpuInput) -> Float[Array, "B T E"]:
        return split_rows(read.x, read.batch, read.tokens)

    def project(self, read: TpuInput, layer: Linear) -> Float[Array, "M J"]:
        return products.multiply(read.x, layer.weight, read.norm, bias=layer.bias)

    def split_heads(
        self,
        projected: Float[Array, "M J"],
        rotation: tuple[Array, Array],
        shared: int,
        width: int,
        dtype: DTypeLike,
        norms: Sequence[Norm | None],
    ) -> tuple[Float[Array, "B H G T K"], KV]:
        (batch, _, tokens, _), shared = rotation[0].shape, shared // self.execution.shards
        rotated = products.rotate_heads(projected, rotation, shared, width, dtype, tuple(norms))
        heads = split_rows(rotated, batch, tokens).reshape(batch, tokens, -1, width).swapaxes(1, 2)
        queries, new = heads[:, : -2 * shared], KV(heads[:, -2 * shared : -shared], heads[:, -shared:])
        return queries.reshape(batch, shared, -1, tokens, width), new

    def attend(
        self,
        heads: tuple[Float[Array, "B H G T K"], KV],
        cache: Cache,
        layer: int,
        past: KV | None,
        mask: Array,
        paths: Array | None,
        scale: float,
        first_seen: Array | None,
        sinks: Array | None = None,
    ) -> tuple[Float[Array, "B T J"], KV]:
        return attend_split(heads, cache, layer, past, mask, paths, scale, first_seen, self.execution)

    def gate(self, read: TpuInput, layer: Linear, activation: str) -> Float[Array, "M F"]:
        return products.multiply_gated(read.x, layer.weight, activation, read.norm, bias=layer.bias)

    def add(self, read: TpuInput, inner: Array, layer: Linear, norm: Norm | None, following: Norm | None) -> TpuInput:
        rows = inner if inner.ndim == 2 else pad_rows(inner)
        if norm is None:
            return read._replace(x=self._multiply_add(rows, layer, read.x), norm=following)
        out = products.normalize(self._multiply_add(rows, layer, None), norm)
        return read._replace(x=read.x + out, norm=following)

    def _multiply_add(self, rows: Array, layer: Linear, residual: Array | None) -> Float[Array, "M E"]:
        """Computes `products.multiply_add`, whose inputs devices may share."""
        shards = self.execution.shards
        if shards == 1:
            return products.multiply_add(rows, layer.weight, residual, bias=layer.bias)
        segments = products.segment_count(rows.shape[1] * shards) // shards
        shares = shared_layers.gather(products.multiply_segments(rows, layer.weight, segments))
        output_scale = stored_values(layer.weight)[1]
        return products.add_shares(shares, residual, output_scale=output_scale, bias=layer.bias)

    def experts(
        self,
        read: TpuInput,
        params: ExpertParams,
        sizes: Experts,
        activation: str,
        norm: Norm | None,
        following: Norm | None,
    ) -> TpuInput:
        raise InvalidConfig(NO_EXPERTS)

    def finish(self, read: TpuInput, norm: Norm) -> Float[Array, "B T E"]:
        return split_rows(products.normalize(read.x, norm), read.batch, read.tokens)

    def logits(self, features: Float[Array, "B T E"], table: Array | Matrix) -> Float[Array, "B T V"]:
        batch, tokens, _ = features.shape
        logits = split_rows(products.multiply(pad_rows(features), table, transposed=True), batch, tokens)
        return shared_layers.gather_columns(logits, self.execution.shards)
