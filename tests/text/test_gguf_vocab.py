"""The merges of SentencePiece vocabularies in GGUF files, also of vocabularies that split in very many ways."""

import itertools
import json
import random

import pytest

from helpers.bounds import bounded
from jaxspec.errors import CheckpointError
from jaxspec.text import Tokenizer
from jaxspec.text.gguf_vocab import MAX_TOKEN, convert_tokenizer

pytestmark = pytest.mark.quick

LETTERS = "ab▁"


def metadata(words: list[str], scores: list[float] | None = None) -> dict:
    """A vocabulary of these words after bytes and control tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.scores": [0.0] * 259 + (scores or [-float(i) for i in range(len(words))]),
    }


def merge(text: str, words: list[str], scores: list[float]) -> list[str]:
    """SentencePiece's own rule: the pair with the best score merges first, the leftmost of several."""
    parts = list(text)
    while True:
        pairs = [
            (-scores[words.index(a + b)], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in words
        ]
        if not pairs:
            return parts
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize("seed", range(60))
def test_any_vocabulary_is_merged_by_score(seed):
    rng = random.Random(seed)
    longer = {"".join(rng.choices(LETTERS, k=rng.randint(2, 5))) for _ in range(rng.randint(0, 40))}
    words = [*LETTERS, *sorted(longer)]
    scores = [-float(i) for i in rng.sample(range(1000), len(words))]
    tokenizer = Tokenizer.from_gguf(metadata(words, scores) | {"tokenizer.ggml.add_space_prefix": False})
    pairs = [tuple(pair) for pair in json.loads(tokenizer.text)["model"]["merges"]]
    every = {(word[:at], word[at:]) for word in words for at in range(1, len(word))}
    assert set(pairs) == {(a, b) for a, b in every if a in words and b in words}
    assert len(set(pairs)) == len(pairs)
    for _ in range(8):
        text = "".join(rng.choices("ab ", k=rng.randint(1, 20)))
        parts = merge(text.replace(" ", "▁"), words, scores)
        assert tokenizer.encode(text, special=False) == [259 + words.index(part) for part in parts]


def runs(letter: str, longest: int) -> list[str]:
    return [letter * n for n in range(1, longest + 1)]


BOMBS = {
    "runs of one letter": runs("a", MAX_TOKEN),
    "runs of every letter": [run for letter in map(chr, range(0x4E00, 0x4E00 + 40)) for run in runs(letter, MAX_TOKEN)],
    "long tokens after runs": runs("a", 1000) + ["a" * 1000 + f"{i:05d}" for i in range(20_000)],
    "runs of two letters": [a + b for a in runs("a", 100) for b in runs("b", 100)] + runs("a", 100) + runs("b", 100),
}


@pytest.mark.parametrize("name", BOMBS)
def test_vocabularies_that_split_in_too_many_ways(name):
    words = metadata(BOMBS[name])
    with (
        bounded(),
        pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.tokens: .*prefixes of each other") as caught,
    ):
        convert_tokenizer(words)
    assert len(str(caught.value)) < 300


def test_long_tokens_that_do_not_split():
    rng = random.Random(0)
    words = [f"{i:04d}" + "".join(rng.choices("abcdefgh", k=996)) for i in range(2_000)]
    with bounded():
        assert convert_tokenizer(metadata(words)).content["model"]["merges"] == []


def test_runs_as_published_vocabularies_have_them():
    """Of up to 200 spaces, and as many of other characters, among 30,000 words."""
    words = [f"w{i}" for i in range(30_000)] + runs("▁", 200) + runs("-", 100) + runs("\n", 31)
    with bounded():
        merges = convert_tokenizer(metadata(words)).content["model"]["merges"]
    assert len(merges) == sum(n - 1 for longest in (200, 100, 31) for n in range(1, longest + 1))
