"""Chats with a language model. Answers are printed as they are generated; statistics go to standard error.

Each line is a message. /reset begins a new conversation, /stats prints the statistics of this conversation, and /exit
or the end of the input ends the command. Ctrl-C ends an answer, but not the conversation.
"""

import argparse
import contextlib
import dataclasses
import re
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from jaxspec.cli import drafting, models, options
from jaxspec.cli.options import COUNT_TYPE, Parser
from jaxspec.errors import CapacityError, MissingTokenizer

if TYPE_CHECKING:
    from jaxspec.decode.session import Session
    from jaxspec.generation.options import GenerateOptions
    from jaxspec.generation.output import Generation
    from jaxspec.models.model import Model

CHAT_LENGTH = 4096
DRAFTED_COLOUR, _GREEN, _BACK = "green", "\x1b[32m", "\x1b[39m"


def add_options(parser: Parser) -> None:
    """Adds the command's options."""
    options.add_models(parser)
    drafting.add_drafting(parser)
    options.add_sampling(parser)
    options.add_grammar(parser)
    options.add_ending(parser, 512)
    add = parser.add_argument_group("conversation").add_argument
    add("--system", metavar="TEXT", help="system message at the start of the chat")
    options.add_template(add)
    length = (
        f"maximum number of tokens of the conversation (default: {CHAT_LENGTH}, or the target's context if smaller)"
    )
    add("--length", type=COUNT_TYPE, metavar="N", help=length)
    add("--colour", "--color", action="store_true", help=f"show drafted and accepted text in {DRAFTED_COLOUR}")


def run(args: argparse.Namespace) -> int:
    """Answers line by line until the input ends.

    Raises:
        ArithmeticError: if an answer ended because logits were not finite.
    """
    chosen, sources = drafting.read_drafting(args)

    from jaxspec.cli import show

    target, chosen = models.load_for_drafting(sources, chosen, new_tokens=None, chat=True)
    chat = Chat(target, options.read_options(args, chosen), args.system, args.length)
    commands = {"/reset": chat.reset, "/stats": lambda: show.say(chat.statistics(), answer=True)}
    for line in read_input_lines():
        if line == "/exit":
            break
        if line in commands:
            commands[line]()
        elif re.fullmatch(r"/\w+", line):
            show.say(f"unknown command {line}; the commands are {', '.join(commands)} and /exit", answer=True)
        else:
            print_answer(chat, line, args.colour)
    return 0


def read_input_lines() -> Iterator[str]:
    """Yields the lines that are typed or sent to standard input; empty lines are skipped."""
    if sys.stdin is None:
        return
    typed = sys.stdin.isatty()
    if typed:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives `input` a history)
    while True:
        try:
            line = input("> " if typed else "").strip()
        except EOFError:
            if typed:
                print()
            return
        except KeyboardInterrupt:
            if not typed:
                raise
            print("\nto leave, type /exit or end the input")
            continue
        if line:
            yield line


def print_answer(chat: "Chat", line: str, colour: bool) -> None:
    """Writes the answer to one message as it is decoded, then its statistics."""
    from jaxspec.cli import show

    with defer_interrupts() as interrupted:
        try:
            with show.writer() as write:
                row = chat.ask(
                    line,
                    lambda text, drafted: write(f"{_GREEN}{text}{_BACK}" if colour and drafted and text else text),
                    interrupted,
                )
        except KeyboardInterrupt:  # the second Ctrl-C: the state is unknown
            chat.forget()
            row = None
        except CapacityError as error:
            show.say(f"{error}; /reset begins a new conversation", answer=True)
            return
        print(flush=True)
    if row is None or row.finish_reason is None:
        show.say("interrupted", answer=True)
    elif row.finish_reason == "error":
        raise ArithmeticError("the target's logits were not finite, which ended the answer early")
    elif row.finish_reason == "length":
        is_full = chat.room < 1
        reason = "the conversation is full; /reset begins a new one" if is_full else "cut at --max-new-tokens"
        show.say(reason, answer=True)
    if row is not None:
        if colour:
            show.print_legend(
                (f"{row.stats.accepted} drafted and accepted", DRAFTED_COLOUR), "the rest comes from the target alone"
            )
        show.say(show.format_summary(chat.timing, row.stats))


@contextlib.contextmanager
def defer_interrupts() -> Iterator[Callable[[], bool]]:
    """Defers the first Ctrl-C, so that no step is interrupted; the second is raised."""
    seen = False

    def note(*_: Any) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)


