"""Tests `jaxspec chat`: every answer equals one call with the whole conversation, and no token is read twice."""

import dataclasses
import io
import json
import pathlib
import re
import signal
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import jaxspec
from helpers.checkpoints import random_params, tiny_config, write_hf
from helpers.narrow import not_none
from helpers.tiers import with_slow
from jaxspec import Model
from jaxspec.cli import chat as command
from jaxspec.cli import drafting, main, options, show
from jaxspec.cli.chat import Chat
from jaxspec.decode.session import Session
from jaxspec.errors import CapacityError, MissingTokenizer
from jaxspec.testing import TableLM
from jaxspec.text import ChatTemplate, Tokenizer

END, A, B = 0, 4, 5
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
WORDS = [*SPECIAL, *"abcdefg", "Ġ", "Ã", "©", "ab"]  # a space, and the bytes of é as GPT-2 spells them
TOKENIZER = Tokenizer.from_gguf(
    {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": WORDS,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(WORDS) - len(SPECIAL)),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": END,
    }
)
SOURCE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
V = len(WORDS)
LM = TableLM(V)


def law(**more: float) -> jax.Array:
    """A random table without special tokens but the end, half characters and `ab`; `more` is added to logits."""
    table = np.array(LM.init_params(jax.random.key(0))["table"])
    table[..., [1, 2, 3, 12, 13, 14]] = -40
    table[:, A, B] = -40
    for name, value in more.items():
        table[..., WORDS.index(name)] += value
    return jnp.asarray(table)


def toy(table: jax.Array, source: str = SOURCE) -> Model:
    return Model(LM, {"table": table}, TOKENIZER, ChatTemplate(source), (END,), "toy")


TOY, ENDLESS = toy(law()), toy(law(**{SPECIAL[END]: -99.0}))
HOT = ("--temperature", "1", "--seed", "5")
LINES = ["abc", "deed a", "cab"]


def begin(*words: str, target: Model = TOY, draft: Model | None = None) -> Chat:
    """The conversation that these options begin."""
    parser = options.Parser(prog="chat")
    command.add_options(parser)
    args = parser.parse_options(["--length", "250", "--max-new-tokens", "24", *words])
    chosen = dataclasses.replace(drafting.read_drafting(args)[0], draft=draft)
    return Chat(target, options.read_options(args, chosen), args.system, args.length)


def ask(chat: Chat, line: str, write=lambda *_: None, interrupted=lambda: False):
    return chat.ask(line, write, interrupted)


def whole(chat: Chat, line: str) -> tuple[str, list[int]]:
    """What one call makes of the conversation with one more message."""
    target, given = chat._target, vars(chat._options)
    prompt = target.encode_chat([*chat.messages, {"role": "user", "content": line}])
    budget = min(given["max_new_tokens"], chat.length - len(prompt))
    (row,) = jaxspec.generate(target, [prompt], **given | {"max_new_tokens": budget})
    return row.text, row.tokens


@pytest.fixture
def read(monkeypatch):
    """How many tokens every prefill read."""
    counts, prefill = [], Session._prefill

    def counted(session, state):
        before = int(state.cache.length[0])
        state = prefill(session, state)
        counts.append(int(state.cache.length[0]) - before)
        return state

    monkeypatch.setattr(Session, "_prefill", counted)
    return counts


@pytest.fixture
def talk(capsys, monkeypatch):
    """Runs `jaxspec chat` with these lines as its input and gives (status, stdout, stderr)."""

    def call(lines, *words, target=TOY):
        monkeypatch.setattr(show, "load_model", lambda *_, **__: target)
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
        status = main(["chat", "--length", "250", "--max-new-tokens", "24", *words])
        return status, *capsys.readouterr()

    return call


