"""Temporary directories. If a process is killed, the next process removes its temporary directories.

A directory in use is locked. The operating system releases the lock when the last process that holds it ends, for
whatever reason, so an unlocked directory is abandoned. Where directories cannot be locked (on Windows and on some
network file systems), a directory counts as abandoned if it is older than a day.
"""

import contextlib
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

PREFIX = ".fetch-"
MAX_AGE = 24 * 3600
"""Seconds after which a directory that cannot be locked counts as abandoned."""


@contextlib.contextmanager
def make_folder(parent: pathlib.Path) -> Iterator[tuple[pathlib.Path, tuple[int, ...]]]:
    """Creates a temporary directory in `parent`, and removes it at the end.

    Yields:
        The directory, and the descriptors that lock it, for child processes to inherit.
    """
    with _locked(parent):  # otherwise another process might lock the new directory first, and remove it
        place = pathlib.Path(tempfile.mkdtemp(dir=parent, prefix=PREFIX))
        lock = _lock(place)
    try:
        yield place, () if lock is None else (lock,)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def remove_abandoned(places: Iterable[pathlib.Path]) -> None:
    """Removes the abandoned directories among these directories, as far as possible."""
    for place in places:
        with contextlib.suppress(OSError), _locked(place.parent):
            if is_abandoned(place):
                shutil.rmtree(place, ignore_errors=True)


def is_abandoned(place: pathlib.Path, lock: pathlib.Path | None = None, min_age: float = 0) -> bool:
    """Returns whether a directory or file is not used by any process, judged by its lock or, without locks, by its age.

    Args:
        place: the directory or file.
        lock: the file that a process locks while it uses `place`; it need not exist. None for `place` itself.
        min_age: minimum age of an abandoned directory or file, in seconds.
    """
    age = time.time() - place.stat().st_mtime
    if age < min_age:
        return False
    try:
        descriptor = _lock(lock or place)
    except FileNotFoundError:
        return lock is not None
    except BlockingIOError:
        return False
    if descriptor is None:
        return age > MAX_AGE
    os.close(descriptor)
    return True


@contextlib.contextmanager
def _locked(parent: pathlib.Path) -> Iterator[None]:
    """Locks a directory while temporary directories are created in it or removed from it."""
    descriptor = _lock(parent, wait=True)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(place: pathlib.Path, wait: bool = False) -> int | None:
    """Returns a descriptor that locks a file or directory while a process has it open; None if locks do not work.

    Raises:
        BlockingIOError: another process has locked it.
        FileNotFoundError: the file or directory does not exist.
    """
    if fcntl is None:
        return None
    handle = os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:  # a file system without locks
        os.close(handle)
        return None
    return handle
