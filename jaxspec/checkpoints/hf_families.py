"""The model types of Hugging Face checkpoints, and the names of their tensors.

A new model type is a row of `FAMILIES`: its differences from Llama, the defaults of its config, and its tensor names.
`jaxspec.checkpoints.hf_config` reads its config.json.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxspec.checkpoints.base import grouped_rows
from jaxspec.models.config import GATE_LIMIT, GATE_SLOPE, ModelConfig

_LAYER = "model.layers.{}."
_NAMES = {
    "embed": ("model.embed_tokens.weight",),
    "attn_norm": (_LAYER + "input_layernorm.weight",),
    "qkv": tuple(f"{_LAYER}self_attn.{name}_proj.weight" for name in "qkv"),
    "qkv_bias": tuple(f"{_LAYER}self_attn.{name}_proj.bias" for name in "qkv"),
    "q_norm": (_LAYER + "self_attn.q_norm.weight",),
    "k_norm": (_LAYER + "self_attn.k_norm.weight",),
    "out": (_LAYER + "self_attn.o_proj.weight",),
    "out_bias": (_LAYER + "self_attn.o_proj.bias",),
    "mlp_norm": (_LAYER + "post_attention_layernorm.weight",),
    "gate_up": (_LAYER + "mlp.gate_proj.weight", _LAYER + "mlp.up_proj.weight"),
    "gate_up_bias": (_LAYER + "mlp.gate_proj.bias", _LAYER + "mlp.up_proj.bias"),
    "down": (_LAYER + "mlp.down_proj.weight",),
    "down_bias": (_LAYER + "mlp.down_proj.bias",),
    "norm": ("model.norm.weight",),
    "head": ("lm_head.weight",),
    "qkvz": (_LAYER + "linear_attn.in_proj_qkv.weight", _LAYER + "linear_attn.in_proj_z.weight"),
    "rates": (_LAYER + "linear_attn.in_proj_b.weight", _LAYER + "linear_attn.in_proj_a.weight"),
    "conv": (_LAYER + "linear_attn.conv1d.weight",),
    "decay": (_LAYER + "linear_attn.A_log",),
    "decay_bias": (_LAYER + "linear_attn.dt_bias",),
    "gate_norm": (_LAYER + "linear_attn.norm.weight",),
    "router": (_LAYER + "mlp.gate.weight",),
    "shared_gate_up": tuple(f"{_LAYER}mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up")),
    "shared_down": (_LAYER + "mlp.shared_expert.down_proj.weight",),
    "shared_gate": (_LAYER + "mlp.shared_expert_gate.weight",),
    "sinks": (_LAYER + "self_attn.sinks",),
    "router_bias": (_LAYER + "mlp.router.bias",),
    "experts_gate_up_bias": (_LAYER + "mlp.experts.gate_up_proj_bias",),
    "experts_down_bias": (_LAYER + "mlp.experts.down_proj_bias",),
}
_EXPERT = _LAYER + "mlp.experts.{expert}."
_SINGLE_EXPERTS = {
    "experts_gate_up": (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"),
    "experts_down": (_EXPERT + "down_proj.weight",),
}
FUSED_EXPERTS = "mlp.experts.gate_up_proj"
"""The end of the names of tensors that hold the gate and up projections of all experts of a layer."""
_FUSED_EXPERTS = {
    "experts_gate_up": (_LAYER + FUSED_EXPERTS,),
    "experts_down": (_LAYER + "mlp.experts.down_proj",),
}
_RECURRENT_OUT = "linear_attn.out_proj.weight"
RECURRENT = "linear_attention"
"""The entry of `layer_types` for a layer with Gated DeltaNet."""


@dataclasses.dataclass(frozen=True)
class Family:
    """The differences of a model type from Llama.

    Attributes:
        defaults: defaults of config.json.
        parts: fields of `ModelConfig` that are not in config.json.
        names: file tensors of the parameters that are named differently.
        slides: `slides(settings, layer)` returns whether the layer has sliding-window attention, for a config.json
            without `layer_types`.
        norm_offset: offset added to the weights of norms, except to that before the gate of a Gated DeltaNet.
        required: entries of config.json that may have only these values; the first is meant if the entry is missing.
        left_out: beginnings of the names of tensors that are left out, such as those of a drafter inside the model.
        embed_scaled: whether embeddings are multiplied by the square root of their width.
        experts: whether layers can have mixtures of experts.
        fused_experts: whether published files have one tensor for the matrices of all experts of a layer. Files of
            either form are read; exported files have this form.
        grouped: whether the projections of Gated DeltaNet are one tensor whose rows are grouped by key head.
        rope: the rotary settings of a config.json without any; None for plain rotary positions.
        interleaved_experts: whether the gate and up projections of experts alternate in files, as in gpt-oss, whose
            experts may be in MXFP4; see `jaxspec.checkpoints.hf_experts`.
    """

    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    parts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    names: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    slides: Callable[[Mapping, int], bool] = lambda settings, layer: False
    norm_offset: float = 0.0
    embed_scaled: bool = False
    required: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    experts: bool = False
    fused_experts: bool = False
    grouped: bool = False
    rope: Mapping[str, Any] | None = None
    interleaved_experts: bool = False

    def all_names(self, config: ModelConfig | None = None, fused: bool | None = None) -> dict[str, tuple[str, ...]]:
        """Returns the file's tensors of each kind of parameter, and of single parameters by their full names.

        Args:
            config: the model's configuration; None for a model of attention and gated MLPs.
            fused: whether the file has one tensor for the matrices of all experts of a layer; None for the form of
                published files.
        """
        layers = () if config is None else filter(config.is_recurrent, range(config.num_layers))
        experts = _FUSED_EXPERTS if (self.fused_experts if fused is None else fused) else _SINGLE_EXPERTS
        outs = {f"layers.{i}.out": (_LAYER.format(i) + _RECURRENT_OUT,) for i in layers}
        return _NAMES | experts | dict(self.names) | outs

    def rows(self, tensor: str, config: ModelConfig) -> np.ndarray | None:
        """Returns the row of a file's tensor for each row of the parameter; None if their order is the same."""
        kinds = {"in_proj_qkvz.weight": "qkvz", "in_proj_ba.weight": "rates"}
        kind = next((kind for end, kind in kinds.items() if tensor.endswith(end)), None)
        return grouped_rows(config.delta, kind) if self.grouped and config.delta is not None and kind else None

    def offset(self, tensor: str) -> float:
        """Returns the offset that is added to the weights of a file's tensor."""
        is_norm = tensor.endswith("norm.weight") and not tensor.endswith("linear_attn.norm.weight")
        return self.norm_offset if is_norm else 0.0


