"""Tests tokenizers, incremental decoding and stop strings with small vocabularies."""

import itertools
import json
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.narrow import not_none
from jaxspec.errors import CheckpointError, InvalidConfig, TokenOutOfRange
from jaxspec.text import ChatTemplate, IncrementalDecoder, StopStrings, Tokenizer, cut_tokens
from jaxspec.text.gguf_vocab import PRE_TOKENIZERS
from jaxspec.text.tokenizer import _BYTE_OF, same_vocab

pytestmark = pytest.mark.quick

ONE_LINE = r"\Achat template.*\Z"
FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467"  # three people, two joiners: one picture
SAMPLES = [
    "Hello, world! It's 2024, isn't it?",
    "Ça va? Füße, Zażółć gęślą jaźń, Съешь ещё, Ξεσκεπάζω",
    "שלום مرحبا नमस्ते สวัสดี 你好,世界 こんにちは 안녕하세요",
    f"cafe\u0301 {FAMILY} \U0001f3f3\ufe0f\u200d\U0001f308 𝔘𝔫𝔦",
    "  \n\t\r\n  \x00\x7f\u2028\ufeff",
    "",
]

SPELLING = {b: c for c, b in _BYTE_OF.items()}


def spell(text: str) -> str:
    """A text as GPT-2's vocabulary writes it."""
    return "".join(SPELLING[b] for b in text.encode())


def byte_level_metadata(**changes) -> dict[str, Any]:
    """A GGUF file's `tokenizer.*` keys: 256 bytes, some merges (one inside a character), special tokens."""
    merges = [(" ", "t"), ("h", "e"), (" t", "he"), ("1", "2"), ("i", "n"), ("e", "\n")]
    merges = [(spell(a), spell(b)) for a, b in merges] + [(SPELLING[0xE4], SPELLING[0xBD])]
    tokens = ["<s>", "</s>", *(SPELLING[b] for b in range(256)), *(a + b for a, b in merges), "<tool é>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 3) + [4],
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def sentence_piece_metadata(**changes) -> dict[str, Any]:
    """The same for a vocabulary with scores, spaces as U+2581 and bytes for what it does not know."""
    words = ["▁", "h", "e", "l", "o", "é", "你", "▁h", "▁he", "ll", "llo", "▁hello", "he"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(words))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


BYTES = Tokenizer.from_gguf(byte_level_metadata())
PIECES = Tokenizer.from_gguf(sentence_piece_metadata())
LIBRARY_BYTES, LIBRARY_PIECES = (tokenizers.Tokenizer.from_str(one.text) for one in (BYTES, PIECES))

texts = st.one_of(st.text(max_size=60), st.text("the 12in\né你<s>", max_size=40), st.sampled_from(SAMPLES))
either = st.sampled_from([BYTES, PIECES])
quick = settings(max_examples=150, deadline=None, derandomize=True)


def random_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24)


def in_pieces(items, cuts):
    """`items` cut at the places `cuts`."""
    places = [0, *sorted({min(c, len(items)) for c in cuts}), len(items)]
    return [items[a:b] for a, b in itertools.pairwise(places)]


cuts = st.lists(st.integers(0, 40), max_size=10)


