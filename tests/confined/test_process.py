"""The confined process: it limits time and memory, is replaced after it was killed, and ends with its parent."""

import gc
import importlib.util
import json
import os
import pathlib
import random
import signal
import struct
import subprocess
import sys
import threading
import time

import pytest

from helpers.paths import ROOT
from jaxspec.confined import process
from jaxspec.confined.process import ConfinedProcess, Limits, RemoteError, RemoteObject
from jaxspec.errors import CheckpointError, InvalidConfig, LimitError, ProcessError
from jaxspec.text import ChatTemplate, Tokenizer

pytestmark = pytest.mark.quick

LIMITS = Limits(0.5, 64 << 20)
SOURCE = "{% for m in messages %}{{ m }};{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
NOW = "2026-11-27"
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def confined():
    confined = ConfinedProcess()
    yield confined
    confined.close()


def template(confined: ConfinedProcess, source: str = SOURCE) -> RemoteObject:
    return RemoteObject("chat template", "template", (source,), LIMITS, confined)


def render(held: RemoteObject, *messages: str, limits: Limits = LIMITS) -> str:
    return held.call("render", [{"messages": list(messages)}], NOW, 1 << 20, limits=limits)[0]


def pid(confined: ConfinedProcess) -> int:
    assert confined._child is not None
    return confined._child.process.pid


