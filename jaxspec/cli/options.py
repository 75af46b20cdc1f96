"""Options that several commands share. This module does not import JAX."""

import argparse
import contextlib
import difflib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from jaxspec.core.sizes import INT32, SEED
from jaxspec.core.sizes import MAX_NODES as MAX_NODES
from jaxspec.errors import InvalidConfig, JaxspecError, UnknownName, shown
from jaxspec.storage.prompt_files import SPLITS
from jaxspec.storage.reading import check_path, read_bytes

TARGET, DRAFTER = "smollm2-135m-instruct", "prompt-lookup"
SOURCES = (
    "a preset, a .gguf file, a Hugging Face directory or a repository of its Hub (organization/name, @revision may "
    "follow), or what jaxspec.save wrote"
)
DTYPES = ("float32", "bfloat16")  # of heads
WEIGHTS = (*DTYPES, "int8", "file")  # of models


class UsageError(Exception):
    """The command line is wrong: exit status 2.

    Attributes:
        of_python: whether the message is that of a function of the Python API, and names its arguments.
    """

    of_python = False

    @classmethod
    @contextlib.contextmanager
    def instead(cls, prefix: str = "") -> Iterator[None]:
        """Raises a usage error in place of a JaxspecError, with a prefix such as "--tree 4x2: "."""
        try:
            yield
        except JaxspecError as error:
            made = cls(f"{prefix}{error}")
            made.of_python = True
            raise made from None


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the nearest name if one was misspelled."""

    def __init__(self, **settings):
        settings |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**settings)
        self.set_defaults(quiet=False)  # for tests that parse only the options of one command
        self.before_parsing: Callable[[list[str]], object] = lambda words: None
        """Called with the words of the command line, on which the help may depend."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def parse_options(self, words: list[str]) -> argparse.Namespace:
        """Parses the options; positional words may come before, between and after them."""
        self.before_parsing(words)
        args, unknown = self.parse_known_intermixed_args(self._ordered(words))
        args.words = [*self.prog.split(), *words]
        if unknown:
            known = re.findall(r"--[\w-]+", self.format_help())
            near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
            self.error(f"unknown option {unknown[0]!r}" + (f", did you mean {near[0]!r}?" if near else ""))
        return args

    def _ordered(self, words: list[str]) -> list[str]:
        """Moves a word that is no number from behind an option with an optional number to before it."""
        optional = {name for action in self._actions if action.nargs == "?" for name in action.option_strings}
        found: list[str] = []
        for word in words:
            swallowed = found and found[-1] in optional and "--" not in found
            taken = word.startswith("-") or re.fullmatch(r"[\d.]+", word, re.ASCII)
            found.insert(len(found) - 1 if swallowed and not taken else len(found), word)
        return found


