"""Text models inside larger models: config.json with a `text_config`, and tensors under a prefix.

Multimodal models of Hugging Face hold a text model beside encoders of images or sound: Gemma 3 from 4B on, Mistral 3,
LLaVA and others. transformers names the tensors `language_model.model.*`, newer versions `model.language_model.*`.
"""

import bisect
from collections.abc import Iterable, Mapping
from typing import Any

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
_PLAIN = "model."
_SHARED = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config", "pad_token_id")
"""Entries of config.json that may stand outside of `text_config`."""
_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_QWEN = _LLAMA | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32}
SIZES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8},
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "phi3": _LLAMA | {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192},
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
"""The sizes that transformers assumes where a `text_config` leaves them out, as published ones do."""


def text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the entries of config.json that describe the text model; of other models, all entries."""
    text = settings.get("text_config")
    kind = text.get("model_type") if isinstance(text, dict) else None
    if not isinstance(text, dict) or not isinstance(kind, str) or kind not in SIZES:
        return settings
    if isinstance(settings.get("model_type"), str) and settings["model_type"] in SIZES and "hidden_size" in settings:
        return settings
    stated = {key: value for key, value in text.items() if value is not None or key == "sliding_window"}
    outside = {key: settings[key] for key in _SHARED if key in settings}
    return SIZES[kind] | outside | stated


def text_names(names: Iterable[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Finds the text model among the tensors of a file.

    Args:
        names: the file's tensors.

    Returns:
        The file's name of each tensor of the text model, by its name in a file of the text model alone; and the tensors
        of other parts.
    """
    names = list(names)
    if _PLAIN + EMBED in names:
        return {name: name for name in names}, ()
    prefixes = [name.removesuffix(EMBED) for name in names if name.endswith("." + EMBED)]
    ordered = sorted(names)  # a file of anyone may have a great many names

    def has_layers(prefix: str) -> bool:
        at = bisect.bisect_left(ordered, f"{prefix}layers.")
        return at < len(ordered) and ordered[at].startswith(f"{prefix}layers.")

    prefixes = [one for one in prefixes if has_layers(one)]
    if len(prefixes) != 1:  # none, or the decoder of another kind of model beside it
        prefixes = [one for one in prefixes if "language_model" in one or "text_model" in one]
    if len(prefixes) != 1:
        return {name: name for name in names}, ()
    prefix = prefixes[0]
    found = {_PLAIN + name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    above = [prefix.split(".")[0] + ".", prefix.removesuffix(_PLAIN), "model.", ""]
    heads = [one + HEAD for one in above if one + HEAD in names]
    if heads:
        found[HEAD] = heads[0]
    used = set(found.values())
    return found, tuple(name for name in names if name not in used)
