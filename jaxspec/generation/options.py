"""The options of `generate`, `stream` and `precompile`: the type, the default and the meaning of each, in one place.

An option is a field of a dataclass and a line of its docstring. `accepts` turns a function of these options into one
that takes them as keywords: type checkers see the constructor of the dataclass, and `help` and `inspect.signature` see
the parameters that `accepts` makes from the fields. The command line takes its defaults and help from the same place.
An option that `precompile` does not take is a field of `GenerateOptions` and not of `CompileOptions`.
"""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import jax
from jax.sharding import Mesh

from jaxspec.core import checks
from jaxspec.core.descriptions import describe_fields, parse_section, with_section
from jaxspec.core.sampling import Sampling
from jaxspec.decode.session import Session
from jaxspec.errors import InvalidConfig, shown
from jaxspec.generation.drafting import Drafting, DraftingOptions
from jaxspec.generation.history import History
from jaxspec.generation.inputs import Prompt
from jaxspec.models.model import Model
from jaxspec.registry import DRAFTER


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class CompileOptions(DraftingOptions):
    """The options of `precompile`: all options that determine the compiled programs, and the batches that they decode.

    Attributes:
        drafting: a `Drafting`, or the path of a file that `jaxspec tune` wrote, instead of `drafter`,
            `drafter_options`, `tree` and `schedule`.
        key: JAX random key; required unless every temperature is 0. The same key gives the same text with any drafter,
            tree and batch size.
        sampling: sampling settings, for all rows or per row.
        grammar: allows only texts of a grammar: a JSON schema (a dict, a `pathlib.Path` of a file, or a pydantic
            model), a regular expression, or an automaton as from `jaxspec.compile_grammar`, which has more settings; or
            a list with one for each prompt, and None for a prompt without a grammar. See docs/grammar.md.
        grammar_after: the grammar begins after this text, such as "</think>", or after these tokens; None to begin with
            the first new token.
        max_new_tokens: maximum number of new tokens of each row; a row is shorter only if it is stopped.
        samples: rows per prompt, each with its own random numbers.
        chat: whether to wrap text prompts in the model's chat template, as messages of the user; None to wrap them if
            there is a template. False continues raw text. Token ids and chat messages are not affected.
        tools: JSON schemas of the functions that the model may call in chats, one dict each, as the chat template takes
            them; None for no tools, or in a session for the tools of its last turn. A prompt
            `{"messages": [...], "tools": [...]}` has tools of its own.
        template_variables: further variables of the chat template, such as `{"enable_thinking": False}`; None for no
            variables, or in a session for the variables of its last turn.
        stop: stop strings: the text is cut before the first of them, and the token that completes it is kept. They do
            not affect compilation.
        stop_ids: ids of stop tokens, in addition to the model's own.
        ignore_eos: whether to ignore the model's own stop tokens.
        logprobs: whether to return the log-probability of every emitted token, under the raw logits and under the
            distribution that is sampled from; a number also returns that many of the most likely tokens. See
            `Generation`.
        width_matched: whether to give every target call the width of the tree, even without a draft; or the number of
            tokens, from 2, of every target call, with any tree that fits. On a CPU the text is then bit-identical to
            that of `drafter="none"` with the same number, or with True and the same tree. On GPUs and TPUs this has not
            been shown; see docs/guarantees.md.
        history: earlier texts of these prompts (`jaxspec.History`), from which the drafters "prompt-lookup" and
            "recycling" copy. With the default rule it changes no text.
        capacity: cache slots of each row, rounded up to whole blocks of 256; None for as many as needed. Set it larger
            to continue the session later.
        batch: maximum number of rows decoded at once (continuous batching): a finished row is replaced by the next one.
            None for all rows, in a batch that is rounded up so that similar numbers of rows share a compilation. The
            rows of a batch have caches of one size. Batching does not change a row's text.
        mesh: devices to decode on, see `jaxspec.make_mesh`: rows are sharded over its axis "data", the target's
            matrices over "model".
        verbose: whether to print notices to standard error: when compilation begins and ends, and when a capacity is
            rounded up.
    """

    drafting: Drafting | str | os.PathLike | None = None
    key: jax.Array | None = None
    sampling: Sampling = Sampling()
    grammar: Any = None
    grammar_after: str | Sequence[int] | None = None
    max_new_tokens: int = 128
    samples: int = 1
    chat: bool | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    template_variables: Mapping[str, Any] | None = None
    stop: Sequence[str] | str = ()
    stop_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: bool | int = False
    width_matched: bool | int = False
    history: History | None = None
    capacity: int | None = None
    batch: int | None = None
    mesh: Mesh | None = None
    verbose: bool = True

    def resolve_drafting(self) -> Drafting:
        """Returns the option `drafting`, or a `Drafting` that is made from the separate options of drafting.

        The options `rule`, `draft` and `heads` have precedence over the same fields of `drafting`.

        Raises:
            InvalidConfig: `drafting` is of another type, or combined with options that it replaces.
        """
        separate = {field.name: getattr(self, field.name) for field in dataclasses.fields(DraftingOptions)}
        drafting: Any = self.drafting
        if drafting is None:
            return Drafting(**separate)
        is_default = isinstance(self.drafter, str) and self.drafter == DRAFTER and self.drafter_options == {}
        if not is_default or any(separate[name] is not None for name in ("tree", "schedule", "draft_params")):
            raise InvalidConfig("drafting= cannot be combined with drafter, drafter_options, tree or schedule")
        if isinstance(drafting, (str, os.PathLike)):
            drafting = Drafting.load(drafting)
        if not isinstance(drafting, Drafting):
            raise InvalidConfig(f"drafting must be a jaxspec.Drafting or the path of a file, got {shown(drafting)}")
        rule = drafting.rule if isinstance(self.rule, str) and self.rule == "coupled" else self.rule
        draft = drafting.draft if self.draft is None else self.draft
        heads = drafting.heads if self.heads is None else self.heads
        return dataclasses.replace(drafting, rule=rule, draft=draft, heads=heads)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class GenerateOptions(CompileOptions):
    """The options of `generate` and `stream`.

    Attributes:
        on_token: called with (row, token, new text) for every token; returning False ends the row after this token.
        session: session of an earlier `Output` with the same settings. The prompts are appended to its rows. Text, as a
            message of the user, and chat messages continue the conversation of a row as the chat template writes it;
            if the template changes what was read, the row is read again from there. Messages may also repeat the whole
            conversation.
        out: path of a file of JSON lines to which each text is written when it is finished. The same call resumes an
            interrupted job: texts in the file are not generated again. See
            `jaxspec.generation.results_file.ResultsFile`.
        progress: called with (finished texts, total texts).
        rounds: rounds between two reads from the device; None for 4 in `stream`, and for all at once in `generate`. At
            most 4 with stop strings or `on_token`.
    """

    on_token: Callable[[int, int, str], Any] | None = None
    session: Session | None = None
    out: str | os.PathLike | None = None
    progress: Callable[[int, int], Any] | None = None
    rounds: int | None = None


