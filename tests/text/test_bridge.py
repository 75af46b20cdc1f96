"""Tests of the bridge between two vocabularies, on the host."""

import dataclasses
import json
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.bridges import BEGIN, END, OTHER, OTHER_TEMPLATE, OTHER_V, bridge
from helpers.toy_text import EOS, TEMPLATE, TOKENIZER, V
from jaxspec.errors import VocabMismatch
from jaxspec.text import ChatTemplate, Tokenizer
from jaxspec.text.bridge import LOW_SHARE, MAX_SPELLING, Side, build_bridge

pytestmark = pytest.mark.quick

BRIDGE = bridge()
PIECES = Tokenizer.from_gguf(
    {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            *("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))),
            *("▁", "a", "b", "c", "▁a", "ab", "▁ab", "é"),
        ],
        "tokenizer.ggml.scores": [0.0] * 259 + [-9.0] * 4 + [-1.0, -2.0, -0.5, -9.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 8,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
)
SPACED = Side(PIECES, None, (2,), PIECES.vocab_size, "pieces")


def side(tokenizer: Tokenizer = TOKENIZER, **changes) -> Side:
    given = {"template": None, "stop_ids": (tokenizer.eos_id,), "vocab": tokenizer.vocab_size}
    return Side(tokenizer, **given | changes)


def byte_level(*pieces: str, kinds: dict[int, int] | None = None) -> Tokenizer:
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": list(pieces),
            "tokenizer.ggml.token_type": [(kinds or {}).get(i, 1) for i in range(len(pieces))],
            "tokenizer.ggml.merges": [],
        }
    )


def test_common_tokens_are_those_of_equal_bytes_and_equal_role():
    found = {int(ours): int(theirs) for ours, theirs in zip(BRIDGE.as_target, BRIDGE.common)}
    texts = {TOKENIZER.token_bytes(i): i for i in range(1, V)}
    expected = {texts[OTHER.token_bytes(i)]: i for i in range(OTHER.vocab_size) if OTHER.token_bytes(i) in texts}
    assert found == expected | {EOS: END}
    assert (np.diff(BRIDGE.as_target) > 0).all()
    assert len(set(found.values())) == len(found)
    assert BRIDGE.shares == {"target": 13 / 16, "draft": 13 / 15, "sample": BRIDGE.sample_share}


@given(st.lists(st.integers(0, V - 1)))
def test_spellings_keep_the_bytes(ids):
    """All but those of ".", for which the draft has no token."""
    expected = b"".join(TOKENIZER.pieces(ids)).replace(b".", b"")
    assert b"".join(OTHER.pieces(BRIDGE.respell(ids))) == expected


@given(st.text("abc \né😀"))
def test_a_text_is_spelled_as_the_tokenizer_does(text):
    for tokenizer in (TOKENIZER, OTHER):
        assert side(tokenizer).spell([text.encode()]) == [tokenizer.encode(text, special=False)]
    common = [i for i in TOKENIZER.encode(text, special=False) if i in BRIDGE.as_target]
    assert TOKENIZER.pieces(common) == OTHER.pieces(BRIDGE.respell(common))  # one for one


@given(st.binary(max_size=12), st.booleans())
def test_any_bytes_can_be_spelled_with_a_token_for_each(text, space):
    text = b" " * space + text
    assert b"".join(PIECES.pieces(SPACED.spell([text])[0])) == text


@given(st.text("abc", max_size=12))
def test_bytes_that_are_no_text_are_spelled_by_the_longest_matches(text):
    ids = side(OTHER).longest_matches(text.encode())
    pieces = OTHER.pieces(ids)
    assert b"".join(pieces).decode() == text
    for at, piece in enumerate(pieces):
        rest = b"".join(pieces[at:])
        assert not [1 for other in side(OTHER).by_bytes if len(other) > len(piece) and rest.startswith(other)]


def test_a_space_mark_is_a_space_and_a_name_of_a_byte_is_a_byte():
    ids = build_bridge(SPACED, side())
    texts = {
        PIECES.token_bytes(int(ours)): TOKENIZER.token_bytes(int(theirs))
        for ours, theirs in zip(ids.as_target, ids.common)
    }
    assert set(texts) == {b" ", b"\n", b"a", b"b", b"c", b"ab", b".", b"</s>", *(bytes([b]) for b in "é😀".encode())}
    assert texts.pop(b"</s>") == b"<eos>"
    assert all(ours == theirs for ours, theirs in texts.items())
    plain = set(range(259, 267))
    letters = [int(ours) for ours in ids.as_target if PIECES.token_bytes(int(ours)) in (b" ", b"a", b"b", b"c", b"ab")]
    assert set(letters) <= plain  # not the byte of the same text
    byte, letter = 3 + ord("a"), 260
    assert (PIECES.id_of("<0x61>"), PIECES.id_of("a")) == (byte, letter)
    assert ids.respell([byte]) == ids.respell([letter]) == [TOKENIZER.id_of("a")]


