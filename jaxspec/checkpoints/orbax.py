"""Trees of arrays in directories, by Orbax: paths are made absolute, as it wants them, and an error is one line.

Orbax works in threads of its own. They log tracebacks through absl and asyncio, and reads that are under way when a
call fails come back to an event loop that is closed by then. Nothing of that is shown: the caller gets one exception.
"""

import contextlib
import gc
import logging
import os
import pathlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class OrbaxError(Exception):
    """What kept Orbax from reading or writing, in one line."""


def write(folder: pathlib.Path, tree: Any) -> None:
    """Writes nested dicts of arrays into a directory that does not exist yet.

    Raises:
        OrbaxError: they cannot be written.
    """

    def save() -> None:
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as writer:
            writer.save(folder.absolute(), tree)

    _quietly(save)


def read(folder: pathlib.Path, like: Any) -> Any:
    """Reads the arrays that `like` has, with its shapes and dtypes.

    Raises:
        OrbaxError: they cannot be read.
    """

    def restore() -> Any:
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as reader:
            return reader.restore(folder.absolute(), like)

    return _quietly(restore)


def stored(folder: pathlib.Path) -> Any:
    """Reads which arrays a directory holds: a tree of their shapes and dtypes.

    Raises:
        OrbaxError: that cannot be read.
    """

    def metadata() -> Any:
        import orbax.checkpoint as ocp

        found: Any = ocp.PyTreeCheckpointer().metadata(folder.absolute()).item_metadata
        return found.tree

    return _quietly(metadata)


def read_part(folder: pathlib.Path, like: Any) -> Any:
    """Reads some of a directory's arrays as NumPy's: those of the tree `like`, whose leaves are shapes and dtypes.

    Raises:
        OrbaxError: they cannot be read.
    """

    def restore() -> Any:
        import jax
        import numpy as np
        import orbax.checkpoint as ocp

        types = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(restore_type=np.ndarray), like)
        args = ocp.args.PyTreeRestore(item=like, restore_args=types, partial_restore=True)
        return ocp.PyTreeCheckpointer().restore(folder.absolute(), args=args)

    return _quietly(restore)


def _quietly(do: Callable[[], T]) -> T:
    with _silence():
        try:
            return do()
        except Exception as error:  # Orbax raises whatever its storage does
            why = _cause(error)
        gc.collect()  # a task that failed unseen logs that when it is collected
    raise OrbaxError(why)


def _cause(error: Exception) -> str:
    """The operating system's reason where there is one, else the message in one line."""
    text = " ".join(str(error).split())
    if code := re.search(r"os_error_code='(\d+)'", text):
        return os.strerror(int(code[1]))
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {text[:200]}"


_ONE_AT_A_TIME = threading.Lock()
"""What `_silence` changes belongs to the process."""


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    loggers, nobody = [logging.getLogger(name) for name in ("absl", "asyncio")], logging.NullHandler()
    with _ONE_AT_A_TIME:
        before = [logger.disabled for logger in loggers]
        if not getattr(sys.unraisablehook, "drops_late_reads", False):
            sys.unraisablehook = _dropping_late_reads(sys.unraisablehook)
        try:
            logging.root.addHandler(nobody)  # absl would else give the root logger a handler, for good
            for logger in loggers:
                logger.disabled = True
            yield
        finally:
            for logger, disabled in zip(loggers, before):
                logger.disabled = disabled
            logging.root.removeHandler(nobody)


def _dropping_late_reads(shown: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A hook for exceptions that nobody can catch. It stays, since reads may end long after the call that failed."""

    def hook(raised: Any) -> None:
        closed = isinstance(raised.exc_value, RuntimeError) and str(raised.exc_value) == "Event loop is closed"
        if not (closed and raised.object is None):
            shown(raised)

    hook.drops_late_reads = True  # pyright: ignore[reportFunctionMemberAccess]
    return hook
