"""Checkpoints of a run: written to a temporary folder that is renamed once complete, and verified when read.

A checkpoint is a folder with the arrays (`state/`, written by Orbax), the other values (`about.json`), and the sha256
of every file of both in `SHA256SUMS`, which `sha256sum -c` can also check.

Each device writes and reads its own parts of the arrays, so a checkpoint can be loaded on another mesh. With several
processes, all processes write the arrays into one folder, and process 0 does everything else.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.backend.processes import alone
from jaxspec.checkpoints import orbax
from jaxspec.errors import StorageError, TrainingError
from jaxspec.storage.writing import sync_folder, write_whole
from jaxspec.train.files import fingerprint, write_json

STATE_FOLDER, ABOUT_FILE, SUMS_FILE = "state", "about.json", "SHA256SUMS"
NUM_NEWEST = 2
"""Number of newest checkpoints that are kept, in addition to the best one."""
INTERRUPTED_SUFFIX = "-interrupted"
"""Suffix of the name of a checkpoint that the next checkpoint replaces."""


class TrainCheckpoint(NamedTuple):
    """Everything that a run is resumed from.

    Attributes:
        state: the `TrainState`.
        order: the position in the order of the rows (`jaxspec.train.sources.make_order`).
        best: step and score of the best evaluation on the held-out texts; None before the first.
        devices: a description of the devices of the run that saved it, which decide the rounding of sums.
    """

    state: Any
    order: dict
    best: tuple[int, float] | None
    devices: str = ""


class DamagedCheckpoint(TrainingError):
    """A checkpoint is missing, or its files differ from the files that were written."""


class Checkpoints:
    """The checkpoints of a run, in one folder."""

    def __init__(self, folder: pathlib.Path):
        """Takes the folder, which need not exist."""
        self.folder = folder.absolute()

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints, ascending."""
        return sorted(self._paths())

    def fingerprints(self) -> dict[str, str]:
        """Returns the sha256 of the arrays of every checkpoint, by the name of its folder; raises as `load` does."""
        return {self._paths()[step].name: self.about(step)["sha256"] for step in self.steps()}

    def save(self, checkpoint: TrainCheckpoint, extra: bool = False) -> None:
        """Saves a checkpoint, and removes checkpoints that are neither among the newest nor the best.

        Args:
            checkpoint: the checkpoint.
            extra: whether the next checkpoint replaces it, since an uninterrupted run would not have saved it.

        Raises:
            StorageError: the checkpoint cannot be written; earlier checkpoints stay intact.
        """
        step = int(checkpoint.state.step)
        if alone(lambda: step in self._paths()):
            return
        path = self.folder / f"step-{step:08d}{INTERRUPTED_SUFFIX if extra else ''}"
        part = self.folder / f".part-{path.name}"
        leaves = {f"{i:04d}": leaf for i, leaf in enumerate(jax.tree.leaves(checkpoint.state))}
        about = {"sha256": fingerprint(leaves), "order": checkpoint.order, "best": checkpoint.best}
        about |= {"devices": checkpoint.devices}

        def begin() -> None:
            with _writing(path, part):
                self.folder.mkdir(parents=True, exist_ok=True)
                for left in self.folder.glob(".part-*"):  # left by a run that was killed
                    shutil.rmtree(left, ignore_errors=True)
                part.mkdir()

        def complete() -> None:
            with _writing(path, part):
                write_json(part / ABOUT_FILE, about)
                sums = _lines(_sums(part)).encode()
                write_whole(part / SUMS_FILE, lambda file: file.write(sums))
                part.rename(path)
                sync_folder(self.folder)
            if not extra:
                self._prune(None if checkpoint.best is None else checkpoint.best[0])

        alone(begin)
        with _writing(path, part):
            orbax.write_tree(part / STATE_FOLDER, leaves)
        alone(complete)

    def load_newest(self, like: Any) -> tuple[TrainCheckpoint | None, list[str]]:
        """Returns the newest intact checkpoint, and a line for each newer, damaged checkpoint, which is renamed.

        Args:
            like: a state with the same settings, for structure, shapes, dtypes and shardings.

        Raises:
            TrainingError: all checkpoints are damaged, or one cannot be read although it may be intact. In both cases
                nothing is changed.
        """
        damaged: dict[int, DamagedCheckpoint] = {}
        for step in reversed(alone(self.steps)):
            try:
                checkpoint = self.load(step, like)
            except DamagedCheckpoint as error:
                damaged[step] = error
                continue
            names = alone(lambda: [self._put_aside(step) for step in damaged])
            return checkpoint, [f"{error}; it is kept as {name}" for error, name in zip(damaged.values(), names)]
        if damaged:
            _, first = next(iter(damaged.items()))
            raise TrainingError(
                f"{first}, and no checkpoint in {self.folder} is intact; nothing was changed. To train from the first "
                "step, remove that folder"
            )
        return None, []

    def load(self, step: int, like: Any) -> TrainCheckpoint:
        """Returns the checkpoint of a step.

        Args:
            step: the step.
            like: a state with the same settings, for structure, shapes, dtypes and shardings. Its arrays may be of the
                type `jax.ShapeDtypeStruct`.

        Raises:
            DamagedCheckpoint: the checkpoint is missing, or its files differ from the files that were written.
            TrainingError: the checkpoint cannot be read for another reason.
        """
        leaves, structure = jax.tree.flatten(like)
        expected = {f"{i:04d}": _placed_like(leaf) for i, leaf in enumerate(leaves)}
        about = alone(lambda: self.about(step))
        path = self.folder / about["name"]
        try:
            arrays = orbax.read_tree(path / STATE_FOLDER, expected)
            if fingerprint(arrays) != about["sha256"]:
                raise ValueError("the arrays are not those that were written")
            best = None if about["best"] is None else tuple(about["best"])
            state = structure.unflatten([arrays[name] for name in expected])
            return TrainCheckpoint(state, about["order"], best, about.get("devices", ""))
        except (
            OSError,
            orbax.OrbaxError,
            ValueError,
            KeyError,
        ) as error:  # its files are intact: `about` verified them
            raise _unreadable(path, error) from None

    def about(self, step: int) -> dict[str, Any]:
        """Verifies all files of a checkpoint; returns its `name` and the content of `about.json`. Raises as `load`."""
        path = self._paths().get(step)
        if path is None:
            raise DamagedCheckpoint(f"{self.folder}: the checkpoint of step {step} is missing")
        try:
            difference = _difference(path)
            if difference is None:
                return json.loads((path / ABOUT_FILE).read_text()) | {"name": path.name}
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from None
        raise DamagedCheckpoint(f"{path}: is damaged: {difference}")

    def _paths(self) -> dict[int, pathlib.Path]:
        try:
            matches = [
                (re.fullmatch(rf"step-(\d+)(?:{INTERRUPTED_SUFFIX})?", path.name), path)
                for path in self.folder.iterdir()
            ]
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise _unreadable(self.folder, error) from None
        return {int(match[1]): path for match, path in matches if match}

    def _prune(self, best: int | None) -> None:
        paths = self._paths()
        extra = [step for step, path in paths.items() if path.name.endswith(INTERRUPTED_SUFFIX)]
        old = sorted(paths.keys() - set(extra))[:-NUM_NEWEST]
        for step in extra + [step for step in old if step != best]:
            shutil.rmtree(paths[step], ignore_errors=True)

    def _put_aside(self, step: int) -> str:
        """Renames a damaged checkpoint, so that the run can save that step again, and returns the new name."""
        path = self._paths()[step]
        numbered = (f"damaged-{path.name}{f'-{i}' if i else ''}" for i in range(1 << 30))
        name = next(name for name in numbered if not (self.folder / name).exists())
        try:
            path.rename(self.folder / name)
        except OSError as error:
            raise TrainingError(f"{path}: is damaged and cannot be renamed: {error.strerror}") from None
        return name


