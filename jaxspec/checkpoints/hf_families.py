"""The model types of Hugging Face checkpoints: maps each config.json to a `ModelConfig` and to the names of its
tensors.

A new model type is a row of `FAMILIES`: its differences from Llama, the defaults of its config, and its tensor names.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxspec.checkpoints.base import grouped_rows, make_config
from jaxspec.checkpoints.hf_rope import LAYER_TYPES, RopeReader
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.models.config import GATE_LIMIT, GATE_SLOPE, DeltaSizes, Experts, ModelConfig
from jaxspec.models.rope import MAX_WIDTH

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

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "rope_interleaved": (False,),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False,),
}
_INTEGER_SETTINGS = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "query_pre_attn_scalar", "sliding_window", "sliding_window_pattern",
    "max_window_layers", "full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim",
    "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads", "num_experts", "num_local_experts",
    "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "decoder_sparse_step",
}  # fmt: skip
"""Settings that are whole numbers. Some tools write them as floats, such as 4096.0."""
_MAX_LAYERS = 4096


def read_config(where: str, settings: Mapping, context: int | None = None) -> tuple[ModelConfig, Family]:
    """Reads a config.json as a `ModelConfig` and its family.

    Args:
        where: the file, for messages.
        settings: its content.
        context: length of the longest text to decode; see `open_source`.

    Raises:
        CheckpointError: the model type or a setting is not supported, or a value is invalid.
    """
    family = _family(where, settings)
    entries = _entries(family, settings)
    for key, allowed in (_SUPPORTED_VALUES | dict(family.required)).items():
        if (got := entries.get(key, allowed[0])) not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise CheckpointError(f"{where}: {key} is {got!r:.80}, expected {expected}; no other value is supported")

    def whole(key: str, default: int | None = None) -> int:
        value = entries.get(key, default)
        if type(value) is not int or value <= 0:
            problem = "is missing" if value is None else f"is {value!r:.80}"
            raise CheckpointError(f"{where}: {key} {problem}, expected a positive whole number")
        return value

    def flag(key: str) -> bool:
        if not isinstance(value := entries.get(key, False), bool):
            raise CheckpointError(f"{where}: {key} is {value!r:.80}, expected true or false")
        return value

    hidden, heads, layers = whole("hidden_size"), whole("num_attention_heads"), whole("num_hidden_layers")
    if layers > _MAX_LAYERS:
        raise CheckpointError(f"{where}: num_hidden_layers is {layers}, expected at most {_MAX_LAYERS}")
    head_dim = whole("head_dim", max(hidden // heads, 1))
    if head_dim > MAX_WIDTH:
        raise CheckpointError(f"{where}: the width of a head is {head_dim}, expected at most {MAX_WIDTH}")
    longest = whole("max_position_embeddings", 2048)
    window, windowed = _windows(where, entries, family, layers)
    reader = RopeReader(where, entries, head_dim, longest, context)
    experts = _experts(where, entries, layers, whole, flag, family.interleaved_experts) if family.experts else {}
    width = experts["experts"].active_width if experts else None  # files without dense layers need not name a width
    values: dict[str, Any] = {
        "vocab_size": whole("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": whole("intermediate_size", width),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": whole("num_key_value_heads", heads),
        "head_dim": head_dim,
        "norm_eps": entries.get("rms_norm_eps", 1e-6),
        "tie_embeddings": flag("tie_word_embeddings"),
        "rope": reader.read("full_attention"),
        "window": window,
        "windowed": windowed,
        "activation": read_activation(where, entries),
        "qkv_bias": flag("attention_bias"),
        "out_bias": flag("attention_bias"),
        "mlp_bias": flag("mlp_bias"),
    }
    values |= _recurrent(where, entries, layers, whole) | experts
    if window and "rope_local_base_freq" in entries:
        values["window_rope"] = reader.read("sliding_attention")
    if family.embed_scaled:
        values["embed_scale"] = hidden**0.5
    if "query_pre_attn_scalar" in entries and whole("query_pre_attn_scalar") != head_dim:
        values["query_scale"] = whole("query_pre_attn_scalar") ** -0.5
    return make_config(where, **values | dict(family.parts), max_position=reader.longest), family


_DELTA_SIZES = {
    "key_heads": "num_key_heads",
    "value_heads": "num_value_heads",
    "key_width": "key_head_dim",
    "value_width": "value_head_dim",
    "taps": "conv_kernel_dim",
}
"""The entry of config.json, without "linear_", for each field of `DeltaSizes`."""


def _recurrent(where: str, entries: Mapping, layers: int, whole: Callable[[str], int]) -> dict[str, Any]:
    """Returns `recurrent` and `delta` of the config, if there are recurrent layers; `whole` reads a whole number."""
    if "linear_num_value_heads" not in entries:
        return {}
    types = entries.get("layer_types")
    if types is None:
        interval = entries["full_attention_interval"]
        if type(interval) is not int or interval < 1:
            raise CheckpointError(
                f"{where}: full_attention_interval is {interval!r:.80}, expected a whole number from 1"
            )
        found = tuple(bool((layer + 1) % interval) for layer in range(layers))
    else:
        found = tuple(kind == RECURRENT for kind in types)
    if not any(found):
        return {}
    sizes: dict[str, Any] = {name: whole(f"linear_{key}") for name, key in _DELTA_SIZES.items()}
    try:
        return {"recurrent": found, "delta": DeltaSizes(**sizes)}
    except InvalidConfig as error:
        raise CheckpointError(f"{where}: {error}") from None


DEFAULT_EXPERTS = {"qwen3_moe": 128, "qwen3_5_moe_text": 256, "qwen3_next": 512, "gpt_oss": 128}
"""The number of experts that transformers assumes if config.json does not say it."""


def _experts(
    where: str,
    entries: Mapping,
    layers: int,
    whole: Callable[..., int],
    flag: Callable[[str], bool],
    biases: bool = False,
) -> dict[str, Any]:
    """Returns `experts` and `sparse` of the config; `whole` and `flag` read a whole number and a boolean.

    Experts with biases have the width that config.json names for MLPs.
    """
    names = [name for name in ("num_experts", "num_local_experts") if name in entries]
    counts = {whole(name) for name in names} or {DEFAULT_EXPERTS[entries["model_type"]]}
    if len(counts) > 1:
        raise CheckpointError(f"{where}: num_experts is {whole(names[0])} but num_local_experts is {whole(names[1])}")
    dense, step = entries["mlp_only_layers"], whole("decoder_sparse_step")
    if not isinstance(dense, list) or not all(type(i) is int and 0 <= i < layers for i in dense):
        raise CheckpointError(f"{where}: mlp_only_layers is {dense!r:.80}, expected numbers of layers from 0")
    sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    if not any(sparse):
        return {}
    shared = whole("shared_expert_intermediate_size") if "shared_expert_intermediate_size" in entries else None
    width = whole("intermediate_size" if biases else "moe_intermediate_size")
    each = whole("num_experts_per_tok")
    if entries.get("experts_per_token", each) != each:  # the same number by its older name
        raise CheckpointError(
            f"{where}: experts_per_token is {entries['experts_per_token']!r:.80}, but num_experts_per_tok is {each}"
        )
    try:
        experts = Experts(counts.pop(), each, width, flag("norm_topk_prob"), shared, biases)
    except InvalidConfig as error:
        raise CheckpointError(f"{where}: {error}") from None
    return {"experts": experts, "sparse": () if all(sparse) else sparse}


def _entries(family: Family, settings: Mapping) -> dict[str, Any]:
    """Returns the entries of a config.json with the defaults of its family."""
    entries = dict(family.defaults) | {key: _number(key, value) for key, value in settings.items() if value is not None}
    if settings.get("sliding_window", 0) is None:
        entries["sliding_window"] = None
    if family.rope is not None and not any(settings.get(key) for key in ("rope_scaling", "rope_parameters")):
        entries["rope_scaling"] = family.rope
    if family.interleaved_experts and _is_mxfp4(entries.get("quantization_config")):
        del entries["quantization_config"]
    return entries


def _is_mxfp4(settings: Any) -> bool:
    """Returns whether an entry `quantization_config` says that experts are in MXFP4."""
    return isinstance(settings, dict) and settings.get("quant_method") == "mxfp4"


def _number(key: str, value: Any) -> Any:
    """Returns the value of a setting. If the setting is an integer, converts a float without a fraction to an int."""
    return int(value) if key in _INTEGER_SETTINGS and type(value) is float and value.is_integer() else value


def _family(where: str, settings: Mapping) -> Family:
    family = FAMILIES.get(str(settings.get("model_type")))
    if family is None:
        inner = settings.get("text_config")
        inner = f" with a text model {inner.get('model_type')!r:.80}" if isinstance(inner, dict) else ""
        raise CheckpointError(
            f"{where}: model_type {settings.get('model_type')!r:.80}{inner} is not supported; supported: "
            f"{', '.join(FAMILIES)}, alone or as the text model of a larger one"
        )
    return family


def read_activation(where: str, entries: Mapping) -> str:
    """Returns `ModelConfig.activation`; raises `CheckpointError` if it is not supported."""
    name = entries.get("hidden_activation", entries.get("hidden_act", "silu"))
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise CheckpointError(
            f"{where}: activation {name!r:.80} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _windows(where: str, entries: Mapping, family: Family, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """Returns `window` and `windowed` of the config."""
    reach, types = entries.get("sliding_window"), entries.get("layer_types")
    if types is not None:
        kinds = ("full_attention", RECURRENT) if "linear_num_value_heads" in entries else LAYER_TYPES
        known = isinstance(types, list) and len(types) == layers and all(kind in kinds for kind in types)
        if not known:
            raise CheckpointError(f"{where}: layer_types is {types!r:.80}, expected {layers} of {' and '.join(kinds)}")
        slides = tuple(kind == "sliding_attention" for kind in types)
    else:
        for key, least in (("sliding_window_pattern", 1), ("max_window_layers", 0)):
            if key in entries and (type(entries[key]) is not int or entries[key] < least):
                raise CheckpointError(f"{where}: {key} is {entries[key]!r:.80}, expected a whole number from {least}")
        slides = tuple(reach is not None and family.slides(entries, i) for i in range(layers))
    if not any(slides):
        return None, ()
    if type(reach) is not int or reach < 1:
        raise CheckpointError(f"{where}: sliding_window is {reach!r:.80}, expected a positive whole number")
    return reach, () if all(slides) else slides
