"""Files that are there whole or not at all, and what to say of a disk that is full."""

import contextlib
import errno
import os
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

from jaxspec.errors import StorageError

_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
_SAYS_FULL = re.compile(r"No space left on device|Disk quota exceeded|There is not enough space on the disk")


def write_whole(path: pathlib.Path, write: Callable[[Any], Any]) -> None:
    """Writes a file beside its place, and moves it there once it is on the disk.

    Args:
        path: the place; a file there is replaced, or kept if anything fails. Missing folders are made.
        write: called with the open binary file.

    Raises:
        StorageError: the file cannot be written.
    """
    part = part_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise StorageError(f"{path} cannot be written: {reason(error, path.parent)}") from None


def sync_folder(folder: pathlib.Path) -> None:
    """Writes a folder's entries to the disk: without it a renamed file may be lost when the machine stops."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def part_of(path: pathlib.Path) -> pathlib.Path:
    """The place where `write_whole` writes; a file there is what a killed process left."""
    return path.with_name(f".{path.name}.part")


def is_full(error: BaseException | None) -> bool:
    """Whether an exception, or one that it was raised from, says that a disk or a quota is full."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if (isinstance(error, OSError) and error.errno in _FULL) or says_full(str(error)):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def says_full(text: str) -> bool:
    """Whether what another program said, or its traceback, is that a disk or a quota is full."""
    return _SAYS_FULL.search(text) is not None


def reason(error: OSError, folder: pathlib.Path) -> str:
    """Says in a few words why a file in `folder` cannot be written."""
    return full(folder) if is_full(error) else error.strerror or type(error).__name__


def full(folder: pathlib.Path, needed: int | None = None) -> str:
    """Says that the disk of `folder` is full, how much of it is free, and how many bytes are `needed`, if known."""
    wanted = "" if needed is None else f"about {_size(needed)} are needed, "
    place = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    try:
        free = f"{_size(shutil.disk_usage(place).free)} are free"
    except OSError:
        free = "how much is free cannot be read"
    return f"no space is left on the disk of {folder} ({wanted}{free})"


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
