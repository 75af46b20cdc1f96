"""Contents of tokenizer.json that are damaged or hostile: every part with every setting replaced in turn."""

import base64
import copy
import itertools
import json
from collections.abc import Iterator
from typing import Any

from jaxspec.text.tokenizer import _BYTE_OF

ODD: tuple[Any, ...] = (None, "", "▁(", -1, 0, 2**40, True, [[]], {"a": 1}, "a" * 5000)
"""Values that replace a setting."""

BYTES = list(_BYTE_OF)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
FUSED = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]


def added(i: int, text: str, **changes) -> dict:
    settings = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": i, "content": text} | settings | changes


def content(**changes) -> dict[str, Any]:
    """A byte-level BPE with a few merges and two special tokens."""
    names = ["<s>", "</s>", *BYTES, "ab", "aa", "aab"]
    merges = [["a", "b"], ["a", "a"], ["a", "ab"]]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added(0, "<s>"), added(1, "</s>")],
        "normalizer": None,
        "pre_tokenizer": dict(BYTE_LEVEL),
        "post_processor": None,
        "decoder": dict(BYTE_LEVEL),
        "model": {"type": "BPE", "vocab": {name: i for i, name in enumerate(names)}, "merges": merges},
    } | changes


BPE = {
    "type": "BPE",
    "dropout": None,
    "unk_token": "<s>",
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
    "vocab": content()["model"]["vocab"],
    "merges": content()["model"]["merges"],
}
UNIGRAM = {
    "type": "Unigram",
    "unk_id": 0,
    "byte_fallback": True,
    "vocab": [["<s>", 0.0], ["</s>", 0.0], ["▁", -1.0], ["a", -2.0], ["b", -2.5], ["▁a", -2.2], ["ab", -3.0]],
}
WORD_PIECE = {
    "type": "WordPiece",
    "unk_token": "<s>",
    "continuing_subword_prefix": "##",
    "max_input_chars_per_word": 100,
    "vocab": {"<s>": 0, "</s>": 1, "a": 2, "##b": 3, "ab": 4},
}
WORD_LEVEL = {"type": "WordLevel", "unk_token": "<s>", "vocab": {"<s>": 0, "</s>": 1, "a": 2, "ab": 3}}
REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
}
PARTS: dict[str, list[dict[str, Any]]] = {
    "normalizer": [
        {"type": "BertNormalizer"}
        | {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True},
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Prepend", "prepend": "▁"},
        REPLACE,
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
        {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(64)).decode()},
        {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]},
        *[{"type": kind} for kind in ("NFC", "NFD", "NFKC", "NFKD", "StripAccents", "Lowercase", "Nmt", "ByteLevel")],
    ],
    "pre_tokenizer": [
        BYTE_LEVEL,
        {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"String": "a"}, "behavior": "MergedWithNext", "invert": True},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {"type": "CharDelimiterSplit", "delimiter": "a"},
        {"type": "Punctuation", "behavior": "Contiguous"},
        {"type": "Digits", "individual_digits": True},
        {"type": "FixedLength", "length": 3},
        {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, BYTE_LEVEL]},
        *[{"type": kind} for kind in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "UnicodeScripts")],
    ],
    "post_processor": [
        TEMPLATE,
        {"type": "BertProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0]},
        {"type": "RobertaProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0]}
        | {"trim_offsets": True, "add_prefix_space": True},
        BYTE_LEVEL,
        {"type": "Sequence", "processors": [BYTE_LEVEL, TEMPLATE]},
    ],
    "decoder": [
        BYTE_LEVEL,
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {"type": "Sequence", "decoders": FUSED},
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
    "model": [BPE, UNIGRAM, WORD_PIECE, WORD_LEVEL],
}
"""The parts of a tokenizer, of every type that the library knows."""


def damaged(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A part with each of its settings left out, or replaced by each odd value, at any depth up to three."""

    def places(node: Any, path: tuple = ()) -> Iterator[tuple]:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in itertools.islice(items, 8):
            yield (*path, key)
            if len(path) < 2:
                yield from places(value, (*path, key))

    for path in places(part):
        for value in (*ODD, "leave out"):
            changed = copy.deepcopy(part)
            node = changed
            for key in path[:-1]:
                node = node[key]
            if value == "leave out":
                del node[path[-1]]
            else:
                node[path[-1]] = value
            yield changed


def family(name: str) -> Iterator[dict[str, Any]]:
    """All damaged tokenizers of one part; each has the other parts as they should be."""
    for part in PARTS[name]:
        rest: dict[str, Any] = {}
        if part in (UNIGRAM, WORD_PIECE, WORD_LEVEL):
            rest = {"pre_tokenizer": None, "decoder": {"type": "Sequence", "decoders": FUSED}}
        for changed in [part, *damaged(part)]:
            yield content(**rest | {name: changed})


def charsmap(trie: bytes, text: bytes = b"a\0") -> dict[str, Any]:
    """A normalizer whose map of characters is this double array."""
    data = len(trie).to_bytes(4, "little") + trie + text
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def split(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


def nested(kind: str, key: str, depth: int) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, key: []}
    for _ in range(depth):
        part = {"type": kind, key: [part]}
    return part


def bombs() -> dict[str, dict[str, Any]]:
    """Small files that crash the library, or take it long or much memory."""
    many = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 20_000
    regexes = [
        "(a+)+$",
        "(a|a)*c",
        "(a*)*c",
        "(?:a?){40}a{40}c",
        "(.*)*(.*)*c",
        "a{1,100000}",
        "((((a{99}){99}){99}){99})",
    ]
    normal = {"type": "Sequence", "normalizers": [REPLACE] * 40}
    found = {
        "doubling": content(normalizer=normal),
        "doubling, once": content(normalizer=REPLACE | {"content": "a" * 1_000_000}),
        "empty charsmap": content(normalizer={"type": "Precompiled", "precompiled_charsmap": ""}),
        "charsmap of ones": content(normalizer=charsmap(b"\xff" * 1024)),
        "charsmap of units": content(normalizer=charsmap(bytes(range(256)) * 4)),
        "charsmap, too long": content(normalizer=charsmap(b"") | {"precompiled_charsmap": "/////w=="}),
        "prefix longer than tokens": content(model=BPE | {"continuing_subword_prefix": "####"}),
        "parts of length 0": content(pre_tokenizer={"type": "FixedLength", "length": 0}),
        "unknown special token": content(post_processor=TEMPLATE | {"special_tokens": {}}),
        "special tokens without end": content(post_processor=TEMPLATE | {"single": many}),
        "nested normalizers": content(normalizer=nested("Sequence", "normalizers", 60)),
        "nested pre-tokenizers": content(pre_tokenizer=nested("Sequence", "pretokenizers", 60)),
        "dropout": content(model=BPE | {"dropout": 0.5}),
        "an id twice": content(model=BPE | {"vocab": dict.fromkeys(BPE["vocab"], 3)}),
        "merges of nothing": content(model=BPE | {"merges": [["", ""], ["", "a"]]}),
        "spaces made before spaces": content(
            pre_tokenizer={"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 30},
        ),
    }
    for pattern in regexes:
        found[f"split at {pattern}"] = content(pre_tokenizer=split(pattern))
        found[f"replace {pattern}"] = content(normalizer=REPLACE | {"pattern": {"Regex": pattern}})
    return found


TEXTS = ["", "a", "ab 12", "a" * 64, "a" * 64 + "b", "<s>ab</s>", "é你\u0301 \ufb01\n\t\x00", "A a"]


def write(path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value), "utf-8")