def _placed_like(leaf: Any) -> Any:
    """Returns an array, or its description, as Orbax reads it: on the devices of a JAX array, or as a NumPy array."""
    if isinstance(leaf, np.ndarray):
        return np.zeros(leaf.shape, leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


@contextlib.contextmanager
def _writing(path: pathlib.Path, part: pathlib.Path) -> Iterator[None]:
    """Removes the temporary folder if a checkpoint cannot be written, and names the checkpoint in the error."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if not isinstance(error, (OSError, orbax.OrbaxError, StorageError)):
            raise
        cause = getattr(error, "strerror", None) or str(error).removeprefix(f"{part}{os.sep}")
        raise StorageError(f"{path} cannot be written: {cause}; earlier checkpoints are intact") from None


def _unreadable(path: pathlib.Path, error: Exception) -> TrainingError:
    cause = getattr(error, "strerror", None) or str(error)
    return TrainingError(
        f"{path}: cannot be read: {cause}; nothing was changed. Remove the cause, and run the command again"
    )


def _sums(place: pathlib.Path) -> dict[str, str]:
    """Returns the sha256 of every file by its path, except hidden ones, which a file manager may have left."""

    def fail(error: OSError) -> None:
        raise error

    sums = {}
    for folder, _, names in os.walk(place, onerror=fail):
        for name in names:
            path = pathlib.Path(folder, name)
            if path != place / SUMS_FILE and not name.startswith("."):
                with path.open("rb") as file:
                    sums[path.relative_to(place).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def _lines(sums: dict[str, str]) -> str:
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def _difference(path: pathlib.Path) -> str | None:
    """Describes how the files differ from the files that were written; returns None if they do not differ.

    Raises:
        OSError: an existing file cannot be read.
    """
    try:
        written = (path / SUMS_FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return f"it has no file {SUMS_FILE}"
    now = _sums(path)
    if written == _lines(now).encode():
        return None
    listed = dict(line.split("  ", 1)[::-1] for line in written.decode("ascii", "replace").splitlines() if "  " in line)
    unlisted = f"{SUMS_FILE} does not list its files"
    missing, other = sorted(listed.keys() - now.keys()), sorted(n for n in now if n in listed and listed[n] != now[n])
    if missing:
        return f"{missing[0]} is missing" if len(listed) > len(now) else unlisted
    return f"the bytes of {other[0]} are not those that were written" if other else unlisted
