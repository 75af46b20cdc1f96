"""Compares published chat templates in jaxspec with plain jinja2, configured as transformers does.

    python scripts/prove/templates.py FOLDER

FOLDER contains `.jinja` files. Each template renders conversations with and without a system message, tools, calls of
tools, parts of content, empty content and reasoning, with all combinations of a generation prompt and thinking. Texts
must be equal, and both must accept the same conversations. jaxspec first converts messages to the form that a template
reads (`jaxspec.text.messages`): where that changes them, plain jinja2 renders the converted ones as well.
"""

import argparse
import collections
import datetime
import functools
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxspec.errors import JaxspecError
from jaxspec.text import ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
DATE = datetime.datetime(2026, 11, 27, 12, 30)

SYSTEM = {"role": "system", "content": "Be <brief> & kind.\n"}
ASK, REPLY, AGAIN = (
    {"role": "user", "content": " What is 1 + 2? "},
    {"role": "assistant", "content": "<think>\nIt is easy.\n</think>\n\n3 "},
    {"role": "user", "content": "'And' \"é\" 数?\n"},
)
CALL = {"name": "add", "arguments": {"a": 1, "b": [2, None, "é\n<x>"], "c": {"d": True}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds <two> numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "number", "description": "The first."},
                "b": {"type": "array", "items": {"type": "number"}},
                "c": {"type": "string", "enum": ["x", "y"]},
            },
            "required": ["a"],
        },
    },
}
CALLED = {"role": "assistant", "tool_calls": [{"id": "call00001", "type": "function", "function": CALL}]}
RESULT = {"role": "tool", "content": '{"sum": 3}', "name": "add", "tool_call_id": "call00001"}
PARTS = [{"type": "text", "text": "Look: "}, {"type": "text", "text": "1 + 2"}]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one message": [ASK],
    "turns": [ASK, REPLY, AGAIN],
    "system": [SYSTEM, ASK],
    "system and turns": [SYSTEM, ASK, REPLY, AGAIN],
    "ends with the assistant": [ASK, REPLY],
    "long": [SYSTEM, *[ASK, REPLY] * 20, AGAIN],
    "call": [ASK, CALLED | {"content": ""}, RESULT],
    "call and answer": [SYSTEM, ASK, CALLED | {"content": ""}, RESULT, REPLY, AGAIN],
    "call with content": [ASK, CALLED | {"content": "I add."}, RESULT],
    "call with null content": [ASK, CALLED | {"content": None}, RESULT],
    "call without content": [ASK, CALLED, RESULT],
    "two results": [ASK, CALLED | {"content": ""}, RESULT, RESULT],
    "arguments as text": [
        ASK,
        CALLED | {"content": "", "tool_calls": [{"type": "function", "function": CALL | {"arguments": '{"a": 1}'}}]},
        RESULT,
    ],
    "parts": [ASK | {"content": PARTS}],
    "parts and system": [SYSTEM | {"content": PARTS[:1]}, ASK | {"content": PARTS}],
    "reasoning": [ASK, REPLY | {"reasoning_content": "It is easy."}, AGAIN],
    "empty": [ASK | {"content": ""}],
    "developer": [SYSTEM | {"role": "developer"}, ASK],
    "unknown role": [ASK | {"role": "robot"}],
    "two users": [ASK, AGAIN],
}
VARIABLES: dict[str, dict[str, Any]] = {
    "": {},
    "tools": {"tools": [TOOL]},
    "thinking": {"enable_thinking": True},
    "no thinking": {"enable_thinking": False},
    "tools and documents": {"tools": [TOOL, TOOL], "documents": [{"title": "t", "text": "x"}]},
}


class Raised(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _Generation(Extension):
    """The tag `{% generation %}`, a block of its own as in transformers."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Any) -> str:
        return caller()


def _raise(message: str) -> None:
    raise Raised(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": DATE.strftime}
    return environment


@functools.lru_cache(maxsize=256)
def compile_plainly(source: str) -> jinja2.Template:
    """Compiles a template with plain jinja2."""
    return _environment().from_string(source)


def render_plainly(source: str, messages: Sequence[Mapping], add: bool, variables: Mapping[str, Any]) -> str | None:
    """Renders a conversation with plain jinja2; None if the template rejects it or fails."""
    given = {"tools": None, "documents": None, **variables}
    try:
        return compile_plainly(source).render(messages=messages, add_generation_prompt=add, **given)
    except Exception:  # a template may do what raises any error
        return None


def cases() -> Iterator[tuple[str, list[dict[str, Any]], bool, dict[str, Any]]]:
    """Yields name, messages, generation prompt and variables of each rendering."""
    for (name, messages), (kind, variables), add in itertools.product(
        CONVERSATIONS.items(), VARIABLES.items(), (True, False)
    ):
        yield f"{name}, {kind}, {add}", messages, add, variables


def compare(path: pathlib.Path, counts: collections.Counter[str]) -> Iterator[str]:
    """Compares one template in all cases; yields a line for each difference."""
    source = path.read_text("utf-8")
    try:
        compile_plainly(source)
    except jinja2.TemplateSyntaxError as error:
        counts["templates that plain jinja2 cannot compile"] += 1
        try:
            ChatTemplate(source)
            yield f"{path.name}: compiles, which plain jinja2 refuses: {error}"
        except JaxspecError:
            pass
        return
    try:
        template = ChatTemplate(source, TOKENS)
    except JaxspecError as error:
        yield f"{path.name}: {error}"
        return
    counts["templates"] += 1
    for name, messages, add, variables in cases():
        given = render_plainly(source, messages, add, TOKENS | variables)
        try:
            read = template._forms.convert(messages)
            text, reason = template.render(messages, add, **variables, strftime_now=DATE.isoformat()), ""
        except JaxspecError as error:
            read, text, reason = messages, None, str(error)
        expected = given if read == messages else render_plainly(source, read, add, TOKENS | variables)
        if text != expected:
            counts["different"] += 1
            yield f"{path.name}: {name}: {reason or repr(text)[:200]}, expected {expected!r:.200}"
        elif text is None:
            counts["conversations that both refuse"] += 1
        elif text == given:
            counts["texts equal"] += 1
        elif given is None:
            counts["texts equal, of messages that the template refuses unless they are converted"] += 1
        else:
            counts["texts equal, of messages that the template reads otherwise unless they are converted"] += 1


def report(
    compare: Callable[[pathlib.Path, collections.Counter[str]], Iterable[str]], doc: str | None, cases: str
) -> int:
    """Compares the templates of the folder that the command line names, and prints differences and counts.

    Args:
        compare: yields a line for each difference of one template, and counts its cases.
        doc: what `--help` says.
        cases: the count without which nothing was compared.

    Returns:
        The exit status: 1 if anything differs, or if there was nothing to compare.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    arguments = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    start, differences = time.perf_counter(), 0
    for path in sorted(arguments.folder.rglob("*.jinja")):
        for line in compare(path, counts):
            differences += 1
            print(line, flush=True)
    for name, count in counts.items():
        print(f"{count:6} {name}")
    print(f"{differences:6} differences, {time.perf_counter() - start:.1f} s")
    return int(differences > 0 or not counts[cases])


if __name__ == "__main__":
    sys.exit(report(compare, __doc__, "templates"))