def test_control_tokens_are_never_compared_by_name():
    """A control token whose name is text elsewhere is not that text, nor the other's control token of that name."""
    target = side(byte_level("a", "<x>", "<end>", kinds={1: 3, 2: 3}), stop_ids=(2,))
    draft = side(byte_level("<x>", "a", "<stop>", "<end>", kinds={2: 3, 3: 3}), stop_ids=(2,))
    ids = build_bridge(target, draft)
    assert list(zip(ids.as_target, ids.common)) == [(0, 1), (2, 2)]
    assert ids.respell([1]) == []


def test_the_end_of_a_turn_is_what_the_template_writes():
    tokenizer = byte_level("a", "b", "<end>", "<turn>", kinds={2: 3, 3: 3})
    template = ChatTemplate("{% for m in messages %}{{ m.content }}<turn>{% endfor %}")
    assert side(tokenizer, stop_ids=(2, 3)).roles == [2, 3, None]
    assert side(tokenizer, stop_ids=(2, 3), template=template).roles == [3, 2, None]


def test_ids_without_a_text_or_a_row_are_never_common():
    padded = build_bridge(side(vocab=V + 5), side(OTHER, vocab=OTHER_V + 3))
    assert padded.as_target.tolist() == BRIDGE.as_target.tolist()
    assert len(padded.starts) == V + 6
    assert padded.respell(range(V, V + 5)) == []
    short = build_bridge(side(vocab=V - 2), side(OTHER, vocab=13))
    assert short.as_target.max() < V - 2
    assert max(short.common.max(), short.spelling.max()) < 13


def test_a_long_spelling_keeps_its_end():
    target = side(byte_level("a", "b", "a" * 50 + "b"), stop_ids=())
    ids = build_bridge(target, side(byte_level("b", "a"), stop_ids=()))
    assert ids.respell([2]) == [1] * (MAX_SPELLING - 1) + [0]


class TestPrompt:
    """Prompts in the draft's tokens."""

    TALK: ClassVar = [{"role": "user", "content": "ab"}]

    def bridge(self, template: ChatTemplate | None = OTHER_TEMPLATE):
        return build_bridge(side(template=TEMPLATE), side(OTHER, template=template, name="other"))

    def test_text(self):
        assert self.bridge().prompt("abc", TOKENIZER.encode("abc"), {}) == OTHER.encode("abc")

    def test_messages(self):
        expected = OTHER.encode("b abca ")
        assert self.bridge().prompt(self.TALK, [], {}) == expected

    def test_ids(self):
        assert self.bridge().prompt([6, 14, EOS], [6, 14, EOS], {}) == [BEGIN, 3, 1, 4, END]

    @pytest.mark.parametrize("turns", [("ab",), ("ab", "c a", "b"), ("", "", "")])
    def test_ids_of_a_conversation(self, turns):
        """As the target's template renders it, with a BOS that the tokenizer adds, too; the draft's renders it anew."""
        talk = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        expected = OTHER.encode(OTHER_TEMPLATE.render(talk))
        for add_bos in (False, True):
            tokenizer = Tokenizer(json.loads(TOKENIZER.text), EOS, EOS, add_bos)
            ids = tokenizer.encode(TEMPLATE.render(talk))
            assert (ids[0] == EOS) == add_bos
            target = side(tokenizer, template=TEMPLATE)
            assert target.conversation(ids) == talk
            assert target.conversation(ids[:-1]) is None
            other = side(OTHER, template=OTHER_TEMPLATE)
            assert build_bridge(target, other).prompt(ids, ids, {}) == expected

    def test_messages_without_a_template_or_that_it_refuses(self):
        for template in (None, ChatTemplate("{{ raise_exception('no') }}")):
            assert self.bridge(template).prompt(self.TALK, [6], {}) == [BEGIN, 3, 1]


def test_what_is_reported():
    name = (
        f"other and toy have 13 tokens in common: 81% of the target's, 87% of the draft's, {BRIDGE.sample_share:.0%} of"
    )
    assert str(BRIDGE).startswith(name)
    assert ("expect few" in str(BRIDGE)) == (BRIDGE.sample_share < LOW_SHARE)
    for share, warns in ((LOW_SHARE - 0.01, True), (LOW_SHARE + 0.01, False)):
        assert ("expect few" in str(dataclasses.replace(BRIDGE, sample_share=share))) == warns


def test_vocabularies_without_a_common_text_are_refused():
    with pytest.raises(VocabMismatch, match="model and model do not have a token with the same text"):
        build_bridge(
            side(byte_level("a", "<x>", kinds={1: 3}), stop_ids=(1,)),
            side(byte_level("b", "<x>", kinds={1: 3}), stop_ids=(1,)),
        )
