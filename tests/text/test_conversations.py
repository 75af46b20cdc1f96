"""Tests training data: every layout of a file, malformed rows, and masks of the assistant's tokens."""

import dataclasses
import json
import random
import re

import numpy as np
import pytest

import jaxspec
from helpers import trainees
from helpers.narrow import not_none
from jaxspec.bench import tasks
from jaxspec.errors import InvalidConfig, TaskError, TrainingError
from jaxspec.text import ChatTemplate
from jaxspec.text.conversations import ROLES, Conversation, _conversation, _RowError, read_conversations
from jaxspec.train import tokenized

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
    b'{"x": 1}': "expected messages, conversations, turns, prompt, question, instruction or text, got 'x'",
    b'{"\\ud800": 1}': r"got '\\ud800'",
    b'{"messages": 3}': "messages must be a list, got int",
    b'{"messages": [3]}': "a message must be an object, got int",
    b'{"messages": [{"role": "tool", "content": "a"}]}': "the conversation has no message from the user",
    b'{"messages": [{"role": "critic", "content": "a"}]}': "role must be one of .* got 'critic'",
    b'{"messages": [{"role": "user", "content": 5}]}': "content must be text, got int",
    b'{"messages": [{"role": ["user"], "content": "a"}]}': "role must be one of .* got list",
    b'{"messages": [{"role": {"user": 1}, "content": "a"}]}': "role must be one of .* got dict",
    b'{"messages": [{"role": null, "content": "a"}]}': "role must be one of .* got NoneType",
    b'{"messages": [{"role": "user", "content": null}]}': "content must be text, got NoneType",
    b'{"conversations": [{"from": ["human"], "value": "a"}]}': "role must be one of .* got list",
    b'{"conversations": [{"from": "human", "value": ["a"]}]}': "content must be text, got list",
    b'{"prompt": "a", "answer": {"a": 1}}': "answer must be text, got dict",
    b'{"turns": [["a"]]}': "a turn must be text, got list",
    b'{"messages": [{"role": "system", "content": "a"}]}': "the conversation has no message from the user",
    b'{"messages": []}': "the conversation has no message from the user",
    b'{"turns": "a"}': "turns must be a list, got str",
    b'{"prompt": "  "}': "prompt is empty",
    b'{"prompt": "a\\u0000b"}': "prompt contains a NUL character",
    b'{"prompt": "\\ud800"}': "prompt contains a lone surrogate",
    b'{"prompt": "\xff"}': "not JSON",
    b'{"prompt": "' + b"a" * (1 << 22) + b'"}': "the line has 41943.. bytes, expected at most 4194304",
}


def test_every_layout_is_the_same_conversation(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, GOOD)))
    (tmp_path / "b.json").write_text(json.dumps(GOOD))
    found, bad = read_conversations([tmp_path / "a.jsonl", tmp_path / "b.json"])
    assert not bad
    assert [one.messages for one in found] == [TURNS] * 8
    assert [one.where[len(str(tmp_path)) + 1 :] for one in found[2:6]] == [
        "a.jsonl:5",
        "a.jsonl:7",
        "b.json[0]",
        "b.json[1]",
    ]
    (tmp_path / "d.jsonl").write_text('{"question_id": 81, "turns": ["ab", "then"]}')
    assert read_conversations([tmp_path / "d.jsonl"])[0][0].messages == TURNS[:1]


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
    got, bad = read_conversations([path], split=split)
    assert {one.where: (one.messages, one.text) for one in got} == {f"{path}:{n}": ((), t) for n, t in found.items()}
    assert not bad
    if split == "line":
        assert [one.text for one in read_conversations([path])[0]] == list(found.values()), "the default"


def test_a_byte_order_mark_is_no_part_of_json(tmp_path):
    for name, text in (("a.jsonl", json.dumps(GOOD[2])), ("a.json", json.dumps(GOOD[2:3]))):
        (tmp_path / name).write_bytes((MARK + text).encode())
        assert [one.messages for one in read_conversations([tmp_path / name])[0]] == [TURNS]


def test_a_text_is_what_a_user_says():
    """The same prompt as that of `generate`; without a chat template it is continued as it is."""
    target, text = trainees.target(), Conversation((), "abcdef", "here")
    ids = target.encode_chat([{"role": "user", "content": "abcdef"}])
    assert tokenized.encode_training_prompts(target, [text], 99)[0] == [ids]
    plain = dataclasses.replace(target, chat_template=None)
    assert tokenized.encode_training_prompts(plain, [text], 99)[0] == [plain.encode("abcdef")]