# --- the conversation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", with_slow(["prompt-lookup", "model"], ("model",)))
@pytest.mark.parametrize("budget", ["24", "5"])
def test_turns_are_one_generation(drafter, budget, read, capsys):
    """Whether an answer ends itself or is cut."""
    words = ["--max-new-tokens", budget, "--drafter", drafter, "--system", "bed"]
    draft = TOY if drafter == "model" else None
    chat = begin(*HOT, *words, *(["--draft-model", "x"] if draft else []), draft=draft)
    reasons, expected = [], []
    for line in LINES:
        expected.append(whole(chat, line))
        prompt = TOY.encode_chat([*chat.messages, {"role": "user", "content": line}])
        before = len(chat.ids)
        read.clear()
        row = ask(chat, line)
        assert chat.ids == prompt + row.tokens
        assert (row.text, row.tokens) == expected[-1]
        assert chat.messages[-1]["content"] == row.text
        state = not_none(chat._session).state
        assert state.tokens[0, : int(state.length[0])].tolist() == chat.ids
        assert read == [len(prompt) - before - (before == 0)]  # the last token of all is read with the first draft
        reasons.append(row.finish_reason)
    assert chat.messages[0] == {"role": "system", "content": "bed"}
    assert chat.read + chat.stats.committed == len(chat.ids)
    assert "stop" in reasons if budget == "24" else "length" in reasons
    assert "reading the conversation again" not in capsys.readouterr().err
    chat.reset()
    assert (ask(chat, LINES[0]).text, chat.answers) == (expected[0][0], 1)


def test_a_template_that_rewrites_what_was_said(capsys):
    forgetful = toy(
        law(), SOURCE.replace("{{ m.content }}", "{{ m.content if m.role == 'user' or loop.last else 'c' }}")
    )
    chat = begin(*HOT, target=forgetful)
    for i, line in enumerate(LINES):
        expected = whole(chat, line)
        row = ask(chat, line)
        assert (row.text, row.tokens) == expected
        assert chat.ids == forgetful.encode_chat(chat.messages[:-1]) + row.tokens
        assert ("reading the conversation again" in capsys.readouterr().err) == (i > 0)


@pytest.mark.parametrize(("token", "budget", "line", "all_of_it"), [("a", 2, "b", "ccaab"), ("Ã", 1, "c", "cc\ufffdc")])
def test_no_token_reaches_across(token, budget, line, all_of_it, capsys):
    """An answer that ends in `a` and a message `b` are the token `ab`; half a character is no text."""
    target = toy(law(**{token: 99.0}), "{% for m in messages %}{{ m.content }}{% endfor %}")
    chat = begin("--max-new-tokens", str(budget), target=target)
    assert ask(chat, "cc").tokens == [WORDS.index(token)] * budget
    expected = whole(chat, line)
    assert ask(chat, line).tokens == expected[1]
    assert "reading the conversation again" in capsys.readouterr().err
    assert chat.ids[:-budget] == TOKENIZER.encode(all_of_it)


def test_tokens_that_the_tokenizer_would_not_have_chosen(capsys):
    """The model writes `a` and `b` where the tokenizer has `ab`: it is the same text, and is not read again."""
    table = np.array(law(a=50.0))
    table[:, A, B] += 99
    table[:, B, END] += 99
    chat = begin(target=toy(jnp.asarray(table)))
    assert ask(chat, "c").tokens == [A, B, END]
    assert ask(chat, "d").tokens == [A, B, END]
    assert "reading the conversation again" not in capsys.readouterr().err
    assert TOKENIZER.decode(chat.ids) == "cabdab"
    assert chat.read == len(chat.ids) - 6


def test_a_full_conversation():
    chat = begin(*HOT, "--length", "20", target=ENDLESS)
    row = ask(chat, "abc")
    assert (row.finish_reason, len(chat.ids), chat.room) == ("length", 20, 0)
    before = list(chat.messages)
    with pytest.raises(CapacityError, match="takes 25 of 20 tokens, so there is no room for an answer"):
        ask(chat, "d")
    assert chat.messages == before
    chat.reset()
    assert ask(chat, "abc").tokens == row.tokens


