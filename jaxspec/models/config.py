"""The configuration of a decoder-only transformer of the Llama family: sizes, constants, and parameter shapes."""

import dataclasses

from jaxspec.core.settings import check_fields, setting
from jaxspec.errors import InvalidConfig
from jaxspec.models.rope import Rope

ACTIVATIONS = ("silu", "gelu_tanh", "clamped_silu")
FLOAT32_MATRICES = ("rates", "router", "shared_gate", "experts_gate_up_bias", "experts_down_bias")
"""Small matrices that stay in float32 in every dtype, because they control how fast a state decays, or which experts a
token has, or are the biases of experts."""
GATE_SLOPE, GATE_LIMIT = 1.702, 7.0
"""The numbers of the activation "clamped_silu"; see `jaxspec.models.rows.Gate`."""
EXPERT_BIASES = ("experts_gate_up_bias", "experts_down_bias")
"""Parameters that hold a bias for each expert, `[X, out]`."""
EXPERT_MATRICES = ("experts_gate_up", "experts_down")
"""Parameters that hold a matrix for each expert, `[X, in, out]`."""


@dataclasses.dataclass(frozen=True)
class DeltaSizes:
    """Sizes of Gated DeltaNet layers (Yang et al. 2025, arXiv:2412.06464); see `jaxspec.models.delta`.

    Attributes:
        key_heads: the number of heads of queries and keys.
        value_heads: the number of heads of values, each with a state; a multiple of `key_heads`.
        key_width: the width of a query and of a key.
        value_width: the width of a value.
        taps: the number of tokens in the causal convolution, including the token itself; 2 to 16.
        tiled: whether value head h reads key head h mod `key_heads`, as in GGUF files, and not key head
            h // (value_heads / key_heads).
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int = setting(4, least=2, most=16)
    tiled: bool = False

    def __post_init__(self):
        check_fields(self)
        if self.value_heads % self.key_heads:
            raise InvalidConfig(f"value_heads ({self.value_heads}) must be a multiple of key_heads ({self.key_heads})")

    @property
    def keys(self) -> int:
        """The width of the keys of all heads."""
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        """The width of the values of all heads."""
        return self.value_heads * self.value_width

    @property
    def channels(self) -> int:
        """C, the number of channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def store_numbers(self) -> int:
        """The number of float32 values that a layer keeps of the text of a row, however long the text is."""
        return self.value_heads * self.key_width * self.value_width + (self.taps - 1) * self.channels

    @property
    def entry_numbers(self) -> int:
        """The number of float32 values that a token of a window leaves behind in a layer."""
        return self.channels + self.keys + self.values + self.value_heads


