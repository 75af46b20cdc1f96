"""The configuration of a decoder-only transformer of the Llama family: sizes, constants, and parameter shapes."""

import dataclasses

from jaxspec.core.settings import check_fields, setting
from jaxspec.errors import InvalidConfig
from jaxspec.models.rope import Rope

ACTIVATIONS = ("silu", "gelu_tanh")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one model. It is hashable, so that it can be a static argument.

    Attributes:
        vocab_size: V, the number of rows of the embedding and of the output head.
        hidden_size: E, the width of the residual stream and of the features.
        intermediate_size: F, the width of the gated MLP.
        num_layers: L, the number of transformer blocks.
        num_heads: the number of query heads; a multiple of `num_kv_heads`.
        num_kv_heads: H, the number of key/value heads.
        head_dim: K, the width of a head, which is even because of rotary embeddings.
        norm_eps: the epsilon of every RMSNorm.
        tie_embeddings: whether the output head is the embedding.
        max_position: the context length in tokens.
        rope: the rotary position embeddings.
        window: the number of tokens that a token sees in a layer with sliding-window attention, including the token
            itself; None if there is no such layer.
        windowed: for each layer, whether its attention is windowed; empty for all layers if `window` is set.
        window_rope: the rotary position embeddings of the windowed layers; None if they are the same as in the other
            layers.
        activation: the activation of the gated MLP: "silu" (SwiGLU) or "gelu_tanh" (GeGLU).
        embed_scale: the factor that is applied to the embeddings.
        query_scale: the factor that is applied to the attention scores; None for `head_dim ** -0.5`.
        qkv_bias, out_bias, mlp_bias: whether these projections have biases.
        qk_norm: whether an RMSNorm is applied to each head's queries and keys.
        post_norms: whether an RMSNorm is applied to the outputs of attention and MLP, before the residual addition.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    max_position: int = 2048
    rope: Rope = dataclasses.field(default_factory=Rope)
    window: int | None = None
    windowed: tuple[bool, ...] = ()
    window_rope: Rope | None = None
    activation: str = setting("silu", ACTIVATIONS)
    embed_scale: float = 1.0
    query_scale: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False

    def __post_init__(self):
        check_fields(self)
        if self.num_heads % self.num_kv_heads:
            raise InvalidConfig(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise InvalidConfig(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.windowed and (self.window is None or len(self.windowed) != self.num_layers):
            raise InvalidConfig(
                f"windowed must have one entry for each of the {self.num_layers} layers and needs a window, "
                f"got {len(self.windowed)} entries and window {self.window}"
            )
        for rope in (self.rope, self.window_rope):
            if rope is not None:
                rope.check(self.head_dim)

    def window_of(self, layer: int) -> int | None:
        """Returns how many tokens this layer's attention sees, including the token itself; None for all."""
        return self.window if not self.windowed or self.windowed[layer] else None

    def rope_of(self, layer: int) -> Rope:
        """Returns the rotary position embeddings of this layer."""
        return self.rope if self.window_rope is None or self.window_of(layer) is None else self.window_rope

    def block_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the name and shape of every parameter of a block, such as `qkv`; see `param_shapes`."""
        e, f, k = self.hidden_size, self.intermediate_size, self.head_dim
        heads = (self.num_heads + 2 * self.num_kv_heads) * k
        shapes: dict[str, tuple[int, ...] | None] = {
            "attn_norm": (e,),
            "qkv": (e, heads),
            "qkv_bias": (heads,) if self.qkv_bias else None,
            "q_norm": (k,) if self.qk_norm else None,
            "k_norm": (k,) if self.qk_norm else None,
            "out": (self.num_heads * k, e),
            "out_bias": (e,) if self.out_bias else None,
            "post_attn_norm": (e,) if self.post_norms else None,
            "mlp_norm": (e,),
            "gate_up": (e, 2 * f),
            "gate_up_bias": (2 * f,) if self.mlp_bias else None,
            "down": (f, e),
            "down_bias": (e,) if self.mlp_bias else None,
            "post_mlp_norm": (e,) if self.post_norms else None,
        }
        return {name: shape for name, shape in shapes.items() if shape is not None}

    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the name and shape of every parameter.

        Matrices are `[in, out]`, except `embed` and `head`, which are `[V, E]`. Query, key and value projections are
        fused into one matrix (`qkv`, in that order), and gate and up projections into another matrix (`gate_up`). Names
        are dotted paths into the parameter tree, such as `layers.3.qkv`.
        """
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, self.hidden_size)}
        for i in range(self.num_layers):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in self.block_shapes().items()}
        shapes["norm"] = (self.hidden_size,)
        if not self.tie_embeddings:
            shapes["head"] = (self.vocab_size, self.hidden_size)
        return shapes


def is_table(name: str) -> bool:
    """Returns whether the parameter of this name has a row per token, `[V, E]`; other matrices are `[in, out]`."""
    return name in ("embed", "head", "markov_in", "markov_out", "selector_in", "selector_out")