def runs(number: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return pathlib.Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ends(number: int, seconds: float = 30.0) -> bool:
    """Whether a process ends soon."""
    deadline = time.monotonic() + seconds
    while runs(number) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not runs(number)


def program(code: str, *arguments: str) -> subprocess.Popen:
    """Starts a Python program that knows the package, and writes what it prints to a pipe."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, cwd=ROOT
    )


# --- one child for all objects ------------------------------------------------------------------------------


def test_objects_share_one_child_that_is_replaced_with_all_of_them(confined):
    first, second = template(confined), template(confined, "{{ messages[0] | upper }}")
    assert (render(first, "a", "b"), render(second, "a")) == ("a;b;", "A")
    before = pid(confined)
    os.kill(before, signal.SIGKILL)
    while confined._child.process.poll() is None:
        time.sleep(0.01)
    assert (render(second, "b"), render(first, "b")) == ("B", "b;")
    assert pid(confined) != before


def test_deleted_objects_leave_the_child(confined):
    kept, deleted = template(confined), template(confined)
    assert {kept.number, deleted.number} == confined._child.numbers
    del deleted
    gc.collect()
    render(kept, "a")
    assert confined._child.numbers == {kept.number}


def test_an_exception_leaves_the_child_and_its_objects(confined):
    held = template(confined, "{{ raise_exception('no ' ~ messages[0]) }}")
    before = pid(confined)
    for _ in range(3):
        with pytest.raises(RemoteError, match="RaisedByTemplate: no a") as caught:
            render(held, "a")
        assert (caught.value.kind, caught.value.text) == ("RaisedByTemplate", "no a")
    with pytest.raises(RemoteError, match="AttributeError"):
        held.call("missing", limits=LIMITS)
    assert pid(confined) == before


@pytest.mark.parametrize(
    "value",
    [None, True, 1 << 70, 2.5, float("inf"), "é\ud800\n", [1, [2]], (1, 2), {1: {"a": None}}, "x" * (20 << 20)],
)
def test_arguments_arrive_as_they_are(confined, value):
    held = template(confined, "{{ messages }}" if not isinstance(value, str) else "{{ messages.strip() }}")
    (text,) = held.call("render", [{"messages": value}], NOW, 1 << 26, limits=Limits(5.0, 1 << 29))
    assert text == (value.strip() if isinstance(value, str) else str(value))


def test_threads_take_turns():
    """In threads whose stack is small, too. A template that never ends delays others, and changes nothing for them."""
    good, results = ChatTemplate("{{ messages[0].content }}"), []

    def refused():
        with pytest.raises(LimitError, match="needs more than"):
            ChatTemplate(ENDLESS).render([{"role": "user", "content": "x"}])

    def rendered(number):
        results.extend(good.render([{"role": "user", "content": f"{number}.{i}"}]) for i in range(50))

    before = threading.stack_size(256 << 10)
    try:
        threads = [threading.Thread(target=refused), *(threading.Thread(target=rendered, args=(n,)) for n in range(3))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.stack_size(before)
    assert sorted(results) == sorted(f"{n}.{i}" for n in range(3) for i in range(50))


# --- limits -------------------------------------------------------------------------------------------------


def test_time_is_limited_in_every_operation(confined):
    """Also where Python cannot be interrupted: the power is one instruction."""
    for source in (ENDLESS, "{{ 9 ** (messages | length * 99999999) }}"):
        held = template(confined, source)
        with pytest.raises(LimitError, match=r"^chat template: needs more than 0.1 s of processor time"):
            render(held, "a", limits=Limits(0.1, 64 << 20))
        assert render(template(confined), "a") == "a;"


@linux
def test_a_child_that_waits_is_killed(confined, monkeypatch):
    """Time that is not processor time is limited as well, and the message does not call it that."""
    held = template(confined)
    os.kill(pid(confined), signal.SIGSTOP)
    monkeypatch.setattr(process, "BUSY_SECONDS", 1.0)
    with pytest.raises(LimitError, match=r"its process did not answer within 1\.1 s; the machine may be overloaded"):
        render(held, "a", limits=Limits(0.01, 64 << 20))
    assert render(held, "a") == "a;"


@linux
def test_a_busy_machine_refuses_nothing(confined):
    """A child that gets no processor for seconds has used none of its time."""
    held = template(confined)
    os.kill(pid(confined), signal.SIGSTOP)
    waking = threading.Timer(3.0, os.kill, (pid(confined), signal.SIGCONT))
    waking.start()
    assert render(held, "a", limits=Limits(0.1, 64 << 20)) == "a;"
    waking.join()


@pytest.mark.parametrize("watch", [False, True])
def test_memory_is_limited_by_the_kernel_or_by_the_parent(watch):
    """The watch is for platforms without RLIMIT_AS; it works on every one."""
    confined = ConfinedProcess(watch)
    try:
        body = "{% for i in range(99999) %}{% set n.x = [n.x, range(999) | list] %}{% endfor %}"
        held = template(confined, "{% set n = namespace(x=[]) %}" + body)
        with pytest.raises(LimitError, match=r"^chat template: needs more than 16 MB of memory"):
            render(held, limits=Limits(5.0, 16 << 20))
        assert render(template(confined), "a") == "a;"
    finally:
        confined.close()


def test_an_answer_is_no_longer_than_the_memory(confined):
    held = template(confined, "{{ 'a' * 999999 }}")
    assert len(render(held)) == 999999
    with pytest.raises(LimitError, match="needs more than 0 MB"):
        render(held, limits=Limits(1.0, 1 << 19))


# --- the parent ---------------------------------------------------------------------------------------------

RENDER = """
import os, signal, sys, time
from jaxspec.confined.process import CONFINED
from jaxspec.text import ChatTemplate
template = ChatTemplate("{{ messages[0].content }}")
say = lambda text: template.render([{"role": "user", "content": text}])
"""


@linux
@pytest.mark.parametrize("ending", ["", "os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)", "raise SystemExit(3)"])
def test_the_child_ends_with_its_parent(ending):
    code = f"{RENDER}\nprint(CONFINED._child.process.pid, flush=True); input()\n{ending}"
    parent = program(code)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert runs(child)
    parent.communicate("\n", timeout=60)
    assert ends(child)


@linux
def test_a_forked_process_has_a_child_of_its_own():
    """Also one that was forked while another thread waited for the child."""
    code = f"""{RENDER}
import threading
slow = ChatTemplate("{{% for a in range(3000) %}}{{% for b in range(500) %}}{{% endfor %}}{{% endfor %}}done")
thread = threading.Thread(target=lambda: slow.render([{{"role": "user", "content": ""}}]))
thread.start()
time.sleep(0.02)
first = CONFINED._child.process.pid
assert thread.is_alive()
if os.fork() == 0:
    assert say("forked") == "forked"
    assert CONFINED._child.process.pid != first
    CONFINED.close()
    os._exit(7)
status = os.waitstatus_to_exitcode(os.wait()[1])
thread.join()
print(status, say("parent"), CONFINED._child.process.pid == first)
"""
    parent = program(code)
    assert parent.communicate(timeout=120)[0] == "7 parent True\n"


@linux
def test_ctrl_c_in_a_terminal_does_not_reach_the_child():
    code = f"""{RENDER}
first = CONFINED._child.process.pid
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.setpgid(0, 0)
os.killpg(0, signal.SIGINT)
print(say("a"), CONFINED._child.process.pid == first, os.getsid(first) == first)
"""
    assert program(code).communicate(timeout=120)[0] == "a True True\n"


def test_it_is_light():
    """Neither the parent nor the child imports JAX, and only the child imports jinja2."""
    code = f"{RENDER}\nprint(say('a'), [name for name in ('jax', 'jinja2', 'tokenizers') if name in sys.modules])"
    assert program(code).communicate(timeout=120)[0] == "a []\n"


# --- what may be wrong with the child -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "broken", ["raise ValueError('so')", "import missing_module", "import os; os._exit(3)", "(", ""]
)
def test_a_program_that_cannot_start(confined, tmp_path, monkeypatch, broken):
    (tmp_path / "serve.py").write_text(broken)
    monkeypatch.setattr(process, "PROGRAM", tmp_path / "serve.py")
    with pytest.raises(ProcessError, match=r"^the process for chat templates and tokenizers cannot be started"):
        template(confined)


def test_a_python_that_is_missing(confined, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ProcessError, match=r"cannot be started: /nowhere/python: No such file"):
        template(confined)
    monkeypatch.undo()
    assert render(template(confined), "a") == "a;"


@pytest.mark.parametrize("unknown", [None, ""])
def test_a_python_that_does_not_know_its_own_path(confined, monkeypatch, unknown):
    """As in programs that embed Python."""
    monkeypatch.setattr(sys, "executable", unknown)
    with pytest.raises(ProcessError, match=r"cannot be started: sys\.executable is empty"):
        template(confined)


def test_a_child_without_what_it_needs_says_so(confined, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    with pytest.raises(ProcessError, match=r"ModuleNotFoundError: No module named"):
        template(confined)


CHILD = """
import os


def read(size):
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        data += part or os._exit(0)
    return data


os.write(1, {ready!r})
for answer in {answers!r}:
    read(int.from_bytes(read(8), "little"))
    os.write(1, answer)
"""


def framed(kind: bytes, data: bytes) -> bytes:
    """An answer of a child."""
    return process.HEADER.pack(kind, len(data)) + data


NULL = framed(b"j", b"null")


def write_child(directory: pathlib.Path, *answers: bytes) -> None:
    """Writes the program of a child that sends these answers, whatever it is asked."""
    (directory / "serve.py").write_text(CHILD.format(ready=NULL, answers=answers))


def garbage(rng: random.Random) -> bytes:
    """What a child may send that was taken over: bytes at random, wrong lengths, and JSON that is no answer."""
    nested = b"[" * rng.choice([9, 99_999])
    refusal = b'["ValueError", "no"]'
    body = rng.choice(
        [
            refusal,
            refusal,
            b"",
            b"{",
            b"\xff\xfe",
            nested,
            b"1",
            b'["a"]',
            b'{"a": 1}',
            b"null",
            rng.randbytes(rng.randrange(99)),
        ]
    )
    size = rng.choice([*[len(body)] * 5, len(body) + 1, 0, 1 << 20, 1 << 40, (1 << 64) - 1])
    header = process.HEADER.pack(rng.choice([b"j", b"e", b"e", b"m", b"b", b"x", b"\0"]), size)
    return rng.choice([*[header + body] * 5, header[: rng.randrange(17)], rng.randbytes(rng.randrange(40))])


def test_what_a_child_sends_is_an_answer_or_an_error(monkeypatch, tmp_path, seed):
    """It is read as JSON or bytes, in time, and an answer that is too long is not read."""
    rng = random.Random(seed)
    monkeypatch.setattr(process, "PROGRAM", tmp_path / "serve.py")
    known = {
        framed(b"j", b"null"): "answer",
        framed(b"b", b"null"): "answer",
        framed(b"e", b'["ValueError", "no"]'): "RemoteError",
        framed(b"e", b"null"): "LimitError",
        framed(b"m", b""): "LimitError",
        framed(b"x", b"null"): "LimitError",
        framed(b"j", b"null")[:-1]: "LimitError",
        b"": "LimitError",
    }
    for data in [*known, *(garbage(rng) for _ in range(60))]:
        write_child(tmp_path, data)
        confined, start = ConfinedProcess(), time.monotonic()
        try:
            RemoteObject("chat template", "template", (SOURCE,), Limits(0.2, 1 << 20), confined)
            kind = "answer"
        except (CheckpointError, RemoteError) as error:
            kind = type(error).__name__
        finally:
            confined.close()
        assert time.monotonic() - start < process.START_SECONDS, data
        assert kind == known.get(data, kind), data
        assert kind in ("answer", "LimitError", "RemoteError")


DESCRIPTION = {"model": "BPE", "dropout": None, "decoder": {"type": "ByteLevel"}, "added": [[1, "<s>", True]]}
WRONG: list = [0, "x", True, [1], [[1]], {"type": 1}, [["1", "a", True]], [[True, "a", True]], [[-1, "a", True]]]
WRONG += [[[1 << 40, "a", False]], [[1, "a", 1]], [[1, 2, True]], [[1, "a", True, 0]], [{"id": 1}], 1.5]
STEPS = [{"type": "Sequence"} | more for more in ({}, {"decoders": 5}, {"decoders": [1]}, {"decoders": {"a": 1}})]


def test_what_a_child_sends_about_a_tokenizer_is_checked(monkeypatch, tmp_path):
    """Its description and its token ids; wrong ones are errors of one line."""
    content = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    wrong = [*WRONG, None, *({key: value for key, value in DESCRIPTION.items() if key != name} for name in DESCRIPTION)]
    wrong += [DESCRIPTION | {"model": value} for value in [*WRONG, None] if not isinstance(value, str)]
    wrong += [DESCRIPTION | {"decoder": value} for value in [*WRONG, None, *STEPS]]
    wrong += [DESCRIPTION | {"added": value} for value in [*WRONG, None]]
    good = framed(b"j", json.dumps(DESCRIPTION).encode())
    answers = [part for value in wrong for part in (NULL, framed(b"j", json.dumps(value).encode()))]
    numbers = [b"", b"\1\0\0", *(struct.pack(f"{len(n)}I", *n) for n in ([1], [2, 0], [1, 0, 0], [4294967295, 0]))]
    lists = [framed(b"b", data) for data in numbers] + [framed(b"j", b"[1, 0]"), framed(b"j", b"null")]
    write_child(tmp_path, *answers, NULL, good, *lists, framed(b"b", struct.pack("3I", 2, 0, 0)))
    monkeypatch.setattr(process, "PROGRAM", tmp_path / "serve.py")
    monkeypatch.setattr(process, "CONFINED", ConfinedProcess())
    try:
        for value in wrong:
            with pytest.raises(CheckpointError, match=r"^tokenizer: (its process answered|decoder)"):
                print(value, Tokenizer(content).kind)
        tokenizer = Tokenizer(content)
        for _ in lists:
            with pytest.raises(CheckpointError, match=r"^tokenizer: its process (sent|answered)"):
                tokenizer.encode("a")
        assert tokenizer.encode("aa") == [0, 0]
    finally:
        process.CONFINED.close()


KEEPER = """
import sys, time, types
sys.path.insert(0, {directory!r})
import serve


class Keeper:
    def __init__(self, source):
        self.kept = []

    def keep(self, size):
        self.kept.append(bytearray(size))
        return bytes(2 * len(self.kept))

    def fail(self):
        raise SystemError("error return without exception set")

    def hold(self, size):
        held, end = b"a" * size, time.monotonic() + 0.3
        while time.monotonic() < end:
            pass
        return held[:1]


sys.modules["keepers"] = types.ModuleType("keepers")
sys.modules["keepers"].Keeper = Keeper
serve.OBJECT_KINDS = {{"template": ("keepers", "Keeper")}}
serve.main()
"""


@linux
def test_a_child_that_keeps_much_memory_is_replaced(confined, monkeypatch, tmp_path):
    """Otherwise each call could use as much again. Answers may be bytes."""
    (tmp_path / "serve.py").write_text(KEEPER.format(directory=str(SERVE.parent)))
    monkeypatch.setattr(process, "PROGRAM", tmp_path / "serve.py")
    held, first = template(confined), pid(confined)
    assert [held.call("keep", 8 << 20, limits=LIMITS) for _ in range(3)] == [bytes(2), bytes(4), bytes(6)]
    assert held.call("keep", 16 << 20, limits=LIMITS) == bytes(8)  # 40 of at most 32 MB are left behind
    assert held.call("keep", 8 << 20, limits=LIMITS) == bytes(2)
    assert pid(confined) != first


@linux
def test_the_watched_memory_does_not_grow_with_the_calls(monkeypatch, tmp_path):
    """What one call has used is not added to what the next may use."""
    (tmp_path / "serve.py").write_text(KEEPER.format(directory=str(SERVE.parent)))
    monkeypatch.setattr(process, "PROGRAM", tmp_path / "serve.py")
    confined, limits = ConfinedProcess(watch=True), Limits(5.0, 64 << 20)
    try:
        held = template(confined)
        assert [held.call("hold", size << 20, limits=limits) for size in (1, 48, 48)] == [b"a"] * 3
        with pytest.raises(LimitError, match="needs more than 64 MB of memory"):
            held.call("hold", 96 << 20, limits=limits)
        assert held.call("hold", 48 << 20, limits=limits) == b"a"
    finally:
        confined.close()


@linux
def test_an_allocation_that_python_loses_track_of_is_a_matter_of_memory(confined, monkeypatch, tmp_path):
    (tmp_path / "serve.py").write_text(KEEPER.format(directory=str(SERVE.parent)))
    monkeypatch.setattr(process, "PROGRAM", tmp_path / "serve.py")
    with pytest.raises(LimitError, match="needs more than 64 MB of memory"):
        template(confined).call("fail", limits=LIMITS)


SERVE = process.PROGRAM
ATTEMPTS = [
    "open('/etc/passwd')",
    "open('/tmp/jaxspec-test', 'w')",
    "os.open('/etc/passwd', os.O_RDONLY)",
    "os.listdir('/')",
    "os.system('true')",
    "os.fork()",
    "os.posix_spawn('/bin/true', ['true'], {})",
    "os.execv('/bin/true', ['true'])",
    "os.kill(os.getppid(), 0)",
    "os.remove('/tmp/jaxspec-test')",
    "os.rename('/tmp/jaxspec-test', '/tmp/b')",
    "os.mkdir('/tmp/jaxspec-test')",
    "os.chmod('/tmp', 0o777)",
    "os.putenv('a', 'b')",
    "os.truncate('/tmp/jaxspec-test', 0)",
    "os.symlink('/etc/passwd', '/tmp/jaxspec-test')",
    "os.scandir('/')",
    "subprocess.Popen(['true'])",
    "subprocess.run('true', shell=True)",
    "socket.socket()",
    "socket.create_connection(('127.0.0.1', 9))",
    "socket.getaddrinfo('localhost', 9)",
    "ctypes.CDLL(None)",
    "ctypes.string_at(1)",
    "importlib.import_module('antigravity')",
    "__import__('antigravity')",
    "mmap.mmap(-1, 99)",
    "tempfile.mkdtemp()",
    "shutil.rmtree('/tmp/jaxspec-test')",
    "glob.glob('/*')",
    "sqlite3.connect(':memory:')" if importlib.util.find_spec("sqlite3") else "os.listdir()",
    "signal.pthread_kill(1, 9)",
    "gc.get_objects()",
    "sys.settrace(print)",
    "resource.prlimit(0, resource.RLIMIT_FSIZE, (1, 1))",
    "pickle.loads(b'cos\\nsystem\\n(S\"true\"\\ntR.')",
    "urllib.request.urlopen('http://127.0.0.1:9')",
    "urllib.request.urlopen('file:///etc/passwd')",
    "code.interact()",
    "pty.spawn('true')",
    "os.pipe()",
    "os.dup(0)",
]


@linux
def test_the_sealed_process_can_reach_nothing():
    """Whatever a template may find a way to call: files, processes, the network, further imports."""
    names = "code ctypes gc glob importlib mmap os pickle pty resource shutil signal socket subprocess sys tempfile"
    more = ["urllib.error", "urllib.request", *(["sqlite3"] if importlib.util.find_spec("sqlite3") else [])]
    code = f"""
import {", ".join([*names.split(), *more])}
sys.path.insert(0, {str(SERVE.parent)!r})
import serve
os.environ["SECRET"] = "1"
serve.seal()
assert not os.environ
for attempt in {ATTEMPTS!r}:
    try:
        eval(attempt)
        print(f"reached: {{attempt}}", flush=True)
    except (OSError, RuntimeError, urllib.error.URLError) as error:
        pass
    except SystemExit:
        print(f"ended: {{attempt}}", flush=True)
print("sealed", flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "sealed\n", (done.stdout, done.stderr[-2000:])


def test_messages_that_are_no_data_are_refused_before_they_are_sent():
    with pytest.raises(InvalidConfig, match="must contain only strings"):
        ChatTemplate("{{ x }}").render([{"role": "user", "content": "a"}], x=object())
