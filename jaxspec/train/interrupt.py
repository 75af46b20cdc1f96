"""Ctrl-C in a loop that may only be left between two steps."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Interrupts:
    """A context in which the first Ctrl-C only sets `wanted`, and the second one raises `KeyboardInterrupt`.

    It changes nothing outside the main thread, or if the program has its own handler.

    Attributes:
        wanted: whether Ctrl-C was pressed.
    """

    def __init__(self, say: Callable[[str], Any]):
        """Takes a function that is called with a line of text at the first Ctrl-C."""
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
        """Ignores further Ctrl-C while files are written."""
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
            with contextlib.suppress(RuntimeError):  # another line may be in the middle of being printed
                self._say("interrupted: this step is finished and saved first; press Ctrl-C again to stop at once")
