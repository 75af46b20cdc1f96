"""The text of an answer is what follows the text of its prompt, for every kind of tokenizer."""

import itertools
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

import jaxspec
from helpers.narrow import not_none
from helpers.toy_text import EOS, LM, PROMPTS, TABLE, TEMPLATE, TOKENIZER, go
from jaxspec import Model
from jaxspec.errors import InvalidConfig
from jaxspec.text import ChatTemplate, IncrementalDecoder, StopStrings, Tokenizer, cut_tokens
from jaxspec.text.conversations import Conversation
from jaxspec.train import tokenized

pytestmark = pytest.mark.quick

_BYTES = [f"<0x{b:02X}>" for b in "é😀".encode()]
WORDS = ["<eos>", "▁", "a", "▁a", "▁▁", "b", "\n", "</turn>", *_BYTES, "▁ab", "é"]
"""Sixteen tokens, as many as the toy model has."""
_FUSED = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
_PREPEND = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]


def spaced(model: str, decoder, normalizer=None, pre_tokenizer=None) -> Tokenizer:
    """A tokenizer that writes spaces as U+2581."""
    if model == "BPE":
        merges = [("▁", "▁"), ("▁", "a"), ("▁a", "b")]
        made = models.BPE({word: i for i, word in enumerate(WORDS)}, merges, unk_token="<eos>", byte_fallback=True)
    else:
        made = models.Unigram([(word, -1.0 - i) for i, word in enumerate(WORDS)], 0, byte_fallback=True)
    inner = tokenizers.Tokenizer(made)
    inner.normalizer = normalizer
    inner.pre_tokenizer = pre_tokenizer
    inner.decoder = decoder
    inner.add_special_tokens(["<eos>", "</turn>"])
    return Tokenizer(json.loads(inner.to_str()), eos_id=0)


def metaspace(scheme: str, model: str = "BPE") -> Tokenizer:
    return spaced(
        model,
        decoders.Metaspace(prepend_scheme=scheme),
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False),
    )


KINDS = {
    "byte-level": TOKENIZER,
    "dummy space": spaced(
        "BPE", decoders.Sequence([*_FUSED, decoders.Strip(" ", 1, 0)]), normalizers.Sequence(_PREPEND)
    ),
    "no dummy space": spaced("BPE", decoders.Sequence(_FUSED), normalizers.Replace(" ", "▁")),
    "dummy space, Unigram": spaced(
        "Unigram", decoders.Sequence([*_FUSED, decoders.Strip(" ", 1, 0)]), normalizers.Sequence(_PREPEND)
    ),
    "Metaspace always": metaspace("always"),
    "Metaspace first": metaspace("first"),
    "Metaspace never": metaspace("never"),
    "Metaspace, Unigram": metaspace("always", "Unigram"),
}
kinds = st.sampled_from(list(KINDS.values()))
some_ids = st.lists(st.integers(0, 15), max_size=8)


def inside_character(ids: list[int], tokenizer: Tokenizer) -> bool:
    """Tells whether a text ends inside a character."""
    decoder = IncrementalDecoder(tokenizer)
    decoder.push(ids)
    return bool(decoder._utf8.getstate()[0])


@pytest.mark.parametrize("kind", KINDS)
def test_every_pair_of_short_prompts_and_answers(kind):
    tokenizer = KINDS[kind]
    prompts = [list(ids) for n in range(3) for ids in itertools.product(range(16), repeat=n)]
    completed = 0
    for prompt, answer in itertools.product(prompts, [[i] for i in range(16)]):
        decoder = IncrementalDecoder(tokenizer, before=prompt)
        text = decoder.push(answer) + decoder.finish()
        whole = tokenizer.decode(prompt + answer)
        if tokenizer.decode(prompt) + text != whole:  # only where the answer completes a character of the prompt
            assert inside_character(prompt, tokenizer)
            assert tokenizer.decode(prompt)[:-1] + text == whole
            completed += 1
    assert completed >= 4 * 17  # the first byte of é before any of four other bytes, after 16 tokens or none


