"""What a call says while it compiles, on standard error."""

import sys

import jax


class Notice:
    """Says when compiling begins and when it has ended: a line each for all that is compiled before a round runs.

    Of several processes the first speaks.
    """

    def __init__(self, verbose: bool = True):
        self._verbose, self._seconds = verbose, None

    def say(self, line: str) -> None:
        """Writes a line."""
        if self._verbose and sys.stderr is not None and jax.process_index() == 0:
            print(f"jaxspec: {line}", file=sys.stderr, flush=True)

    def begin(self) -> None:
        """Something is about to be compiled."""
        if self._seconds is None:
            self._seconds = 0.0
            self.say("compiling ...")

    def took(self, seconds: float) -> None:
        """It was compiled, in so many seconds."""
        assert self._seconds is not None
        self._seconds += seconds

    def end(self) -> None:
        """What was compiled is about to run; nothing is said where nothing was."""
        if self._seconds is not None:
            self.say(f"compiled in {self._seconds:.1f} s")
            self._seconds = None
