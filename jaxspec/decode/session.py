"""The host's side of a decode: compiled once per configuration, stepped with the state donated, and timed."""

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core.records import Status
from jaxspec.decode.loop import FOREVER, Decoder
from jaxspec.decode.state import Request, Weights

_EXECUTABLES: collections.OrderedDict[tuple, Callable] = collections.OrderedDict()
# The newest only: on a CPU each takes up to 1000 of the 65530 memory maps that Linux gives a process by default.
_KEPT = 32


@dataclasses.dataclass
class Timing:
    """Wall-clock seconds of the parts of a decode, kept apart; `tokens` are those emitted while decoding."""

    compile_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Of decoding alone, all rows together."""
        return self.tokens / self.decode_s if self.decode_s else 0.0

    def __add__(self, other: "Timing") -> "Timing":
        return Timing(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))

    def as_dict(self) -> dict:
        return dataclasses.asdict(self) | {"tokens_per_s": self.tokens_per_s}


def clear_executables() -> None:
    """Forgets what was compiled."""
    _EXECUTABLES.clear()


class Session:
    """A batch of rows being decoded. One call of `run` or many short ones: the executable is the same.

    Attributes:
        decoder: the configuration.
        weights: parameters of target and drafter.
        state: the current state; the one before was donated.
        timing: seconds so far.
    """

    def __init__(self, decoder: Decoder, weights: Weights, request: Request, capacity: int):
        self.decoder, self.weights, self.timing = decoder, weights, Timing()
        self.capacity = capacity
        self._cut: np.ndarray | None = None
        self.state = self._call("init", (weights, request), donate=(), static=(capacity,))
        self._prefill()

    def extend(self, request: Request) -> None:
        """Appends text to every row, gives it a new budget, and reads what is new."""
        self.timing = Timing()
        if self._cut is not None:
            length = jnp.minimum(self.state.length, jnp.asarray(self._cut, jnp.int32))
            self.state = self._call("truncate", (self.weights, self.state, length))
            self._cut = None
        self.state = self._call("extend", (self.state, request))
        self._prefill()

    def run(self, max_rounds: int = FOREVER) -> None:
        """At most so many rounds more."""
        before = np.asarray(self.state.length).sum()
        arguments = (self.weights, self.state, jnp.int32(max_rounds))
        self.state = self._call("run", arguments, donate=(1,), clock="decode_s")
        self.timing.tokens += int(np.asarray(self.state.length).sum() - before)

    def cut(self, length: np.ndarray, status: np.ndarray) -> None:
        """Ends rows from the host: the new lengths (none longer), and the new status of each row.

        What was cut off is dropped when the session is extended; till then it stands past the row's end.
        """
        now = np.asarray(self.state.length)
        if (length < now).any():
            self.timing.tokens -= int((now - length).sum())
            cut = np.where(length < now, length, FOREVER)
            self._cut = cut if self._cut is None else np.minimum(self._cut, cut)
        self.state = self.state._replace(status=jnp.asarray(status, jnp.int32))

    @property
    def running(self) -> bool:
        return bool((np.asarray(self.state.status) == Status.RUNNING).any())

    def _prefill(self) -> None:
        self.state = self._call("prefill", (self.weights, self.state), donate=(1,), clock="prefill_s")

    def _call(
        self, method: str, arguments: tuple, donate: tuple = (), static: tuple = (), clock: str | None = None
    ) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        key = (method, self.decoder, static, structure, tuple((a.shape, str(a.dtype)) for a in leaves))
        if key not in _EXECUTABLES:
            start = time.perf_counter()
            function = getattr(self.decoder, method)
            jitted = jax.jit(lambda *args: function(*args, *static), donate_argnums=donate)
            _EXECUTABLES[key] = jitted.lower(*arguments).compile()
            self.timing.compile_s += time.perf_counter() - start
            if len(_EXECUTABLES) > _KEPT:
                _EXECUTABLES.popitem(last=False)
        _EXECUTABLES.move_to_end(key)
        start = time.perf_counter()
        result = jax.block_until_ready(_EXECUTABLES[key](*arguments))
        if clock:
            setattr(self.timing, clock, getattr(self.timing, clock) + time.perf_counter() - start)
        return result