@dataclasses.dataclass(frozen=True)
class Experts:
    """Sizes of a mixture of experts in place of a gated MLP (Shazeer et al. 2017, arXiv:1701.06538).

    A token is read by the experts with the highest probabilities, which a router computes; see
    `jaxspec.models.experts`.

    Attributes:
        count: X, the number of experts of a layer.
        per_token: k, the number of experts of a token.
        width: I, the width of an expert, which is a gated MLP.
        normalise: whether the weights of a token's experts are scaled to the sum 1.
        shared_width: the width of a gated MLP that reads every token beside the experts, through a gate of its own;
            None if there is none.
        biases: whether the router and the projections of the experts have biases.
    """

    count: int
    per_token: int
    width: int
    normalise: bool = True
    shared_width: int | None = None
    biases: bool = False

    def __post_init__(self):
        check_fields(self)
        if self.per_token > self.count:
            raise InvalidConfig(f"per_token ({self.per_token}) must be at most count ({self.count})")

    @property
    def active_width(self) -> int:
        """The number of units that read a token."""
        return self.per_token * self.width + (self.shared_width or 0)


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
        activation: the activation of the gated MLP: "silu" (SwiGLU), "gelu_tanh" (GeGLU) or "clamped_silu" (SwiGLU
            with clamped inputs, as in gpt-oss; see `jaxspec.models.rows.Gate`).
        embed_scale: the factor that is applied to the embeddings.
        query_scale: the factor that is applied to the attention scores; None for `head_dim ** -0.5`.
        qkv_bias, out_bias, mlp_bias: whether these projections have biases.
        qk_norm: whether an RMSNorm is applied to each head's queries and keys.
        post_norms: whether an RMSNorm is applied to the outputs of attention and MLP, before the residual addition.
        out_gate: whether the outputs of attention are multiplied by the sigmoid of a gate, whose projection follows the
            query of each head in `qkv`.
        delta: the sizes of the layers with Gated DeltaNet in place of attention; None if there are no such layers.
        recurrent: for each layer, whether it has Gated DeltaNet in place of attention; empty if no layer does.
        experts: the sizes of the mixtures of experts in place of gated MLPs; None if there are none.
        sparse: for each layer, whether it has a mixture of experts; empty for all layers if `experts` is set.
        sinks: whether each query head has a sink, a score that takes part in the softmax of attention and has no value
            (Xiao et al. 2024, arXiv:2309.17453; learned as in gpt-oss, arXiv:2508.10925).
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
    out_gate: bool = False
    delta: DeltaSizes | None = None
    recurrent: tuple[bool, ...] = ()
    experts: Experts | None = None
    sparse: tuple[bool, ...] = ()
    sinks: bool = False

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
        if bool(self.recurrent) != (self.delta is not None) or len(self.recurrent) not in (0, self.num_layers):
            raise InvalidConfig(
                f"recurrent must have one entry for each of the {self.num_layers} layers and needs delta, "
                f"got {len(self.recurrent)} entries and delta {self.delta}"
            )
        if self.sparse and (self.experts is None or len(self.sparse) != self.num_layers):
            raise InvalidConfig(
                f"sparse must have one entry for each of the {self.num_layers} layers and needs experts, "
                f"got {len(self.sparse)} entries and experts {self.experts}"
            )
        for rope in (self.rope, self.window_rope):
            if rope is not None:
                rope.check(self.head_dim)

    def is_recurrent(self, layer: int) -> bool:
        """Returns whether this layer has Gated DeltaNet in place of attention."""
        return bool(self.recurrent) and self.recurrent[layer]

    def is_sparse(self, layer: int) -> bool:
        """Returns whether this layer has a mixture of experts in place of a gated MLP."""
        return self.experts is not None and (not self.sparse or self.sparse[layer])

    def place(self, layer: int) -> int:
        """Returns the index of this layer among the layers of its kind, with which the stores of a cache are read."""
        return sum(self.is_recurrent(i) == self.is_recurrent(layer) for i in range(layer))

    def window_of(self, layer: int) -> int | None:
        """Returns how many tokens this layer's attention sees, including the token itself; None for all."""
        return self.window if not self.windowed or self.windowed[layer] else None

    def rope_of(self, layer: int) -> Rope:
        """Returns the rotary position embeddings of this layer."""
        return self.rope if self.window_rope is None or self.window_of(layer) is None else self.window_rope

    def layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Returns the name and shape of every parameter of a layer, such as `qkv`; see `param_shapes`."""
        e = self.hidden_size
        shapes: dict[str, tuple[int, ...] | None] = {
            "attn_norm": (e,),
            **(self._delta_shapes() if self.is_recurrent(layer) else self._attention_shapes()),
            "post_attn_norm": (e,) if self.post_norms else None,
            "mlp_norm": (e,),
            **(self._expert_shapes() if self.is_sparse(layer) else self._mlp_shapes()),
            "post_mlp_norm": (e,) if self.post_norms else None,
        }
        return {name: shape for name, shape in shapes.items() if shape is not None}

    def _mlp_shapes(self) -> dict[str, tuple[int, ...] | None]:
        e, f = self.hidden_size, self.intermediate_size
        return {
            "gate_up": (e, 2 * f),
            "gate_up_bias": (2 * f,) if self.mlp_bias else None,
            "down": (f, e),
            "down_bias": (e,) if self.mlp_bias else None,
        }

    def _expert_shapes(self) -> dict[str, tuple[int, ...] | None]:
        e, x = self.hidden_size, self.experts
        assert x is not None
        shared = x.shared_width
        return {
            "router": (e, x.count),
            "router_bias": (x.count,) if x.biases else None,
            "experts_gate_up": (x.count, e, 2 * x.width),
            "experts_gate_up_bias": (x.count, 2 * x.width) if x.biases else None,
            "experts_down": (x.count, x.width, e),
            "experts_down_bias": (x.count, e) if x.biases else None,
            "shared_gate_up": None if shared is None else (e, 2 * shared),
            "shared_down": None if shared is None else (shared, e),
            "shared_gate": None if shared is None else (e, 1),
        }

    def _attention_shapes(self) -> dict[str, tuple[int, ...] | None]:
        e, k, heads = self.hidden_size, self.head_dim, sum(self.projections("qkv"))
        return {
            "qkv": (e, heads),
            "qkv_bias": (heads,) if self.qkv_bias else None,
            "q_norm": (k,) if self.qk_norm else None,
            "k_norm": (k,) if self.qk_norm else None,
            "out": (self.num_heads * k, e),
            "out_bias": (e,) if self.out_bias else None,
            "sinks": (self.num_heads,) if self.sinks else None,
        }

    def _delta_shapes(self) -> dict[str, tuple[int, ...] | None]:
        e, d = self.hidden_size, self.delta
        assert d is not None
        return {
            "qkvz": (e, d.channels + d.values),
            "rates": (e, 2 * d.value_heads),
            "conv": (d.channels, 1, d.taps),
            "decay": (d.value_heads,),
            "decay_bias": (d.value_heads,),
            "gate_norm": (d.value_width,),
            "out": (d.values, e),
        }

    def projections(self, name: str) -> tuple[int, ...]:
        """Returns the widths of the projections side by side in a fused parameter, such as `qkv` or `gate_up_bias`."""
        if name in ("qkvz", "rates", "conv"):
            d = self.delta
            assert d is not None
            heads = (d.value_heads, d.value_heads)
            return heads if name == "rates" else (d.keys, d.keys, d.values, d.values)[: 3 if name == "conv" else 4]
        if name.startswith("qkv"):
            queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
            return queries * (1 + self.out_gate), keys, keys
        experts = self.experts
        if experts is not None and name in ("experts_gate_up", "experts_gate_up_bias", "shared_gate_up"):
            width = experts.shared_width or 0 if name == "shared_gate_up" else experts.width
            return width, width
        return self.intermediate_size, self.intermediate_size

    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the name and shape of every parameter.

        Matrices are `[in, out]`, except `embed` and `head`, which are `[V, E]`. Query, key and value projections are
        fused into one matrix (`qkv`, in that order), and gate and up projections into another matrix (`gate_up`). In a
        layer with Gated DeltaNet, `qkvz` holds the projections to the convolution's channels and to the output gate,
        and `rates` those to update rates and to decays. `decay` is the logarithm of minus the decay's factor. In a
        layer with experts, `experts_gate_up` and `experts_down` hold a matrix for each expert. Names are dotted paths
        into the parameter tree, such as `layers.3.qkv`.
        """
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, self.hidden_size)}
        for i in range(self.num_layers):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in self.layer_shapes(i).items()}
        shapes["norm"] = (self.hidden_size,)
        if not self.tie_embeddings:
            shapes["head"] = (self.vocab_size, self.hidden_size)
        return shapes


def is_matrix(name: str, axes: int) -> bool:
    """Returns whether a parameter is a weight matrix, or one for each expert, which has the model's dtype."""
    return name in EXPERT_MATRICES or (axes == 2 and name not in FLOAT32_MATRICES)


def is_table(name: str) -> bool:
    """Returns whether the parameter of this name has a row per token, `[V, E]`; other matrices are `[in, out]`."""
    return name in ("embed", "head", "markov_in", "markov_out", "selector_in", "selector_out")
