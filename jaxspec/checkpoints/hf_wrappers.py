"""Text models inside larger models: config.json with a `text_config`, and tensors under a prefix.

Multimodal models of Hugging Face contain a text model and encoders of images or sound: Gemma 3 from 4B on, Mistral 3,
LLaVA and others. transformers names the tensors of the text model `language_model.model.*`, and in newer versions
`model.language_model.*`.
"""

import bisect
from collections.abc import Iterable, Mapping
from typing import Any

from jaxspec.errors import CheckpointError

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
_TEXT_PREFIX = "model."
_OUTER_KEYS = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config", "pad_token_id")
"""Entries of config.json that can be outside of `text_config`."""
_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_QWEN = _LLAMA | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32}
DEFAULT_SIZES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8},
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "qwen3_moe": _QWEN
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4},
    "phi3": _LLAMA | {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192},
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "qwen3_next": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
    "qwen3_5_text": {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "gpt_oss": {
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "qwen3_5_moe_text": {
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
}
"""The sizes that transformers assumes if a `text_config` omits them; published files do."""


def text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the entries of config.json that describe the text model; for a model that is only a text model, all
    entries."""
    text = settings.get("text_config")
    kind = text.get("model_type") if isinstance(text, dict) else None
    if not isinstance(text, dict) or not isinstance(kind, str) or kind not in DEFAULT_SIZES:
        return settings
    if (
        isinstance(settings.get("model_type"), str)
        and settings["model_type"] in DEFAULT_SIZES
        and "hidden_size" in settings
    ):
        return settings
    stated = {key: value for key, value in text.items() if value is not None or key == "sliding_window"}
    outside = {key: settings[key] for key in _OUTER_KEYS if key in settings}
    return DEFAULT_SIZES[kind] | outside | stated


def check_ties(where: str, settings: Mapping[str, Any]) -> None:
    """Refuses a config.json of Qwen3.5 that ties the output head to the embedding outside of `text_config` and not
    inside, or the other way round.

    Files of other families have such entries, of which the inner entry is read.

    Raises:
        CheckpointError: the entries contradict each other.
    """
    text = settings.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") != "qwen3_5_text":
        return
    outer, inner = (each.get("tie_word_embeddings") for each in (settings, text))
    if None not in (outer, inner) and outer != inner:
        raise CheckpointError(
            f"{where}: tie_word_embeddings is {outer!r:.80}, but {inner!r:.80} inside text_config; expected the same "
            "value"
        )


def text_names(names: Iterable[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Finds the text model among the tensors of a file.

    Args:
        names: the file's tensors.

    Returns:
        A map from the name that each tensor of the text model would have in a file of the text model alone to its name
        in this file; and the names of the tensors of other parts.
    """
    names = list(names)
    if _TEXT_PREFIX + EMBED in names:
        return {name: name for name in names}, ()
    prefixes = [name.removesuffix(EMBED) for name in names if name.endswith("." + EMBED)]
    ordered = sorted(names)  # an untrusted file can contain very many names

    def has_layers(prefix: str) -> bool:
        at = bisect.bisect_left(ordered, f"{prefix}layers.")
        return at < len(ordered) and ordered[at].startswith(f"{prefix}layers.")

    prefixes = [prefix_name for prefix_name in prefixes if has_layers(prefix_name)]
    if len(prefixes) != 1:  # none, or a second decoder of another kind of model
        prefixes = [
            prefix_name for prefix_name in prefixes if "language_model" in prefix_name or "text_model" in prefix_name
        ]
    if len(prefixes) != 1:
        return {name: name for name in names}, ()
    prefix = prefixes[0]
    text_tensors = {_TEXT_PREFIX + name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    head_prefixes = [prefix.split(".")[0] + ".", prefix.removesuffix(_TEXT_PREFIX), "model.", ""]
    heads = [prefix_name + HEAD for prefix_name in head_prefixes if prefix_name + HEAD in names]
    if heads:
        text_tensors[HEAD] = heads[0]
    used = set(text_tensors.values())
    return text_tensors, tuple(name for name in names if name not in used)
