"""Checkpoints of a run: written beside their place and moved there, verified by sha256 when they are read."""

import json
import pathlib
import re
import shutil
import tempfile
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.errors import TrainingError
from jaxspec.train.disk import fingerprint, sync_folder, write_json

STATE, ABOUT = "state", "about.json"
KEPT = 2
"""The newest ones; the best is kept besides."""


class Checkpoint(NamedTuple):
    """What a run goes on from."""

    state: Any  # a `TrainState`
    order: dict  # of the rows: the state of the data's iterator
    best: tuple[int, float] | None  # step and score of the best evaluation on the held-out texts


class Checkpoints:
    """Those of one run, in one folder."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder

    def steps(self) -> list[int]:
        """Of the checkpoints that are there, ascending."""
        if not self._folder.is_dir():
            return []
        found = (re.fullmatch(r"step-(\d+)", path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def save(self, checkpoint: Checkpoint) -> None:
        """Adds one, and removes what is neither new nor the best.

        Raises:
            TrainingError: it cannot be written; those that are there stay as they are.
        """
        import orbax.checkpoint as ocp

        step = int(checkpoint.state.step)
        place = self._folder / f"step-{step:08d}"
        if place.exists():
            return
        leaves = {f"{i:04d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(checkpoint.state))}
        about = {"sha256": fingerprint(leaves), "order": checkpoint.order, "best": checkpoint.best}
        part = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in self._folder.glob(".part-*"):  # by a run that was killed
                shutil.rmtree(left, ignore_errors=True)
            part = pathlib.Path(tempfile.mkdtemp(dir=self._folder, prefix=".part-"))
            with ocp.StandardCheckpointer() as writer:
                writer.save(part / STATE, leaves)
            write_json(part / ABOUT, about)
            part.rename(place)
            sync_folder(self._folder)
        except TrainingError:
            raise
        except Exception as error:  # the writers of arrays have errors of their own for a full disk
            cause = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
            raise TrainingError(f"{place}: cannot be written: {cause}; the checkpoints before it are whole") from None
        finally:
            if part is not None:
                shutil.rmtree(part, ignore_errors=True)
        best = None if checkpoint.best is None else checkpoint.best[0]
        for old in self.steps()[:-KEPT]:
            if old != best:
                shutil.rmtree(self._folder / f"step-{old:08d}", ignore_errors=True)

    def newest(self, like: Any) -> tuple[Checkpoint | None, list[str]]:
        """The newest whole one, and what was wrong with those after it.

        Args:
            like: a state of the same settings, for structure, shapes and dtypes.
        """
        wrong = []
        for step in reversed(self.steps()):
            try:
                return self.load(step, like), wrong
            except TrainingError as error:
                wrong.append(str(error))
        return None, wrong

    def load(self, step: int, like: Any) -> Checkpoint:
        """That of a step.

        Raises:
            TrainingError: it is not there, or damaged, or of other settings.
        """
        import orbax.checkpoint as ocp

        place = self._folder / f"step-{step:08d}"
        leaves, structure = jax.tree.flatten(like)
        wanted = {f"{i:04d}": np.zeros(leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)}
        try:
            about = json.loads((place / ABOUT).read_text())
            with ocp.StandardCheckpointer() as reader:
                found = reader.restore(place / STATE, wanted)
            if fingerprint(found) != about["sha256"]:
                raise ValueError("its bytes are not those that were written")
            best = None if about["best"] is None else tuple(about["best"])
            state = structure.unflatten([found[name] for name in wanted])
            return Checkpoint(state, about["order"], best)
        except Exception as error:  # whatever a damaged file leads to
            raise TrainingError(f"{place}: is damaged: {' '.join(str(error).split())[:200]}") from None
