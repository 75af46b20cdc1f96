"""The processes of a run on several hosts: what one process does for all, and how they wait for each other.

Each process runs the same program on the devices of its host. The processes exchange small values through the key-value
store of JAX's coordination service, which process 0 runs. Unlike a collective operation of devices, reading the store
has no time limit, and Ctrl-C interrupts it. The store is not part of JAX's public interface, and no other module
uses it.
"""

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from jax._src import distributed

from jaxspec.errors import InvalidConfig, JaxspecError, LostProcess, shown
from jaxspec.registry import locate

T = TypeVar("T")

AUTO = "auto"
"""The name of the hosts that a TPU pod, SLURM or Open MPI describes to its processes."""
HEARTBEAT_SECONDS = 100
"""Seconds after which a process that gives no sign of life counts as lost, and JAX ends the others."""
WAIT_MS = 500
"""Milliseconds of each wait for a value, after which Python handles signals."""
STEPS_AHEAD = 2
"""Number of steps after which all processes have seen the wish of one process to end."""
GRACE_SECONDS = 2.0
"""Seconds that process 0 waits, before it ends early, for the others to read the reason and to end."""
_NOTE = "jaxspec/note"
"""The key of the note that a process leaves when it ends early."""
_calls = itertools.count()
"""Numbers the exchanges, which all processes make in the same order."""
_ends_with_others = False
"""True once the processes have agreed to end after the same step."""


def parse_hosts(text: str) -> tuple[str | None, int | None, int | None]:
    """Returns the address of process 0, the number of processes and the number of this one; None for `AUTO`.

    Raises:
        InvalidConfig: the text is neither "auto" nor of the form HOST:PORT,N,I.
    """
    if text == AUTO:
        return None, None, None
    address, *numbers = text.split(",")
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and len(numbers) == 2 and all(number.isdecimal() for number in numbers):
        count, number = map(int, numbers)
        if number < count:
            return address, count, number
    raise InvalidConfig(
        f"hosts must be 'auto' or HOST:PORT,N,I: the address of process 0, the number of processes, and the number of "
        f"this process from 0 to N - 1; got {shown(text)}"
    )


@contextlib.contextmanager
def joined(hosts: str) -> Iterator[None]:
    """Joins the other processes of a run on several hosts; JAX must not have been used before.

    If the block raises, or receives SIGTERM or Ctrl-C, the other processes print the reason and end as well. They do
    so even inside a collective operation. If a process is killed, JAX ends the others within `HEARTBEAT_SECONDS`.

    Args:
        hosts: see `parse_hosts`; an empty text for one process.

    Raises:
        InvalidConfig: the text is invalid, no cluster is found, or JAX was used before.
        LostProcess: an operation failed because another process has ended.
    """
    if not hosts:
        yield
        return
    _connect(*parse_hosts(hosts))
    left = threading.Event()
    watcher = threading.Thread(target=_watch, args=(left,), daemon=True)
    watcher.start()
    try:
        with _sigterm_as_ctrl_c():
            yield
    except BaseException as error:
        left.set()
        _leave(error)
        if isinstance(error, (jax.errors.JaxRuntimeError, ValueError)) and _is_lost(error):
            line = " ".join(str(error).split())
            raise LostProcess(f"another process has ended, or cannot be reached: {line:.200}") from error
        raise
    left.set()
    watcher.join()


def _connect(address: str | None, count: int | None, number: int | None) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM would only set a flag, in all parts of a run
    is_local = address is not None and address.startswith(("127.", "localhost", "[::1]"))
    try:
        jax.distributed.initialize(
            address,
            count,
            number,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            coordinator_bind_address=address if is_local else None,
        )
    except (ValueError, RuntimeError) as error:
        if address is None:
            raise InvalidConfig(
                f"hosts 'auto': no TPU pod, SLURM or Open MPI was found ({error!s:.200}); pass HOST:PORT,N,I"
            ) from None
        raise InvalidConfig(f"process {number} cannot join {address}: {error!s:.200}") from None


