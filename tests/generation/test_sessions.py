"""Sessions of conversations: a later turn is what the chat template writes for the whole conversation."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers.chat_templates import FAMILIES, shared_tokenizer
from helpers.narrow import not_none
from jaxspec import Model
from jaxspec.errors import InvalidConfig
from jaxspec.testing import TableLM
from jaxspec.text import ChatTemplate

TOKENIZER = shared_tokenizer()
LM = TableLM(TOKENIZER.vocab_size, 1 << 12, order=1)
QUESTION, MORE = {"role": "user", "content": "Who is Ada?"}, {"role": "user", "content": "And then?"}
TALK = [QUESTION, {"role": "assistant", "content": "a lady"}, {"role": "user", "content": "When?"}]
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS = {"question": [QUESTION], "talk": TALK, "system": [SYSTEM, QUESTION]}
REREAD = {
    "llama-2": "a space before its end token",
    "alpaca": "no end token",
    "falcon": "no end token",
    "deepseek-v2": "a space before the answer",
    "mistral-v3": "a space before the answer",
    "vicuna": "a space before the answer",
    "deepseek-r1": "no reasoning of earlier answers, and its beginning is in the prompt",
}
"""Families whose templates write something else than these models answer, and what."""


def answering(family: str, *pieces: str) -> Model:
    """A model of a family that answers every prompt with these pieces, each of which has a token of its own.

    The pieces must be distinct, and none of them the last token of a prompt.
    """
    one = FAMILIES[family]
    template = one.template
    ids = [TOKENIZER.id_of(piece) for piece in pieces]
    table = np.zeros((LM.vocab, LM.vocab), np.float32)
    table[:, ids[0]] = 1.0
    for token, following in itertools.pairwise(ids):
        table[token, following] = 9.0
    ends = {i for name in (one.end, one.eos) if (i := TOKENIZER.id_of(name)) is not None}
    return Model(LM, {"table": jnp.asarray(table)}, TOKENIZER, template, tuple(sorted(ends)), family)


def say(target: Model, prompts: Any, **options: Any) -> jaxspec.Output:
    settings: dict[str, Any] = {"drafter": "none", "max_new_tokens": 8, "capacity": 1024, "verbose": False}
    return jaxspec.generate(target, prompts, **settings | options)


def whole(messages: Sequence[dict], row: jaxspec.Generation, *more: dict) -> list[dict]:
    """The conversation with an answer and further messages."""
    return [*messages, {"role": "assistant", "content": row.text}, *more]


def check_second_turn(target: Model, messages: list[dict], more: Any, **options: Any) -> bool:
    """Compares the text of a session with the rendering of the conversation; returns whether it was cut."""
    first = say(target, [messages], **options)
    second = say(target, more, session=first.session)
    new = [{"role": "user", "content": more}] if isinstance(more, str) else more
    expected = target.encode_chat(whole(messages, first[0], *new))
    tokens = not_none(second.session).row_tokens(0)
    assert tokens == expected + second[0].tokens
    assert second[0].tokens == say(target, [expected])[0].tokens
    third = say(target, "Why?", session=second.session)
    again = whole(whole(messages, first[0], *new), second[0], {"role": "user", "content": "Why?"})
    assert not_none(third.session).row_tokens(0) == target.encode_chat(again) + third[0].tokens
    return first[0].prompt_tokens + first[0].tokens + second[0].prompt_tokens != expected


PAIRS = [(name, talk) for name in FAMILIES for talk in CONVERSATIONS if talk != "system" or FAMILIES[name].system]


@pytest.mark.parametrize(("family", "conversation"), PAIRS)
def test_an_answer_that_ends_itself(family, conversation):
    """Prompt, answer and new prompt are the ids of the conversation; nothing is read again if the template allows."""
    one = FAMILIES[family]
    cut = check_second_turn(answering(family, "Q", "Z", one.end or one.eos), CONVERSATIONS[conversation], "And then?")
    reread = family in REREAD or (family, conversation) == ("mistral-v3", "system")
    assert cut == reread


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_that_is_cut_by_its_length(family):
    """The template ends the turn that the model did not end."""
    check_second_turn(answering(family, "Q", "Z", "X", "K"), [QUESTION], "And then?", max_new_tokens=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_that_is_cut_before_a_stop_string(family):
    """The conversation goes on from the text of the answer, without the stop string."""
    check_second_turn(answering(family, "Q", "Z", "X", "K"), [QUESTION], "And then?", stop=["X"])


@pytest.mark.parametrize("family", FAMILIES)
def test_reasoning(family):
    """A template may drop the reasoning of earlier answers; what follows it is then read again."""
    one = FAMILIES[family]
    pieces = ["<think>", "Q", "</think>", "Z", one.end or one.eos]
    cut = check_second_turn(answering(family, *pieces), [QUESTION], [MORE])
    assert cut == (family in REREAD or family in ("qwen-3", "smollm-3"))


@pytest.mark.parametrize("family", ["chatml", "qwen-3", "llama-3", "gemma", "vicuna"])
def test_text_of_a_special_token_is_no_part_of_an_answer(family):
    """A model that writes a control token in the middle: it is not in the answer, nor in the conversation."""
    one = FAMILIES[family]
    assert check_second_turn(answering(family, "Q", "[gMASK]", "Z", one.end), [QUESTION], [MORE])


class TestRows:
    TARGET = answering("qwen-2.5", "Q", "Z", "<|im_end|>")

    def test_each_row_and_sample_has_its_own_conversation(self):
        prompts = ["Hello", [SYSTEM, QUESTION], [*TALK]]
        first = say(self.TARGET, prompts, samples=2)
        second = say(self.TARGET, ["a", [MORE], "b"], samples=2, session=first.session)
        asked = [[{"role": "user", "content": "Hello"}], [SYSTEM, QUESTION], TALK]
        new = [{"role": "user", "content": "a"}, MORE, {"role": "user", "content": "b"}]
        session = not_none(second.session)
        for row in range(6):
            expected = self.TARGET.encode_chat(whole(asked[row // 2], first[row], new[row // 2]))
            assert session.row_tokens(row) == expected + second[row].tokens
            assert (second[row].prompt, second[row].sample) == (row // 2, row % 2)

    def test_a_stream_that_is_left_goes_on(self):
        running = jaxspec.stream(self.TARGET, "Hello", drafter="none", rounds=1, capacity=1024, verbose=False)
        chunk = next(running)
        assert chunk.finish_reason is None
        session, row = running.output.session, running.output[0]
        second = say(self.TARGET, "a", session=session)
        asked = [{"role": "user", "content": "Hello"}]
        expected = self.TARGET.encode_chat(whole(asked, row, {"role": "user", "content": "a"}))
        assert not_none(second.session).row_tokens(0) == expected + second[0].tokens

    def test_messages_may_repeat_the_whole_conversation(self):
        """Also with another form of the answer, such as the call that it was parsed as."""
        first = say(self.TARGET, [[QUESTION]])
        talk = whole([QUESTION], first[0], MORE)
        second = say(self.TARGET, [talk], session=first.session)
        assert not_none(second.session).row_tokens(0) == self.TARGET.encode_chat(talk) + second[0].tokens
        first = say(self.TARGET, [[QUESTION]])
        talk = [QUESTION, {"role": "assistant", "content": "other"}, MORE]
        second = say(self.TARGET, [talk], session=first.session)
        assert not_none(second.session).row_tokens(0) == self.TARGET.encode_chat(talk) + second[0].tokens

    def test_raw_text_and_ids_are_appended_as_they_are(self):
        first = say(self.TARGET, "Hello")
        second = say(self.TARGET, "more", session=first.session, chat=False)
        assert second[0].prompt_tokens == self.TARGET.encode("more")
        ids = [[TOKENIZER.id_of("a")]]
        third = say(self.TARGET, ids, session=second.session)
        tokens = [i for row in (first[0], second[0], third[0]) for i in (*row.prompt_tokens, *row.tokens)]
        assert not_none(third.session).row_tokens(0) == tokens

    @pytest.mark.parametrize(("prompt", "chat"), [("raw", False), ([[5, 6]], None)])
    def test_a_chat_cannot_continue_what_is_not_one(self, prompt, chat):
        first = say(self.TARGET, prompt, chat=chat)
        with pytest.raises(InvalidConfig, match=r"prompt 0: the session's text was given as token ids or raw text"):
            say(self.TARGET, "Hello", session=first.session)

    def test_what_is_read_again_is_announced(self, capfd):
        target = answering("qwen-3", "<think>", "Q", "</think>", "Z", "<|im_end|>")
        first = say(target, "Hello")
        say(target, "more", session=first.session, verbose=True)
        shown = capfd.readouterr().err
        assert shown.count("differently; reading the conversation again") == 1
        assert "more" not in shown


TOOL = {"type": "function", "function": {"name": "age", "parameters": {"type": "object", "properties": {}}}}


class TestTools:
    TARGET = answering("hermes", "Q", "Z", "<|im_end|>")

    def test_tools_and_variables_reach_the_template(self):
        for prompt in ("Hello", [[{"role": "user", "content": "Hello"}]]):
            row = say(self.TARGET, prompt, tools=[TOOL])[0]
            assert row.prompt_tokens == self.TARGET.encode_chat([{"role": "user", "content": "Hello"}], [TOOL])
        target = answering("smollm-3", "Q", "Z", "<|im_end|>")
        row = say(target, "Hello", template_variables={"enable_thinking": False})[0]
        assert "/no_think" in TOKENIZER.decode(row.prompt_tokens)
        assert "/no_think" not in TOKENIZER.decode(say(target, "Hello")[0].prompt_tokens)

    def test_a_prompt_has_tools_of_its_own(self):
        asked = [{"role": "user", "content": "Hello"}]
        prompts = [{"messages": asked, "tools": [TOOL]}, {"messages": asked}, "Hello", {"messages": asked, "tools": []}]
        rows = say(self.TARGET, prompts)
        plain, with_tool = self.TARGET.encode_chat(asked), self.TARGET.encode_chat(asked, [TOOL])
        assert [row.prompt_tokens for row in rows] == [with_tool, plain, plain, plain]
        rows = say(self.TARGET, prompts, tools=[TOOL])
        assert [row.prompt_tokens for row in rows] == [with_tool, with_tool, with_tool, plain]
        assert say(self.TARGET, prompts[0])[0].prompt_tokens == with_tool  # one prompt alone

    def test_a_session_keeps_its_tools(self):
        """The result of a call is a message; the tools are written again as in the first turn."""
        first = say(self.TARGET, [[QUESTION]], tools=[TOOL])
        result = {"role": "tool", "content": "36"}
        second = say(self.TARGET, [[result]], session=first.session)
        expected = self.TARGET.encode_chat(whole([QUESTION], first[0], result), [TOOL])
        assert not_none(second.session).row_tokens(0) == expected + second[0].tokens
        third = say(self.TARGET, "And then?", session=second.session, tools=[])
        talk = whole(whole([QUESTION], first[0], result), second[0], MORE)
        assert not_none(third.session).row_tokens(0) == self.TARGET.encode_chat(talk) + third[0].tokens

    def test_tools_without_a_chat_are_refused(self):
        for options in ({"tools": [TOOL]}, {"template_variables": {"enable_thinking": False}}):
            with pytest.raises(InvalidConfig, match=f"{next(iter(options))} are for the chat template, but no prompt"):
                say(self.TARGET, "raw", chat=False, **options)
        with pytest.raises(InvalidConfig, match='prompt 0 must be a dict with "messages" and optionally "tools"'):
            say(self.TARGET, {"messages": [QUESTION], "tool": []})

    def test_precompile_takes_them(self):
        options: dict[str, Any] = {"drafter": "none", "max_new_tokens": 8, "capacity": 1024, "verbose": False}
        say(self.TARGET, "Hello", tools=[TOOL])
        seconds = jaxspec.precompile(self.TARGET, {"messages": [QUESTION], "tools": [TOOL]}, **options)
        assert seconds == 0
        options["tools"] = "add"
        with pytest.raises(InvalidConfig, match="tools must be a list of dicts"):
            jaxspec.precompile(self.TARGET, "Hello", **options)


def test_another_template_is_another_conversation():
    """A model whose template writes the date of today: what was read before it stays."""
    target = answering("chatml", "Q", "Z", "<|im_end|>")
    first = say(target, "Hello")
    dated = dataclasses.replace(
        target, chat_template=ChatTemplate(FAMILIES["chatml"].source.replace("<|im_end|>", ".<|im_end|>", 1))
    )
    second = say(dated, "more", session=first.session)
    asked = [{"role": "user", "content": "Hello"}]
    expected = dated.encode_chat(whole(asked, first[0], {"role": "user", "content": "more"}))
    assert not_none(second.session).row_tokens(0) == expected + second[0].tokens
