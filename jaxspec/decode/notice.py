"""Messages about compilation, on standard error."""

import sys

import jax


class Notice:
    """Prints a line when compilation begins and another when it ends; all functions compiled in between share them.

    If there are several processes, only the first one prints.
    """

    def __init__(self, verbose: bool = True):
        self._verbose, self._seconds = verbose, None

    def say(self, line: str) -> None:
        """Prints a line."""
        if self._verbose and sys.stderr is not None and jax.process_index() == 0:
            print(f"jaxspec: {line}", file=sys.stderr, flush=True)

    def begin(self) -> None:
        """Announces a compilation."""
        if self._seconds is None:
            self._seconds = 0.0
            self.say("compiling ...")

    def took(self, seconds: float) -> None:
        """Adds the seconds of a compilation."""
        assert self._seconds is not None
        self._seconds += seconds

    def end(self) -> None:
        """Prints the seconds of all compilations since `begin`; prints nothing if there were none."""
        if self._seconds is not None:
            self.say(f"compiled in {self._seconds:.1f} s")
            self._seconds = None
