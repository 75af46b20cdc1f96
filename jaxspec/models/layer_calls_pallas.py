"""The calls of a transformer's layer as Pallas kernels for a GPU, whose rows do not depend on other rows.

See `jaxspec.models.layer_calls` for the list, and `jaxspec.models.products_pallas` for the kernels and their order of
sums. Rows stay padded and side by side (`[M, E]`) from the embedding to the last norm.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxspec.backend.layout import LANES
from jaxspec.core.records import KV, Cache
from jaxspec.errors import InvalidConfig
from jaxspec.models import attention_pieces, shared_layers
from jaxspec.models import products_pallas as products
from jaxspec.models.attention_pieces import ProjectedHeads
from jaxspec.models.config import Experts, ModelConfig
from jaxspec.models.execution import Execution
from jaxspec.models.experts import NO_EXPERTS, ExpertParams
from jaxspec.models.packed import Matrix
from jaxspec.models.products_pallas import PreparedRows, padded_rows
from jaxspec.models.rows import Linear, Norm
from jaxspec.models.split_table import SplitTable


def check_sizes(config: ModelConfig, platform: str = "gpu", shards: int = 1) -> None:
    """Raises InvalidConfig if there is no kernel for a call of a network of these sizes; the message says why.

    Args:
        config: the network's configuration.
        platform: "gpu" or "tpu".
        shards: the number of devices that share a layer.
    """
    if config.recurrent or config.out_gate:
        raise InvalidConfig("products='pallas' has no recurrent layers and no gates after attention; use 'xla'")
    if config.experts is not None:
        raise InvalidConfig(NO_EXPERTS)
    if shards > products.MAX_SEGMENTS or products.MAX_SEGMENTS % shards:
        raise InvalidConfig(f"products='pallas' splits layers over 1, 2, 4 or 8 devices, got {shards}; use 'xla'")
    on_tpu = platform == "tpu"
    unit = LANES if on_tpu else products.MIN_TILE
    sizes = {
        "hidden_size": (config.hidden_size, unit),
        "intermediate_size": (config.intermediate_size, unit * shards),
        "num_heads * head_dim": (config.num_heads * config.head_dim, unit * shards),
        "num_kv_heads * head_dim": (config.num_kv_heads * config.head_dim, unit * shards),
        "num_kv_heads": (config.num_kv_heads, shards),
        "vocab_size": (config.vocab_size, shards if on_tpu else unit * shards),
    }
    if not on_tpu and shards > 1:
        # The order in which a product sums the squares of the norm before it depends on a tile of fewer outputs.
        heads = config.num_heads + 2 * config.num_kv_heads
        sizes["the width of queries, keys and values"] = (
            heads * config.head_dim,
            products.PLAIN_TILE.outputs * shards,
        )
    where = "" if shards == 1 else f" on {shards} devices"
    for name, (size, multiple) in sizes.items():
        if size % multiple:
            raise InvalidConfig(
                f"products='pallas' needs a multiple of {multiple} for {name}{where}, got {size}; use 'xla'"
            )


class PallasInput(NamedTuple):
    """The residual stream, padded rows `[M, E]`, of B rows and T tokens, and its rows prepared for the next norm."""

    x: Float[Array, "M E"]
    prepared: PreparedRows | None
    batch: int
    tokens: int
    epsilon: float


class PallasHeads(NamedTuple):
    """The heads of a window, which attention norms and rotates.

    Attributes:
        projected: the rows of the projection, and what rotates them.
        shared: the number of key/value heads of a device.
        dtype: the dtype of rotated heads.
        epsilon: the epsilon of the norms of heads.
    """

    projected: ProjectedHeads
    shared: int
    dtype: DTypeLike
    epsilon: float


@dataclasses.dataclass(frozen=True)
class PallasCalls:
    """The calls as Pallas kernels."""

    execution: Execution

    def embed(self, table: Array | Matrix | SplitTable, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        return shared_layers.look_up_share(table, tokens, self.execution.shards)

    def begin(self, x: Float[Array, "B T E"], norm: Norm | None) -> PallasInput:
        batch, tokens, _ = x.shape
        return self._prepared(pad_rows(x), norm, batch, tokens)

    def residual(self, read: PallasInput) -> Float[Array, "B T E"]:
        return split_rows(read.x, read.batch, read.tokens)

    def project(self, read: PallasInput, layer: Linear) -> Float[Array, "M J"]:
        rows = read.x if read.prepared is None else read.prepared
        return products.multiply(rows, layer.weight, epsilon=read.epsilon, bias=layer.bias)

    def split_heads(
        self,
        projected: Float[Array, "M J"],
        rotation: tuple[Array, Array],
        shared: int,
        width: int,
        dtype: DTypeLike,
        norms: Sequence[Norm | None],
    ) -> PallasHeads:
        query, key = (None if norm is None else norm.scale for norm in norms)
        epsilon = max((norm.epsilon for norm in norms if norm is not None), default=0.0)
        heads = ProjectedHeads(projected, rotation, (query, key))
        return PallasHeads(heads, shared // self.execution.shards, dtype, epsilon)

    def attend(
        self,
        heads: PallasHeads,
        cache: Cache,
        layer: int,
        past: KV | None,
        mask: Array,
        paths: Array | None,
        scale: float,
        first_seen: Array | None,
        sinks: Array | None = None,
    ) -> tuple[Float[Array, "M J"], KV]:
        number, rows = jnp.full(1, layer, jnp.int32), padded_rows(mask.shape[0] * mask.shape[1])
        return attention_pieces.attend_rows(
            heads.projected, cache.stores, number, cache.length, past, mask, scale, first_seen,
            heads.shared, heads.dtype, rows, heads.epsilon, piece=attention_pieces.PIECE_SLOTS,
        )  # fmt: skip

    def gate(self, read: PallasInput, layer: Linear, activation: str) -> Float[Array, "M F"]:
        assert read.prepared is not None, "an MLP without a norm in front"
        return products.multiply_gated(read.prepared, layer.weight, activation, epsilon=read.epsilon, bias=layer.bias)

    def add(
        self, read: PallasInput, inner: Array, layer: Linear, norm: Norm | None, following: Norm | None
    ) -> PallasInput:
        rows = inner if inner.ndim == 2 else pad_rows(inner)
        if norm is None:
            scale, epsilon = (None, 0.0) if following is None else (following.scale, following.epsilon)
            x, prepared = self._multiply_add(rows, layer, read.x, scale)
            return PallasInput(x, prepared, read.batch, read.tokens, epsilon)
        out, _ = self._multiply_add(rows, layer, None, None)
        x = read.x + products.normalize(out, norm.scale, norm.epsilon)
        return self._prepared(x, following, read.batch, read.tokens)

    def experts(
        self,
        read: PallasInput,
        params: ExpertParams,
        sizes: Experts,
        activation: str,
        norm: Norm | None,
        following: Norm | None,
    ) -> PallasInput:
        raise InvalidConfig(NO_EXPERTS)

    def finish(self, read: PallasInput, norm: Norm) -> Float[Array, "B T E"]:
        features = products.normalize(read.x, norm.scale, norm.epsilon, read.batch * read.tokens)
        return split_rows(features, read.batch, read.tokens)

    def logits(self, features: Float[Array, "B T E"], table: Array | Matrix) -> Float[Array, "B T V"]:
        batch, tokens, _ = features.shape
        logits = products.multiply(pad_rows(features), table, transposed=True, count=batch * tokens)
        return shared_layers.gather_columns(split_rows(logits, batch, tokens), self.execution.shards)

    def _multiply_add(
        self, rows: Array, layer: Linear, residual: Array | None, scale: Array | None
    ) -> tuple[Float[Array, "M E"], PreparedRows | None]:
        """Computes `products.multiply_add`, whose inputs devices may share."""
        shards = self.execution.shards
        if shards == 1:
            return products.multiply_add(rows, layer.weight, residual, scale, bias=layer.bias)
        segments = products.segment_count(rows.shape[1] * shards) // shards
        shares = shared_layers.gather(products.multiply_segments(rows, layer.weight, segments))
        output_scale = products.stored_values(layer.weight)[1]
        return products.add_shares(shares, residual, scale, output_scale=output_scale, bias=layer.bias)

    def _prepared(self, x: Float[Array, "M E"], norm: Norm | None, batch: int, tokens: int) -> PallasInput:
        if norm is None:
            return PallasInput(x, None, batch, tokens, 0.0)
        return PallasInput(x, products.prepare(x, norm.scale), batch, tokens, norm.epsilon)


def pad_rows(x: Float[Array, "B T E"]) -> Float[Array, "M E"]:
    """Returns the tokens of all rows side by side, padded."""
    count = x.shape[0] * x.shape[1]
    return jnp.pad(x.reshape(count, -1), ((0, padded_rows(count) - count), (0, 0)))


def split_rows(rows: Float[Array, "M E"], batch: int, tokens: int) -> Float[Array, "B T E"]:
    return rows[: batch * tokens].reshape(batch, tokens, -1)