@pytest.mark.parametrize("row", BAD, ids=lambda row: row[:40].decode("utf-8", "replace"))
def test_bad_rows_are_counted_by_line_or_refused(tmp_path, row):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(GOOD[0]).encode() + b"\n" + row + b"\n" + json.dumps(GOOD[2]).encode())
    found, bad = read_conversations([path])
    assert len(found) == 2
    assert [one.where for one in bad] == [f"{path}:2"]
    with pytest.raises(TrainingError, match=f"a.jsonl:2: .*{BAD[row]}.*; correct or remove the row"):
        read_conversations([path], strict=True)
    path.write_bytes(row)
    with pytest.raises(TrainingError, match="contains no prompt; the first row"):
        read_conversations([path])


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
        except _RowError as error:
            reasons.add(str(error))
            continue
        read_at_all += 1
        assert found.text is not None or found.ids or any(m["role"] == "user" for m in found.messages)
        assert {m["role"] for m in found.messages} <= {*ROLES.values()}
        assert all(text.strip() for text in ([found.text] if found.text else [m["content"] for m in found.messages]))
    assert 100 < read_at_all < 500
    assert all(why.isprintable() for why in reasons)


def test_files_that_are_none(tmp_path):
    with pytest.raises(TrainingError, match=r"no.jsonl: cannot be read: No such file"):
        read_conversations([tmp_path / "no.jsonl"])
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(TrainingError, match=r"expected .jsonl, .json or .txt"):
        read_conversations([tmp_path / "a.csv"])
    for name, text, why in (
        ("a.json", "{}", "expected a list"),
        ("b.json", "[", "Expecting"),
        ("c.txt", "\n", "contains no"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(TrainingError, match=why):
            read_conversations([tmp_path / name])
    for data, why in ((b"a\xff", "not UTF-8 (byte 0xff at 1 cannot be decoded)"), ("a".encode("utf-16"), "UTF-16")):
        (tmp_path / "d.txt").write_bytes(data)
        with pytest.raises(TrainingError, match=re.escape(f"d.txt: the file is {why}; save it as UTF-8")):
            read_conversations([tmp_path / "d.txt"])
    (tmp_path / "d.txt").write_bytes(b"a\0b\nc")
    assert read_conversations([tmp_path / "d.txt"])[1][0].why == "a text contains a NUL character"


def test_only_the_assistants_tokens_are_learnt_from():
    target = trainees.target()
    messages = (*TURNS, {"role": "user", "content": "e"}, {"role": "assistant", "content": "fg"})
    (found,), bad = tokenized.encode_texts(target, [Conversation(messages, None, "here")])
    assert not bad
    pieces = [not_none(target.tokenizer).token_bytes(i).decode() for i in found.ids]
    user, say, end = "<|user|>", "<|assistant|>", "<|end|>"
    assert pieces == [user, "a", "b", end, say, "c", "d", end, user, "e", end, say, "f", "g", end]
    assert np.flatnonzero(found.mask).tolist() == [5, 6, 7, 12, 13, 14]  # the end of a turn is the assistant's, too
    (prompt,), _ = tokenized.encode_training_prompts(target, [Conversation(messages, None, "here")], 99)
    assert prompt == found.ids[:5].tolist()


def test_what_cannot_be_learnt_from_is_reported():
    target = trainees.target()
    silent = Conversation(TURNS[:1], None, "here")
    assert tokenized.encode_texts(target, [silent])[1][0].why.startswith("the assistant has no answer")
    assert "expected 1 to 3" in tokenized.encode_training_prompts(target, [silent], 3)[1][0].why
    forgetful = "{{ messages[-1].content }}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    odd = dataclasses.replace(target, chat_template=ChatTemplate(forgetful))
    assert "changes earlier messages" in tokenized.encode_texts(odd, [Conversation(TURNS, None, "here")])[1][0].why
    plain = Conversation((), "abcdef", "here")
    (found,), _ = tokenized.encode_texts(target, [plain])
    assert found.mask.all()


SAID = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
SYSTEM = {"role": "system", "content": "be"}
MORE = [*SAID, {"role": "user", "content": "e"}, {"role": "assistant", "content": "fg"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
USED = [
    SAID[0],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    SAID[1],
]
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def shared(*said: str) -> list[dict]:
    """Messages in ShareGPT's layout."""
    return [{"from": part.partition(":")[0], "value": part.partition(":")[2]} for part in said]


# Rows as data sets publish them: the messages that are read, and how many of them are the prompt.
PUBLISHED: dict[str, tuple[dict, list[dict], int]] = {
    "OpenAI": ({"messages": SAID}, SAID, 1),
    "OpenAI, system": ({"messages": [SYSTEM, *SAID]}, [SYSTEM, *SAID], 2),
    "OpenAI, several turns": ({"messages": MORE}, MORE, 1),
    "OpenAI, nulls": ({"messages": [{**m, "name": None, "tool_calls": None} for m in SAID]}, SAID, 1),
    "OpenAI, tools": ({"messages": USED, "tools": TOOLS}, USED, 1),
    "OpenAI, tools as text": ({"messages": USED, "tools": json.dumps(TOOLS)}, USED, 1),
    "OpenAI, no tools": ({"messages": SAID, "tools": []}, SAID, 1),
    "OpenAI, tools null": ({"messages": SAID, "tools": None}, SAID, 1),
    "OpenAI, parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}, SAID[1]]},
        [{"role": "user", "content": [{"type": "text", "text": "ab"}]}, SAID[1]],
        1,
    ),
    "OpenAI, a call without content": (
        {"messages": [SAID[0], {"role": "assistant", "tool_calls": [CALL]}, *USED[2:]]},
        USED,
        1,
    ),
    "OpenAI, a result as an object": (
        {"messages": [*USED[:2], {"role": "tool", "content": {"sum": 3}}]},
        [*USED[:2], {"role": "tool", "content": '{"sum": 3}'}],
        1,
    ),
    "OpenAI, developer": (
        {"messages": [{"role": "developer", "content": "be"}, *SAID]},
        [{"role": "developer", "content": "be"}, *SAID],
        2,
    ),
    "OpenAI, an empty system message": ({"messages": [{"role": "system", "content": ""}, *SAID]}, SAID, 1),
    "UltraChat": ({"prompt": "ab", "prompt_id": "x", "messages": SAID}, SAID, 1),
    "ShareGPT": ({"id": "x", "conversations": shared("human:ab", "gpt:cd")}, SAID, 1),
    "ShareGPT, system": ({"conversations": shared("system:be", "human:ab", "gpt:cd")}, [SYSTEM, *SAID], 2),
    "ShareGPT, several turns": ({"conversations": shared("human:ab", "gpt:cd", "human:e", "gpt:fg")}, MORE, 1),
    "ShareGPT, split": ({"conversations": shared("gpt:x", "human:ab", "gpt:cd")}, SAID, 1),
    "ShareGPT, bots": ({"conversations": shared("user:ab", "chatgpt:cd", "human:e", "bot:fg")}, MORE, 1),
    "ShareGPT, capitals": ({"conversations": shared("Human:ab", "GPT:cd")}, SAID, 1),
    "ShareGPT, a call": (
        {
            "conversations": shared(
                "human:ab", 'function_call:{"name": "add", "arguments": {"a": 1}}', "observation:3", "gpt:cd"
            ),
            "tools": json.dumps(TOOLS),
        },
        USED,
        1,
    ),
    "ShareGPT, Hermes": (
        {"conversations": shared("human:ab", "gpt:<tool_call>{}</tool_call>", "tool:3", "gpt:cd")},
        [SAID[0], {"role": "assistant", "content": "<tool_call>{}</tool_call>"}, *USED[2:]],
        1,
    ),
    "LMSYS": ({"conversation_id": "x", "model": "m", "conversation": SAID, "turn": 1}, SAID, 1),
    "null columns": ({"messages": None, "conversations": shared("human:ab", "gpt:cd"), "prompt": None}, SAID, 1),
    "null columns, the other way": ({"messages": SAID, "conversations": None, "turns": None}, SAID, 1),
    "Spec-Bench": ({"question_id": 81, "category": "writing", "turns": ["ab", "e"]}, SAID[:1], 1),
    "turns of messages": ({"turns": SAID}, SAID, 1),
    "prompt": ({"prompt": "ab"}, SAID[:1], 1),
    "prompt, answer": ({"prompt": "ab", "answer": "cd"}, SAID, 1),
    "prompt, response": ({"prompt": "ab", "response": "cd"}, SAID, 1),
    "prompt, completion": ({"prompt": "ab", "completion": "cd"}, SAID, 1),
    "prompt, null completion": ({"prompt": "ab", "completion": None}, SAID[:1], 1),
    "prompt, completion, messages": ({"prompt": SAID[:1], "completion": SAID[1:]}, SAID, 1),
    "prompt of several turns": ({"prompt": MORE[:3], "completion": MORE[3:]}, MORE, 3),
    "prompt of several turns alone": ({"prompt": MORE[:3]}, MORE[:3], 3),
    "prompt with a system message": ({"prompt": [SYSTEM, SAID[0]], "completion": SAID[1:]}, [SYSTEM, *SAID], 2),
    "prompt with tools": ({"prompt": USED[:1], "completion": USED[1:], "tools": TOOLS}, USED, 1),
    "prompt with a system text": ({"system": "be", "prompt": "ab", "response": "cd"}, [SYSTEM, *SAID], 2),
    "HumanEval": ({"task_id": "HumanEval/0", "prompt": "ab", "canonical_solution": "x", "test": "y"}, SAID[:1], 1),
    "GSM8K": ({"question": "ab", "answer": "cd"}, SAID, 1),
    "OpenOrca": ({"id": "x", "system_prompt": "be", "question": "ab", "response": "cd"}, [SYSTEM, *SAID], 2),
    "OpenOrca, no system prompt": ({"system_prompt": "", "question": "ab", "response": "cd"}, SAID, 1),
    "query": ({"query": "ab", "response": "cd", "type": "x"}, SAID, 1),
    "Alpaca": ({"instruction": "ab", "input": "", "output": "cd"}, SAID, 1),
    "Alpaca, input": (
        {"instruction": "a", "input": "b", "output": "cd"},
        [{"role": "user", "content": "a\n\nb"}, SAID[1]],
        1,
    ),
    "Alpaca, text": ({"instruction": "ab", "input": "", "output": "cd", "text": "Below is ..."}, SAID, 1),
    "Dolly": (
        {"instruction": "a", "context": "b", "response": "cd", "category": "x"},
        [{"role": "user", "content": "a\n\nb"}, SAID[1]],
        1,
    ),
    "input, output": ({"input": "ab", "output": "cd"}, SAID, 1),
    "FLAN": ({"inputs": "ab", "targets": "cd", "task_name": "x"}, SAID, 1),
    "preferences": ({"prompt": "ab", "chosen": "cd", "rejected": "x"}, SAID, 1),
    "preferences, messages": ({"prompt": SAID[:1], "chosen": SAID[1:], "rejected": SAID[1:]}, SAID, 1),
    "preferences, whole": ({"chosen": SAID, "rejected": SAID}, SAID, 1),
    "preferences, whole, several turns": ({"chosen": MORE, "rejected": SAID}, MORE, 3),
    "UltraFeedback": ({"prompt": "ab", "chosen": SAID, "rejected": SAID, "score_chosen": 1.0}, SAID, 1),
}


@pytest.mark.parametrize("layout", PUBLISHED)
def test_rows_as_they_are_published(tmp_path, layout):
    """Read with their answers, and as prompts; the same by `generate`, `train` and `bench`."""
    row, messages, asked = PUBLISHED[layout]
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (one,), bad = read_conversations([tmp_path / "a.jsonl"], strict=True)
    assert not bad
    assert list(one.messages) == messages
    with_tools = bool(row.get("tools"))
    assert list(one.tools) == (TOOLS if with_tools else [])
    assert one.prompt == ({"messages": messages[:asked], "tools": TOOLS} if with_tools else messages[:asked])
    (question,) = tasks.load_task(tmp_path / "a.jsonl").questions
    content = messages[0]["content"]
    plain = asked == 1 and isinstance(content, str)
    assert question.turns[0] == (content if plain else tuple(messages[:asked]))
    assert len(question.turns) == {"Spec-Bench": 2}.get(
        layout, sum(m["role"] == "user" for m in messages[asked:]) + 1 + with_tool_turn(messages, asked)
    )


def with_tool_turn(messages: list[dict], asked: int) -> int:
    """The number of turns after the first that are results of tools alone."""
    return sum(m["role"] == "tool" for m in messages[asked:])


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "a part of type 'image_url'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content must be text, got NoneType"),
        ({"messages": SAID, "tools": "add"}, "tools is not JSON"),
        ({"messages": SAID, "tools": [3]}, r"tools\[0\] must be a dict"),
        ({"messages": SAID, "tools": {"a": 1}}, "tools must be a list of dicts"),
        ({"conversations": shared("human:a", "function_call:add(1)")}, "the call of a tool is not JSON"),
        ({"conversations": shared("human:a", "function_call:[1]")}, "the call of a tool must be"),
        ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "c"}, "chosen must be a list, got str"),
        ({"prompt": "ab", "completion": 3}, "completion must be text, got int"),
        ({"prompt": "ab", "completion": [3]}, "a message must be an object, got int"),
        ({"prompt": SAID[:1], "completion": []}, None),
        ({"messages": [SAID[0], {"role": "assistant", "content": ""}]}, "content is empty"),
        ({"messages": None, "prompt": None}, "expected messages, .* got nothing"),
        ({"turns": []}, "turns is empty"),
        ({"instruction": "", "output": "b"}, "instruction is empty"),
        ({"passage": "x"}, "expected messages, .* got 'passage'"),
    ],
)
def test_rows_that_cannot_be_used_are_named_alike(tmp_path, row, why):
    """One reader for files of prompts: the same line of the same file has one message everywhere."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row))
    if why is None:
        assert read_conversations([path])[0]
        return
    messages = []
    for reader in (lambda: read_conversations([path], strict=True), lambda: tasks.load_task(path)):
        with pytest.raises(
            (TrainingError, TaskError), match=f"a.jsonl:1: .*{why}.*; correct or remove the row"
        ) as error:
            reader()
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_tools_and_their_results_are_learnt_around():
    """The calls of the assistant are learnt, the results of tools are not; answers in a prompt are not either."""
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% else %}"
        "{{ m.content }}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    target = dataclasses.replace(trainees.target(), chat_template=ChatTemplate(source))
    call = {"type": "function", "function": {"name": "de", "arguments": {}}}
    messages = (
        TURNS[0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "user", "content": "f"},
        TURNS[1],
    )
    tokenizer = not_none(target.tokenizer)
    for asked, learnt in ((None, "de<|end|>cd<|end|>"), (3, "cd<|end|>")):
        (found,), bad = tokenized.encode_texts(target, [Conversation(messages, None, "here", asked=asked)])
        assert not bad
        assert tokenizer.decode(found.ids[found.mask], skip_special=False) == learnt


def test_a_share_is_held_out_evenly():
    kept, held = tokenized.split_held_out(100, 0.05)
    assert held.tolist() == [19, 39, 59, 79, 99]
    assert sorted([*kept, *held]) == list(range(100))
    assert tokenized.split_held_out(3, 0.0)[1].size == 0
    with pytest.raises(TrainingError, match=r"1 usable prompt is too few .* use at least 2$"):
        tokenized.split_held_out(1, 0.5)


def test_too_few_prompts_name_what_would_be_enough():
    """The number and the share that the message names are enough, and one prompt fewer is not."""
    for count in range(2, 400, 7):
        share = 0.37 / count
        words = r"too few to hold out a fraction of .*; use at least (\d+) or set held_out .* at least ([\d.]+)$"
        with pytest.raises(TrainingError, match=words) as error:
            tokenized.split_held_out(count, share)
        needed, least = not_none(re.search(words, str(error.value))).groups()
        assert tokenized.split_held_out(int(needed), share)[1].size == 1
        with pytest.raises(TrainingError, match="too few"):
            tokenized.split_held_out(int(needed) - 1, share)
        assert tokenized.split_held_out(count, float(least))[1].size >= 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"loss": "mse"}, "loss must be one of ce, kl"),
        ({"heads": 0}, "heads must be a whole number from 1, got 0"),
        ({"heads": 2.0}, "heads must be a whole number from 1, got 2.0"),
        ({"inputs": "token"}, "inputs must be one of hidden, path, recurrent"),
        ({"learning_rate": -1}, "learning_rate must be finite and above 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be finite"),
        ({"clip": -1.0}, "clip must be finite and at least 0"),
        ({"distill": 1}, "distill must be true or false"),
        ({"held_out": 1.0}, "held_out must be below 1"),
        ({"batch": 8, "accumulate": 3}, "a multiple of accumulate times the axis data of mesh, 3 x 1; got 8"),
        ({"medusa2": True}, "set cache_features to false"),
        ({"row_tokens": 6}, "row_tokens must be at least 7 for 4 drafted tokens, got 6"),
        ({"split": "word"}, "split must be one of line, blank, file"),
        ({"steps": "many"}, "steps must be a number"),
    ],
)
def test_settings_that_cannot_be(change, why):
    with pytest.raises(InvalidConfig, match=why):
        jaxspec.MedusaSettings(**change)