def one_of(kind: str, names: Iterable[str]) -> Callable[[str], str]:
    """Returns the type of an option whose value is one of the names."""
    names = tuple(names)

    def check(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(str(UnknownName(kind, name, names)))
        return name

    return check


def whole(least: int, most: int = INT32) -> Callable[[str], int]:
    """Returns the type of an option whose value is a whole number within limits."""

    def check(text: str) -> int:
        digits = text.lstrip("0") or "0" if re.fullmatch(r"\d+", text, re.ASCII) else "-1"
        number = int(digits) if len(digits) <= 20 else most + 1
        if least <= number <= most:
            return number
        limits = f"from {least} to {most}" if number > most or most < INT32 else f"from {least}"
        raise argparse.ArgumentTypeError(f"expected a whole number {limits}, got {shown(text)}")

    return check


COUNT = whole(1, INT32)
"""The type of an option whose value is a number of things, at least one."""


def setting(name: str) -> Callable[[str], float]:
    """Returns the type of an option for a setting of `jaxspec.Sampling`, which has the limits."""

    def check(text: str) -> float:
        from jaxspec.core.sampling import Sampling

        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
        try:
            Sampling(**{name: value})
        except InvalidConfig as error:
            percent = name in ("top_p", "min_p") and 1 < value <= 100
            hint = f"; did you mean {value / 100:g}?" if percent else ""
            raise argparse.ArgumentTypeError(f"{str(error).removeprefix(f'{name} ')}{hint}") from None
        return value

    return check


def filled(what: str) -> Callable[[str], str]:
    """Returns the type of an option whose value is a text that is not empty."""

    def check(text: str) -> str:
        if not text:
            raise argparse.ArgumentTypeError(f"the {what} is empty; expected at least one character")
        return text

    return check


def path(text: str) -> pathlib.Path:
    """Parses an option's value: a path, which `pathlib` would take for the working directory if it were empty."""
    return pathlib.Path(filled("path")(text))


def check_output(option: str, path: str | pathlib.Path | None, folder: bool = False) -> None:
    """Refuses an output that cannot be written, before anything takes time; None is no output.

    Args:
        option: the option that names it.
        path: the file, or the folder, which need not exist.
        folder: whether it is a folder.

    Raises:
        UsageError: the folder that it is to be in does not exist, it is of another kind, or may not be written to.
    """
    if path is None:
        return
    with UsageError.instead():
        place = check_path(path, option).absolute()
    if place.is_dir() != folder and place.exists():
        found, expected = ("file", "folder") if folder else ("folder", "file")
        raise UsageError(f"{option} {path}: is a {found}, expected a {expected}")
    near = place if place.exists() else place.parent
    while folder and not near.exists():  # folders are created
        near = near.parent
    if not place.exists() and not near.is_dir():
        problem = f"{near} is a file" if near.exists() else f"there is no folder {near}; create it first"
        raise UsageError(f"{option} {path}: {problem}")
    if not os.access(near, os.W_OK):
        raise UsageError(f"{option} {path}: there is no permission to write to {near}")


DTYPE: dict[str, Any] = {"type": one_of("dtype", WEIGHTS), "metavar": "|".join(WEIGHTS)}


def add_dtype(add: Callable) -> None:
    """Adds `--dtype`; `add` is the `add_argument` of a parser or a group."""
    add(
        "--dtype",
        default=WEIGHTS[0],
        **DTYPE,
        help=f"of the weights; file: those of a GGUF file as they are (default: {WEIGHTS[0]})",
    )


def add_split(add: Callable) -> None:
    """Adds `--split`, for `.txt` files of prompts; see `jaxspec.storage.prompt_files`."""
    add(
        "--split",
        type=one_of("split", SPLITS),
        metavar="|".join(SPLITS),
        help="what is a prompt in a .txt file: a line, a paragraph between blank lines, or the whole file "
        f"(default: {SPLITS[0]})",
    )


def check_split(split: str | None, files: Iterable[str]) -> None:
    """Raises UsageError if there is a `--split` but no `.txt` file."""
    if split is not None and not any(file.lower().endswith(".txt") for file in files):
        raise UsageError("--split is for .txt files of prompts; leave it out, or name such a file")


def add_models(parser: Parser) -> Callable:
    """Adds the options of target and draft model; returns the group's `add_argument`, for further options."""
    add = parser.add_argument_group("models").add_argument
    add("--target", default=TARGET, metavar="NAME_OR_PATH", help=f"{SOURCES} (default: {TARGET})")
    add("--draft-model", metavar="SOURCE", help="of the drafters 'model' (default: the preset's own) and 'pard'")
    add("--context", type=COUNT, metavar="N", help="longest text of the target (default: what it was made for)")
    add_dtype(add)
    add("--draft-dtype", **DTYPE, help="of the draft model's weights (default: that of --dtype)")
    return add


def add_chat(add: Callable) -> None:
    """Adds `--chat` and `--no-chat`."""
    add(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="take prompts as messages to an assistant (default: if the target has a chat template)",
    )


def add_template(add: Callable) -> None:
    """Adds `--tools` and `--template-variable`, for chat templates."""
    add(
        "--tools",
        type=tools,
        metavar="FILE",
        help="a JSON list of the tools that the assistant may call: the JSON schema of each function",
    )
    add(
        "--template-variable",
        action="append",
        default=[],
        type=variable,
        metavar="NAME=VALUE",
        help="a further variable of the chat template, such as enable_thinking=false; VALUE is JSON, or else a text; "
        "repeatable",
    )


def tools(path: str) -> list:
    """Reads the file of `--tools`."""
    from jaxspec.text.messages import check_tools  # imports Jinja

    try:
        found = json.loads(read_bytes(check_path(path, "the path of the tools")))
        checked = check_tools(found)
    except (ValueError, RecursionError) as error:
        why = error if isinstance(error, JaxspecError) else f"{path}: not JSON: {error}"
        raise argparse.ArgumentTypeError(str(why)) from None
    if not checked:
        raise argparse.ArgumentTypeError(f"{path}: expected a list of tools, got {shown(found)}")
    return checked


def variable(text: str) -> tuple[str, Any]:
    """Parses NAME=VALUE, where the value is JSON (true, 3, null, a list, ...), or else a text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, as in enable_thinking=false, got {text!r}")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def add_sampling(parser: Parser) -> Callable:
    """Adds the options of sampling and the seed; returns the group's `add_argument`."""
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=setting("temperature"), default=0.0, metavar="T", help="0: the likeliest token (default)")
    add_limits(add)
    return add


def add_limits(add: Callable) -> None:
    """Adds the options of sampling other than the temperature, and the seed."""
    add("--top-k", type=whole(0, INT32), default=0, metavar="K", help="only the K likeliest tokens; 0: all")
    add("--top-p", type=setting("top_p"), default=1.0, metavar="P", help="only the likeliest of mass P; 1: all")
    add("--min-p", type=setting("min_p"), default=0.0, metavar="P", help="only P times the likeliest and above; 0: all")
    add("--seed", type=whole(0, SEED), default=0, metavar="N", help="the same seed gives the same text (default: 0)")


def add_ending(parser: Parser, budget: int) -> Callable:
    """Adds the options that end a text, with default `budget` for `--max-new-tokens`; returns `add_argument`."""
    add = parser.add_argument_group("ending").add_argument
    add("--max-new-tokens", type=COUNT, default=budget, metavar="N", help=f"default: {budget}")
    add(
        "--stop",
        action="append",
        type=filled("string"),
        default=[],
        metavar="STR",
        help="end before this string; repeatable",
    )
    add("--ignore-eos", action="store_true", help="continue past the model's stop tokens")
    return add
