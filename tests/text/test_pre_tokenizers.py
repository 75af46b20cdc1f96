"""Pre-tokenizers that GGUF files name split a text as those of the original tokenizer.json files."""

import json
import random
import unicodedata

import pytest
import tokenizers
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

from helpers.checkpoints import random_params, tiny_config, write_gguf
from jaxspec.checkpoints.gguf import open_gguf
from jaxspec.errors import CheckpointError
from jaxspec.text import Tokenizer
from jaxspec.text.gguf_vocab import PRE_TOKENIZERS, adds_bos, convert_tokenizer
from jaxspec.text.tokenizer import _BYTE_OF

pytestmark = pytest.mark.quick

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SEED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK_V3 = (
    "\\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
CASED = (  # as published; some of these letters look like others
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
CJK = "[一-龥ࠀ-一가-\ud7ff]+"
BYTES = ByteLevel(add_prefix_space=False, use_regex=False)


def splits(*patterns: str, behavior: str = "isolated", invert: bool = False, digits: bool = False):
    parts = [Split(Regex(pattern), behavior, invert) for pattern in patterns]
    return Sequence([*parts, *[Digits(individual_digits=True)] * digits, BYTES])


DIGITS = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
ORIGINAL = {
    "gpt-2": ByteLevel(add_prefix_space=False),
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
    "llama-bpe": splits(LLAMA3),
    "llama3": splits(LLAMA3),
    "llama-v3": splits(LLAMA3),
    "smaug-bpe": splits(LLAMA3),
    "dbrx": splits(LLAMA3, behavior="removed", invert=True),
    "qwen2": splits(QWEN2),
    "deepseek-r1-qwen": splits(QWEN2),
    "qwen35": splits(QWEN35),
    "deepseek-llm": splits("[\r\n]", rf"\s?[{CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", CJK, digits=True),
    "deepseek-coder": splits("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, digits=True),
    "deepseek-v3": splits(*DEEPSEEK_V3),
    "gpt-4o": splits(GPT4O, behavior="removed", invert=True),
    "tekken": splits(TEKKEN),
    "seed-coder": splits(SEED),
}
"""The pre-tokenizers of the original tokenizer.json files; Tekken's pattern is that of the tekken.json files."""
COMPOSED = ("qwen2", "deepseek-r1-qwen", "qwen35")

SCRIPTS = [
    "the Committee WILL meet McDonald iPhone I'm we've they'LL O'Brien don't 'Tis",
    "0 1 12 123 1234 12345 1,234.56 ½ Ⅻ ² ٣٤٥ १२३ 2024-03-14",
    "Füße Zażółć gęślą jaźń École ŒUVRE ǅ ﬁ cafe\u0301 e\u0301\u0302",
    "Съешь ещё Ξεσκεπάζω ՀԱՅԵՐԵՆ ქართული ᏣᎳᎩ",
    "שָׁלוֹם مَرْحَبًا नमस्ते হ্যালো สวัสดี ជំរាបសួរ",
    "你好，世界。 こんにちは カタカナ 안녕하세요 ㄱㄴ ㄅㄆ 　全角ＡＢＣ１２３",
    "👩\u200d👩\u200d👧 🏳️\u200d🌈 𝔘𝔫𝔦 𐐀𐐁 𞤀𞤁",
    " \t\n\r\n\u2028\u3000\u00a0\u200b  \n\n \n",
    "!?.,;:()[]{}<>|/\\`~@#$%^&*-_=+\"'‘’“”…—¿¡«»€£¥",
    "def f(x): return x[1:-1] // 2\n    # a comment\n\tif a != b: pass\r\n",
]


def texts(count: int) -> list[str]:
    """Texts in many scripts, some of characters from all of them, others of any characters."""
    rng = random.Random(7)
    letters = "".join(SCRIPTS)
    words = [word for script in SCRIPTS for word in script.split(" ")]
    made = list(SCRIPTS)
    while len(made) < count:
        kind = rng.random()
        if kind < 0.4:
            made.append("".join(rng.choices(letters, k=rng.randint(1, 24))))
        elif kind < 0.8:
            made.append("".join(word + rng.choice(["", " ", "  ", "\n", "'s"]) for word in rng.choices(words, k=8)))
        else:
            codes = (rng.choice((rng.randrange(0x3000), rng.randrange(0x11000))) for _ in range(16))
            made.append("".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000))
    return made


TEXTS = texts(300)


def parts_of(splitter, text: str) -> list[str]:
    return [part for part, _ in splitter.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", ORIGINAL)
def test_a_text_is_split_as_by_the_original(pre):
    content = convert_tokenizer(metadata(pre)).content
    built = tokenizers.Tokenizer.from_str(json.dumps(content)).pre_tokenizer
    for text in TEXTS:
        assert parts_of(built, text) == parts_of(ORIGINAL[pre], text), (pre, text)


def test_every_name_has_an_original_and_most_differ():
    assert {*PRE_TOKENIZERS} - {*ORIGINAL} == {"default"}  # for files that were converted before names were written
    seen = {pre: json.dumps([parts_of(splitter, text) for text in TEXTS]) for pre, splitter in ORIGINAL.items()}
    assert len({*seen.values()}) == 11


def metadata(pre: str, **changes) -> dict:
    """Metadata of a tokenizer of bytes with some merges, two of which no other merges lead to."""
    spelled = {byte: char for char, byte in _BYTE_OF.items()}
    merges = [(spelled[32], "t"), ("1", "2"), ("12", "3"), (spelled[0xCC], spelled[0x81]), ("h", "e")]
    tokens = ["<s>", "</s>", *spelled.values(), *(a + b for a, b in merges), "xyz"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
        "tokenizer.ggml.bos_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


@pytest.mark.parametrize("pre", ORIGINAL)
def test_ids_are_those_of_the_original_tokenizer(pre):
    """As transformers reads a tokenizer.json: normalizer, pre-tokenizer, and merges that tokens may skip or not."""
    tokenizer = Tokenizer.from_gguf(metadata(pre, add_bos_token=False))
    whole = pre in ("llama-bpe", "llama3", "llama-v3", "tekken")
    described = json.loads(tokenizer.text)["model"]
    merges = [tuple(merge) for merge in described["merges"]]
    original = tokenizers.Tokenizer(tokenizers.models.BPE(described["vocab"], merges, ignore_merges=whole))
    original.pre_tokenizer = ORIGINAL[pre]
    if pre in COMPOSED:
        original.normalizer = tokenizers.normalizers.NFC()
    for text in [*TEXTS, "xyz", " xyz", "the 123 cafe\u0301"]:
        assert tokenizer.encode(text) == original.encode(text).ids, (pre, text)
        composed = unicodedata.normalize("NFC", text) if pre in COMPOSED else text
        assert tokenizer.decode(tokenizer.encode(text)) == composed
    assert (len(tokenizer.encode("xyz")) == 1) == whole


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_bos_is_the_default_of_those_families_that_begin_with_it(pre):
    expected = pre in ("llama-bpe", "llama3", "llama-v3", "tekken")
    assert adds_bos(metadata(pre)) == expected
    assert Tokenizer.from_gguf(metadata(pre)).encode("he")[:1] == ([0] if expected else [2 + 256 + 4])
    assert not adds_bos(metadata(pre, add_bos_token=False))
    assert adds_bos(metadata(pre, add_bos_token=True))


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_a_file_is_opened_with_its_tokenizer(tmp_path, pre):
    entries = metadata(pre)
    config = tiny_config(vocab_size=len(entries["tokenizer.ggml.tokens"]))
    checkpoint = open_gguf(write_gguf(tmp_path / "model.gguf", config, random_params(config), metadata=entries))
    tokenizer = Tokenizer.from_source(checkpoint.tokenizer, config.vocab_size)
    assert checkpoint.add_bos == tokenizer.add_bos == adds_bos(entries)
    direct = Tokenizer.from_gguf(entries)
    assert tokenizer.encode_all(SCRIPTS) == direct.encode_all(SCRIPTS)


@pytest.mark.parametrize("pre", ["falcon3", "martian", "", 3, ["llama3"], "x" * 5000])
def test_other_names_are_refused_with_what_to_do(pre):
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.ggml\.pre: expected one of .*Hugging Face directory"
    ) as caught:
        Tokenizer.from_gguf(metadata(pre))
    assert len(str(caught.value)) < 600
