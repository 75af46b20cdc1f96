"""What a decoder-only transformer of the Llama family looks like, as data."""

import dataclasses
import math

from jaxspec.errors import InvalidConfig


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one model; hashable, so that it can be a static argument.

    Attributes:
        vocab_size: rows of the embedding and of the head (V).
        hidden_size: width of the residual stream, and of the features (E).
        intermediate_size: width of the SwiGLU (F).
        num_layers: transformer blocks (L).
        num_heads: query heads; a multiple of `num_kv_heads`.
        num_kv_heads: key/value heads (H).
        head_dim: width of a head (K), even, for RoPE.
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of every RMSNorm.
        tie_embeddings: the head is the embedding.
        max_position: the longest text the model was made for, in tokens.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    max_position: int = 2048

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is bool:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InvalidConfig(f"{field.name} must be a number, got {value!r}")
            if not math.isfinite(value) or value <= 0:
                raise InvalidConfig(f"{field.name} must be positive and finite, got {value!r}")
            if field.type is int and not isinstance(value, int):
                raise InvalidConfig(f"{field.name} must be a whole number, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise InvalidConfig(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise InvalidConfig(f"head_dim must be even for rotary positions, got {self.head_dim}")

    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """The name and shape of every parameter, in this library's layout.

        Matrices stand [in, out], except `embed` and `head`, which stand [V, E]. Query, key and value
        projections are one matrix (`qkv`, in that order), gate and up projections another (`gate_up`).
        Names are dotted paths into the parameter tree: `layers.3.qkv`.
        """
        e, f, k = self.hidden_size, self.intermediate_size, self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, e)}
        for i in range(self.num_layers):
            shapes |= {
                f"layers.{i}.attn_norm": (e,),
                f"layers.{i}.qkv": (e, (self.num_heads + 2 * self.num_kv_heads) * k),
                f"layers.{i}.out": (self.num_heads * k, e),
                f"layers.{i}.mlp_norm": (e,),
                f"layers.{i}.gate_up": (e, 2 * f),
                f"layers.{i}.down": (f, e),
            }
        shapes["norm"] = (e,)
        if not self.tie_embeddings:
            shapes["head"] = (self.vocab_size, e)
        return shapes
