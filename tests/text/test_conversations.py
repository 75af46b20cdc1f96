"""Tests training data: every layout of a file, malformed rows, and masks of the assistant's tokens."""

import dataclasses
import json
import random
import re

import numpy as np
import pytest

from helpers import trainees
from helpers.narrow import not_none
from jaxspec.errors import InvalidConfig, TrainingError
from jaxspec.text import ChatTemplate
from jaxspec.text.conversations import Conversation, _Bad, _conversation, read
from jaxspec.train import tokenized
from jaxspec.train.settings import Settings, check_together

pytestmark = pytest.mark.quick

GOOD = [
    {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]},
    {
        "conversations": [
            {"from": "gpt", "value": "x"},
            {"from": "human", "value": "ab"},
            {"from": "gpt", "value": "cd"},
        ]
    },
    {"prompt": "ab", "answer": "cd"},
    {"prompt": "ab", "response": "cd"},
]
TURNS = ({"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"})
BAD = {
    b"{": "not JSON",
    b"[1]": "expected an object, got list",
    b'{"x": 1}': "expected messages, conversations, turns or prompt, got 'x'",
    b'{"\\ud800": 1}': r"got '\\ud800'",
    b'{"messages": 3}': "messages must be a list, got int",
    b'{"messages": [3]}': "a message must be an object, got int",
    b'{"messages": [{"role": "tool", "content": "a"}]}': "role must be one of .* got 'tool'",
    b'{"messages": [{"role": "user", "content": 5}]}': "content must be text, got int",
    b'{"messages": [{"role": ["user"], "content": "a"}]}': "role must be one of .* got list",
    b'{"messages": [{"role": {"user": 1}, "content": "a"}]}': "role must be one of .* got dict",
    b'{"messages": [{"role": null, "content": "a"}]}': "role must be one of .* got NoneType",
    b'{"messages": [{"role": "user", "content": null}]}': "content must be text, got NoneType",
    b'{"conversations": [{"from": ["human"], "value": "a"}]}': "role must be one of .* got list",
    b'{"conversations": [{"from": "human", "value": ["a"]}]}': "content must be text, got list",
    b'{"prompt": "a", "answer": {"a": 1}}': "answer must be text, got dict",
    b'{"turns": [["a"]]}': "a turn must be text, got list",
    b'{"messages": [{"role": "system", "content": "a"}]}': "there is no message of a user",
    b'{"messages": []}': "there is no message of a user",
    b'{"turns": "a"}': "turns must be a list, got str",
    b'{"prompt": "  "}': "prompt is empty",
    b'{"prompt": "a\\u0000b"}': "prompt contains a NUL character",
    b'{"prompt": "\\ud800"}': "prompt contains a lone surrogate",
    b'{"prompt": "\xff"}': "not JSON",
    b'{"prompt": "' + b"a" * (1 << 22) + b'"}': "a line of 41943.. bytes, expected at most 4194304",
}


def test_every_layout_is_the_same_conversation(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, GOOD)))
    (tmp_path / "b.json").write_text(json.dumps(GOOD))
    found, bad = read([tmp_path / "a.jsonl", tmp_path / "b.json"])
    assert not bad
    assert [one.messages for one in found] == [TURNS] * 8
    assert [one.where[len(str(tmp_path)) + 1 :] for one in found[2:6]] == [
        "a.jsonl:5",
        "a.jsonl:7",
        "b.json[0]",
        "b.json[1]",
    ]
    (tmp_path / "d.jsonl").write_text('{"question_id": 81, "turns": ["ab", "then"]}')
    assert read([tmp_path / "d.jsonl"])[0][0].messages == TURNS[:1]


MARK = "\ufeff"


