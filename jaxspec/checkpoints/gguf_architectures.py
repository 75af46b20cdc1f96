"""The architectures of GGUF files: the names of their tensors, and their differences from Llama.

A new architecture is a row of `ARCHITECTURES`.
"""

import dataclasses
from collections.abc import Container, Mapping
from typing import Any

from jaxspec.models.config import ModelConfig

BLOCK = "blk.{}."
"""The beginning of the names of the tensors of a layer."""
NAMES = {
    "embed": ("token_embd.weight",),
    "attn_norm": (BLOCK + "attn_norm.weight",),
    "qkv": tuple(f"{BLOCK}attn_{name}.weight" for name in "qkv"),
    "qkv_bias": tuple(f"{BLOCK}attn_{name}.bias" for name in "qkv"),
    "q_norm": (BLOCK + "attn_q_norm.weight",),
    "k_norm": (BLOCK + "attn_k_norm.weight",),
    "out": (BLOCK + "attn_output.weight",),
    "out_bias": (BLOCK + "attn_output.bias",),
    "post_attn_norm": (BLOCK + "post_attention_norm.weight",),
    "mlp_norm": (BLOCK + "ffn_norm.weight",),
    "gate_up": (BLOCK + "ffn_gate.weight", BLOCK + "ffn_up.weight"),
    "down": (BLOCK + "ffn_down.weight",),
    "post_mlp_norm": (BLOCK + "post_ffw_norm.weight",),
    "norm": ("output_norm.weight",),
    "head": ("output.weight",),
    "qkvz": (BLOCK + "attn_qkv.weight", BLOCK + "attn_gate.weight"),
    "rates": (BLOCK + "ssm_beta.weight", BLOCK + "ssm_alpha.weight"),
    "conv": (BLOCK + "ssm_conv1d.weight",),
    "decay": (BLOCK + "ssm_a",),
    "decay_bias": (BLOCK + "ssm_dt.bias",),
    "gate_norm": (BLOCK + "ssm_norm.weight",),
    "router": (BLOCK + "ffn_gate_inp.weight",),
    "experts_gate_up": (BLOCK + "ffn_gate_exps.weight", BLOCK + "ffn_up_exps.weight"),
    "experts_down": (BLOCK + "ffn_down_exps.weight",),
    "shared_gate_up": (BLOCK + "ffn_gate_shexp.weight", BLOCK + "ffn_up_shexp.weight"),
    "shared_down": (BLOCK + "ffn_down_shexp.weight",),
    "shared_gate": (BLOCK + "ffn_gate_inp_shexp.weight",),
    "sinks": (BLOCK + "attn_sinks.weight",),
    "router_bias": (BLOCK + "ffn_gate_inp.bias",),
    "experts_gate_up_bias": (BLOCK + "ffn_gate_exps.bias", BLOCK + "ffn_up_exps.bias"),
    "experts_down_bias": (BLOCK + "ffn_down_exps.bias",),
}
_JOINED_EXPERTS = {"experts_gate_up": BLOCK + "ffn_gate_up_exps.weight"}
_JOINED = _JOINED_EXPERTS | {"qkv": BLOCK + "attn_qkv.weight", "qkv_bias": BLOCK + "attn_qkv.bias"}
_JOINED_GROUPED = _JOINED_EXPERTS | {"qkvz": BLOCK + "ssm_in.weight", "rates": BLOCK + "ssm_ba.weight"}
"""Tensors that hold several matrices, which other files hold separately."""
_RECURRENT_OUT = BLOCK + "ssm_out.weight"
DRAFTING_NAMES = {
    "fc": (BLOCK + "nextn.eh_proj.weight",),
    "embed_norm": (BLOCK + "nextn.enorm.weight",),
    "hidden_norm": (BLOCK + "nextn.hnorm.weight",),
    "norm": (BLOCK + "nextn.shared_head_norm.weight",),
}
"""The tensors of a block for multi-token prediction, besides those of a layer with attention."""
OTHER_PARTS = ("v.", "mm.", "a.")
"""Prefixes of the tensors of encoders of images and sound, which some files contain in addition to the text model."""
ROTARY_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The differences of a `general.architecture` from Llama.

    Attributes:
        parts: fields of `ModelConfig` that are not in the metadata.
        names: file tensors of the parameters that are named differently.
        interleaved: whether rotary embeddings rotate adjacent entries instead of halves.
        full_every: with a sliding window, every n-th layer has full attention; 0 if no layer has full attention.
        rope_theta: default of the rotary base.
        window_theta: default of the rotary base of layers with a sliding window; None for the base of other layers.
        embed_scaled: whether embeddings are multiplied by the square root of their width.
        recurrent: whether some layers have Gated DeltaNet in place of attention.
        experts: whether all layers have mixtures of experts.
        grouped: whether the rows of update rates and decays are grouped by key head, and value heads have the order of
            Hugging Face files. In other files with Gated DeltaNet, value head h reads key head h mod the number of key
            heads.
        expert_biases: whether the router and the projections of experts have biases.
        truncates_yarn: whether YaRN rounds the borders of its ramp to whole indices. Files do not say it.
    """

    parts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    names: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    interleaved: bool = False
    full_every: int = 0
    rope_theta: float = 10000.0
    window_theta: float | None = None
    embed_scaled: bool = False
    recurrent: bool = False
    experts: bool = False
    grouped: bool = False
    expert_biases: bool = False
    truncates_yarn: bool = True

    def all_names(self, config: ModelConfig, stored: Container[str]) -> dict[str, tuple[str, ...]]:
        """Returns the file's tensors of each kind of parameter, and of single parameters by their full names.

        Args:
            config: the model's configuration.
            stored: the names of the file's tensors.
        """
        names = NAMES | dict(self.names)
        for i in range(config.num_layers):
            own = self.layer_names(i, stored, config.is_recurrent(i))
            names |= {f"layers.{i}.{kind}": tensors for kind, tensors in own.items()}
        return names

    def layer_names(self, layer: int, stored: Container[str], recurrent: bool = False) -> dict[str, tuple[str, ...]]:
        """Returns the tensors of a layer that are named differently than in other layers, by kind of parameter.

        Args:
            layer: the number of the block in the file.
            stored: the names of the file's tensors; some converters write several matrices as one tensor.
            recurrent: whether the layer has Gated DeltaNet in place of attention.
        """
        joined = _JOINED if not recurrent else _JOINED_GROUPED if self.grouped else _JOINED_EXPERTS
        own = {kind: (name,) for kind, name in joined.items() if name.format(layer) in stored}
        return own | ({"out": (_RECURRENT_OUT,)} if recurrent else {})


ARCHITECTURES = {
    "llama": Architecture(interleaved=True),
    "qwen2": Architecture(parts={"qkv_bias": True}),
    "qwen3": Architecture(parts={"qk_norm": True}),
    "phi3": Architecture(names={"qkv": (BLOCK + "attn_qkv.weight",), "gate_up": (BLOCK + "ffn_up.weight",)}),
    "gemma3": Architecture(
        parts={"qk_norm": True, "post_norms": True, "activation": "gelu_tanh"},
        full_every=6,
        rope_theta=1e6,
        window_theta=1e4,
        embed_scaled=True,
    ),
    "qwen35": Architecture(
        parts={"qk_norm": True, "out_gate": True},
        names={"mlp_norm": (BLOCK + "post_attention_norm.weight",)},
        rope_theta=1e7,
        recurrent=True,
    ),
    "gpt-oss": Architecture(
        parts={"sinks": True, "activation": "clamped_silu"},
        names={"mlp_norm": (BLOCK + "post_attention_norm.weight",)},
        full_every=2,
        rope_theta=150000.0,
        experts=True,
        expert_biases=True,
        truncates_yarn=False,
    ),
    "qwen3moe": Architecture(parts={"qk_norm": True}, experts=True),
}
ARCHITECTURES["qwen35moe"] = dataclasses.replace(ARCHITECTURES["qwen35"], experts=True)
ARCHITECTURES["qwen3next"] = dataclasses.replace(ARCHITECTURES["qwen35moe"], grouped=True)
