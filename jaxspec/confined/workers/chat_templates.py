"""Chat templates in the confined process: jinja2's sandbox, with the configuration of transformers.

The text is a function of the template and its input: random numbers are not available, and addresses of objects in the
text are refused. The only exception is the date that `strftime_now` formats, which the parent sends.
"""

import contextlib
import datetime
import json
import pprint  # noqa: F401  (jinja2 and Python would import these three modules on first use, when imports are no longer allowed)
import re
import textwrap  # noqa: F401
import unicodedata  # noqa: F401

import jinja2
import jinja2.debug
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

_ADDRESS = re.compile(r"<[^<>\n]{1,200} at 0x[0-9a-f]+>")


class RaisedByTemplate(Exception):
    """The template called `raise_exception`, for example because of an unknown role or two answers in a row."""


class TemplateError(Exception):
    """The template cannot be compiled or rendered."""


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's messages for training. Its variables are local to the
    tag."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Formats a value as JSON, without the HTML escapes of jinja2's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message):
    raise RaisedByTemplate(message)


class _Clock:
    """The date and time of the current request."""

    now = datetime.datetime.min

    @classmethod
    def format(cls, form):
        return cls.now.strftime(form)


def _environment():
    extensions = ["jinja2.ext.loopcontrols", _Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    del environment.filters["random"], environment.globals["lipsum"]
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _Clock.format}
    return environment


_ENVIRONMENT = _environment()


class Template:
    """A compiled chat template."""

    def __init__(self, source):
        self._source = source
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno}: {error.message}") from None
        except (RecursionError, SyntaxError, ValueError) as error:
            raise TemplateError(f"cannot be compiled: {error or type(error).__name__}") from None

    def render(self, inputs, now, characters):
        """Renders a list of conversations.

        Args:
            inputs: the variables of each conversation.
            now: the date and time, in ISO format.
            characters: the maximum number of characters of all texts together.

        Returns:
            The texts.
        """
        _Clock.now = datetime.datetime.fromisoformat(now)
        texts = []
        for variables in inputs:
            parts = []
            for part in self._template.generate(variables):
                parts.append(part)
                characters -= len(part)
                if characters < 0:
                    raise TemplateError("its output is too long")
            texts.append(self._checked("".join(parts), variables))
        return texts

    def _checked(self, text, variables):
        if " at 0x" in text:
            source_and_variables = f"{self._source}{variables}"
            for match in _ADDRESS.findall(text):
                if match not in source_and_variables:
                    raise TemplateError(f"prints {match.rpartition(' at ')[0]}>, which differs from run to run")
        return text


# Renders a template that fails, so that jinja2 imports all modules that it needs.
_WARM = (
    "{{ '\\N{EN DASH}' }}{% for m in x %}{{ m | tojson(indent=2) }}{% endfor %}{{ strftime_now('%d %b') }}{{ 1 / y }}"
)
with contextlib.suppress(ZeroDivisionError):
    _ENVIRONMENT.from_string(_WARM).render(x=[{}], y=0)
