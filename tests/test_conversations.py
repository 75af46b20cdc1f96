"""What is trained on: every layout of a file, rows that are bad, masks of the assistant's tokens alone."""

import dataclasses
import json

import numpy as np
import pytest
import trainees

from jaxspec.errors import InvalidConfig, TrainingError
from jaxspec.text import ChatTemplate
from jaxspec.train import texts
from jaxspec.train.conversations import Conversation, read
from jaxspec.train.settings import Settings

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
    b"{": "no JSON",
    b"[1]": "expected an object, got list",
    b'{"x": 1}': "expected messages, conversations, turns or prompt; it has x",
    b'{"messages": 3}': "messages must be a list, got int",
    b'{"messages": [3]}': "a message must be an object, got int",
    b'{"messages": [{"role": "tool", "content": "a"}]}': "role must be one of .* got 'tool'",
    b'{"messages": [{"role": "user", "content": 5}]}': "content must be text, got int",
    b'{"messages": [{"role": "system", "content": "a"}]}': "nobody asks anything",
    b'{"messages": []}': "nobody asks anything",
    b'{"turns": "a"}': "turns must be a list, got str",
    b'{"prompt": "  "}': "prompt is empty",
    b'{"prompt": "a\\u0000b"}': "prompt has a NUL character",
    b'{"prompt": "\\ud800"}': "prompt has a lone surrogate",
    b'{"prompt": "\xff"}': "no JSON",
    b'{"prompt": "' + b"a" * (1 << 22) + b'"}': "a line of 41943.. bytes, at most 4194304",
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
    (tmp_path / "c.txt").write_text("one\ntext\n\n\nanother\n")
    found, _ = read([tmp_path / "c.txt"])
    assert [(one.messages, one.text) for one in found] == [((), "one\ntext"), ((), "another")]
    (tmp_path / "d.jsonl").write_text('{"question_id": 81, "turns": ["ab", "then"]}')
    assert read([tmp_path / "d.jsonl"])[0][0].messages == TURNS[:1]


@pytest.mark.parametrize("row", BAD, ids=lambda row: row[:40].decode("utf-8", "replace"))
def test_bad_rows_are_counted_by_line_or_refused(tmp_path, row):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(GOOD[0]).encode() + b"\n" + row + b"\n" + json.dumps(GOOD[2]).encode())
    found, bad = read([path])
    assert len(found) == 2
    assert [one.where for one in bad] == [f"{path}:2"]
    with pytest.raises(TrainingError, match=f"a.jsonl:2: .*{BAD[row]}.*; mend it"):
        read([path], refuse=True)
    path.write_bytes(row)
    with pytest.raises(TrainingError, match="holds no conversation; the first row"):
        read([path])


def test_files_that_are_none(tmp_path):
    with pytest.raises(TrainingError, match=r"no.jsonl: cannot be read: No such file"):
        read([tmp_path / "no.jsonl"])
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(TrainingError, match=r"expected .jsonl, .json or .txt"):
        read([tmp_path / "a.csv"])
    for name, text, why in (
        ("a.json", "{}", "expected a list"),
        ("b.json", "[", "Expecting"),
        ("c.txt", "\n", "holds no"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(TrainingError, match=why):
            read([tmp_path / name])
    (tmp_path / "d.txt").write_bytes(b"\xff")
    with pytest.raises(TrainingError, match=r"d.txt: .*decode"):
        read([tmp_path / "d.txt"])


def test_only_the_assistants_tokens_are_learnt_from():
    target = trainees.target()
    messages = (*TURNS, {"role": "user", "content": "e"}, {"role": "assistant", "content": "fg"})
    (found,), bad = texts.texts_of(target, [Conversation(messages, None, "here")])
    assert not bad
    pieces = [target.tokenizer.inner.id_to_token(i) for i in found.ids]
    user, say, end = "<|user|>", "<|assistant|>", "<|end|>"
    assert pieces == [user, "a", "b", end, say, "c", "d", end, user, "e", end, say, "f", "g", end]
    assert np.flatnonzero(found.mask).tolist() == [5, 6, 7, 12, 13, 14]  # the end of a turn is the assistant's, too
    (prompt,), _ = texts.prompts_of(target, [Conversation(messages, None, "here")], 99)
    assert prompt == found.ids[:5].tolist()


def test_what_cannot_be_learnt_from_is_reported():
    target = trainees.target()
    silent = Conversation(TURNS[:1], None, "here")
    assert texts.texts_of(target, [silent])[1][0].why.startswith("the assistant says nothing")
    assert "at most 3 are taken" in texts.prompts_of(target, [silent], 3)[1][0].why
    forgetful = "{{ messages[-1].content }}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    odd = dataclasses.replace(target, chat_template=ChatTemplate(forgetful))
    assert "rewrites what was said" in texts.texts_of(odd, [Conversation(TURNS, None, "here")])[1][0].why
    plain = Conversation((), "abcdef", "here")
    (found,), _ = texts.texts_of(target, [plain])
    assert found.mask.all()
    assert texts.prompts_of(target, [plain], 99)[0] == [found.ids[:3].tolist()]


def test_a_share_is_held_out_evenly():
    learnt, held = texts.split(100, 0.05)
    assert held.tolist() == [19, 39, 59, 79, 99]
    assert sorted([*learnt, *held]) == list(range(100))
    assert texts.split(3, 0.0)[1].size == 0
    with pytest.raises(TrainingError, match="too few to hold out"):
        texts.split(3, 0.05)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"loss": "mse"}, "loss must be one of ce, kl"),
        ({"heads": 0}, "heads must be a whole number from 1, got 0"),
        ({"heads": 2.0}, "heads must be a whole number from 1, got 2.0"),
        ({"learning_rate": 0}, "learning_rate must be finite and above 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be finite"),
        ({"clip": -1.0}, "clip must be finite and at least 0"),
        ({"distill": 1}, "distill must be true or false"),
        ({"held_out": 1.0}, "held_out is a share below 1"),
        ({"batch": 8, "accumulate": 3}, "a batch of 8 rows cannot be read in 3 parts over 1 devices"),
        ({"medusa2": True}, "its features cannot be cached"),
        ({"row_tokens": 6}, "rows of 6 tokens have no place for 4 heads"),
        ({"steps": "many"}, "steps must be a number"),
    ],
)
def test_settings_that_cannot_be(change, why):
    with pytest.raises(InvalidConfig, match=why):
        Settings(**change)
