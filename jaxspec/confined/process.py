"""The confined process: a child that handles untrusted content, with limits of processor time and memory.

A chat template is a program that comes with a checkpoint, and a tokenizer contains regular expressions. No inspection
of them bounds what they cost, but a process can be killed. All models share one child. It starts on first use, ends
with its parent, and is replaced after it was killed. It imports neither JAX nor jaxspec, and cannot open files, start
programs or use the network; see `workers/serve.py`.

Requests are written with `marshal`, which keeps tuples and keys that are not strings. Answers are JSON or bytes, since
they come from a process that may have been taken over.
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
END_SECONDS = 10.0  # between the end of a child's answers and its own, on a busy machine
# Seconds of waiting per second of processor time, and in addition. The kernel limits the processor time, so the waiting
# is for a child that is stuck, and long enough for a busy machine. Without the kernel's timer it is the only limit.
BUSY_FACTOR, BUSY_SECONDS = (10.0, 60.0) if hasattr(signal, "setitimer") else (2.0, 1.0)
LOOK_SECONDS = 0.05  # between looks at the child's memory, where the kernel does not limit it
HEADER = struct.Struct("<cQ")  # of an answer: its kind, the bytes that follow
LENGTH = struct.Struct("<Q")  # of a request
PROGRAM = pathlib.Path(__file__).parent.absolute() / "workers" / "serve.py"
KEPT_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")  # without which Python may not start
CHILD_VARIABLES = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",  # so that large blocks go back to the kernel
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a request may take.

    Attributes:
        seconds: processor time, at whose end the kernel kills the child. The parent waits much longer, since other
            programs may have the processors, and kills a child that has not answered then.
        memory: bytes in addition to what the child uses before the request; also the maximum length of the answer.
    """

    seconds: float
    memory: int