@contextlib.contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Makes SIGTERM, with which a preemption begins, raise KeyboardInterrupt; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch(left: threading.Event) -> None:
    """Ends this process once another process has left a note."""
    while not left.is_set():
        try:
            note = json.loads(_client().blocking_key_value_get(_NOTE, WAIT_MS))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                continue
            note = {"process": 0, "why": "it cannot be reached"}
        if not left.is_set():
            line = f"process {note['process']} of {count_processes()} has ended: {note['why']}"
            print(f"jaxspec: error: {line}; so this process ends as well", file=sys.stderr, flush=True)
            _let_others_leave()
            os._exit(1)


def _leave(error: BaseException) -> None:
    """Tells the other processes why this one ends, or waits for them if they end as well."""
    if _ends_with_others:
        with contextlib.suppress(LostProcess):
            wait_for_all()
        return
    why = "it was interrupted" if isinstance(error, KeyboardInterrupt) else " ".join(str(error).split())[:500]
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        _client().key_value_set(_NOTE, json.dumps({"process": process_number(), "why": why}))
    _let_others_leave()


def _let_others_leave() -> None:
    """Delays the end of process 0, which runs the store: JAX aborts a process that finds no store."""
    if process_number() == 0:
        time.sleep(GRACE_SECONDS)


def _is_lost(error: BaseException) -> bool:
    return any(word in str(error) for word in ("Gloo", "UNAVAILABLE", "Connection closed", "coordination service"))


def ends_after(step: int, wanted: bool, run: int) -> bool:
    """Returns whether the run ends after this step, in every process alike.

    A process must call it after every step, and must have waited for the step before. No process is therefore more than
    one step ahead of a process that wants to end, and all of them see its wish before the step that it names.

    Args:
        step: the step.
        wanted: whether this process wants to end.
        run: a number of the run, see `number_run`.
    """
    global _ends_with_others
    if count_processes() == 1:
        return wanted
    key = f"jaxspec/end-{run}"
    if wanted:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process named a step first
            _client().key_value_set(key, str(step + STEPS_AHEAD))
    try:
        last = int(_client().key_value_try_get(key))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise LostProcess(f"process 0 cannot be reached: {error!s:.200}") from None
        return False
    _ends_with_others = step >= last
    return _ends_with_others


def number_run() -> int:
    """Returns a number that is the same in all processes, and another one at every call."""
    global _ends_with_others
    _ends_with_others = False
    return next(_calls)


def count_processes() -> int:
    """Returns the number of processes of the run."""
    return 1 if _client() is None else distributed.global_state.num_processes


def process_number() -> int:
    """Returns the number of this process, from 0."""
    return 0 if _client() is None else distributed.global_state.process_id


def alone(do: Callable[[], T]) -> T:
    """Lets process 0 call a function while all other processes wait, and returns its result in every process.

    Args:
        do: the function. With several processes, its result must consist of JSON values.

    Raises:
        JaxspecError: the error of the function in process 0, in every process.
        LostProcess: process 0 cannot be reached.
    """
    if count_processes() == 1:
        return do()
    key = f"jaxspec/{next(_calls)}"
    if process_number():
        return _open_envelope(_wait_for(key))
    try:
        value = do()
    except JaxspecError as error:
        kind = type(error)
        _put(key, {"error": f"{kind.__module__}:{kind.__qualname__}", "message": str(error)})
        raise
    _put(key, {"value": value})
    return value


def wait_for_all() -> None:
    """Waits until every process has called this function.

    Raises:
        LostProcess: another process cannot be reached.
    """
    if (count := count_processes()) == 1:
        return
    key = f"jaxspec/{next(_calls)}"
    _put(f"{key}/{process_number()}", {})
    for number in range(count):
        _wait_for(f"{key}/{number}")


def _client() -> Any:
    """Returns the client of the coordination service; None without `jax.distributed.initialize`."""
    return distributed.global_state.client


def _put(key: str, value: dict[str, Any]) -> None:
    _client().key_value_set(key, json.dumps(value))


def _wait_for(key: str) -> dict[str, Any]:
    """Returns a value as soon as a process has put it."""
    while True:
        try:
            return json.loads(_client().blocking_key_value_get(key, WAIT_MS))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise LostProcess(f"process 0 cannot be reached: {error!s:.200}") from None


def _open_envelope(envelope: dict[str, Any]) -> Any:
    if "error" not in envelope:
        return envelope["value"]
    kind = locate(envelope["error"])
    error = kind.__new__(kind)  # an error class may have other arguments than a message
    error.args = (envelope["message"],)
    raise error
