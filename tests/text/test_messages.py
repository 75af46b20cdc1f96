"""Messages as other systems write them: the chat template decides, and reads them in the form that it knows."""

import json
import sys
from typing import Any

import pytest
from text.test_templates import FAMILIES, TOKENS, TOOLS

from jaxspec.confined.process import CONFINED
from jaxspec.errors import InvalidConfig, ProcessError
from jaxspec.text import ChatTemplate
from jaxspec.text.messages import check_tools, check_variables

pytestmark = pytest.mark.quick

ASKED = {"role": "user", "content": "What is 1 + 2?"}
ARGUMENTS = {"a": 1, "b": "two"}
RESULT = {"role": "tool", "content": "3", "name": "add", "tool_call_id": "call00001"}
"""A question, and the result of the call that answers it."""


def call(arguments: Any = ARGUMENTS, **content: Any) -> dict[str, Any]:
    """A message that calls a tool."""
    function = {"name": "add", "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
    } | content


CALLS = {
    "null content": call(content=None),
    "no content": call(),
    "empty content": call(content=""),
    "arguments as text": call(json.dumps(ARGUMENTS), content=None),
    "nulls everywhere": call(content=None, refusal=None, audio=None, function_call=None, name=None),
}
READ_CALLS = ["llama-3.1", "mistral", "qwen-2.5", "deepseek-r1", "gpt-oss", "glm-4", "hermes"]
"""The families whose templates write tool calls."""
REFUSE_TOOLS = ["llama-2"]


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tool_call_is_read_in_every_form(family, form):
    """All forms are rendered alike, with the call where the template writes calls, and without a trace of Python."""
    template = ChatTemplate(FAMILIES[family][0], TOKENS)
    # An assistant's answer in the middle keeps roles alternating.
    messages = [ASKED, CALLS[form], RESULT]
    if family in REFUSE_TOOLS:
        with pytest.raises(InvalidConfig, match="roles must alternate"):
            template.render(messages)
        return
    text = template.render(messages)
    assert "None" not in text
    assert "\\" not in text
    if family in READ_CALLS:
        assert "add" in text
        assert "two" in text
    if not (family == "deepseek-r1" and form == "empty content"):  # this template writes calls beside null alone
        assert text == template.render([ASKED, CALLS["null content"], RESULT])


PARTS = {
    "text": ([{"type": "text", "text": "hello"}], "hello"),
    "texts": ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
    "strings": (["one", {"type": "input_text", "text": "two"}], "one\ntwo"),
}


@pytest.mark.parametrize("form", PARTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_content_is_a_text_or_a_list_of_parts(family, form):
    """A template that reads lists reads them itself; for any other the texts are joined by newlines, as in vLLM."""
    template = ChatTemplate(FAMILIES[family][0], TOKENS)
    parts, text = PARTS[form]
    got = template.render([{"role": "user", "content": parts}])
    joined = text if family not in ("gemma-3", "glm-4") else text.replace("\n", "")
    assert got == template.render([{"role": "user", "content": joined}])


def test_a_template_that_reads_lists_alone_is_given_lists():
    source = "{% for m in messages %}{% for part in m.content %}{{ part['text'] }}{% endfor %};{% endfor %}"
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": [{"type": "text", "text": "cd"}]}]
    assert ChatTemplate(source).render(talk) == "ab;cd;"


@pytest.mark.parametrize("kind", ["image_url", "image", "input_image", "input_audio", "video", "file", "audio_url"])
@pytest.mark.parametrize("family", ["chatml", "gemma-3"])
def test_parts_that_are_not_text_are_refused(family, kind):
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: "x"}]}
    with pytest.raises(InvalidConfig, match=rf"messages\[0\]\['content'\]\[1\] is of type '{kind}', but only text is"):
        ChatTemplate(FAMILIES[family][0], TOKENS).render([message])


def test_a_part_of_its_own_kind_is_for_templates_that_read_lists():
    message = {"role": "user", "content": [{"type": "thinking", "thinking": "hm"}]}
    with pytest.raises(InvalidConfig, match="is of type 'thinking', but the chat template only reads text"):
        ChatTemplate(FAMILIES["chatml"][0], TOKENS).render([message])
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{{ part['text'] if part.type == 'text' else part['thinking'] }}{% endfor %}{% endif %}{% endfor %}"
    )
    assert ChatTemplate(source).render([message]) == "hm"


def test_roles_and_other_keys_are_the_templates():
    source = "{% for m in messages %}{{ m.role }}:{{ m.note | default('-') }}:{{ m.content | tojson }} {% endfor %}"
    talk = [{"role": "critic", "content": {"x": [1]}, "note": "n"}, {"role": "user", "content": 3, "note": None}]
    assert ChatTemplate(source).render(talk) == 'critic:n:{"x": [1]} user:-:3 '


@pytest.mark.parametrize("family", ["llama-3.1", "qwen-2.5", "deepseek-r1", "gemma-3", "lists"])
def test_a_process_that_fails_to_start_says_nothing_about_a_template(family, monkeypatch):
    """What the template reads is found out later, and is the same."""
    lists = "{% for m in messages %}{% for part in m.content %}{{ part['text'] }}{% endfor %};{% endfor %}"
    source = lists if family == "lists" else FAMILIES[family][0]
    template, messages = ChatTemplate(source, TOKENS), [ASKED, call(content=None), RESULT]
    messages = [ASKED] if family == "lists" else messages
    CONFINED.close()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(ProcessError):
            template.render(messages)
    assert template.render(messages) == ChatTemplate(source, TOKENS).render(messages)


def test_messages_are_not_changed():
    messages = [ASKED, call(json.dumps(ARGUMENTS), content=None), RESULT]
    before = json.dumps(messages)
    ChatTemplate(FAMILIES["qwen-2.5"][0], TOKENS).render(messages)
    assert json.dumps(messages) == before


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("add", "tools must be a list of dicts, each the JSON schema of a function; got 'add'"),
        (TOOLS[0], "tools must be a list of dicts"),
        (
            [add],
            r"tools\[0\] is the function 'add'; pass its JSON schema instead, for example transformers.utils.get_json_",
        ),
        ([TOOLS[0], 3], r"tools\[1\] must be a dict, the JSON schema of a function; got 3"),
    ],
)
def test_tools_are_dicts(tools, message):
    with pytest.raises(InvalidConfig, match=message):
        check_tools(tools)
    assert check_tools(TOOLS) == TOOLS
    assert check_tools(None) is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ("enable_thinking", "template_variables must be a dict such as"),
        ({1: 2}, "template_variables must be a dict such as"),
        ({"tools": []}, "template_variables must not contain 'tools'; it has its own argument"),
    ],
)
def test_variables_are_named(variables, message):
    with pytest.raises(InvalidConfig, match=message):
        check_variables(variables)
    assert check_variables({"enable_thinking": False}) == {"enable_thinking": False}
