"""Reads and writes trees of arrays with Orbax; an error is one exception with a one-line message.

Orbax works in its own threads, which log tracebacks through absl and asyncio. Reads that are in progress when a call
fails end with an error about a closed event loop. This module silences all of these messages.
"""

import contextlib
import gc
import logging
import os
import pathlib
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class OrbaxError(Exception):
    """Orbax could not read or write; the message is one line."""


def write_tree(folder: pathlib.Path, tree: Any) -> None:
    """Writes nested dicts of arrays to a directory that does not exist yet.

    If processes share an array, all of them must call it with the same directory.

    Raises:
        OrbaxError: the arrays cannot be written.
    """

    def save() -> None:
        import jax
        import numpy as np
        import orbax.checkpoint as ocp

        # Among several processes, Orbax writes an array of one process only if it is of NumPy.
        local = jax.process_count() > 1 and not _is_shared(tree)
        with ocp.StandardCheckpointer(multiprocessing_options=_processes_of(tree)) as writer:
            writer.save(folder.absolute(), jax.tree.map(np.asarray, tree) if local else tree)

    _quietly(save)


def read_tree(folder: pathlib.Path, like: Any) -> Any:
    """Reads all arrays of a directory, with the structure, shapes, dtypes and shardings of `like`.

    Raises:
        OrbaxError: the arrays cannot be read.
    """

    def restore() -> Any:
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer(multiprocessing_options=_processes_of(like)) as reader:
            return reader.restore(folder.absolute(), like)

    return _quietly(restore)


def _processes_of(tree: Any) -> Any:
    """Returns the processes that read or write arrays: all that share an array, or this process alone.

    Orbax makes these processes wait for each other.
    """
    import jax
    import orbax.checkpoint as ocp

    if jax.process_count() == 1 or _is_shared(tree):
        return ocp.options.MultiprocessingOptions()
    own = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"{own}"
    )


def _is_shared(tree: Any) -> bool:
    """Returns whether processes share an array of a tree."""
    import jax

    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)]
    return not all(sharding is None or sharding.is_fully_addressable for sharding in shardings)


def read_shapes(folder: pathlib.Path) -> Any:
    """Returns the tree of shapes and dtypes of a directory's arrays.

    Raises:
        OrbaxError: the metadata cannot be read.
    """

    def metadata() -> Any:
        import orbax.checkpoint as ocp

        metadata_of_items: Any = ocp.PyTreeCheckpointer().metadata(folder.absolute()).item_metadata
        return metadata_of_items.tree

    return _quietly(metadata)


def read_part(folder: pathlib.Path, like: Any) -> Any:
    """Reads some of a directory's arrays as NumPy arrays: the arrays in the tree `like` of shapes and dtypes.

    Raises:
        OrbaxError: the arrays cannot be read.
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
        except Exception as error:  # Orbax raises whatever its storage raises
            why = _cause(error)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of writes that never began
            gc.collect()  # a failed task whose exception was never retrieved logs it on collection
    raise OrbaxError(why)


def _cause(error: Exception) -> str:
    """Returns the operating system's reason if there is one, otherwise the message in one line."""
    text = " ".join(str(error).split())
    if code := re.search(r"os_error_code='(\d+)'", text):
        return os.strerror(int(code[1]))
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {text[:200]}"


_ONE_AT_A_TIME = threading.Lock()
"""`_silence` changes global state of the process."""


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    loggers, null = [logging.getLogger(name) for name in ("absl", "asyncio")], logging.NullHandler()
    with _ONE_AT_A_TIME:
        before = [logger.disabled for logger in loggers]
        if not getattr(sys.unraisablehook, "drops_late_reads", False):
            sys.unraisablehook = _dropping_late_reads(sys.unraisablehook)
        try:
            logging.root.addHandler(null)  # otherwise absl installs a permanent handler on the root logger
            for logger in loggers:
                logger.disabled = True
            yield
        finally:
            for logger, disabled in zip(loggers, before):
                logger.disabled = disabled
            logging.root.removeHandler(null)


def _dropping_late_reads(shown: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a hook for unraisable exceptions. The hook stays installed, because reads can end long after the failed
    call."""

    def hook(raised: Any) -> None:
        closed = isinstance(raised.exc_value, RuntimeError) and str(raised.exc_value) == "Event loop is closed"
        if not (closed and raised.object is None):
            shown(raised)

    hook.drops_late_reads = True  # pyright: ignore[reportFunctionMemberAccess]
    return hook