class Refused(Exception):
    """The child raised an exception while it handled a request, and can handle others.

    Attributes:
        kind: name of the exception's class.
        text: its message as one line.
    """

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class Held:
    """An object in the confined process.

    It is created at once, again after the child was replaced, and deleted with this handle.
    """

    def __init__(
        self,
        what: str,
        kind: str,
        arguments: tuple[Any, ...],
        limits: Limits,
        process: "Confined | None" = None,
    ):
        """Creates the object.

        Args:
            what: noun for error messages, such as "chat template".
            kind: its class, a key of `KINDS` in `workers/serve.py`.
            arguments: of the class: None, bool, int, float, str, bytes, and lists, tuples and dicts of these.
            limits: of its creation.
            process: the process; None for the one that all models share.

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
        """Copies and pickles it as what it was created from; a copy is an object of its own in the shared process."""
        return Held, (self.what, self.kind, self.arguments, self.limits)

    def call(self, method: str, *arguments: Any, limits: Limits) -> Any:
        """Calls a method of the object, and returns its result: bytes, or anything that JSON can express.

        Raises:
            Refused: the method raised an exception.
            LimitError: the call exceeds its limits, or the child crashed.
            ProcessError: the child cannot be started.
        """
        return self._process.request(self, method, arguments, limits)


class Confined:
    """The confined process, seen from its parent. Threads take turns; a forked process gets a child of its own."""

    def __init__(self, watch: bool = sys.platform != "linux"):
        """Describes a process that starts on first use.

        Args:
            watch: whether the parent limits the child's memory by looking at it, instead of the kernel.
        """
        self._watch = watch
        self._child: _Child | None = None
        self._forget()
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def start(self) -> None:
        """Starts the child without waiting for it, so that it imports while its parent does other work."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """Ends the child; the next request starts another one."""
        with self._lock:
            self._drop()

    def release(self, number: int) -> None:
        """Deletes an object with the next request. Takes no lock: the garbage collector may call it at any time."""
        self._released.append(number)

    def request(self, held: Held, method: str | None, arguments: tuple[Any, ...], limits: Limits) -> Any:
        """Calls a method of an object, which is created first if the child does not have it; see `Held.call`.

        Args:
            held: the object.
            method: name of the method, or None to create the object only.
            arguments: of the method.
            limits: of the call.
        """
        with self._lock:
            child = self._running()
            try:
                child.wait_until_ready()
                released = [self._released.popleft() for _ in range(len(self._released))]
                child.numbers -= {*released}
                if held.number not in child.numbers:
                    child.ask(held.what, (released, held.number, held.kind, held.arguments), held.limits)
                    child.numbers.add(held.number)
                    child.settle()
                    released = []
                return (
                    None if method is None else child.ask(held.what, (released, held.number, method, arguments), limits)
                )
            except Refused:
                raise
            except BaseException:  # a limit, a crash, Ctrl-C: the next bytes from this child may be anything
                self._drop()
                raise

    def _running(self) -> "_Child":
        if self._child is not None and (self._child.leaves or self._child.process.poll() is not None):
            self._drop()
        if self._child is None:
            self._child = _Child(self._watch)
        return self._child

    def _drop(self) -> None:
        if self._child is not None:
            child, self._child = self._child, None
            child.kill()

    def _forget(self) -> None:
        """Begins without a child, also in a process that was forked, whose parent keeps the child."""
        child, self._child = self._child, None
        self._lock = threading.Lock()  # another thread may have held the old one while the process was forked
        self._released: collections.deque[int] = collections.deque()
        if child is not None:
            child.abandon()


class _Child:
    """The running process and its pipes.

    Attributes:
        numbers: of the objects that it has.
        leaves: whether it has ended after its last answer, because it had grown too large.
    """

    def __init__(self, watch: bool):
        self.numbers: set[int] = set()
        self.leaves = False
        self._watch, self._settled, self._ready, self._owner = watch, 0, False, os.getpid()
        if not hasattr(select, "poll"):
            raise ProcessError(
                "chat templates and tokenizers run in a process of limited time and memory, which this system "
                f"({sys.platform}) cannot make; use Linux, macOS, or WSL 2 on Windows"
            )
        if not sys.executable:
            raise ProcessError(
                "the process for chat templates and tokenizers cannot be started: sys.executable does not name a "
                "Python; set it to the path of one that has the packages jinja2 and tokenizers"
            )
        paths = [os.path.abspath(path) for path in sys.path]
        kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(PROGRAM), str(int(watch)), *paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd=os.sep,
                env=kept | CHILD_VARIABLES,
                start_new_session=True,  # Ctrl-C in a terminal interrupts the parent alone
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
        """Waits until the child has imported what it needs."""
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
        """Takes the current size for what the objects need. Calls may use their limit in addition, however many."""
        if self._watch:
            self._settled = _resident(self.process.pid) or self._settled

    def ask(self, what: str, request: tuple[Any, ...], limits: Limits) -> Any:
        """Sends a request and returns the answer; raises as `Held.call` does."""
        data = marshal.dumps((*request, limits.seconds, limits.memory))
        waiting = BUSY_FACTOR * limits.seconds + BUSY_SECONDS
        deadline = time.monotonic() + waiting
        over_time = LimitError(
            f"{what}: takes more than {limits.seconds:.2g} s of processor time, which is its limit; "
            "the file may be damaged or hostile"
        )
        over_memory = LimitError(
            f"{what}: takes more than {limits.memory >> 20} MB of memory, which is its limit; "
            "the file may be damaged or hostile"
        )
        try:
            self._send(LENGTH.pack(len(data)) + data, deadline, limits.memory)
            kind, answer = self._receive(deadline, limits.memory)
            self.leaves, kind = kind.isupper(), kind.lower()
            if kind == b"m":
                raise MemoryError
            if kind == b"b":
                return answer
            value = json.loads(answer.decode("utf-8", "surrogatepass"))
            if kind == b"j":
                return value
            raise Refused(*map(str, value)) if kind == b"e" else ValueError(kind)
        except TimeoutError:
            raise LimitError(
                f"{what}: its process did not answer within {waiting:.2g} s; the machine may be overloaded"
            ) from None
        except MemoryError:
            raise over_memory from None
        except (EOFError, BrokenPipeError, ValueError, TypeError, RecursionError) as error:
            if isinstance(error, EOFError | BrokenPipeError):  # it has ended, and says why as soon as it has a turn
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout=END_SECONDS)
            code = self.process.returncode
            if code is not None and -code == getattr(signal, "SIGPROF", 0):
                raise over_time from None
            ending = "sent what is no answer" if code is None else f"ended with status {code}"
            raise LimitError(
                f"{what}: its process {ending}, so it may need too much memory or too deep a nesting; "
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
            self.process.returncode = 0  # it is not a child of this process, which was forked

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
        watched = self._watch and memory is not None
        while True:
            left = max(0.0, deadline - time.monotonic())
            if poll.poll(1000 * (min(left, LOOK_SECONDS) if watched else left) + 1):
                return
            if not left:
                raise TimeoutError
            if watched and memory is not None and _resident(self.process.pid) > self._settled + memory:
                raise MemoryError


def _resident(pid: int) -> int:
    """Returns the resident memory of a process in bytes; 0 if it is not known."""
    with contextlib.suppress(OSError, ValueError, IndexError, subprocess.SubprocessError):
        if os.path.exists("/proc/self/statm"):
            pages = pathlib.Path(f"/proc/{pid}/statm").read_bytes().split()[1]
            return int(pages) * os.sysconf("SC_PAGE_SIZE")
        shown = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, timeout=1)
        return int(shown.stdout) << 10
    return 0


_NUMBERS = itertools.count()
CONFINED = Confined()
"""The process that all models share."""
