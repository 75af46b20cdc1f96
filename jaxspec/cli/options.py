"""Options that several commands share, and what they select. Imports JAX only when used."""

import argparse
import contextlib
import dataclasses
import difflib
import json
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from jaxspec.core.descriptions import read_fields
from jaxspec.core.sizes import MAX_INT32, MAX_SEED
from jaxspec.core.sizes import MAX_NODES as MAX_NODES
from jaxspec.errors import InvalidConfig, JaxspecError, UnknownName, shown
from jaxspec.registry import PROCESSORS, find
from jaxspec.storage.prompt_files import SPLITS
from jaxspec.storage.reading import check_path, read_bytes

if TYPE_CHECKING:
    from jaxspec.core.processor import Processor
    from jaxspec.core.sampling import Sampling
    from jaxspec.generation.drafting import Drafting
    from jaxspec.generation.options import GenerateOptions

DEFAULT_TARGET = "smollm2-135m-instruct"
SOURCE_HELP = (
    "a preset, a .gguf file, a Hugging Face directory or a repository of its Hub (organization/name, @revision may "
    "follow), or what jaxspec.save wrote"
)
HEAD_DTYPES = ("float32", "bfloat16")  # of heads
MODEL_DTYPES = (*HEAD_DTYPES, "int8", "file")  # of models


class UsageError(Exception):
    """The command line is wrong: exit status 2.

    Attributes:
        of_python: whether the message comes from a function of the Python API, and names the function's arguments.
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
        """Moves a word that is not a number, and that follows an option with an optional number, before that option."""
        optional = {name for action in self._actions if action.nargs == "?" for name in action.option_strings}
        ordered: list[str] = []
        for word in words:
            follows_optional = ordered and ordered[-1] in optional and "--" not in ordered
            is_value = word.startswith("-") or re.fullmatch(r"[\d.]+", word, re.ASCII)
            ordered.insert(len(ordered) - 1 if follows_optional and not is_value else len(ordered), word)
        return ordered


def choice_type(kind: str, names: Iterable[str]) -> Callable[[str], str]:
    """Returns the type of an option whose value is one of the names."""
    names = names if isinstance(names, Collection) else tuple(names)

    def check(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(str(UnknownName(kind, name, names)))
        return name

    return check


def whole_type(least: int, most: int = MAX_INT32) -> Callable[[str], int]:
    """Returns the type of an option whose value is a whole number within limits."""

    def check(text: str) -> int:
        digits = text.lstrip("0") or "0" if re.fullmatch(r"\d+", text, re.ASCII) else "-1"
        number = int(digits) if len(digits) <= 20 else most + 1
        if least <= number <= most:
            return number
        limits = f"from {least} to {most}" if number > most or most < MAX_INT32 else f"from {least}"
        raise argparse.ArgumentTypeError(f"expected a whole number {limits}, got {shown(text)}")

    return check


COUNT_TYPE = whole_type(1, MAX_INT32)
CHECKED_VOCAB = 1 << 20
"""A size that no vocabulary exceeds: token ids on the command line are compared with it before a model is loaded."""
"""The type of an option whose value is a number of things, at least one."""


def sampling_type(name: str) -> Callable[[str], float]:
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


def text_type(what: str) -> Callable[[str], str]:
    """Returns the type of an option whose value is a text that is not empty."""

    def check(text: str) -> str:
        if not text:
            raise argparse.ArgumentTypeError(f"the {what} is empty; expected at least one character")
        return text

    return check


def parse_path(text: str) -> pathlib.Path:
    """Parses an option's value as a path. An empty path is refused: `pathlib` takes it for the working directory."""
    return pathlib.Path(text_type("path")(text))


def check_output(option: str, path: str | pathlib.Path | None, folder: bool = False) -> None:
    """Refuses an output that cannot be written, before anything takes time; None is no output.

    Args:
        option: the option that names the output.
        path: the file, or the folder, which need not exist.
        folder: whether the output is a folder.

    Raises:
        UsageError: the folder of the output does not exist, the output is of the other kind, or there is no
            permission to write to it.
    """
    if path is None:
        return
    with UsageError.instead():
        place = check_path(path, option).absolute()
    if place.is_dir() != folder and place.exists():
        kind, expected = ("file", "folder") if folder else ("folder", "file")
        raise UsageError(f"{option} {path}: is a {kind}, expected a {expected}")
    near = place if place.exists() else place.parent
    while folder and not near.exists():  # folders are created
        near = near.parent
    if not place.exists() and not near.is_dir():
        problem = f"{near} is a file" if near.exists() else f"there is no folder {near}; create it first"
        raise UsageError(f"{option} {path}: {problem}")
    if not os.access(near, os.W_OK):
        raise UsageError(f"{option} {path}: there is no permission to write to {near}")