P = ParamSpec("P")
Options = TypeVar("Options")
ReturnType = TypeVar("ReturnType")
ReturnType_co = TypeVar("ReturnType_co", covariant=True)


class TextFunction(Protocol[P, ReturnType_co]):
    """A function of a target and prompts that takes options as keywords."""

    __name__: str

    def __call__(
        self, target: Model, prompts: Prompt | Iterable[Prompt], *args: P.args, **kwargs: P.kwargs
    ) -> ReturnType_co:
        """Calls the function.

        Args:
            target: target model; see `load`.
            prompts: one prompt, or any iterable of prompts: text, token ids, or chat messages
                `[{"role": "user", "content": ...}, ...]`. Lengths may differ.
        """
        # jedi, which does not know ParamSpec, follows the keywords to the fields of this class.
        return cast(Any, GenerateOptions(**kwargs))  # pyright: ignore


def accepts(
    options: Callable[P, Options],
) -> Callable[[Callable[[Model, Prompt | Iterable[Prompt], Options], ReturnType]], TextFunction[P, ReturnType]]:
    """Returns a decorator that makes a function of (target, prompts, options) take the options as keywords.

    The signature of the decorated function has every option with its type and default, and its docstring has a section
    `Args:` with every description. Unknown keywords are refused, and the error suggests the nearest name.

    Args:
        options: the dataclass of the options.
    """
    kind = cast(type, options)

    def default(field: dataclasses.Field) -> Any:
        return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()

    def decorate(
        function: Callable[[Model, Prompt | Iterable[Prompt], Options], ReturnType],
    ) -> TextFunction[P, ReturnType]:
        @functools.wraps(function)
        def call(target: Model, prompts: Any, **keywords: Any) -> ReturnType:
            return function(target, prompts, kind(**keywords))

        types = call.__annotations__
        parameters = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=types[name])
            for name in ("target", "prompts")
        ]
        parameters += [
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default(field), annotation=field.type)
            for field in dataclasses.fields(kind)
        ]
        signature = inspect.Signature(parameters, return_annotation=types["return"])
        call.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
        call.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        call.__annotations__["return"] = signature.return_annotation
        described = parse_section(TextFunction.__call__.__doc__, "Args") | describe_fields(kind)
        call.__doc__ = with_section(function.__doc__ or "", "Args", described)
        return cast(Any, checks.check_arguments(call))

    return decorate
