"""The confined process: a child process that handles untrusted content, with limits of processor time and memory.

A chat template is a program that comes with a checkpoint, and a tokenizer contains regular expressions. Inspecting them
cannot bound their cost, but a process can be killed. All models share one child process. It starts on first use, ends
with its parent, and is replaced after it was killed. It imports neither JAX nor jaxspec, and cannot open files, start
programs or use the network; see `workers/serve.py`.

Requests are written with `marshal`, which preserves tuples and keys that are not strings. Answers are JSON or bytes,
because they come from a process that may be under the control of a hostile file.
"""

import atexit
import collections
import contextlib
import dataclasses
import itertools
import json
import marshal
import os
import pathlib
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

from jaxspec.errors import LimitError, ProcessError

START_SECONDS = 60.0  # for Python to start and import, on a busy machine with a slow disk
END_SECONDS = 10.0  # for a child to end after its pipes are closed, on a busy machine
# The parent waits BUSY_FACTOR times the processor time plus BUSY_SECONDS. The operating system limits the processor
# time, so this limit is only for a child that is stuck, and long enough for a busy machine. Where the operating system
# does not have such a timer, it is the only limit.
BUSY_FACTOR, BUSY_SECONDS = (10.0, 60.0) if hasattr(signal, "setitimer") else (2.0, 1.0)
POLL_SECONDS = 0.05  # between checks of the child's memory, where the operating system does not limit it
HEADER = struct.Struct("<cQ")  # of an answer: its kind, the bytes that follow
LENGTH = struct.Struct("<Q")  # of a request
PROGRAM = pathlib.Path(__file__).parent.absolute() / "workers" / "serve.py"
INHERITED_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")  # Python may need them to start
CHILD_VARIABLES = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",  # so that large blocks are returned to the operating system
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a request.

    Attributes:
        seconds: processor time. When it is used up, the operating system kills the child. The parent waits much longer,
            because other programs may use the processors, and then kills a child that has not answered.
        memory: bytes in addition to the memory of the child before the request; also the maximum length of the answer.
    """

    seconds: float
    memory: int


class RemoteError(Exception):
    """The child raised an exception while it handled a request. It can still handle other requests.

    Attributes:
        kind: name of the exception's class.
        text: its message as one line.
    """

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class RemoteObject:
    """An object in the confined process.

    The object is created immediately, created again when the child was replaced, and deleted together with this handle.
    """

    def __init__(
        self,
        what: str,
        kind: str,
        arguments: tuple[Any, ...],
        limits: Limits,
        process: "ConfinedProcess | None" = None,
    ):
        """Creates the object.

        Args:
            what: noun for error messages, such as "chat template".
            kind: class of the object, a key of `KINDS` in `workers/serve.py`.
            arguments: arguments of the class: None, bool, int, float, str, bytes, and lists, tuples and dicts of these.
            limits: limits of its creation.
            process: the process; None for the process that all models share.

        Raises:
            Refused: the class raised an exception.
            LimitError: the creation exceeds its limits, or the child crashed.
            ProcessError: the child cannot be started.
        """
        self.what, self.kind, self.arguments, self.limits = what, kind, arguments, limits
        self.number = next(_NUMBERS)
        self._process = CONFINED if process is None else process
        self._process.request(self, None, (), limits)
        weakref.finalize(self, self._process.release, self.number).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles the arguments that created the object; a copy is a new object in the shared process."""
        return RemoteObject, (self.what, self.kind, self.arguments, self.limits)

    def call(self, method: str, *arguments: Any, limits: Limits) -> Any:
        """Calls a method of the object, and returns its result: bytes, or anything that JSON can express.

        Raises:
            Refused: the method raised an exception.
            LimitError: the call exceeds its limits, or the child crashed.
            ProcessError: the child cannot be started.
        """
        return self._process.request(self, method, arguments, limits)