def test_an_answer_is_ended_from_outside(read, capsys):
    """The next turn goes on from there, even where nothing had come yet."""
    chat = begin(*HOT, target=ENDLESS)
    looks = iter([False, True])
    row = ask(chat, LINES[0], interrupted=lambda: next(looks))
    assert row.finish_reason is None
    assert 0 < len(row.tokens) < 24
    for line, ends in ((LINES[1], True), (LINES[2], False), (LINES[0], False)):
        expected, before = whole(chat, line), len(chat.ids)
        read.clear()
        row = ask(chat, line, interrupted=lambda ends=ends: ends)
        assert row.tokens == ([] if ends else expected[1])
        assert read == [len(chat.ids) - len(row.tokens) - before]
    assert chat.messages[3] == {"role": "assistant", "content": ""}
    assert "reading the conversation again" not in capsys.readouterr().err


def test_what_cannot_talk():
    with pytest.raises(MissingTokenizer, match="toy has no chat template"):
        begin(target=Model(LM, TOY.params, TOKENIZER, name="toy"))
    with pytest.raises(CapacityError, match="--length 99 is more than the target's context of 64 tokens"):
        begin("--length", "99", target=Model(TableLM(V, 64), TOY.params, TOKENIZER, TOY.chat_template))


# --- the command --------------------------------------------------------------------------------------------


def test_lines_are_answered(talk):
    chat = begin(*HOT)
    answers = [ask(chat, line) for line in LINES]
    status, out, err = talk(["", LINES[0], "  ", *LINES[1:], "/exit", "no more"], *HOT)
    assert status == 0
    assert out == "".join(f"{row.text}\n" for row in answers)
    summaries = re.findall(r"^(\d+) tokens, [\d.]+ tokens/s .*, [\d.]+ tokens per round, .*$", err, re.MULTILINE)
    assert summaries == [str(len(row.tokens)) for row in answers]


def test_commands(talk):
    status, out, err = talk([LINES[0], "/stats", "/reset", LINES[0], "/stats", "/what", "/no command"], *HOT)
    assert status == 0
    first, second, third = out.splitlines()
    assert first == second
    assert third  # a message may begin with a slash
    stats = re.findall(r"^answers: 1; tokens: (\d+) of 250, (\d+) read; (\d+) tokens", err, re.MULTILINE)
    assert len(stats) == 2
    assert stats[0] == stats[1]
    assert int(stats[0][0]) == int(stats[0][1]) + int(stats[0][2])
    assert "unknown command /what; the commands are /reset, /stats and /exit" in err
    told = [line for line in err.splitlines() if line.startswith(("answers: ", "unknown command"))]
    again = talk([LINES[0], "/stats", "/reset", LINES[0], "/stats", "/what", "/no command"], *HOT, "--quiet")
    assert again[:2] == (status, out)
    assert [re.sub(r"[\d.]+ (tokens/s|s\b)", "", line) for line in again[2].splitlines()] == [
        re.sub(r"[\d.]+ (tokens/s|s\b)", "", line) for line in told
    ]


def test_colour(talk):
    """Without it the text is plain; with it, what is green is what was accepted."""
    words = ("--ignore-eos", "--max-new-tokens", "60")
    plain = talk(["abcabc"], *words)[1]
    for word in ("--colour", "--color"):
        status, out, err = talk(["abcabc"], *words, word)
        assert status == 0
        assert out.replace(command._GREEN, "").replace(command._BACK, "") == plain
        green = re.findall(f"{re.escape(command._GREEN)}(.*?){re.escape(command._BACK)}", out)
        accepted = int(not_none(re.search(r"^(\d+) drafted and accepted, the rest", err, re.MULTILINE))[1])
        assert 0 < len(green) <= accepted
    assert "\x1b" not in plain


