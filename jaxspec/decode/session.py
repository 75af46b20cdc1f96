"""The host side of decoding: compiles once per configuration, runs with the state donated, and measures times."""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.amounts import plural
from jaxspec.backend import command_buffer
from jaxspec.backend.compilation_cache import keep_compilations
from jaxspec.backend.layout import default_platform
from jaxspec.core.mesh import MODEL, count_groups, place, to_host
from jaxspec.core.networks import CompiledTarget
from jaxspec.core.records import Status
from jaxspec.decode import lifecycle
from jaxspec.decode.loop import NO_LIMIT, Decoder
from jaxspec.decode.notice import Notice
from jaxspec.decode.partition import Partition
from jaxspec.decode.state import Request, State, Weights

_EXECUTABLES: collections.OrderedDict[tuple, jax.stages.Compiled] = collections.OrderedDict()
# Only the most recently used executables stay: on a CPU, each takes up to 1000 of the 65530 memory maps of a Linux
# process.
_MAX_EXECUTABLES = 32


@dataclasses.dataclass(repr=False)
class Timing:
    """Wall-clock seconds of compilation, prefill and decoding.

    Attributes:
        compile_s: seconds of tracing and compiling.
        prefill_s: seconds of reading prompts.
        decode_s: seconds of running rounds.
        tokens: tokens emitted in those rounds.
    """

    compile_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens of all rows per second of decoding."""
        return self.tokens / self.decode_s if self.decode_s else 0.0

    def __add__(self, other: "Timing") -> "Timing":
        return Timing(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))

    def as_dict(self) -> dict:
        return dataclasses.asdict(self) | {"tokens_per_s": self.tokens_per_s}

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}={getattr(self, name):.3f}" for name in ("compile_s", "prefill_s", "decode_s"))
        return f"Timing({parts}, tokens={self.tokens}, {self.tokens_per_s:.1f} tokens/s)"


def clear_executables() -> None:
    """Releases all compiled functions of sessions."""
    _EXECUTABLES.clear()


class Session:
    """A batch of rows that are decoded together.

    One long call of `run` and many short ones use the same executable.

    Attributes:
        decoder: the configuration.
        weights: parameters of target and drafter.
        state: the current state. Earlier states were donated.
        timing: seconds since the session began or was extended.
        capacity: the number of cache slots per row.
        mesh: the devices; None for the default device.
        rows: the number of rows with a text, which come first; the rest of the batch is padding.
        notice: announces compilations; silent by default.
        records: what the caller keeps about each row, such as its conversation; see `jaxspec.generation.turns`.
    """

    def __init__(
        self,
        decoder: Decoder,
        weights: Weights,
        request: Request,
        capacity: int,
        mesh: Mesh | None = None,
        rows: int | None = None,
        notice: Notice | None = None,
    ):
        self.decoder, self.weights, self.timing = decoder, weights, Timing()
        self.rows = len(request.count) if rows is None else rows
        self.capacity, self.mesh, self.notice = capacity, mesh, notice or Notice(False)
        self.records: list[Any] = []
        self._cut: np.ndarray | None = None
        self._request = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), request)
        self._partition = None if mesh is None else Partition(mesh, self._row_axes)
        self.state = self._call(_init, (decoder, capacity), (weights, request))
        self.state = self._prefill(self.state)

    def __repr__(self) -> str:
        rows = len(self.state.status)
        return f"Session({plural(rows, 'row')}, {self.capacity} slots, {type(self.decoder.drafter).__name__})"

    def extend(self, request: Request) -> None:
        """Appends text to every row, sets a new budget, and reads the new text."""
        self.timing = Timing()
        if self._cut is not None:
            length = jnp.minimum(self.state.length, jnp.asarray(self._cut, jnp.int32))
            self.state = self._call(lifecycle.truncate, (self.decoder.drafter,), (self.weights, self.state, length))
            self._cut = None
        static = self.decoder.target.vocab, self.decoder.drafter
        self.state = self._prefill(self._call(lifecycle.extend, static, (self.state, request)))

    def replace(self, positions: Sequence[int], request: Request) -> None:
        """Replaces rows with new rows, and reads the prompts of the new rows while the other rows wait.

        Args:
            positions: for each group of devices, the position in the group of the row to replace; -1 to replace none.
            request: the new rows, one for each group.
        """
        size = self.state.length.shape[0] // len(positions)
        for group, position in enumerate(positions):
            if self._cut is not None and position >= 0:
                self._cut[group * size + position] = NO_LIMIT
        new = self._prefill(self._call(_init, (self.decoder, self.capacity), (self.weights, request)))
        static = (tuple(jax.tree.leaves(self._row_axes)),)
        arguments = (self.state, new, jnp.asarray(positions, jnp.int32))
        compiled, arguments = self._compiled(lifecycle.replace, static, arguments, donate=(0,))
        self.notice.end()
        self.state, seconds = _timed(compiled, arguments)
        self.timing.prefill_s += seconds

    def run(self, max_rounds: int = NO_LIMIT, least: Sequence[int] | None = None, max_depth: int = NO_LIMIT) -> None:
        """Runs rounds until all rows have finished.

        Args:
            max_rounds: the largest number of rounds that are run.
            least: for each group of devices, the number of running rows below which the group stops; None for 1 in
                every group.
            max_depth: the greatest depth of a draft.
        """
        before = to_host(self.state.length).sum()
        counts = jnp.asarray([1] * count_groups(self.mesh) if least is None else least, jnp.int32)
        arguments = (self.weights, self.state, jnp.int32(max_rounds), counts, jnp.int32(max_depth))
        static = (self.decoder,)
        compiled, arguments = self._compiled(Decoder.run, static, arguments, donate=(1,))
        self.notice.end()
        self.state, seconds = _timed(compiled, arguments)
        self.timing.decode_s += seconds
        self.timing.tokens += int(to_host(self.state.length).sum() - before)

    def cut(self, length: np.ndarray, status: np.ndarray) -> None:
        """Ends rows from the host.

        Tokens past the new length are dropped when the session is extended.

        Args:
            length: the new length of each row, at most the current one.
            status: the new status of each row.
        """
        current = to_host(self.state.length)
        if (length < current).any():
            self.timing.tokens -= int((current - length).sum())
            cut = np.where(length < current, length, NO_LIMIT)
            self._cut = cut if self._cut is None else np.minimum(self._cut, cut)
        new = status.astype(np.int32)
        placed = jnp.asarray(new) if self.mesh is None else place(new, self.state.status.sharding)
        self.state = self.state._replace(status=placed)

    def row_tokens(self, row: int) -> list[int]:
        """Returns the token ids of a row's whole text: prompts and answers."""
        length = int(to_host(self.state.length)[row])
        length = length if self._cut is None else min(length, int(self._cut[row]))
        return to_host(self.state.tokens)[row, :length].tolist()

    @property
    def running(self) -> bool:
        return bool((to_host(self.state.status) == Status.RUNNING).any())

    @functools.cached_property
    def _row_axes(self) -> State:
        """The axes of the state's rows; see `lifecycle.row_axes`."""
        init = functools.partial(_init, self.decoder, self.capacity)
        return lifecycle.row_axes(init, self.weights, self._request)

    @property
    def _options(self) -> Mapping[str, str]:
        if self.mesh is None:
            return command_buffer.options(default_platform())
        return command_buffer.options(self.mesh.devices.flat[0].platform, self.mesh.shape[MODEL] > 1)

    def _prefill(self, state: State) -> State:
        """Reads the text that has not been read yet, and counts the time as prefill."""
        compiled = self._compiled(Decoder.prefill, (self.decoder,), (self.weights, state), donate=(1,))
        state, seconds = _timed(*compiled)
        self.timing.prefill_s += seconds
        return state

    def _call(self, function: Callable, static: tuple, arguments: tuple) -> Any:
        """Returns `function(*static, *arguments)`, compiled for these arguments; the call is not timed."""
        return _timed(*self._compiled(function, static, arguments))[0]

    def _compiled(
        self,
        function: Callable,
        static: tuple,
        arguments: tuple,
        donate: tuple[int, ...] = (),
    ) -> tuple[Callable, tuple]:
        """Returns `function(*static, ...)` compiled for these arguments, and the arguments on the mesh.

        Args:
            function: a module-level function or a method of `Decoder`. Equal functions with equal `static` compile
                once.
            static: the first arguments, which are hashable.
            arguments: the other arguments, which are pytrees of arrays.
            donate: the indices of the arguments whose buffers are donated.
        """
        if self._partition is not None:
            arguments = self._partition.put(arguments)
        leaves, structure = jax.tree.flatten(arguments)
        kinds = tuple((a.shape, str(a.dtype), self.mesh and a.sharding) for a in leaves)
        key = (function, static, structure, kinds)
        if key not in _EXECUTABLES:
            keep_compilations()
            self.notice.begin()
            start = time.perf_counter()

            def call(*arguments: Any) -> Any:
                return function(*static, *arguments)

            called = call if self._partition is None else self._partition.over(call, arguments)
            lowered = jax.jit(called, donate_argnums=donate).lower(*arguments)
            target = self.decoder.target
            needed = target.compiler_options if isinstance(target, CompiledTarget) else {}
            _EXECUTABLES[key] = command_buffer.compile(lowered, self._options, needed)
            seconds = time.perf_counter() - start
            self.timing.compile_s += seconds
            self.notice.took(seconds)
            if len(_EXECUTABLES) > _MAX_EXECUTABLES:
                _EXECUTABLES.popitem(last=False)
        _EXECUTABLES.move_to_end(key)
        return _EXECUTABLES[key], arguments


def _init(decoder: Decoder, capacity: int, weights: Weights, request: Request) -> State:
    return decoder.init(weights, request, capacity)


def _timed(compiled: Callable, arguments: tuple) -> tuple[Any, float]:
    """Returns the result of a call, and the seconds until it is ready."""
    start = time.perf_counter()
    result = jax.block_until_ready(compiled(*arguments))
    return result, time.perf_counter() - start
