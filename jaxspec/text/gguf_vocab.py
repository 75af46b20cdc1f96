"""Converts the tokenizer in the metadata of a GGUF file to the content of a `tokenizer.json`."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxspec.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (  # the pattern of GPT-4; families differ in the number of digits per token
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (  # the pattern of GPT-4o: a word ends before a capital letter; families differ in contractions and digits
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%(contraction)s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%(contraction)s"
    r"|%(digits)s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED = (  # letters with upper and lower case, as in DeepSeek LLM
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    r"\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    r"\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    r"\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    r"\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    r"\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    r"\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    r"\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    r"\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    r"\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """The parts of a byte-level tokenizer that a GGUF file only names, in `tokenizer.ggml.pre`.

    Attributes:
        splits: regular expressions that split a text, applied in order.
        composes: whether characters are composed (NFC) before the text is split.
        keeps_tokens: whether a part of the text that is a token is never split, whatever the merges are.
        adds_bos: whether a text begins with BOS unless the file says otherwise.
    """

    splits: tuple[str, ...]
    composes: bool = False
    keeps_tokens: bool = False
    adds_bos: bool = False


def _literal(pattern: str) -> str:
    r"""Returns a pattern with the characters that its `\u` and `\U` stand for, which Oniguruma does not know."""
    return pattern.encode("ascii").decode("raw_unicode_escape")


_DIGITS_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer((_CL100K % r"\p{N}{1,3}",), keeps_tokens=True, adds_bos=True)
_QWEN2 = PreTokenizer((_CL100K % r"\p{N}",), composes=True)
PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,  # Granite Code
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": PreTokenizer(_LLAMA3.splits),
    "dbrx": PreTokenizer(_LLAMA3.splits),  # Phi-4
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": PreTokenizer(
        (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        composes=True,
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            _literal(rf"\s?[{_CASED}]+"),
            _literal(r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
            r"\s+$",
            _literal(_CJK),
            r"\p{N}",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _literal(_CJK), r"\p{N}")),
    "deepseek-v3": PreTokenizer(
        (
            r"\p{N}{1,3}",
            _literal(r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    "gpt-4o": PreTokenizer(  # Phi-4-mini
        (_O200K % {"contraction": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "digits": r"\p{N}{1,3}"},)
    ),
    "tekken": PreTokenizer(  # Mistral Nemo and Small
        (_O200K % {"contraction": "", "digits": r"\p{N}"},), keeps_tokens=True, adds_bos=True
    ),
    "seed-coder": PreTokenizer(
        (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"
            r"|\s+(?!\S)|\s+",
        )
    ),
}
"""Pre-tokenizers by the value of `tokenizer.ggml.pre`, taken from the tokenizer.json of the original models."""

MAX_TOKEN = 1024
"""Maximum length of a token in characters; the longest published tokens are runs of about 200 spaces."""
MAX_PREFIXES_PER_TOKEN, MAX_PREFIXES = 16, 1 << 20
"""Maximum number of prefixes that are tokens: so many for each token of a SentencePiece vocabulary, plus a constant.
Published vocabularies have 3 for each token."""
MAX_MERGED_PER_CHARACTER, MAX_MERGED = 4, 1 << 22
"""Maximum number of characters of all merges: so many for each character of a SentencePiece vocabulary, plus a
constant. Published vocabularies have 2 for each character."""


class GgufTokenizer(NamedTuple):
    """The tokenizer of a GGUF file.

    Attributes:
        content: the content of a `tokenizer.json`.
        bos_id, eos_id: ids of the tokens that begin and end a text, or None.
        add_bos: whether a text begins with BOS.
    """

    content: dict[str, Any]
    bos_id: int | None
    eos_id: int | None
    add_bos: bool


def convert_tokenizer(metadata: Mapping[str, object]) -> GgufTokenizer:
    """Converts `tokenizer.*` metadata.

    Raises:
        CheckpointError: an entry is missing or invalid.
    """
    model = metadata.get("tokenizer.ggml.model")
    builders: dict[str, Callable[..., dict[str, Any]]] = {"gpt2": _byte_level, "llama": _sentence_piece}
    if not isinstance(model, str) or model not in builders:
        raise CheckpointError(f"tokenizer.ggml.model: expected one of {sorted(builders)}, got {model!r:.40}")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise CheckpointError("tokenizer.ggml.tokens: a token is duplicated")
    if any(len(token) > MAX_TOKEN for token in tokens):
        raise CheckpointError(f"tokenizer.ggml.tokens: a token has more than {MAX_TOKEN} characters")
    types = _list(metadata, "tokenizer.ggml.token_type", len(tokens), default=NORMAL)
    while types and types[-1] == UNUSED:  # padding of the vocabulary
        types.pop()
        tokens.pop()
    content = builders[model](metadata, tokens, types)
    content["added_tokens"] = [
        {"id": i, "content": token, "special": kind != USER_DEFINED, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
    ]
    bos, eos = (_token_id(metadata, f"tokenizer.ggml.{n}_token_id", len(tokens)) for n in ("bos", "eos"))
    return GgufTokenizer(content, bos, eos, adds_bos(metadata))


def adds_bos(metadata: Mapping[str, object]) -> bool:
    """Returns whether a text begins with BOS. EOS is never added, because the prompt will be continued."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    named = PRE_TOKENIZERS.get(pre) if isinstance(pre, str) else None
    default = model == "llama" or (named is not None and named.adds_bos)
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def _byte_level(metadata: Mapping[str, object], tokens: list[str], types: Sequence[int]) -> dict[str, Any]:
    """Describes GPT-2's byte-level BPE: bytes are mapped to printable characters and merged in a given order."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"tokenizer.ggml.pre: expected one of {sorted(PRE_TOKENIZERS)}, got {pre!r:.40}; the Hugging Face "
            "directory of the model has its pre-tokenizer in tokenizer.json, so load that instead"
        )
    kind = PRE_TOKENIZERS[pre]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = []
    for merge in _strings(metadata, "tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not space or any(part not in vocab for part in (left, right, left + right)):
            raise CheckpointError(f"tokenizer.ggml.merges: {merge!r:.80} is not a pair of tokens that form a token")
        merges.append((left, right))
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in kind.splits
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "normalizer": {"type": "NFC"} if kind.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": kind.keeps_tokens},
    }


def _sentence_piece(metadata: Mapping[str, object], tokens: list[str], types: Sequence[int]) -> dict[str, Any]:
    """Describes Llama 2's BPE: characters merge into the token with the highest score, and unknown characters become
    bytes."""
    scores = _list(metadata, "tokenizer.ggml.scores")
    if len(scores) < len(tokens):
        raise CheckpointError(f"tokenizer.ggml.scores: expected one value per token, got {len(scores)}")
    if not all(isinstance(score, (int, float)) and math.isfinite(score) for score in scores):
        raise CheckpointError("tokenizer.ggml.scores: must contain only finite numbers")
    vocab = {token: i for i, token in enumerate(tokens)}
    usable = {t: i for t, i in vocab.items() if types[i] in (NORMAL, USER_DEFINED)}
    pairs = sorted((-scores[vocab[a + b]], vocab[a], vocab[b], a, b) for a, b in _splits(usable))
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    prepend = [{"type": "Prepend", "prepend": "▁"}] * prefix
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    plain = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    return {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, space]},
        "decoder": {"type": "Sequence", "decoders": [plain, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": [(left, right) for *_, left, right in pairs],
            "unk_token": next((t for t, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None),
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _splits(tokens: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns all pairs of tokens whose concatenation is a token.

    In sorted order, a token follows its prefixes, so a stack holds the prefixes of the current token. The work and the
    size of the result are bounded by the size of the vocabulary.

    Raises:
        CheckpointError: tokens split into other tokens in far more ways than in vocabularies trained on text.
    """
    pairs: list[tuple[str, str]] = []
    prefix_budget = MAX_PREFIXES_PER_TOKEN * len(tokens) + MAX_PREFIXES
    character_budget = MAX_MERGED_PER_CHARACTER * sum(map(len, tokens)) + MAX_MERGED
    prefixes: list[str] = []
    for token in sorted(tokens):
        while prefixes and not token.startswith(prefixes[-1]):
            prefixes.pop()
        prefix_budget -= len(prefixes)
        splits = [(prefix, rest) for prefix in prefixes if (rest := token[len(prefix) :]) in tokens]
        character_budget -= len(token) * len(splits)
        if prefix_budget < 0 or character_budget < 0:
            raise CheckpointError(
                "tokenizer.ggml.tokens: tokens are prefixes of each other far more often than in vocabularies that "
                f"were trained on text (about {MAX_PREFIXES_PER_TOKEN} for each of {len(tokens)} tokens)"
            )
        pairs += splits
        if token:
            prefixes.append(token)
    return pairs


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    values = _list(metadata, key)
    if not all(isinstance(v, str) for v in values):
        raise CheckpointError(f"{key}: must contain only strings")
    return values


def _list(metadata: Mapping[str, object], key: str, length: int | None = None, default: Any = None) -> list[Any]:
    values = metadata.get(key)
    if values is None and default is not None and length is not None:
        return [default] * length
    if values is None:
        raise CheckpointError(f"{key} is missing; the tokenizer needs it")
    values = values.tolist() if hasattr(values, "tolist") else values  # type: ignore[attr-defined]
    if not isinstance(values, list | tuple):
        raise CheckpointError(f"{key}: must be a list, got {type(values).__name__}")
    if length is not None and len(values) != length:
        raise CheckpointError(f"{key}: expected one value per token ({length}), got {len(values)}")
    return list(values)


def _token_id(metadata: Mapping[str, object], key: str, size: int) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= int(value) < size:  # type: ignore
        raise CheckpointError(f"{key}: expected a token id in 0..{size - 1}, got {value!r}")
    return int(value)  # type: ignore[call-overload]