class TestTokenizer:
    @quick
    @given(texts)
    def test_decoding_undoes_encoding(self, text):
        assert BYTES.decode(BYTES.encode(text), skip_special=False) == text
        assert PIECES.decode(PIECES.encode(text, special=False), skip_special=False) == text.replace("▁", " ")

    @quick
    @given(st.data())
    def test_decoding_byte_level_ids_is_the_library_s(self, data):
        ids = data.draw(random_ids(BYTES))
        assert BYTES.decode(ids) == LIBRARY_BYTES.decode(ids)
        assert BYTES.decode(ids, skip_special=False) == LIBRARY_BYTES.decode(ids, skip_special_tokens=False)

    @quick
    @given(texts)
    def test_decoding_sentence_pieces_is_the_library_s(self, text):
        ids = PIECES.encode(text)
        assert PIECES.decode(ids) == LIBRARY_PIECES.decode(ids)

    def test_digits_stand_alone_or_not(self):
        assert len(BYTES.encode("12")) == 2  # though a merge exists
        assert len(Tokenizer.from_gguf(byte_level_metadata(pre="gpt-2")).encode("12")) == 1

    @pytest.mark.parametrize("pre", PRE_TOKENIZERS)
    def test_every_scheme_round_trips(self, pre):
        tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre=pre, add_bos_token=False))
        for text in SAMPLES:
            normal = text.replace("e\u0301", "é") if PRE_TOKENIZERS[pre].composes else text
            assert tokenizer.decode(tokenizer.encode(text)) == normal

    def test_scores_decide_the_merges(self):
        names = [PIECES.token_bytes(i) for i in PIECES.encode("hello é你ß", special=False)]
        assert names == [b" hello", b" ", "é".encode(), "你".encode(), b"\xc3", b"\x9f"]

    @pytest.mark.parametrize("add_bos", [True, False])
    def test_bos_once(self, add_bos):
        tokenizer = Tokenizer.from_gguf(byte_level_metadata(add_bos_token=add_bos))
        bare = tokenizer.encode("the", special=False)
        assert tokenizer.encode("the") == [0] * add_bos + bare
        assert tokenizer.encode("<s>the") == [0, *bare]
        assert tokenizer.encode("") == [0] * add_bos

    def test_special_tokens(self):
        assert BYTES.encode("the</s>") == [*BYTES.encode("the"), BYTES.eos_id]
        assert BYTES.decode([0, *BYTES.encode("the"), 1]) == "the"
        assert BYTES.decode([0, 1], skip_special=False) == "<s></s>"
        tool = not_none(BYTES.id_of("<tool é>"))
        assert BYTES.encode("<tool é>") == [tool]
        assert BYTES.decode([tool]) == "<tool é>"  # user-defined tokens are text
        assert BYTES.id_of("<no>") is None

    def test_ids_outside_the_vocabulary(self):
        for wrong in (-1, BYTES.vocab_size):
            with pytest.raises(TokenOutOfRange, match=f"token {wrong} "):
                BYTES.decode([wrong])

    @pytest.mark.parametrize("text", ["\ud800", b"bytes", None])
    def test_what_is_no_text(self, text):
        with pytest.raises(InvalidConfig):
            BYTES.encode(text)


class TestTokenizerJson:
    def write(self, directory, config=None, **changes):
        described = json.loads(BYTES.text) | changes
        (directory / "tokenizer.json").write_text(json.dumps(described))
        if config is not None:
            (directory / "tokenizer_config.json").write_text(json.dumps(config))
        return directory / "tokenizer.json"

    @pytest.mark.parametrize("text", SAMPLES)
    def test_same_as_from_gguf(self, tmp_path, text):
        tokenizer = Tokenizer.from_json(self.write(tmp_path))
        assert tokenizer.encode(text) == BYTES.encode(text)
        assert tokenizer.decode(BYTES.encode(text)) == text

    def test_bos_of_the_post_processor_is_not_doubled(self, tmp_path):
        bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
        processor = {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        }
        config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
        tokenizer = Tokenizer.from_json(self.write(tmp_path, config, post_processor=processor))
        assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
        assert tokenizer.encode("the") == tokenizer.encode("<s>the") == [0, *BYTES.encode("the")]
        quiet = Tokenizer.from_json(self.write(tmp_path, config | {"add_bos_token": False}, post_processor=processor))
        assert quiet.encode("the") == BYTES.encode("the")

    def test_padding_and_truncation_are_training_s(self, tmp_path):
        cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
        tokenizer = Tokenizer.from_json(self.write(tmp_path, truncation=cut))
        assert len(tokenizer.encode("xyzxyz")) == 6

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', "\x00" * 9, "[" * 99999])
    def test_malformed(self, tmp_path, text):
        path = tmp_path / "tokenizer.json"
        path.write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            Tokenizer.from_json(path)

    def test_other_failures(self, tmp_path):
        with pytest.raises(CheckpointError, match="cannot be read"):
            Tokenizer.from_json(tmp_path / "none.json")
        decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
        with pytest.raises(CheckpointError, match="WordPiece"):
            Tokenizer.from_json(self.write(tmp_path, decoder=decoder))
        with pytest.raises(CheckpointError, match="object"):
            Tokenizer.from_json(self.write(tmp_path, config=[]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, r"ggml\.model.*'bert'"),
        ({"model": None}, r"ggml\.model"),
        ({"pre": "martian"}, "martian"),
        ({"tokens": None}, r"tokens is missing"),
        ({"tokens": "abc"}, "must be a list"),
        ({"tokens": [1, 2]}, "only strings"),
        ({"tokens": ["a", "a"]}, "duplicated"),
        ({"tokens": ["a" * 2000]}, "1024 characters"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["a"]}, "'a' is not a pair"),
        ({"merges": ["a q"]}, "'a q' is not a pair"),
        ({"token_type": [1]}, "one value per token"),
        ({"bos_token_id": 10**6}, "bos_token_id"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"model": "llama"}, "scores is missing"),
    ],
)
def test_malformed_metadata_is_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_gguf(byte_level_metadata(**changes))


