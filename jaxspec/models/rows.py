"""Operations on rows that a matrix product may include: RMSNorm or the gate of an MLP before it, and sums after it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxspec.kernels import calls
from jaxspec.models.config import GATE_LIMIT, GATE_SLOPE


def rms_norm(
    x: Float[Array, "*b E"], scale: Float[Array, "E"], epsilon: float, kernels: bool = False
) -> Float[Array, "*b E"]:
    """Applies RMSNorm over the last axis; with `kernels`, a row's bits do not depend on the other rows."""

    def plain(x: Array, scale: Array) -> Array:
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * lax.rsqrt(variance + epsilon) * scale.astype(jnp.float32)

    if not kernels:
        return plain(x, scale)
    kernel = functools.partial(calls.rms_norm_with_kernel, epsilon=epsilon)
    return lax.platform_dependent(x, scale, cpu=kernel, default=plain)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Norm:
    """RMSNorm; see `rms_norm`."""

    scale: Any
    epsilon: float = dataclasses.field(metadata={"static": True})
    kernels: bool = dataclasses.field(default=False, metadata={"static": True})
    name: ClassVar[str] = "norm"  # in `jaxspec.kernels.calls.PREPARATIONS`

    def __call__(self, x: Float[Array, "*b E"]) -> Float[Array, "*b E"]:
        return rms_norm(x, self.scale, self.epsilon, self.kernels)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gate:
    """The gate of an MLP: the first half of a row through an activation, times the second half.

    "clamped_silu" is the gate of gpt-oss (arXiv:2508.10925): the first half is at most `GATE_LIMIT` and goes through
    x * sigmoid(`GATE_SLOPE` * x). The second half is clamped to -`GATE_LIMIT` to `GATE_LIMIT` and gets 1 added. The CPU
    kernels do not have this gate.

    Attributes:
        name: "silu" (SwiGLU) or "gelu_tanh" (GeGLU), also in `jaxspec.kernels.calls.PREPARATIONS`; or "clamped_silu".
        shards: the number of parts of a row; each part has two halves of its own.
    """

    name: str = dataclasses.field(metadata={"static": True})
    shards: int = dataclasses.field(default=1, metadata={"static": True})
    scale: ClassVar[None] = None
    epsilon: ClassVar[float] = 0.0

    def __call__(self, both: Float[Array, "*b I2"]) -> Float[Array, "*b I"]:
        gate, up = jnp.split(both.reshape(*both.shape[:-1], self.shards, -1), 2, axis=-1)
        return self.of_halves(gate, up).reshape(*both.shape[:-1], -1)

    def of_halves(self, gate: Float[Array, "*b I"], up: Float[Array, "*b I"]) -> Float[Array, "*b I"]:
        """Returns the gated units of rows whose halves are separate."""
        if self.name == "clamped_silu":
            gate, up = jnp.minimum(gate, GATE_LIMIT), jnp.clip(up, -GATE_LIMIT, GATE_LIMIT) + 1
            gate = gate * jax.nn.sigmoid(GATE_SLOPE * gate)
        else:
            gate = jax.nn.silu(gate) if self.name == "silu" else jax.nn.gelu(gate, approximate=True)
        return gate * up


class Linear(NamedTuple):
    """A linear layer: a weight matrix `[I, O]`, or a `Matrix` `[O, I]`, and a bias `[O]` or None."""

    weight: Any
    bias: Any = None

    @classmethod
    def of(cls, weight: Any, bias: Any) -> "Linear":
        """Reads the values of NNX parameters."""
        return cls(weight[...], None if bias is None else bias[...])


class Fused(NamedTuple):
    """Operations that a matrix product includes: it first prepares the rows, and then adds to the outputs.

    Attributes:
        before: the operation that is applied to the rows.
        bias: the bias `[O]`, which is added to every row's outputs.
        residual: the residual stream `[N, O]`, which is added last.
    """

    before: Norm | Gate | None = None
    bias: Any = None
    residual: Any = None

    def around(self, multiply: Callable[[Array], Array], x: Array) -> Array:
        """Returns the result of `multiply`, a product by XLA, with these operations before and after it."""
        out = multiply(x if self.before is None else self.before(x))
        out = out if self.bias is None else out + self.bias
        return out if self.residual is None else self.residual + out

    def options(self, outputs: slice = slice(None)) -> dict[str, Any]:
        """Returns the arguments of `jaxspec.kernels.calls.multiply` for some of the outputs."""
        options = {
            "bias": None if self.bias is None else self.bias[outputs],
            "residual": None if self.residual is None else self.residual[:, outputs],
        }
        if self.before is not None:
            options |= {"preparation": self.before.name, "norm": self.before.scale, "epsilon": self.before.epsilon}
        return options


NO_FUSION = Fused()
"""No operations besides the product."""
