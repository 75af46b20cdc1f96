"""Ctrl-C in a loop whose state may only be left between two steps."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Interrupts:
    """Takes Ctrl-C as a wish, for the loop to grant where its state is whole; a second one interrupts at once.

    A context. It changes nothing outside the main thread, or where the program has a handler of its own.

    Attributes:
        wanted: whether Ctrl-C was pressed.
    """

    def __init__(self, say: Callable[[str], Any]):
        self.wanted, self._say, self._saving = False, say, False

    def __enter__(self) -> "Interrupts":
        main = threading.current_thread() is threading.main_thread()
        self._ours = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._ours:
            signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Keeps what is written here from being interrupted, however often Ctrl-C is pressed."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def _take(self, *_: object) -> None:
        if self.wanted and not self._saving:
            raise KeyboardInterrupt
        if not self.wanted:
            self.wanted = True
            with contextlib.suppress(RuntimeError):  # it may have come in the middle of another line
                self._say("interrupted: this step is finished and saved first; Ctrl-C again ends it at once")
