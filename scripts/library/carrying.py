"""What a machine without a network needs for a measurement: wheels and the weights of SmolLM2-135M-Instruct.

`pack` writes folders `1`, `2` and so on, for machines that receive only so many bytes at once. The first has the
wheels; the weights are cut into pieces. `install_wheels` and `join_weights` are the other end.
"""

import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from typing import Any

from jaxspec.bench import environment
from jaxspec.checkpoints import presets

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m-instruct"
WHEELS = ("gguf",)
"""Packages that machines with JAX, Flax and PyTorch lack; all of pure Python. SmolLM2's file needs them."""
MANIFEST, PIECE = "manifest.json", "weights"
SPARE_BYTES = 1 << 20
"""Bytes of a transfer that are left for what the machines tell each other."""
INSTALL_S = 60


def pack(folder: pathlib.Path, limit_bytes: int) -> list[pathlib.Path]:
    """Writes what to carry, and returns the folders in the order in which to carry them.

    Args:
        folder: the folder of the folders. Its content is replaced.
        limit_bytes: the largest transfer. The tracked files of the checkout are part of each one.

    Raises:
        ValueError: the checkout leaves no room, or the folder is not one of this function.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / "1" / MANIFEST).exists():
        raise ValueError(f"{folder} holds other files; name a new folder")
    shutil.rmtree(folder, ignore_errors=True)
    first = folder / "1"
    first.mkdir(parents=True)
    download_wheels(first)
    commit, dirty = environment.find_commit()
    weights = presets.fetch_preset(MODEL, report=print)
    room = limit_bytes - SPARE_BYTES - tracked_bytes()
    taken = sum(path.stat().st_size for path in first.iterdir())
    if room - taken < 1 << 20:
        raise ValueError(
            f"the checkout takes {tracked_bytes()} bytes of {limit_bytes}, which leaves no room for weights"
        )
    folders, size = [], weights.stat().st_size
    with open(weights, "rb") as stream:
        while stream.tell() < size:
            own = folder / str(len(folders) + 1)
            own.mkdir(exist_ok=True)
            (own / PIECE).write_bytes(stream.read(room - (0 if folders else taken)))
            folders.append(own)
    manifest = {"commit": commit, "dirty": dirty, "weights": weights.name, "pieces": len(folders)}
    for own in folders:
        (own / MANIFEST).write_text(json.dumps(manifest) + "\n")
    return folders


def download_wheels(folder: pathlib.Path) -> None:
    """Downloads the wheels of `WHEELS`, in the versions of this environment."""
    names = [f"{name}=={importlib.metadata.version(name)}" for name in WHEELS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), *names]
    subprocess.run(command, check=True)


def tracked_bytes() -> int:
    """Returns the bytes of the files of the checkout that git tracks."""
    names = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    return sum((ROOT / name).stat().st_size for name in names.split("\0") if name and (ROOT / name).exists())


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """Returns what `pack` wrote about a folder of folders; empty if nothing was carried."""
    found = sorted(folder.glob(f"*/{MANIFEST}"))
    return json.loads(found[0].read_text()) if found else {}


def wheels_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the wheels in a folder, and in its folders."""
    return sorted({*folder.glob("*.whl"), *folder.glob("*/*.whl")})


def install_wheels(wheels: Sequence[pathlib.Path], site: pathlib.Path) -> dict[str, str]:
    """Installs the wheels whose packages are missing into a folder, and returns what was done, by file name."""
    done = {path.name: "is installed" for path in wheels}
    missing = [path for path in wheels if not is_installed(path.name.split("-")[0])]
    if missing:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        command += ["--no-cache-dir", "--disable-pip-version-check", "--upgrade", "--target", site, *missing]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
            said = "now installed" if ran.returncode == 0 else f"pip failed: {' '.join(ran.stderr.split())[-300:]}"
        except subprocess.TimeoutExpired:
            said = f"pip took more than {INSTALL_S} s"
        done |= {path.name: said for path in missing}
    return done


def is_installed(package: str) -> bool:
    """Returns whether this Python has a package."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def missing_packages() -> list[str]:
    """Returns the packages that jaxspec depends on and this Python lacks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [line.split(">")[0].split("=")[0] for line in project["dependencies"]]
    return [name for name in names if not is_installed(name)]


def join_weights(folder: pathlib.Path, cache: pathlib.Path) -> str:
    """Joins the pieces of the weights in a cache directory of jaxspec, and returns what was done, in words."""
    manifest = read_manifest(folder)
    if not manifest:
        return "no weights were carried"
    pieces = [folder / str(number + 1) / PIECE for number in range(manifest["pieces"])]
    if missing := [piece.parent.name for piece in pieces if not piece.exists()]:
        return f"the weights are incomplete: folder {', '.join(missing)} of {len(pieces)} is missing"
    target = weights_path(cache)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name("part")
    with open(part, "wb") as sink:
        for piece in pieces:
            with open(piece, "rb") as source:
                shutil.copyfileobj(source, sink)
    os.replace(part, target)
    return "the weights are complete"


def weights_path(cache: pathlib.Path) -> pathlib.Path:
    """Returns where `jaxspec.load` looks for the weights in a cache directory."""
    weights = presets.PRESETS[MODEL].weights
    assert weights is not None
    return cache / f"{weights.kind}s" / weights.name / pathlib.PurePosixPath(weights.member).name