@pytest.mark.parametrize("colour", [[], ["--colour"]])
def test_words_are_whole_on_a_terminal_and_piped_text_is_raw(talk, monkeypatch, colour):
    """The end of a line replaces a space, or parts nothing wider than the terminal; not a letter is lost."""
    words = (*HOT[:2], "--seed", "1", "--ignore-eos", "--max-new-tokens", "120", *colour)
    spaced = toy(law(Ġ=3.0))
    piped = talk(["abc"], *words, target=spaced)[1]
    monkeypatch.setenv("COLUMNS", "20")
    assert talk(["abc"], *words, target=spaced)[1] == piped, "not a terminal: raw, whatever its width"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = talk(["abc"], *words, target=spaced)[1]
    plain, lines = (re.sub(r"\x1b\[\d+m", "", text) for text in (piped, shown))
    assert lines.split() == plain.split()
    assert max(map(len, plain.split())) < 20 < len(plain)
    assert max(map(len, lines.splitlines())) <= 20
    assert ("\x1b[32m" in shown) == bool(colour)


def test_a_full_conversation_is_told(talk):
    status, out, err = talk(["abc", "d", "/reset", "abc"], *HOT, "--length", "20", "--ignore-eos")
    assert status == 0
    first, second = out.splitlines()
    assert first == second
    assert err.count("the conversation is full; /reset begins a new one") == 2
    assert err.count("no room for an answer; /reset begins a new conversation") == 1
    assert "cut at --max-new-tokens" in talk(["abc"], *HOT, "--ignore-eos")[2]


@pytest.mark.parametrize("times", [1, 2])
def test_interrupts(talk, monkeypatch, times):
    """One ends the answer after the step under way; a second one at once. The program goes on."""
    run, calls, handler = Session.run, iter(range(99)), signal.getsignal(signal.SIGINT)

    def interrupted(session, *rounds):
        if next(calls) == 1:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        run(session, *rounds)

    monkeypatch.setattr(Session, "run", interrupted)
    status, out, err = talk([LINES[0], LINES[1]], *HOT, "--ignore-eos")
    first, second = out.splitlines()
    assert status == 0
    assert err.count("interrupted") == 1
    assert 0 < len(first) < 24
    assert len(second) >= 8
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_interrupt_between_answers(monkeypatch, capsys):
    """On a terminal it is answered with how to leave; where the lines are sent, it ends the program."""
    monkeypatch.setattr(show, "load_model", lambda *_, **__: TOY)
    for typed, status in ((True, 0), (False, 130)):
        keyboard, events = io.StringIO(), iter([KeyboardInterrupt, EOFError])

        def wait(*_, events=events):
            raise next(events)

        keyboard.isatty, keyboard.readline = (lambda typed=typed: typed), wait
        monkeypatch.setattr(sys, "stdin", keyboard)
        assert main(["chat"]) == status
        assert ("to leave, type /exit or end the input" in capsys.readouterr().out) == typed


def test_no_logits(talk):
    status, _, err = talk(["abc"], target=toy(jnp.full_like(law(), jnp.nan)))
    assert status == 1
    assert "not finite" in err