class TestIncrementalDecoder:
    @quick
    @given(either, st.data(), cuts, st.booleans())
    def test_any_ids_in_any_pieces(self, tokenizer, data, cuts, skip):
        ids = data.draw(st.one_of(random_ids(tokenizer), texts.map(tokenizer.encode)))
        decoder = IncrementalDecoder(tokenizer, skip)
        pushed = [decoder.push(piece) for piece in in_pieces(ids, cuts)]
        assert "".join(pushed) + decoder.finish() == tokenizer.decode(ids, skip)

    @quick
    @given(either, texts)
    def test_text_never_shows_half_a_character(self, tokenizer, text):
        text = text.replace("\ufffd", "")
        decoder = IncrementalDecoder(tokenizer)
        assert "\ufffd" not in "".join(decoder.push([i]) for i in tokenizer.encode(text))
        assert decoder.finish() == ""

    def test_a_character_split_over_tokens(self):
        decoder = IncrementalDecoder(BYTES)
        ids = BYTES.encode("a你" + FAMILY)
        assert BYTES.token_bytes(ids[1]) == b"\xe4\xbd"
        assert [decoder.push([i]) for i in ids[:3]] == ["a", "", "你"]
        decoder.push(ids[3:-1])
        assert decoder.finish() == "\ufffd"  # the last person lacks a byte


