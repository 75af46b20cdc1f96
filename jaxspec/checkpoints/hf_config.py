"""Reads the config.json of a Hugging Face checkpoint as a `ModelConfig`."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.checkpoints.base import make_config
from jaxspec.checkpoints.hf_families import FAMILIES, RECURRENT, Family
from jaxspec.checkpoints.hf_rope import LAYER_TYPES, RopeReader
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.models.config import DeltaSizes, Experts, ModelConfig
from jaxspec.models.rope import MAX_WIDTH

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