@settings(max_examples=400, deadline=None, derandomize=True)
@given(kinds, some_ids, some_ids, st.booleans())
def test_any_prompt_and_answer(tokenizer, prompt, answer, skip):
    """Token by token, what is pushed is what follows; the prompt's own text was pushed before."""
    earlier = IncrementalDecoder(tokenizer, skip)
    earlier.push(prompt)
    pieces = [earlier.push([i]) for i in answer] + [earlier.finish()]
    decoder = IncrementalDecoder(tokenizer, skip, before=prompt)
    text = "".join([decoder.push([i]) for i in answer] + [decoder.finish()])
    assert text == "".join(pieces) or (inside_character(prompt, tokenizer) and "\ufffd" + text == "".join(pieces))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(kinds, some_ids, some_ids, st.lists(st.text(" ab\n", min_size=1, max_size=2), max_size=2))
def test_stop_strings_see_the_first_space(tokenizer, prompt, answer, stops):
    def text_of(count: int) -> str:
        decoder = IncrementalDecoder(tokenizer, before=prompt)
        return decoder.push(answer[:count]) + decoder.finish()

    count, text = cut_tokens(tokenizer, answer, stops, before=prompt)
    hit = next((n for n in range(len(answer) + 1) if any(s in text_of(n) for s in stops)), len(answer))
    assert (count, text) == (hit, text_of(hit)[: StopStrings(stops).find(text_of(hit))])


@pytest.mark.parametrize("kind", KINDS)
def test_generated_text_follows_the_prompt(kind):
    """The results of a call, of a stream and of the callback; also in the second turn of a session."""
    tokenizer = KINDS[kind]
    target = Model(LM, {"table": TABLE}, tokenizer, TEMPLATE, stop_ids=(EOS,), name=kind)
    prompts = [[2], [3, 2], [2, 4], [7], *PROMPTS]
    seen = {}
    free = go(
        prompts, target=target, capacity=256, on_token=lambda row, token, text: seen.setdefault(row, []).append(text)
    )
    for i, row in enumerate(free):
        decoder = IncrementalDecoder(tokenizer, before=prompts[i])
        assert row.text == decoder.push(row.tokens) + decoder.finish()
        assert tokenizer.decode(prompts[i]) + not_none(row.text) == tokenizer.decode(prompts[i] + row.tokens)
        assert not_none(row.text).startswith("".join(seen[i]))
    assert any(not_none(text).startswith(" ") for text in free.text)

    chunks = [""] * len(prompts)
    for chunk in go(prompts, target=target, capacity=256, call=jaxspec.stream):
        chunks[chunk.row] += chunk.text
    assert chunks == free.text

    again = go(prompts, target=target, session=free.session)
    for prompt, first, second in zip(prompts, free, again):
        before = prompt + first.tokens + prompt
        assert tokenizer.decode(before) + second.text == tokenizer.decode(before + second.tokens)


@pytest.mark.parametrize("kind", ["dummy space", "Metaspace always"])
def test_a_stop_string_begins_with_the_first_space(kind):
    tokenizer = KINDS[kind]
    target = Model(LM, {"table": TABLE}, tokenizer, TEMPLATE, stop_ids=(EOS,), name=kind)
    free = go([[i] for i in range(2, 8)], target=target)
    row = next(row for row in free if not_none(row.text)[:1] == " " and row.text.strip())
    first = not_none(row.text)[:2]
    stopped = go([[i] for i in range(2, 8)], target=target, stop=[first])[row.prompt]
    assert (stopped.text, stopped.finish_reason) == ("", "stop")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(kinds, st.text("ab \né", max_size=8), st.text("ab \né", max_size=8))