@pytest.mark.parametrize(
    ("text", "split", "found"),
    [
        ("one\ntwo\n", "line", {1: "one", 2: "two"}),
        ("one\ntwo", "line", {1: "one", 2: "two"}),
        (MARK + "one\r\n\r\n  two \r\n \t\r\nthree\rfour", "line", {1: "one", 3: "  two ", 5: "three", 6: "four"}),
        ("one\u2028and\x0cone\x85\ntwo", "line", {1: "one\u2028and\x0cone\x85", 2: "two"}),
        ("one\ntext\n\n \n\nanother\n", "blank", {1: "one\ntext", 6: "another"}),
        (MARK + "\r\none\r\ntext\r\n\r\nanother", "blank", {2: "one\ntext", 5: "another"}),
        (MARK + "one\r\n\r\ntext\r\n", "file", {1: "one\n\ntext"}),
    ],
)
def test_a_text_file_has_a_prompt_per_line_or_is_split_otherwise(tmp_path, text, split, found):
    """Whatever its line ends, with and without a byte order mark and a last line end."""
    path = tmp_path / "a.TXT"
    path.write_bytes(text.encode())
    got, bad = read([path], split=split)
    assert {one.where: (one.messages, one.text) for one in got} == {f"{path}:{n}": ((), t) for n, t in found.items()}
    assert not bad
    if split == "line":
        assert [one.text for one in read([path])[0]] == list(found.values()), "the default"


def test_a_byte_order_mark_is_no_part_of_json(tmp_path):
    for name, text in (("a.jsonl", json.dumps(GOOD[2])), ("a.json", json.dumps(GOOD[2:3]))):
        (tmp_path / name).write_bytes((MARK + text).encode())
        assert [one.messages for one in read([tmp_path / name])[0]] == [TURNS]


def test_a_text_is_what_a_user_says():
    """The same prompt as that of `generate`; without a chat template it is continued as it is."""
    target, text = trainees.target(), Conversation((), "abcdef", "here")
    ids = target.encode_chat([{"role": "user", "content": "abcdef"}])
    assert tokenized.prompts_of(target, [text], 99)[0] == [ids]
    plain = dataclasses.replace(target, chat_template=None)
    assert tokenized.prompts_of(plain, [text], 99)[0] == [plain.encode("abcdef")]


@pytest.mark.parametrize("row", BAD, ids=lambda row: row[:40].decode("utf-8", "replace"))
def test_bad_rows_are_counted_by_line_or_refused(tmp_path, row):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(GOOD[0]).encode() + b"\n" + row + b"\n" + json.dumps(GOOD[2]).encode())
    found, bad = read([path])
    assert len(found) == 2
    assert [one.where for one in bad] == [f"{path}:2"]
    with pytest.raises(TrainingError, match=f"a.jsonl:2: .*{BAD[row]}.*; correct or remove the row"):
        read([path], strict=True)
    path.write_bytes(row)
    with pytest.raises(TrainingError, match="contains no conversation; the first row"):
        read([path])


def test_rows_of_any_values_are_read_or_bad():
    """Every value of every key replaced by values of other kinds, some of them nested: a row, or why it is none."""
    rng = random.Random(0)
    odd = [None, True, -1, 1e300, 10**400, "", " ", "a", "\0", "\ud800", [], ["a"], {}, {"a": []}, [[["user"]]]]
    read_at_all, reasons = 0, set()

    def changed(value):
        if rng.random() < 0.15:
            return rng.choice(odd)
        if isinstance(value, dict):
            return {
                (rng.choice(["", "x", "\ud800"]) if rng.random() < 0.05 else k): changed(v) for k, v in value.items()
            }
        return [changed(one) for one in value] if isinstance(value, list) else value

    rows = [*GOOD, {"turns": ["ab", "cd"]}, "a text"]
    for row in (changed(rows[i % len(rows)]) for i in range(600)):
        try:
            found = _conversation(row, "here")
        except _Bad as error:
            reasons.add(str(error))
            continue
        read_at_all += 1
        assert found.text is not None or all(m["role"] in ("user", "assistant", "system") for m in found.messages)
        assert all(text.strip() for text in ([found.text] if found.text else [m["content"] for m in found.messages]))
    assert 100 < read_at_all < 500
    assert all(why.isprintable() for why in reasons)


