"""Folders for what is being made, which do not outlive their process: the next one removes what a killed one left.

A folder in use is locked. The system drops the lock with the last process that holds it, however that ends, so an
unlocked folder is abandoned. Where folders cannot be locked (on Windows, and on some network disks), it is one that is
older than a day.
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
OLD = 24 * 3600
"""Seconds after which a folder that cannot be locked is taken for abandoned."""


@contextlib.contextmanager
def folder(parent: pathlib.Path) -> Iterator[tuple[pathlib.Path, tuple[int, ...]]]:
    """A new folder in `parent`, removed at the end, and what locks it: descriptors for child processes to inherit."""
    with _locked(parent):  # else another process might lock the new folder first, and remove it
        place = pathlib.Path(tempfile.mkdtemp(dir=parent, prefix=PREFIX))
        held = _lock(place)
    try:
        yield place, () if held is None else (held,)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if held is not None:
            os.close(held)


def remove_abandoned(places: Iterable[pathlib.Path]) -> None:
    """Removes those of these folders whose processes have ended; what cannot be removed stays."""
    for place in places:
        with contextlib.suppress(OSError), _locked(place.parent):
            if is_abandoned(place):
                shutil.rmtree(place, ignore_errors=True)


def is_abandoned(place: pathlib.Path, lock: pathlib.Path | None = None, least: float = 0) -> bool:
    """Whether no process is using a folder or a file, by its lock, or by its age where nothing can be locked.

    Args:
        place: the folder or file.
        lock: what a process that uses it has locked; itself if None. No process does if the lock does not exist.
        least: its age in seconds, at least.
    """
    age = time.time() - place.stat().st_mtime
    if age < least:
        return False
    try:
        held = _lock(lock or place)
    except FileNotFoundError:
        return lock is not None
    except BlockingIOError:
        return False
    if held is None:
        return age > OLD
    os.close(held)
    return True


@contextlib.contextmanager
def _locked(parent: pathlib.Path) -> Iterator[None]:
    """Waits for the lock of a folder in which folders are made and removed."""
    held = _lock(parent, wait=True)
    try:
        yield
    finally:
        if held is not None:
            os.close(held)


def _lock(place: pathlib.Path, wait: bool = False) -> int | None:
    """A descriptor that locks a file or folder while any process has it open; None where that cannot be locked.

    Raises:
        BlockingIOError: another process has locked it.
        FileNotFoundError: it does not exist.
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