def test_parts_of_a_text_are_encoded_as_the_whole(tokenizer, first, second):
    """A part that continues another gets neither BOS nor a space of the tokenizer's own."""
    ids = tokenizer.encode(first)
    parts = ids + tokenizer.encode(second, begins=not ids)
    assert tokenizer.decode(parts) == tokenizer.decode(tokenizer.encode(first + second))
    assert tokenizer.encode_all([second, first], begins=False) == [
        tokenizer.encode(text, begins=False) for text in (second, first)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_adds_no_space(kind):
    tokenizer = KINDS[kind]
    for text in ("a", " a", "ab", "  a", "\n", "é", "", "a b"):
        pieces = tokenizer.pieces(tokenizer.encode(text, begins=False))
        assert b"".join(pieces) == text.encode()
    with pytest.raises(InvalidConfig, match="must be a str"):
        tokenizer.encode(None, begins=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_training_reads_a_conversation_as_it_is_decoded(kind):
    """The tokens are those of the whole text, also where the encoder puts a space before a part of its own."""
    tokenizer = KINDS[kind]
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos }}{% endif %}{% endfor %}",
        {"eos": "<eos>"},
    )
    target = Model(LM, {"table": TABLE}, tokenizer, template, stop_ids=(EOS,), name=kind)
    roles = ["user", "assistant"] * 2
    messages = [{"role": role, "content": text} for role, text in zip(roles, ["a", " b", "ab", " a"])]
    (found,), bad = tokenized.encode_texts(target, [Conversation(tuple(messages), None, "here")])
    assert not bad
    assert found.ids.tolist() == tokenizer.encode(template.render(messages))
    learnt = [tokenizer.token_bytes(i) for i, own in zip(found.ids.tolist(), found.mask) if own]
    assert b"".join(learnt) == b" b<eos> a<eos>"


TAGGED = ChatTemplate(
    "{% for m in messages %}{{ m.content }}{{ eos if m.role == 'assistant' else '\n' }}{% endfor %}",
    {"eos": "<eos>"},
)


def conversation(contents: list[str]) -> tuple[dict[str, str], ...]:
    return tuple({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(kinds, st.lists(st.text("ab \né", min_size=1, max_size=4), min_size=2, max_size=8))
def test_training_encodes_each_answer_after_its_prompt(tokenizer, contents):
    """200 conversations: what each message adds to the ids of the text before it, unless it changes them."""
    messages = conversation(contents[: len(contents) // 2 * 2])
    target = Model(LM, {"table": TABLE}, tokenizer, TAGGED, stop_ids=(EOS,))
    (found,), _ = tokenized.encode_texts(target, [Conversation(messages, None, "here")])
    ids, mask, before = [], [], ""
    for i, message in enumerate(messages):
        text = TAGGED.render(messages[: i + 1])
        known = tokenizer.encode(text)
        held = known[: len(ids)] == ids
        new = known[len(ids) :] if held else tokenizer.encode(text.removeprefix(before), begins=False)
        ids, mask, before = ids + new, mask + [message["role"] == "assistant"] * len(new), text
    assert (found.ids.tolist(), found.mask.tolist()) == (ids, mask)


@pytest.mark.parametrize("kind", KINDS)
def test_training_encodes_a_conversation_a_few_times(kind, monkeypatch):
    """Of 20 turns, every character is encoded in the whole text and in its part, which may follow a special token."""
    encoded, encode = [], Tokenizer._encode
    monkeypatch.setattr(Tokenizer, "_encode", lambda self, texts, *a: encoded.extend(texts) or encode(self, texts, *a))
    messages = conversation(["a", "ab"] * 20)
    target = Model(LM, {"table": TABLE}, KINDS[kind], TAGGED, stop_ids=(EOS,))
    tokenized.encode_texts(target, [Conversation(messages, None, "here")])
    breaks = 1 + len(messages)  # before what continues a text, see `encode_all`
    assert sum(map(len, encoded)) <= 3 * len(TAGGED.render(messages)) + breaks