OPTION_CLASSES = (
    ("jaxspec.generation.options", "CompileOptions"),
    ("jaxspec.generation.options", "GenerateOptions"),
    ("jaxspec.core.sampling", "Sampling"),
)
"""The classes whose fields `add_option` adds: module and name."""


def add_option(add: Callable, name: str, note: str = "", **words: Any) -> None:
    """Adds the flag of an option of `jaxspec.generate` or of `jaxspec.Sampling`, with its default and description.

    The help is the first sentence of the description.

    Args:
        add: the `add_argument` of a parser or a group.
        name: the name of the option.
        note: a text that follows the description in parentheses; if it is empty, the default follows, if that is a
            number.
        **words: further arguments of `add`, which say how the value is written.
    """
    field = next(fields[name] for kind in OPTION_CLASSES if name in (fields := read_fields(*kind)))
    default = words.setdefault("default", field.default)
    if not note and isinstance(default, (int, float)) and not isinstance(default, bool):
        note = f"default: {default:g}"
    sentence = re.split(r"\. |; None", field.description.removesuffix("."))[0].removeprefix("whether to ")
    described = f"{sentence} ({note})" if note else sentence
    add(f"--{name.replace('_', '-')}", help=described.replace("%", "%%"), **words)


DTYPE_ARGUMENTS: dict[str, Any] = {"type": choice_type("dtype", MODEL_DTYPES), "metavar": "|".join(MODEL_DTYPES)}


def add_dtype(add: Callable) -> None:
    """Adds `--dtype`; `add` is the `add_argument` of a parser or a group."""
    add(
        "--dtype",
        default=MODEL_DTYPES[0],
        **DTYPE_ARGUMENTS,
        help=f"dtype of the weights; file keeps the weights of a GGUF file as they are (default: {MODEL_DTYPES[0]})",
    )


def add_split(add: Callable) -> None:
    """Adds `--split`, for `.txt` files of prompts; see `jaxspec.storage.prompt_files`."""
    add(
        "--split",
        type=choice_type("split", SPLITS),
        metavar="|".join(SPLITS),
        help="the unit that is one prompt in a .txt file: a line, a paragraph between blank lines, or the whole file "
        f"(default: {SPLITS[0]})",
    )


def check_split(split: str | None, files: Iterable[str]) -> None:
    """Raises UsageError if there is a `--split` but no `.txt` file."""
    if split is not None and not any(file.lower().endswith(".txt") for file in files):
        raise UsageError("--split is for .txt files of prompts, and there is none; leave it out")


def add_models(parser: Parser) -> Callable:
    """Adds the options of target and draft model; returns the group's `add_argument`, for further options."""
    add = parser.add_argument_group("models").add_argument
    add("--target", default=DEFAULT_TARGET, metavar="NAME_OR_PATH", help=f"{SOURCE_HELP} (default: {DEFAULT_TARGET})")
    add(
        "--draft-model",
        metavar="SOURCE",
        help="draft model of the drafters 'model' (default: the draft model of the preset) and 'pard'",
    )
    add(
        "--context",
        type=COUNT_TYPE,
        metavar="N",
        help="maximum number of tokens of a text (default: the target's context)",
    )
    add_dtype(add)
    add(
        "--draft-dtype", **DTYPE_ARGUMENTS, help="dtype of the draft model's weights (default: the dtype of the target)"
    )
    add(
        "--exact",
        action="store_true",
        help="refuse a target whose bits may depend on the drafter or the batch; on a GPU or TPU, choose products that "
        "do not",
    )
    return add


def add_chat(add: Callable) -> None:
    """Adds `--chat` and `--no-chat`."""
    add_option(add, "chat", "default: if there is a template", action=argparse.BooleanOptionalAction)


def add_template(add: Callable) -> None:
    """Adds `--tools` and `--template-variable`, for chat templates."""
    add(
        "--tools",
        type=read_tools,
        metavar="FILE",
        help="file with a JSON list of the tools that the assistant may call: the JSON schema of each function",
    )
    add(
        "--template-variable",
        action="append",
        default=[],
        type=parse_variable,
        metavar="NAME=VALUE",
        help="an extra variable of the chat template, such as enable_thinking=false; VALUE is JSON or a text; "
        "repeatable",
    )


def read_tools(path: str) -> list:
    """Reads the file of `--tools`."""
    from jaxspec.text.messages import check_tools  # imports Jinja

    try:
        value = json.loads(read_bytes(check_path(path, "the path of the tools")))
        checked = check_tools(value)
    except (ValueError, RecursionError) as error:
        reason = error if isinstance(error, JaxspecError) else f"{path}: not JSON: {error}"
        raise argparse.ArgumentTypeError(str(reason)) from None
    if not checked:
        raise argparse.ArgumentTypeError(f"{path}: expected a list of tools, got {shown(value)}")
    return checked