def write_checkpoint(folder: pathlib.Path, settings: dict[str, Any]) -> None:
    """Writes a transformer with a context of 256 tokens."""
    names = [*SPECIAL, *map(chr, range(33, 123)), "Ġ"]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({name: i for i, name in enumerate(names)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    config = tiny_config(max_position=256)
    files = {"tokenizer.json": inner.to_str(), "tokenizer_config.json": json.dumps(settings)}
    write_hf(folder, config, random_params(config, 3), settings={"eos_token_id": END}, files=files)


def test_a_chat_fits_its_answers_into_a_small_context(tmp_path, capsys, monkeypatch):
    """The default budget is larger than the context; so is what a chat without an option may take."""
    write_checkpoint(tmp_path, {"chat_template": SOURCE})
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
    assert main(["chat", "--target", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("command", "way"),
    [("chat", "use `jaxspec generate` instead"), ("generate", "pass plain text (--no-chat)")],
)
def test_a_target_without_a_template(tmp_path, capsys, command, way):
    write_checkpoint(tmp_path, {})
    words = [] if command == "chat" else ["--chat", "hello", "--max-new-tokens", "8"]
    assert main([command, "--target", str(tmp_path), *words]) == 1
    assert f"has no chat template; {way}" in capsys.readouterr().err


def test_a_checkpoint(tmp_path, capsys, monkeypatch):
    """A transformer, from its directory, against one call per turn."""
    write_checkpoint(tmp_path, {"chat_template": SOURCE})
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo three\n"))
    words = ["--temperature", "1", "--seed", "2", "--max-new-tokens", "20"]
    assert main(["chat", "--target", str(tmp_path), *words]) == 0
    out = capsys.readouterr().out

    target, messages = jaxspec.load(tmp_path), []
    settings = {"key": jax.random.key(2), "sampling": jaxspec.Sampling(1.0), "max_new_tokens": 20, "capacity": 512}
    for line in ("one", "two three"):
        messages.append({"role": "user", "content": line})
        (row,) = jaxspec.generate(target, [messages], **settings)
        messages.append({"role": "assistant", "content": row.text})
    assert out == "".join(f"{m['content']}\n" for m in messages[1::2])


# --- tools and variables of the template --------------------------------------------------------------------

THINKING = SOURCE.replace("<|assistant|>{% endif", "<|assistant|>{{ 'a' if mode is defined else '' }}{% endif")
WITH_TOOLS = "{% if tools %}<|system|>{{ tools[0].name }}<|end|>{% endif %}" + SOURCE


def test_variables_and_tools_reach_every_turn(tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps([{"name": "fed"}]))
    cases: list[tuple[str, list[str], Any, Any]] = [
        (THINKING, ["--template-variable", "mode=3"], None, {"mode": 3}),
        (WITH_TOOLS, ["--tools", str(tmp_path / "tools.json")], [{"name": "fed"}], None),
    ]
    for source, words, tools, variables in cases:
        target = toy(law(), source)
        chat = begin(*HOT, *words, target=target)
        for line in LINES:
            messages = [*chat.messages, {"role": "user", "content": line}]
            prompt = target.encode_chat(messages, tools, variables)
            row = ask(chat, line)
            assert chat.ids == prompt + row.tokens
            assert prompt != target.encode_chat(messages)


@pytest.mark.parametrize(
    ("text", "value"),
    [("a=false", False), ("a=1", 1), ('a=[1, "x"]', [1, "x"]), ("a=null", None), ("a=high", "high"), ("a=", "")],
)
def test_a_variable_is_json_or_text(text, value):
    assert options.parse_variable(text) == ("a", value)


@pytest.mark.parametrize(
    ("words", "content", "message"),
    [
        (["--template-variable", "thinking"], None, "expected NAME=VALUE, as in enable_thinking=false, got 'thinking'"),
        (["--template-variable", "tools=[]"], None, "template_variables must not contain 'tools'"),
        (["--tools", "FILE"], None, "cannot be read: No such file"),
        (["--tools", "FILE"], "{", "not JSON"),
        (["--tools", "FILE"], "[]", "expected a list of tools, got []"),
        (["--tools", "FILE"], '{"name": "a"}', "tools must be a list of dicts"),
        (["--tools", "FILE"], "[1]", "tools[0] must be a dict"),
    ],
)
def test_wrong_tools_and_variables(tmp_path, talk, words, content, message):
    path = tmp_path / "tools.json"
    if content is not None:
        path.write_text(content)
    status, out, err = talk(["abc"], *(str(path) if word == "FILE" else word for word in words))
    assert (status in (1, 2), out) == (True, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