class Chat:
    """A conversation, and the state of the decoder after it.

    Attributes:
        messages: the conversation so far, as the chat template takes it.
        ids: the tokens of the decoder's state.
        length: the maximum number of tokens of a conversation.
        timing: the timing of the last answer.
    """

    def __init__(self, target: "Model", options: "GenerateOptions", system: str | None, length: int | None):
        """Begins a conversation.

        Args:
            target: the target.
            options: how answers are generated; `max_new_tokens` is the maximum number of tokens of one answer.
            system: the system message; None for no system message.
            length: maximum number of tokens of the conversation; None for the default.

        Raises:
            MissingTokenizer: the target has no chat template.
            CapacityError: `length` is more than the target's context.
        """

        if target.tokenizer is None or target.chat_template is None:
            raise MissingTokenizer(
                f"{target.name} has no chat template, which chat needs; use `jaxspec generate` instead"
            )
        context = target.lm.context
        self.length = length or min(CHAT_LENGTH, context)
        if self.length > context:
            raise CapacityError(f"--length {length} is more than the target's context of {context} tokens")
        from jaxspec.decode.notice import Notice

        drafting = options.resolve_drafting().resolve(target, options.sampling, report=Notice(options.verbose).say)
        decoder, _ = drafting.build(target)
        self._options = dataclasses.replace(options, capacity=decoder.slots(self.length))
        self._target, self._system, self._compiled = target, system, False
        self.reset()

    def reset(self) -> None:
        """Begins a new conversation."""
        from jaxspec.decode.session import Timing
        from jaxspec.decode.stats import Stats

        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self.answers = self.read = 0
        self.timing, self.total, self.stats = Timing(), Timing(), Stats()
        self.forget()

    def forget(self) -> None:
        """Drops the decoder's state; the next turn reads the whole conversation."""
        self.ids: list[int] = []
        self._session: Session | None = None

    @property
    def room(self) -> int:
        """The number of tokens that still fit."""
        return self.length - len(self.ids)

    def ask(self, line: str, write: Callable[[str, bool], object], interrupted: Callable[[], bool]) -> "Generation":
        """Answers a message, and returns the generation.

        Args:
            line: the message.
            write: called with each token's text, and whether the token was drafted.
            interrupted: called before every step; the answer ends once it returns True.

        Raises:
            CapacityError: no room is left for an answer; the conversation is unchanged.
        """
        from jaxspec.api import start_stream
        from jaxspec.cli import show
        from jaxspec.generation.inputs import read_turns

        messages = [*self.messages, {"role": "user", "content": line}]
        records = None if self._session is None else self._session.records
        tools, variables = self._options.tools, self._options.template_variables
        (turn,) = read_turns(self._target, [messages], True, tools, variables, records)
        ids = [*turn.prefix, *turn.ids]
        budget = min(self._options.max_new_tokens, self.length - len(ids))
        if budget < 1:
            raise CapacityError(
                f"the conversation takes {len(ids)} of {self.length} tokens, so there is no room for an answer"
            )
        pieces: list[str] = []
        options = dataclasses.replace(
            self._options,
            max_new_tokens=budget,
            session=self._session,
            on_token=lambda row, token, piece: pieces.append(piece),
        )
        with contextlib.nullcontext() if self._compiled else show.show_activity("reading the prompt"):
            running = start_stream(self._target, [messages], options)
            chunk = None if interrupted() else next(running, None)
        self._compiled = True
        while chunk is not None:
            for piece, drafted in zip(pieces, chunk.drafted, strict=True):
                write(piece, drafted)
            write(chunk.text.removeprefix("".join(pieces)), False)  # the text that was held back until the end
            pieces.clear()
            chunk = None if interrupted() else next(running, None)

        output = running.output
        row = output[0]
        self._session, self.timing = output.session, output.timing
        self.read += len(turn.ids) if turn.prefix == self.ids else len(ids)
        self.ids = [*ids, *row.tokens]
        self.messages = [*messages, {"role": "assistant", "content": row.text or ""}]
        self.answers, self.total, self.stats = self.answers + 1, self.total + output.timing, self.stats + row.stats
        return row

    def statistics(self) -> str:
        """Returns the statistics of the conversation, in one line."""
        from jaxspec.cli import show

        return (
            f"answers: {self.answers}; tokens: {len(self.ids)} of {self.length}, {self.read} read; "
            f"{show.format_summary(self.total, self.stats)}"
        )