def parse_variable(text: str) -> tuple[str, Any]:
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
    add_option(add, "temperature", type=sampling_type("temperature"), metavar="T")
    add_limits(add)
    add_processors(add)
    add(
        "--generation-config",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use the penalties and forbidden tokens that the target's generation_config.json sets",
    )
    return add


def add_processors(add: Callable) -> None:
    """Adds the option of processors."""
    add(
        "--processor",
        action="append",
        type=parse_processor,
        default=[],
        metavar="NAME=VALUE",
        help=f"changes the logits by the text so far ({'|'.join(PROCESSORS)}), as in repetition=1.1; repeatable",
    )


def add_grammar(parser: Parser) -> None:
    """Adds the options of grammars."""
    add = parser.add_argument_group("grammar").add_argument
    add(
        "--json-schema",
        dest="grammar",
        type=pathlib.Path,
        metavar="FILE",
        help="allow only JSON texts of the JSON schema in a file",
    )
    add(
        "--regex",
        dest="grammar",
        type=text_type("regular expression"),
        metavar="PATTERN",
        help="allow only texts that a regular expression matches as a whole; replaces --json-schema",
    )
    add(
        "--grammar-after",
        type=text_type("text"),
        metavar="TEXT",
        help="begin the grammar after the tokens of a text, such as </think>",
    )


def parse_processor(text: str) -> "Processor":
    """Parses NAME=VALUE as a processor of the registry and its setting, which is JSON."""
    name, _, value = text.partition("=")
    try:
        setting = json.loads(value, object_hook=_by_id)
        named = isinstance(setting, dict) and all(isinstance(key, str) for key in setting)
        processor = find("processor", name)(**setting) if named else find("processor", name)(setting)
        processor.rows(1, CHECKED_VOCAB)
    except (JaxspecError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    except (ValueError, RecursionError):
        expected = "expected NAME=VALUE with a number or JSON, as in repetition=1.1"
        raise argparse.ArgumentTypeError(f"{expected}, got {shown(text)}") from None
    return processor


def _by_id(entries: dict[str, Any]) -> dict[Any, Any]:
    """Returns an object of JSON with whole numbers as keys, which JSON writes as strings."""
    return {int(key) if key.isdecimal() else key: value for key, value in entries.items()}


def add_limits(add: Callable) -> None:
    """Adds the options of sampling other than the temperature, and the seed."""
    add_option(add, "top_k", type=whole_type(0, MAX_INT32), metavar="K")
    add_option(add, "top_p", type=sampling_type("top_p"), metavar="P")
    add_option(add, "min_p", type=sampling_type("min_p"), metavar="P")
    add(
        "--seed",
        type=whole_type(0, MAX_SEED),
        default=0,
        metavar="N",
        help="the same seed gives the same text (default: 0)",
    )


def read_sampling(args: argparse.Namespace, temperature: float) -> "Sampling":
    """Returns the sampling settings that the options select, at a temperature."""
    from jaxspec.core.sampling import Sampling

    processors = getattr(args, "processor", [])
    return Sampling(temperature, args.top_k, args.top_p, args.min_p, processors=processors)


def add_length(add: Callable, default: int) -> None:
    """Adds `--max-new-tokens` and `--ignore-eos`."""
    add_option(add, "max_new_tokens", type=COUNT_TYPE, default=default, metavar="N")
    add_option(add, "ignore_eos", action="store_true")


def add_ending(parser: Parser, default: int) -> None:
    """Adds the options that end a text, with this default for `--max-new-tokens`."""
    add = parser.add_argument_group("ending").add_argument
    add_length(add, default)
    add_option(add, "stop", "repeatable", action="append", type=text_type("string"), default=[], metavar="STR")


def read_options(args: argparse.Namespace, drafting: "Drafting") -> "GenerateOptions":
    """Returns the options of `jaxspec.generate` that the options of a command select.

    Args:
        args: the options of `jaxspec generate` or `jaxspec chat`.
        drafting: the drafting, with models and heads.
    """
    from jaxspec.core.noise import seed_key
    from jaxspec.generation.drafting import DraftingOptions
    from jaxspec.generation.options import GenerateOptions

    names = {field.name for field in dataclasses.fields(GenerateOptions)}
    names -= {field.name for field in dataclasses.fields(DraftingOptions)}
    given: dict[str, Any] = {name: value for name, value in vars(args).items() if name in names}
    return GenerateOptions(
        **given,
        drafting=drafting,
        key=seed_key(args.seed),
        sampling=read_sampling(args, args.temperature),
        template_variables=dict(args.template_variable) or None,
        verbose=not args.quiet,
    )