class ConfinedProcess:
    """The confined process, as seen from its parent. Only one thread uses it at a time; a forked process gets its own
    child."""

    def __init__(self, watch: bool = sys.platform != "linux"):
        """Describes a process that starts on first use.

        Args:
            watch: whether the parent checks the child's memory, because the operating system cannot limit it.
        """
        self._watch = watch
        self._child: _Child | None = None
        self._forget()
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def start(self) -> None:
        """Starts the child without waiting for it, so that the child imports its modules while the parent does other
        work."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """Ends the child; the next request starts another one."""
        with self._lock:
            self._drop()

    def release(self, number: int) -> None:
        """Deletes an object with the next request. This method does not lock, because the garbage collector may call it
        at any time."""
        self._released.append(number)

    def request(self, target: RemoteObject, method: str | None, arguments: tuple[Any, ...], limits: Limits) -> Any:
        """Calls a method of an object, and creates the object first if the child does not have it; see
        `RemoteObject.call`.

        Args:
            target: the object.
            method: name of the method, or None to only create the object.
            arguments: arguments of the method.
            limits: limits of the call.
        """
        with self._lock:
            child = self._running()
            try:
                child.wait_until_ready()
                released = [self._released.popleft() for _ in range(len(self._released))]
                child.numbers -= {*released}
                if target.number not in child.numbers:
                    child.ask(target.what, (released, target.number, target.kind, target.arguments), target.limits)
                    child.numbers.add(target.number)
                    child.settle()
                    released = []
                return (
                    None
                    if method is None
                    else child.ask(target.what, (released, target.number, method, arguments), limits)
                )
            except RemoteError:
                raise
            except BaseException:  # a limit, a crash or Ctrl-C: the next bytes from this child are unpredictable
                self._drop()
                raise

    def _running(self) -> "_Child":
        if self._child is not None and (self._child.has_ended or self._child.process.poll() is not None):
            self._drop()
        if self._child is None:
            self._child = _Child(self._watch)
        return self._child

    def _drop(self) -> None:
        if self._child is not None:
            child, self._child = self._child, None
            child.kill()

    def _forget(self) -> None:
        """Resets the state to having no child. After a fork, the child belongs to the parent process."""
        child, self._child = self._child, None
        self._lock = threading.Lock()  # another thread may have held the old lock during the fork
        self._released: collections.deque[int] = collections.deque()
        if child is not None:
            child.abandon()


class _Child:
    """The running process and its pipes.

    Attributes:
        numbers: the numbers of the objects that the child has.
        has_ended: whether the child ended after its last answer, because its memory had grown too much.
    """

    def __init__(self, watch: bool):
        self.numbers: set[int] = set()
        self.has_ended = False
        self._watch, self._settled, self._ready, self._owner = watch, 0, False, os.getpid()
        if not hasattr(select, "poll"):
            raise ProcessError(
                "chat templates and tokenizers run in a process with limits of time and memory, which this system "
                f"({sys.platform}) does not support; use Linux, macOS, or WSL 2 on Windows"
            )
        if not sys.executable:
            raise ProcessError(
                "the process for chat templates and tokenizers cannot be started: sys.executable is empty; "
                "set it to the path of a Python that has the packages jinja2 and tokenizers"
            )
        paths = [os.path.abspath(path) for path in sys.path]
        inherited = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(PROGRAM), str(int(watch)), *paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd=os.sep,
                env=inherited | CHILD_VARIABLES,
                start_new_session=True,  # Ctrl-C in a terminal interrupts only the parent
            )
        except OSError as error:
            raise ProcessError(
                f"the process for chat templates and tokenizers cannot be started: {sys.executable}: {error.strerror}"
            ) from None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests, self._answers = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._requests, False)
        os.set_blocking(self._answers, False)

    def wait_until_ready(self) -> None:
        """Waits until the child has imported its modules."""
        if not self._ready:
            deadline = time.monotonic() + START_SECONDS
            try:
                answer = self._receive(deadline, None)
            except (EOFError, TimeoutError, BrokenPipeError):
                answer = (b"e", b"")
            if answer[0] != b"j":
                raise ProcessError(
                    "the process for chat templates and tokenizers cannot be started "
                    f"({sys.executable} -I -S {PROGRAM}): {answer[1].decode(errors='replace') or 'it ended at once'}"
                )
            self._ready = True
            self.settle()

    def settle(self) -> None:
        """Records the current memory as the memory that the objects need. Each call may use its limit in addition."""
        if self._watch:
            self._settled = _resident(self.process.pid) or self._settled

    def ask(self, what: str, request: tuple[Any, ...], limits: Limits) -> Any:
        """Sends a request and returns the answer; raises the errors of `RemoteObject.call`."""
        data = marshal.dumps((*request, limits.seconds, limits.memory))
        waiting = BUSY_FACTOR * limits.seconds + BUSY_SECONDS
        deadline = time.monotonic() + waiting
        over_time = LimitError(
            f"{what}: needs more than {limits.seconds:.2g} s of processor time, which is the limit; "
            "the file may be damaged or hostile"
        )
        over_memory = LimitError(
            f"{what}: needs more than {limits.memory >> 20} MB of memory, which is the limit; "
            "the file may be damaged or hostile"
        )
        try:
            self._send(LENGTH.pack(len(data)) + data, deadline, limits.memory)
            kind, answer = self._receive(deadline, limits.memory)
            self.has_ended, kind = kind.isupper(), kind.lower()
            if kind == b"m":
                raise MemoryError
            if kind == b"b":
                return answer
            value = json.loads(answer.decode("utf-8", "surrogatepass"))
            if kind == b"j":
                return value
            raise RemoteError(*map(str, value)) if kind == b"e" else ValueError(kind)
        except TimeoutError:
            raise LimitError(
                f"{what}: its process did not answer within {waiting:.2g} s; the machine may be overloaded"
            ) from None
        except MemoryError:
            raise over_memory from None
        except (EOFError, BrokenPipeError, ValueError, TypeError, RecursionError) as error:
            if isinstance(error, EOFError | BrokenPipeError):  # it has ended; wait for its exit status
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout=END_SECONDS)
            code = self.process.returncode
            if code is not None and -code == getattr(signal, "SIGPROF", 0):
                raise over_time from None
            ending = "sent an invalid answer" if code is None else f"ended with status {code}"
            raise LimitError(
                f"{what}: its process {ending}, possibly because it needs too much memory or nests too deeply; "
                "the file may be damaged or hostile"
            ) from None

    def kill(self) -> None:
        self.process.kill()
        self.abandon()
        self.process.wait()

    def abandon(self) -> None:
        """Closes the pipes, after which the child ends if no other process has them."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self.process.returncode is None and os.getpid() != self._owner:
            self.process.returncode = 0  # this process was forked, so the child is not its own

    def _send(self, data: bytes, deadline: float, memory: int) -> None:
        view = memoryview(data)
        while view:
            self._wait(self._requests, select.POLLOUT, deadline, memory)
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(self._requests, view) :]

    def _receive(self, deadline: float, memory: int | None) -> tuple[bytes, bytes]:
        """Returns the kind and the bytes of the next answer."""
        kind, size = HEADER.unpack(self._read(HEADER.size, deadline, memory))
        if memory is not None and size > memory:
            raise MemoryError
        return kind, self._read(size, deadline, memory)

    def _read(self, size: int, deadline: float, memory: int | None) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait(self._answers, select.POLLIN, deadline, memory)
            with contextlib.suppress(BlockingIOError):
                part = os.read(self._answers, min(size - len(data), 1 << 20))
                if not part:
                    raise EOFError
                data += part
        return bytes(data)

    def _wait(self, pipe: int, event: int, deadline: float, memory: int | None) -> None:
        """Waits until the pipe can be read or written; raises TimeoutError or MemoryError."""
        poll = select.poll()
        poll.register(pipe, event)
        polls_memory = self._watch and memory is not None
        while True:
            left = max(0.0, deadline - time.monotonic())
            if poll.poll(1000 * (min(left, POLL_SECONDS) if polls_memory else left) + 1):
                return
            if not left:
                raise TimeoutError
            if polls_memory and memory is not None and _resident(self.process.pid) > self._settled + memory:
                raise MemoryError


def _resident(pid: int) -> int:
    """Returns the resident memory of a process in bytes; 0 if it is not known."""
    with contextlib.suppress(OSError, ValueError, IndexError, subprocess.SubprocessError):
        if os.path.exists("/proc/self/statm"):
            pages = pathlib.Path(f"/proc/{pid}/statm").read_bytes().split()[1]
            return int(pages) * os.sysconf("SC_PAGE_SIZE")
        listing = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, timeout=1)
        return int(listing.stdout) << 10
    return 0


_NUMBERS = itertools.count()
CONFINED = ConfinedProcess()
"""The process that all models share."""
