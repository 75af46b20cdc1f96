"""The command line: `jaxspec COMMAND ...`, one module per command.

A command's module has `add_options(parser)` and `run(args) -> int`, the exit status. Heavy imports are inside `run`, so
that help and usage errors appear at once.
"""

import argparse
import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import jaxspec
from jaxspec.cli.ctrl_c import is_interrupt, repeat_dropped_interrupts
from jaxspec.cli.flags import as_flags
from jaxspec.cli.options import Parser, UsageError
from jaxspec.errors import JaxspecError, UnknownName

COMMANDS = {
    "generate": "continue prompts with a language model, speculatively",
    "chat": "talk with a language model that has a chat template, speculatively",
    "inspect": "show what a checkpoint holds and the memory it takes, without reading weights",
    "export": "write draft heads in the layout of another system (Medusa, EAGLE, DFlash or vLLM)",
    "demo": "write with a small language model, and compare the drafters with plain decoding",
    "bench": "measure drafters against plain decoding on standard prompts",
    "tune": "measure how many tokens to draft with a pair of models, and write the result to a file",
    "train": "train draft heads (Medusa, EAGLE, DFlash, DSpark, JetSpec) or a PARD draft model for a target",
    "fingerprint": "print the sha256 of everything in a training run",
    "detect": "test whether texts have the watermark of a secret",
    "acceptance": "compute the share of drafted tokens that each rule accepts, and the optimum",
}

INTERRUPTED, PIPE_CLOSED = 130, 141  # the exit statuses of a shell for SIGINT and SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    0: done. 1: the command failed, for a reason that is printed in one line. 2: the command line is wrong. 130:
    interrupted.

    Args:
        argv: the words after the program's name; None for the arguments of the process.
    """
    try:
        with repeat_dropped_interrupts():
            status = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
        return status
    except UsageError as error:
        return _fail(str(error), 2)
    except BrokenPipeError:
        # The reader has closed the pipe. Python flushes stdout again at exit, which must not raise.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except BaseException as error:
        if not is_interrupt(error):
            raise
        print("\njaxspec: interrupted", file=sys.stderr)
        return INTERRUPTED


def run_process() -> NoReturn:
    """Runs the command of this process, and ends the process with its exit status.

    After Ctrl-C, the process ends without an orderly shutdown of the interpreter. XLA may still be computing in threads
    of its own: Python's shutdown would wait for these threads, and would sometimes crash in them, which would change
    the exit status. A failed process of several ends in the same way, because JAX's shutdown waits for the others.
    """
    status = main()
    processes = sys.modules.get("jaxspec.backend.processes")
    if status == INTERRUPTED or (status and processes is not None and processes.count_processes() > 1):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
    sys.exit(status)


class Version(argparse.Action):
    """Prints the version of jaxspec and JAX, and which CPU kernels are in use."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import jax

        from jaxspec.kernels.library import describe_kernels

        print(f"jaxspec {jaxspec.__version__}\nJAX {jax.__version__}\nCPU kernels: {describe_kernels()}")
        parser.exit()


def _run(words: list[str]) -> int:
    parser = Parser(
        prog="jaxspec",
        usage="jaxspec COMMAND ...",
        description="Speculative decoding as one XLA program.",
        epilog="commands:\n"
        + "".join(f"  {name:<12}{line}\n" for name, line in COMMANDS.items())
        + "\n'jaxspec COMMAND --help' describes the options of a command.",
    )
    parser.add_argument("--version", action=Version, nargs=0, help="show the version, and the CPU kernels in use")
    try:
        if not words or words[0].startswith("-"):
            parser.parse_options(words)
            parser.error("no command given")
        name, *words = words
        if name not in COMMANDS:
            parser.error(str(UnknownName("command", name, COMMANDS)))
        command = importlib.import_module(f"jaxspec.cli.{name}")
        parser = Parser(prog=f"jaxspec {name}", description=command.__doc__)
        command.add_options(parser)
        parser.add_argument("-q", "--quiet", action="store_true", help="do not report progress on standard error")
        parser.add_argument("--debug", action="store_true", help="on failure, show the traceback")
        args = parser.parse_options(words)
    except SystemExit as leave:  # --help, --version
        return int(leave.code or 0)
    try:
        with contextlib.nullcontext() if not args.quiet else _silenced():
            return command.run(args)
    except UsageError as error:
        raise UsageError(as_flags(str(error), parser)) if error.of_python else error from None
    except BrokenPipeError:
        raise
    except Exception as error:
        if is_interrupt(error):
            raise
        if args.debug:
            traceback.print_exc()
            return 1
        if isinstance(error, JaxspecError):
            return _fail(as_flags(str(error), parser), 1)
        return _fail(f"{type(error).__name__}: {error}", 1)


def _silenced() -> contextlib.AbstractContextManager[None]:
    from jaxspec.cli import show

    return show.silence()


def _fail(message: str, status: int) -> int:
    """Prints the message on one line, and returns the status."""
    print("jaxspec: error:", " ".join(message.split()), file=sys.stderr)
    return status