def test_files_that_are_none(tmp_path):
    with pytest.raises(TrainingError, match=r"no.jsonl: cannot be read: No such file"):
        read([tmp_path / "no.jsonl"])
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(TrainingError, match=r"expected .jsonl, .json or .txt"):
        read([tmp_path / "a.csv"])
    for name, text, why in (
        ("a.json", "{}", "expected a list"),
        ("b.json", "[", "Expecting"),
        ("c.txt", "\n", "contains no"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(TrainingError, match=why):
            read([tmp_path / name])
    for data, why in ((b"a\xff", "not UTF-8 (byte 0xff at 1 cannot be decoded)"), ("a".encode("utf-16"), "UTF-16")):
        (tmp_path / "d.txt").write_bytes(data)
        with pytest.raises(TrainingError, match=re.escape(f"d.txt: the file is {why}; save it as UTF-8")):
            read([tmp_path / "d.txt"])
    (tmp_path / "d.txt").write_bytes(b"a\0b\nc")
    assert read([tmp_path / "d.txt"])[1][0].why == "a text contains a NUL character"


def test_only_the_assistants_tokens_are_learnt_from():
    target = trainees.target()
    messages = (*TURNS, {"role": "user", "content": "e"}, {"role": "assistant", "content": "fg"})
    (found,), bad = tokenized.texts_of(target, [Conversation(messages, None, "here")])
    assert not bad
    pieces = [not_none(target.tokenizer).token_bytes(i).decode() for i in found.ids]
    user, say, end = "<|user|>", "<|assistant|>", "<|end|>"
    assert pieces == [user, "a", "b", end, say, "c", "d", end, user, "e", end, say, "f", "g", end]
    assert np.flatnonzero(found.mask).tolist() == [5, 6, 7, 12, 13, 14]  # the end of a turn is the assistant's, too
    (prompt,), _ = tokenized.prompts_of(target, [Conversation(messages, None, "here")], 99)
    assert prompt == found.ids[:5].tolist()


def test_what_cannot_be_learnt_from_is_reported():
    target = trainees.target()
    silent = Conversation(TURNS[:1], None, "here")
    assert tokenized.texts_of(target, [silent])[1][0].why.startswith("there is no answer of the assistant")
    assert "the maximum is 3" in tokenized.prompts_of(target, [silent], 3)[1][0].why
    forgetful = "{{ messages[-1].content }}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    odd = dataclasses.replace(target, chat_template=ChatTemplate(forgetful))
    assert "rewrites earlier messages" in tokenized.texts_of(odd, [Conversation(TURNS, None, "here")])[1][0].why
    plain = Conversation((), "abcdef", "here")
    (found,), _ = tokenized.texts_of(target, [plain])
    assert found.mask.all()


def test_a_share_is_held_out_evenly():
    kept, held = tokenized.split(100, 0.05)
    assert held.tolist() == [19, 39, 59, 79, 99]
    assert sorted([*kept, *held]) == list(range(100))
    assert tokenized.split(3, 0.0)[1].size == 0
    with pytest.raises(TrainingError, match=r"1 usable prompt is too few .* use at least 2$"):
        tokenized.split(1, 0.5)


def test_too_few_prompts_name_what_would_be_enough():
    """The number and the share that the message names are enough, and one prompt fewer is not."""
    for count in range(2, 400, 7):
        share = 0.37 / count
        words = r"too few to hold out a fraction of .*: use at least (\d+) or set held_out .* at least ([\d.]+)$"
        with pytest.raises(TrainingError, match=words) as error:
            tokenized.split(count, share)
        needed, least = not_none(re.search(words, str(error.value))).groups()
        assert tokenized.split(int(needed), share)[1].size == 1
        with pytest.raises(TrainingError, match="too few"):
            tokenized.split(int(needed) - 1, share)
        assert tokenized.split(count, float(least))[1].size >= 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"loss": "mse"}, "loss must be one of ce, kl"),
        ({"heads": 0}, "heads must be a whole number from 1, got 0"),
        ({"heads": 2.0}, "heads must be a whole number from 1, got 2.0"),
        ({"inputs": "token"}, "inputs must be one of hidden, path, recurrent"),
        ({"learning_rate": -1}, "learning_rate must be finite and at least 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be finite"),
        ({"clip": -1.0}, "clip must be finite and at least 0"),
        ({"distill": 1}, "distill must be true or false"),
        ({"held_out": 1.0}, "held_out must be below 1"),
        ({"batch": 8, "accumulate": 3}, "a batch of 8 rows cannot be read in 3 parts over 1 devices"),
        ({"medusa2": True}, "its features cannot be cached"),
        ({"row_tokens": 6}, "rows of 6 tokens have no place for 4 drafted tokens"),
        ({"split": "word"}, "split must be one of line, blank, file"),
        ({"steps": "many"}, "steps must be a number"),
    ],
)
def test_settings_that_cannot_be(change, why):
    with pytest.raises(InvalidConfig, match=why):
        check_together(Settings(**trainees.shared(change)), trainees.kind(**{"heads": 4} | change))
