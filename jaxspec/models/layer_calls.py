"""The calls of a transformer's layer: one list, which every way to run a layer implements.

A layer is six calls: the projection to heads, the heads' rotation, attention, the projection out of the heads, the
gated MLP, and the projection out of it. A mixture of experts is one call in place of the last two. Norms, gates, biases
and the residual stream belong to the calls beside them.
`jaxspec.models.transformer_block.TransformerBlock` makes these calls and does not know what runs them:

- `FusedCalls`: XLA's operations and, in programs for a CPU, the C++ kernels. The same traced program may be compiled
  for a CPU or for another platform, so both are one implementation, which XLA divides by platform.
- `jaxspec.models.layer_calls_pallas.PallasCalls`: one Pallas kernel for each call, on a GPU.
- `jaxspec.models.layer_calls_tpu.TpuCalls`: one Pallas kernel for each call, on a TPU.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxspec.backend.layout import row_major
from jaxspec.core.records import KV, Cache
from jaxspec.models.attention import attend_split
from jaxspec.models.config import Experts
from jaxspec.models.execution import Execution
from jaxspec.models.experts import ExpertParams, feed
from jaxspec.models.layers import look_up, matmul, split_heads
from jaxspec.models.packed import Matrix
from jaxspec.models.rows import Fused, Gate, Linear, Norm
from jaxspec.models.split_table import SplitTable


class LayerCalls(Protocol):
    """The list of calls. What stands between two calls (`Any`) is the implementation's own.

    Letters: B rows, T tokens of a window, E the width of the residual stream, H key/value heads, G query heads per
    key/value head, K the width of a head, W the tokens that attention sees in the window.
    """

    def embed(self, table: Array | Matrix | SplitTable, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        """Returns the rows of a table, in float32."""
        ...

    def begin(self, x: Float[Array, "B T E"], norm: Norm | None) -> Any:
        """Returns the input of the first call after a norm: the residual stream, and what the norm needs of it."""
        ...

    def residual(self, read: Any) -> Float[Array, "B T E"]:
        """Returns the residual stream of an input."""
        ...

    def project(self, read: Any, layer: Linear) -> Any:
        """Norms an input and applies a linear layer, for `split_heads`."""
        ...

    def split_heads(
        self,
        projected: Any,
        rotation: tuple[Array, Array],
        shared: int,
        width: int,
        dtype: DTypeLike,
        norms: Sequence[Norm | None],
    ) -> Any:
        """Returns the heads of a window, for `attend`; see `jaxspec.models.layers.split_heads`."""
        ...

    def attend(
        self,
        heads: Any,
        cache: Cache,
        layer: int,
        past: KV | None,
        mask: Array,
        paths: Array | None,
        scale: float,
        first_seen: Array | None,
        sinks: Array | None = None,
    ) -> tuple[Any, KV]:
        """Computes attention; see `jaxspec.models.attention.attend`.

        Args:
            heads: what `split_heads` returned.
            past: keys and values `[B, H, P, K]` of earlier tokens of the window; None for none.
            cache, layer, mask, paths, scale, first_seen, sinks: see `jaxspec.models.attention.attend`.

        Returns:
            The outputs of all heads, for `add`, and the keys and values of the window `[B, H, T, K]`.
        """
        ...

    def gate(self, read: Any, layer: Linear, activation: str) -> Any:
        """Norms an input and applies the first half of a gated MLP, for `add`."""
        ...

    def add(self, read: Any, inner: Any, layer: Linear, norm: Norm | None, following: Norm | None) -> Any:
        """Adds the output of a sublayer to the residual stream of an input.

        Args:
            read: the input of the sublayer.
            inner: what `attend` or `gate` returned, or rows `[B, T, J]`.
            layer: the last linear layer of the sublayer.
            norm: the norm of its outputs; None for no norm.
            following: the norm that the next call begins with; None if no call follows.

        Returns:
            The input of the next call.
        """
        ...

    def experts(
        self,
        read: Any,
        params: ExpertParams,
        sizes: Experts,
        activation: str,
        norm: Norm | None,
        following: Norm | None,
    ) -> Any:
        """Norms an input, and adds the output of a mixture of experts to its residual stream.

        Args:
            read: the input.
            params: the parameters of the layer.
            sizes: the sizes of the layer.
            activation: the activation of the experts.
            norm: the norm of the outputs; None for no norm.
            following: the norm that the next call begins with; None if no call follows.

        Returns:
            The input of the next call.
        """
        ...

    def finish(self, read: Any, norm: Norm) -> Float[Array, "B T E"]:
        """Applies the last norm of the network to the residual stream of an input."""
        ...

    def logits(self, features: Float[Array, "B T E"], table: Array | Matrix) -> Float[Array, "B T V"]:
        """Multiplies features with the rows of a table."""
        ...


class FusedInput(NamedTuple):
    """The residual stream `[B, T, E]`, and the norm that the next product applies to it."""

    x: Any
    norm: Norm | None


class FusedRows(NamedTuple):
    """Rows `[B, T, J]`, and the operation that the next product applies to them."""

    x: Any
    before: Gate


@dataclasses.dataclass(frozen=True)
class FusedCalls:
    """The calls as products of XLA or of the C++ kernels, which include the operations on rows beside them."""

    execution: Execution

    def embed(self, table: Array | Matrix | SplitTable, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        return look_up(table, tokens)

    def begin(self, x: Float[Array, "B T E"], norm: Norm | None) -> FusedInput:
        return FusedInput(x, norm)

    def residual(self, read: FusedInput) -> Float[Array, "B T E"]:
        return read.x

    def project(self, read: FusedInput, layer: Linear) -> Float[Array, "B T J"]:
        return row_major(matmul(read.x, layer.weight, fused=Fused(read.norm, layer.bias)))

    def split_heads(
        self,
        projected: Float[Array, "B T J"],
        rotation: tuple[Array, Array],
        shared: int,
        width: int,
        dtype: DTypeLike,
        norms: Sequence[Norm | None],
    ) -> tuple[Float[Array, "B H G T K"], KV]:
        return split_heads(projected, rotation, shared, width, dtype, norms, self.execution)

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
        return attend_split(heads, cache, layer, past, mask, paths, scale, first_seen, self.execution, sinks)

    def gate(self, read: FusedInput, layer: Linear, activation: str) -> FusedRows:
        both = matmul(read.x, layer.weight, fused=Fused(read.norm, layer.bias))
        return FusedRows(both, Gate(activation, self.execution.shards))

    def add(
        self, read: FusedInput, inner: FusedRows | Array, layer: Linear, norm: Norm | None, following: Norm | None
    ) -> FusedInput:
        return FusedInput(self.leave(inner, layer, norm, read.x), following)

    def experts(
        self,
        read: FusedInput,
        params: ExpertParams,
        sizes: Experts,
        activation: str,
        norm: Norm | None,
        following: Norm | None,
    ) -> FusedInput:
        return FusedInput(self.feed_experts(read, params, sizes, activation, norm, read.x), following)

    def finish(self, read: FusedInput, norm: Norm) -> Float[Array, "B T E"]:
        # With the barriers, XLA compiles this norm apart from the taps, which only some drafters read.
        return lax.optimization_barrier(norm(lax.optimization_barrier(read.x)))

    def logits(self, features: Float[Array, "B T E"], table: Array | Matrix) -> Float[Array, "B T V"]:
        return matmul(features, table, transposed=True)

    def leave(
        self,
        inner: FusedRows | Float[Array, "B T J"],
        layer: Linear,
        norm: Norm | None,
        residual: Float[Array, "B T E"] | None = None,
    ) -> Float[Array, "B T E"]:
        """Returns the output of a sublayer, as `add` computes it, plus the residual stream if it is given."""
        x, before = inner if isinstance(inner, FusedRows) else (inner, None)
        if norm is None:
            return matmul(x, layer.weight, fused=Fused(before, layer.bias, residual))
        out = norm(matmul(x, layer.weight, fused=Fused(before, layer.bias)))
        return out if residual is None else residual + out

    def feed_experts(
        self,
        read: FusedInput,
        params: ExpertParams,
        sizes: Experts,
        activation: str,
        norm: Norm | None,
        residual: Float[Array, "B T E"] | None = None,
    ) -> Float[Array, "B T E"]:
        """Returns the output of a mixture of experts, plus the residual stream if it is given."""
        rows = read.x if read.norm is None else read.norm(read.x)
        out = feed(rows, params, sizes, activation, self.execution.shards)
        out = out if norm is None else norm(out)
        return out if residual is None else residual + out


def calls_of(execution: Execution) -> LayerCalls:
    """Returns the calls that run a layer."""
    if execution.products == "pallas" and execution.platform == "tpu":
        from jaxspec.models.layer_calls_tpu import TpuCalls  # Pallas takes a third of a second to import

        return TpuCalls(execution)
    if execution.products == "pallas":
        from jaxspec.models.layer_calls_pallas import PallasCalls

        return PallasCalls(execution)
    return FusedCalls(execution)