class TestStopStrings:
    alphabet = st.text("ab\n", min_size=1, max_size=4)

    @quick
    @given(st.lists(alphabet, max_size=3), st.text("ab\n", max_size=30), cuts)
    @example(["abab"], "ababab", [3])
    @example(["abba", "b"], "abba", [])
    def test_the_pieces_do_not_matter(self, stops, text, cuts):
        ends = ((end, start) for end in range(len(text) + 1) for start in range(end) if text[start:end] in stops)
        start = next(ends, (0, None))[1]
        assert StopStrings(stops).find(text) == start

        matcher = StopStrings(stops)
        safe, matched = "", False
        for piece in in_pieces(text, cuts):
            new, matched = matcher.push(piece)
            safe += new
            assert text[:start].startswith(safe)
        assert matched == (start is not None)
        assert safe + matcher.finish() == text[:start]

    def test_holds_back_no_more_than_it_must(self):
        matcher = StopStrings(["\n\nUser:"])
        assert matcher.push("Hi\n") == ("Hi", False)
        assert matcher.push("\nUse a") == ("\n\nUse a", False)
        assert matcher.push("\n\nUser: x") == ("", True)
        assert matcher.push("more") == ("", True)
        assert matcher.finish() == ""

    @pytest.mark.parametrize("strings", [[""], ["a", None], [1], ["x" * 5000]])
    def test_refused(self, strings):
        with pytest.raises(InvalidConfig, match="stop string"):
            StopStrings(strings)

    @quick
    @given(either, st.lists(st.text("the 你é", min_size=1, max_size=3), max_size=3), st.data())
    def test_cut_tokens(self, tokenizer, stops, data):
        ids = data.draw(st.one_of(random_ids(tokenizer), texts.map(tokenizer.encode)))
        texts_of = [tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)]
        hit = next((n for n, text in enumerate(texts_of) if any(s in text for s in stops)), len(ids))
        count, text = cut_tokens(tokenizer, ids, stops)
        assert count == hit
        assert text == texts_of[hit][: StopStrings(stops).find(texts_of[hit])]


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no role ' + m.role) }}{% endif %}\n"
    "<{{ m['role'] }}>{% generation %}{{ m['content'] | trim }}{% endgeneration %}\n"
    "    {% if loop.last %}{% break %}{% endif %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class TestChatTemplate:
    def test_renders_as_templates_expect(self):
        chat = ChatTemplate(TEMPLATE, {"bos_token": "<s>"})
        messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "{{ 1 }}"}]
        assert chat.render(messages, add_generation_prompt=False) == "<s><user>hi<assistant>{{ 1 }}"
        assert chat.render(messages[:1]).endswith("hi<assistant>")

    def test_helpers(self):
        source = "{{ tools | tojson }} {{ strftime_now('%Y') | length }} {{ 'a' ~ 1 }}{{ namespace(x=2).x }}"
        message = [{"role": "user", "content": "x"}]
        assert ChatTemplate(source).render(message, tools=[{"é": "<&>"}]) == '[{"é": "<&>"}] 4 a12'

    def test_a_template_may_refuse(self):
        with pytest.raises(InvalidConfig, match="no role robot"):
            ChatTemplate(TEMPLATE).render([{"role": "robot", "content": ""}])

    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            ("hi", "must be a non-empty list"),
            ([], "must be a non-empty list"),
            ({"role": "user"}, "must be a non-empty list"),
            (["hi"], r"messages\[0\] must be a dict"),
            ([{"content": "a"}], r"messages\[0\]\['role'\] must be a str, got None"),
            ([{"role": "user", "content": "a"}, {"role": 1, "content": "a"}], r"messages\[1\]\['role'\]"),
        ],
    )
    def test_messages_are_checked(self, messages, message):
        with pytest.raises(InvalidConfig, match=message):
            ChatTemplate(TEMPLATE).render(messages)

    @pytest.mark.parametrize(
        "source", ["{{ x }", "{% for %}", "{% bla %}", "{{ 1 | bla }}", "x" * 2**19, None, "{{" + "(" * 9999]
    )
    def test_what_cannot_be_compiled(self, source):
        with pytest.raises(CheckpointError, match=ONE_LINE):
            ChatTemplate(source)

    @pytest.mark.parametrize(
        "source",
        [
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
            "{{ self.__init__.__globals__ }}",
            "{{ raise_exception.__globals__.datetime }}",
            "{{ messages.append(1) }}",
            "{{ messages[0].update(role='x') }}",
            "{% include '/etc/passwd' %}",
            "{% import 'os' as os %}",
            "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
            "{{ (messages | map(attribute='__class__') | first).mro() }}",
        ],
    )
    def test_nothing_outside_is_reached(self, source):
        with pytest.raises(CheckpointError, match=ONE_LINE):
            ChatTemplate(source).render([{"role": "user", "content": "x"}])

    @pytest.mark.parametrize(
        "body",
        [
            "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
            "{% for i in range(9999) %}{% if range(9999) | sum %}{% endif %}{% endfor %}",
            "{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "{% for i in range(60) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
            "{% for i in range(60) %}{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
            "{% for i in range(60) %}{% set n.x = n.x | replace('a', n.x) %}{% endfor %}",
            "{% for i in range(60) %}{% set n.x = [n.x, n.x] | join %}{% endfor %}",
            "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
            "{% for i in range(9999) %}{{ 'a' * 999 }}{% endfor %}",
            "{{ 'a' * 10 ** 9 }}",
            "{{ 9 ** (9 ** 9) }}",
            "{{ 'a'.ljust(10 ** 9) }}",
            "{{ range(10 ** 9) | list }}",
            "{{ '%999999999d' % 3 }}",
            "{{ '%*d' % (999999999, 3) }}",
            "{{ '%999999999d' | format(3) }}",
            "{{ '{:>999999999}'.format(3) }}",
            "{{ '{:{}}'.format(3, '999999999') }}",
            "{{ messages | tojson(indent=999999999) }}",
            "{{ 2.5 | round(999999999, 'ceil') }}",
        ],
    )
    def test_nothing_runs_away(self, body):
        source = "{% set n = namespace(x='aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa') %}" + body
        with pytest.raises(CheckpointError, match=ONE_LINE):
            ChatTemplate(source).render([{"role": "user", "content": "x"}])

    def test_long_conversations_fit(self):
        messages = [{"role": "user", "content": "word " * 200}, {"role": "assistant", "content": "ok"}] * 500
        assert len(ChatTemplate(TEMPLATE).render(messages)) > 500_000
        with pytest.raises(CheckpointError):  # and the next call is not affected
            ChatTemplate("{% for i in range(9999) %}{{ 'a' * 999 }}{% endfor %}").render(messages)
        assert ChatTemplate(TEMPLATE).render(messages)


class TestSameVocabulary:
    def changed(self, at: int, token: str | None = None, kind: int = 1) -> Tokenizer:
        metadata = byte_level_metadata()
        tokens, types = list(metadata["tokenizer.ggml.tokens"]), list(metadata["tokenizer.ggml.token_type"])
        tokens[at] = tokens[at] if token is None else token
        types[at] = kind
        return Tokenizer.from_gguf(metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})

    def test_equal_ones(self):
        assert same_vocab(BYTES, Tokenizer.from_gguf(byte_level_metadata()))
        padded = byte_level_metadata()
        padded["tokenizer.ggml.tokens"] = [*padded["tokenizer.ggml.tokens"], "[PAD0]", "[PAD1]"]
        padded["tokenizer.ggml.token_type"] = [*padded["tokenizer.ggml.token_type"], 5, 5]
        tokenizer = Tokenizer.from_gguf(padded)
        assert tokenizer.vocab_size == BYTES.vocab_size  # padding has no text
        assert same_vocab(BYTES, tokenizer)

    def test_different_ones(self):
        last = BYTES.vocab_size - 1
        assert not same_vocab(BYTES, self.changed(last, "<other>", 4))
        assert not same_vocab(BYTES, self.changed(last, kind=3))  # control in one, text in the other
        longer = byte_level_metadata()
        longer["tokenizer.ggml.tokens"] = [*longer["tokenizer.ggml.tokens"], "<more>"]
        longer["tokenizer.ggml.token_type"] = [*longer["tokenizer.ggml.token_type"], 4]
        assert not same_vocab(BYTES, Tokenizer.from_gguf(longer))
        assert not same_vocab(BYTES, PIECES)
