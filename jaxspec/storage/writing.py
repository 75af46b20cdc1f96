"""Atomic writes of files, and error messages for full disks."""

import contextlib
import errno
import os
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

from jaxspec.amounts import size
from jaxspec.errors import StorageError

_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
_SAYS_FULL = re.compile(r"No space left on device|Disk quota exceeded|There is not enough space on the disk")


def write_whole(path: pathlib.Path, write: Callable[[Any], Any]) -> None:
    """Writes a file atomically: writes a temporary file in the same directory, flushes it to disk and renames it.

    Args:
        path: path of the file. An existing file is replaced; if writing fails, it stays unchanged. Missing directories
            are created.
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
    """Flushes a directory's entries to disk; otherwise a renamed file may be lost in a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def part_of(path: pathlib.Path) -> pathlib.Path:
    """Returns the path of the temporary file of `write_whole`; if the file exists, a killed process left it."""
    return path.with_name(f".{path.name}.part")


def is_full(error: BaseException | None) -> bool:
    """Returns whether an exception, or one of its causes, reports a full disk or quota."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if (isinstance(error, OSError) and error.errno in _FULL) or says_full(str(error)):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def says_full(text: str) -> bool:
    """Returns whether the output of another program reports a full disk or quota."""
    return _SAYS_FULL.search(text) is not None


def reason(error: OSError, folder: pathlib.Path) -> str:
    """Describes briefly why a file in `folder` cannot be written."""
    return full(folder) if is_full(error) else error.strerror or type(error).__name__


def full(folder: pathlib.Path, needed: int | None = None) -> str:
    """Describes a full disk: the free space on the disk of `folder`, and the number of bytes `needed`, if known."""
    required = "" if needed is None else f"about {size(needed)} are needed, "
    place = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    try:
        free = f"{size(shutil.disk_usage(place).free)} are free"
    except OSError:
        free = "the free space is unknown"
    return f"no space is left on the disk of {folder} ({required}{free})"
