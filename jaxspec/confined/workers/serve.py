"""The program of the confined process: it holds objects that come with checkpoints, and answers requests to them.

    python -I -S serve.py WATCH PATH...

The standard input is a sequence of requests, see `jaxspec.confined.process`. The process ends when the input ends. The
program does not import jaxspec. After its imports, it gives up everything that requests do not need: the environment,
files, other processes, the network and further imports. WATCH is 1 if the parent limits the memory, else 0.
"""

import gc
import importlib
import json
import marshal
import os
import signal
import struct
import sys
from typing import Any

resource: Any
try:
    resource = importlib.import_module("resource")
except ImportError:  # not on this platform: the parent limits the memory
    resource = None

OBJECT_KINDS = {
    "template": ("chat_templates", "Template"),
    "tokenizer": ("text_tokenizers", "ConfinedTokenizer"),
    "expression": ("regular_expressions", "RegularExpression"),
}
"""Module and class of each kind of object."""

HEADER, LENGTH = struct.Struct("<cQ"), struct.Struct("<Q")
LEFTOVER_SHARE = 0.5  # the share of a call's memory limit that may stay in use afterwards; above it, the process ends
UNUSED_RESOURCES = ("RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC")
ALLOWED_EVENTS = {
    "builtins.id",
    "code.__new__",  # jinja2 rewrites tracebacks
    "compile",
    "exec",
    "marshal.loads",
    "object.__getattr__",
    "resource.setrlimit",
    "sys._getframe",
}
"""Audit events that templates need, or that this program causes. All other events are refused."""


def refuse(event, arguments):
    """Refuses every audit event that is not known to be harmless."""
    if event not in ALLOWED_EVENTS:
        raise PermissionError(f"not allowed: {event}")


class Limiter:
    """Limits the processor time and the memory of requests, if the platform supports it."""

    def __init__(self, watched):
        self.sizes, self._settled = None, 0
        if resource is not None and not watched:
            self.sizes = os.open("/proc/self/statm", os.O_RDONLY)  # opened now: later, files cannot be opened

    def begin(self, seconds, memory):
        """Sets the limits. When the processor time is used up, the operating system ends the process."""
        if self.sizes is not None:
            self._limit(self._used() + memory)
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, seconds)

    def end(self):
        """Lifts the limits."""
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, 0)
        if self.sizes is not None:
            self._limit(resource.RLIM_INFINITY)

    def settle(self):
        """Records the current memory as the memory that the objects need."""
        self._settled = self._used()

    def left_behind(self):
        """Returns how many bytes the process has grown since `settle`."""
        return self._used() - self._settled

    def _used(self):
        return 0 if self.sizes is None else int(os.pread(self.sizes, 64, 0).split()[0]) * resource.getpagesize()

    def _limit(self, size):
        limit = resource.getrlimit(resource.RLIMIT_AS)[1]
        capped = limit != resource.RLIM_INFINITY and (size == resource.RLIM_INFINITY or size > limit)
        resource.setrlimit(resource.RLIMIT_AS, (limit if capped else size, limit))


def seal():
    """Gives up everything that requests do not need."""
    os.environ.clear()
    if resource is not None:
        for kind in [getattr(resource, name) for name in UNUSED_RESOURCES if hasattr(resource, name)]:
            resource.setrlimit(kind, (0, 0))
    sys.addaudithook(refuse)


def read_message(size):
    """Reads from the standard input; ends the process at its end."""
    data = bytearray()
    while len(data) < size:
        part = os.read(0, min(size - len(data), 1 << 20))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)


def write_message(pipe, kind, data):
    """Writes an answer: `j` for JSON, `b` for bytes, `e` for an exception, `m` if memory ran out.

    The letter is upper case if the process ends now.
    """
    view = memoryview(HEADER.pack(kind, len(data)) + data)
    while view:
        view = view[os.write(pipe, view) :]


def to_json(value):
    """Encodes a value as JSON; surrogates are kept."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def describe_error(error):
    """Encodes an exception: its class, and its message as one line of at most 500 characters."""
    text = str(error)[:2000]
    return to_json([type(error).__name__, " ".join(text.split())[:500]])


def refusal(error):
    """Returns the answer for an exception. The limits still apply, because the message may contain the text of any
    value."""
    try:
        # Python reports some allocations that failed as "SystemError: error return without exception set".
        return (b"m", b"") if isinstance(error, (MemoryError, SystemError)) else (b"e", describe_error(error))
    except MemoryError:
        return b"m", b""
    except BaseException as other:  # for example, a value that is nested too deeply
        return b"e", to_json([type(error).__name__, type(other).__name__])


def answer_request(objects, classes, limiter, request):
    """Handles a request; returns the kind of the answer and its bytes."""
    released, number, name, arguments, seconds, memory = request
    for other in released:
        objects.pop(other, None)
    try:
        limiter.begin(seconds, memory)
        if number in objects:
            value = getattr(objects[number], name)(*arguments)
        else:
            objects[number], value = classes[name](*arguments), None
        return (b"b", value) if isinstance(value, bytes) else (b"j", to_json(value))
    except BaseException as error:
        return refusal(error)
    finally:
        limiter.end()


def main():
    """Imports, gives up rights, and answers requests."""
    pipe = os.dup(1)
    os.dup2(2, 1)  # so that printed text does not mix with the answers
    sys.path[:] = [os.path.dirname(os.path.abspath(__file__)), *sys.argv[2:]]
    if hasattr(signal, "SIGPROF"):  # a parent may have ignored or blocked it
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    try:
        classes = {
            kind: getattr(importlib.import_module(module), name) for kind, (module, name) in OBJECT_KINDS.items()
        }
        limiter = Limiter(sys.argv[1] == "1")
        limiter.settle()
        seal()
    except BaseException as error:
        write_message(pipe, b"e", f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    write_message(pipe, b"j", b"null")
    objects = {}
    while True:
        (size,) = LENGTH.unpack(read_message(LENGTH.size))
        request = marshal.loads(read_message(size))
        is_new, limit = request[1] not in objects, LEFTOVER_SHARE * request[-1]
        kind, data = answer_request(objects, classes, limiter, request)
        if limiter.left_behind() - len(data) > limit:
            gc.collect()
        if is_new and request[1] in objects:
            limiter.settle()
        ends = limiter.left_behind() - len(data) > limit
        write_message(pipe, kind.upper() if ends else kind, data)
        if ends:
            os._exit(0)


if __name__ == "__main__":
    main()
