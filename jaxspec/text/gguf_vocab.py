"""Builds a `tokenizers.Tokenizer` from the metadata of a GGUF file."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxspec.errors import CheckpointError

if TYPE_CHECKING:
    import tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (  # GPT-4's; families differ in the number of digits per token
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Pre-tokenization by tokenizer.ggml.pre: regular expressions that split a text, applied in order.
SPLITS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_CL100K % r"\p{N}{1,3}",),
    "qwen2": (_CL100K % r"\p{N}",),
}

MAX_TOKEN = 1024  # characters; the longest published tokens are runs of about 200 spaces


def tokenizer_from_gguf(
    metadata: Mapping[str, object],
) -> tuple["tokenizers.Tokenizer", int | None, int | None, bool]:
    """Builds a tokenizer from `tokenizer.*` metadata.

    Returns:
        The tokenizer, its BOS id, its EOS id, and whether a text begins with BOS.

    Raises:
        CheckpointError: an entry is missing or invalid.
    """
    from tokenizers import AddedToken

    model = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    if not isinstance(model, str) or model not in builders:
        raise CheckpointError(f"tokenizer.ggml.model: expected one of {sorted(builders)}, got {model!r}")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise CheckpointError("tokenizer.ggml.tokens: a token is duplicated")
    if any(len(token) > MAX_TOKEN for token in tokens):
        raise CheckpointError(f"tokenizer.ggml.tokens: a token has more than {MAX_TOKEN} characters")
    types = _list(metadata, "tokenizer.ggml.token_type", len(tokens), default=NORMAL)
    while types and types[-1] == UNUSED:  # padding of the vocabulary
        types.pop()
        tokens.pop()
    inner = builders[model](metadata, tokens, types)

    added = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
    ]
    inner.add_tokens(added)
    bos, eos = (_token_id(metadata, f"tokenizer.ggml.{n}_token_id", len(tokens)) for n in ("bos", "eos"))
    # The default if the flag is missing. EOS is never added, since the prompt is to be continued.
    wants_bos = model == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    return inner, bos, eos, bool(metadata.get("tokenizer.ggml.add_bos_token", wants_bos))


def _byte_level(metadata: Mapping[str, object], tokens: list[str], types: Sequence[int]) -> Any:
    """Builds GPT-2's byte-level BPE: bytes are mapped to printable characters and merged in the order of the merges."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in SPLITS:
        raise CheckpointError(f"tokenizer.ggml.pre: expected one of {sorted(SPLITS)}, got {pre!r}")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = []
    for merge in _strings(metadata, "tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not space or any(part not in vocab for part in (left, right, left + right)):
            raise CheckpointError(f"tokenizer.ggml.merges: {merge!r} is not a pair of tokens that form a token")
        merges.append((left, right))
    inner = Tokenizer(BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()  # type: ignore[assignment]
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])  # type: ignore[assignment]
    inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return inner


def _sentence_piece(metadata: Mapping[str, object], tokens: list[str], types: Sequence[int]) -> Any:
    """Builds Llama 2's BPE: characters are merged into the token with the highest score, unknown ones become bytes."""
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    scores = _list(metadata, "tokenizer.ggml.scores")
    if len(scores) < len(tokens):
        raise CheckpointError(f"tokenizer.ggml.scores: expected one value per token, got {len(scores)}")
    if not all(isinstance(score, (int, float)) and math.isfinite(score) for score in scores):
        raise CheckpointError("tokenizer.ggml.scores: must contain only finite numbers")
    vocab = {token: i for i, token in enumerate(tokens)}
    usable = {t: i for t, i in vocab.items() if types[i] in (NORMAL, USER_DEFINED)}
    pairs = [
        (-scores[i], vocab[t[:cut]], vocab[t[cut:]], t[:cut], t[cut:])
        for t, i in usable.items()
        for cut in range(1, len(t))
        if t[:cut] in usable and t[cut:] in usable
    ]
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    merges = [(left, right) for *_, left, right in sorted(pairs)]
    inner = Tokenizer(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    space = normalizers.Replace(" ", "▁")
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space  # type: ignore
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence(  # type: ignore[assignment]
        [*steps, decoders.Strip(" ", 1, 0)] if prefix else steps
    )
    return inner


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
        raise CheckpointError(f"{key} is missing, which the tokenizer needs")
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