_QWEN = {
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}


def _last_layers(settings: Mapping, layer: int) -> bool:
    return settings["use_sliding_window"] is True and layer >= settings["max_window_layers"]


FAMILIES = {
    "llama": Family(),
    "mistral": Family(
        defaults={"max_position_embeddings": 131072, "sliding_window": 4096},
        slides=lambda settings, layer: True,
    ),
    "qwen2": Family(defaults=_QWEN, parts={"qkv_bias": True}, slides=_last_layers),
    "qwen3": Family(defaults=_QWEN | {"head_dim": 128}, parts={"qk_norm": True}, slides=_last_layers),
    "qwen3_moe": Family(
        defaults=_QWEN
        | {
            "sliding_window": None,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        parts={"qk_norm": True},
        slides=lambda settings, layer: settings["use_sliding_window"] is True,
        experts=True,
    ),
    "phi3": Family(
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        names={"qkv": (_LAYER + "self_attn.qkv_proj.weight",), "gate_up": (_LAYER + "mlp.gate_up_proj.weight",)},
        slides=lambda settings, layer: True,
    ),
    "gemma3_text": Family(
        defaults={
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        parts={"qk_norm": True, "post_norms": True},
        names={
            "post_attn_norm": (_LAYER + "post_attention_layernorm.weight",),
            "mlp_norm": (_LAYER + "pre_feedforward_layernorm.weight",),
            "post_mlp_norm": (_LAYER + "post_feedforward_layernorm.weight",),
        },
        slides=lambda settings, layer: (layer + 1) % settings["sliding_window_pattern"] != 0,
        norm_offset=1.0,
        embed_scaled=True,
    ),
}

_QWEN_HYBRID = Family(
    defaults={
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    parts={"qk_norm": True, "out_gate": True},
    norm_offset=1.0,
    required={
        "attn_output_gate": (True,),
        "output_gate_type": ("silu", "swish"),
        "mamba_ssm_dtype": ("float32",),
        "mtp_use_dedicated_embeddings": (False,),
        "mlp_only_layers": ([],),
    },
    left_out=("mtp.",),
)
FAMILIES["qwen3_5_text"] = _QWEN_HYBRID
FAMILIES["qwen3_5_moe_text"] = dataclasses.replace(
    _QWEN_HYBRID,
    defaults=dict(_QWEN_HYBRID.defaults)
    | {
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    required=dict(_QWEN_HYBRID.required) | {"norm_topk_prob": (True,), "decoder_sparse_step": (1,)},
    experts=True,
    fused_experts=True,
)
FAMILIES["qwen3_next"] = dataclasses.replace(
    FAMILIES["qwen3_5_moe_text"],
    defaults=dict(FAMILIES["qwen3_5_moe_text"].defaults) | {"num_experts_per_tok": 10},
    names={
        "qkvz": (_LAYER + "linear_attn.in_proj_qkvz.weight",),
        "rates": (_LAYER + "linear_attn.in_proj_ba.weight",),
    },
    required={key: values for key, values in _QWEN_HYBRID.required.items() if key != "mlp_only_layers"},
    fused_experts=False,
    grouped=True,
)

FAMILIES["gpt_oss"] = Family(
    defaults={
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "attention_bias": True,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    parts={"sinks": True, "activation": "clamped_silu"},
    names={"router": (_LAYER + "mlp.router.weight",)},
    slides=lambda settings, layer: layer % 2 == 0,
    required={
        "hidden_act": ("silu",),
        "attention_bias": (True,),
        "swiglu_alpha": (GATE_SLOPE,),
        "swiglu_limit": (GATE_LIMIT,),
        "norm_topk_prob": (True,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
    },
    experts=True,
    fused_experts=True,
    rope={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    interleaved_experts=True,
)
