"""Ctrl-C in a loop that may only be left between two steps, by all processes after the same step."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jaxspec.backend import processes

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that interrupt a loop, if they raise `KeyboardInterrupt` elsewhere. SIGTERM does so on several hosts."""


class Interrupts:
    """A context in which the first Ctrl-C only sets `wanted`, and the second one raises `KeyboardInterrupt`.

    It changes nothing outside the main thread, or if the program has its own handler.

    Attributes:
        wanted: whether Ctrl-C was pressed in this process.
    """

    def __init__(self, say: Callable[[str], Any]):
        """Takes a function that is called with a line of text at the first Ctrl-C."""
        self.wanted, self._say, self._saving = False, say, False
        self._run = processes.number_run()

    def __enter__(self) -> "Interrupts":
        main = threading.current_thread() is threading.main_thread()
        handled = signal.default_int_handler
        self._ours = [number for number in SIGNALS if main and signal.getsignal(number) is handled]
        for number in self._ours:
            signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._ours:
            signal.signal(number, signal.default_int_handler)

    def ends_after(self, step: int) -> bool:
        """Returns whether the loop ends after this step, because Ctrl-C was pressed in any process."""
        return processes.ends_after(step, self.wanted, self._run)

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
