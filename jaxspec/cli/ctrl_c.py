"""Ctrl-C at any moment of a command, even where Python drops the KeyboardInterrupt or raises another exception."""

import _thread
import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

RETRY_SECONDS = 0.05
"""Seconds until a Ctrl-C that was dropped is repeated."""


def is_interrupt(error: BaseException | None) -> bool:
    """Returns whether an exception comes from Ctrl-C.

    Python 3.11 turns exceptions that `__set_name__` raises into a RuntimeError. This can happen to a Ctrl-C while a
    module is imported.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


@contextlib.contextmanager
def repeat_dropped_interrupts() -> Iterator[None]:
    """Repeats a Ctrl-C that arrived in a callback of the garbage collector, such as JAX's, where Python drops it."""
    timers: list[threading.Timer] = []

    def again(dropped: Any) -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            return before(dropped)
        timers.append(threading.Timer(RETRY_SECONDS, _thread.interrupt_main))
        timers[-1].daemon = True
        timers[-1].start()

    before, sys.unraisablehook = sys.unraisablehook, again
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in timers:
            timer.cancel()
