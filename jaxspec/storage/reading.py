"""Reads untrusted paths and files; every failure is a typed error that names the file.

All JSON in this package is read by this module, so that every reader accepts and rejects the same files.
"""

import json
import math
import os
import pathlib
import re
import stat
from typing import Any

from jaxspec.errors import CheckpointError, InvalidConfig, JaxspecError, shown

MAX_BYTES = 64 << 20
"""Maximum size of a settings file; the largest published files, indices of shards, are smaller than one megabyte."""
MAX_DIGITS, MAX_JSON_DEPTH = 40, 64
"""Maximum number of digits of an integer (published files have up to 31), and maximum nesting of lists and objects."""


def check_path(path: Any, what: str = "path", error: type[JaxspecError] = InvalidConfig) -> pathlib.Path:
    """Returns a path with `~` expanded; the file need not exist.

    Args:
        path: a str, or a path-like object of str such as `pathlib.Path`.
        what: description of the path, for messages.
        error: type of the error to raise.

    Raises:
        JaxspecError: of type `error`; the path has another type, is empty or not valid on this system, or is in the
            home directory of an unknown user.
    """
    try:
        name = os.fspath(path)
    except TypeError:
        name = None
    if not isinstance(name, str):
        raise error(f"{what} must be a str or a pathlib.Path, got {shown(path)}")
    if not name.strip():
        raise error(f"{what} is empty, expected the name of a file or directory")
    if "\0" in name:
        raise error(f"{what} {shown(name)} contains a NUL character, which no file name can have; remove it")
    expanded = os.path.expanduser(name)
    try:
        os.stat(expanded)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except UnicodeEncodeError:
        raise error(f"{what} {shown(name)} contains a lone surrogate, which no file name can have; remove it") from None
    except OSError as problem:  # too long, a loop of links, no permission
        raise error(f"{what} {shown(name)} cannot be used: {problem.strerror}") from None
    if expanded.startswith("~"):
        user = pathlib.PurePath(expanded).parts[0]
        raise error(f"{what} {shown(name)} begins with {user}, but no home directory is known for that user; "
                    f"write the directory in full, or ./{user} for a file of this name")  # fmt: skip
    return pathlib.Path(expanded)


def check_regular(path: pathlib.Path, error: type[JaxspecError] = CheckpointError) -> int:
    """Returns the size of a regular file in bytes, without opening the file.

    Raises:
        JaxspecError: of type `error`; the path is a directory, a pipe (opening it would block) or a device (reading it
            may never end).
        OSError: the file does not exist.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe or device"
        raise error(f"{path}: is {kind}, expected a file")
    return status.st_size


def read_bytes(path: pathlib.Path, error: type[JaxspecError] = CheckpointError, limit: int = MAX_BYTES) -> bytes:
    """Reads a regular file.

    Raises:
        JaxspecError: of type `error`; the file does not exist, is not a regular file (a pipe would block), has more
            than `limit` bytes, or cannot be read.
    """
    try:
        size = check_regular(path, error)
        if size > limit:
            raise error(f"{path}: has {size} bytes, expected at most {limit}")
        return path.read_bytes()
    except (OSError, ValueError) as problem:
        if isinstance(problem, JaxspecError):
            raise
        raise error(f"{path}: cannot be read: {getattr(problem, 'strerror', None) or problem}") from None


def read_text_file(path: pathlib.Path, error: type[JaxspecError] = CheckpointError, limit: int = MAX_BYTES) -> str:
    """Reads a regular file of UTF-8 text, without its byte order mark; raises the errors of `read_bytes`."""
    return _decode(read_bytes(path, error, limit), str(path), error)


def read_json_file(path: pathlib.Path, error: type[JaxspecError] = CheckpointError, limit: int = MAX_BYTES) -> dict:
    """Reads the object of a JSON file; raises the errors of `read_bytes` and `parse_object`."""
    return parse_object(read_bytes(path, error, limit), str(path), error)


def parse_object(data: bytes | str, where: str, error: type[JaxspecError] = CheckpointError) -> dict:
    """Parses a JSON text whose value is an object.

    The text must have the same meaning for every JSON reader. Therefore these are also errors: NaN and infinite
    numbers, which are not JSON; integers with more than `MAX_DIGITS` digits; a key with two different values; a lone
    surrogate; and nesting deeper than `MAX_DEPTH`.

    Raises:
        JaxspecError: of type `error`, with a message that begins with `where`.
    """
    text = _decode(data, f"{where}: not JSON", error) if isinstance(data, bytes) else data
    if not text.strip():
        raise error(f"{where}: not JSON: it is empty, expected an object")
    try:
        content = _DECODER.decode(text)
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(content, ensure_ascii=False).encode()
        _check_depth(content)
    except UnicodeEncodeError:
        raise error(f"{where}: a string in it contains a lone surrogate, which is not a character") from None
    except RecursionError:
        raise error(f"{where}: {_TOO_DEEP}") from None
    except ValueError as problem:
        raise error(f"{where}: not JSON: {problem}") from None
    if not isinstance(content, dict):
        raise error(f"{where}: contains a {type(content).__name__}, expected an object")
    return content


_TOO_DEEP = f"lists and objects nested deeper than {MAX_JSON_DEPTH} levels"


def _decode(data: bytes, where: str, error: type[JaxspecError]) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(f"{where}: not UTF-8: {problem.reason} at byte {problem.start}") from None


def _check_depth(content: Any) -> None:
    level = [content] if isinstance(content, (dict, list)) else []
    for _ in range(MAX_JSON_DEPTH):
        inside = (node.values() if isinstance(node, dict) else node for node in level)
        level = [child for children in inside for child in children if isinstance(child, (dict, list))]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a whole number of {len(digits)} digits, expected at most {MAX_DIGITS}")
    return int(digits)


def _real(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"the number {digits[:40]} is too large")
    return value


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        for key, value in pairs:
            if made[key] != value:
                raise ValueError(f"the key {key!r:.80} has two different values")
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_whole, parse_float=_real, parse_constant=_constant)
