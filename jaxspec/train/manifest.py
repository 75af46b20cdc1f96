"""Manifests: files that record the settings that the content of a folder was made with, so that no run mixes them.

Answers depend on the settings of answers, features also on those that divide and pack the texts, checkpoints on all
that change the result. A manifest is replaced as long as its folder has no content, and compared from then on.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

from jaxspec.errors import TrainingError
from jaxspec.storage.reading import check_path
from jaxspec.train.files import write_json
from jaxspec.train.settings import Settings

ANSWERS, FEATURES, HELD, CHECKPOINTS = "answers", "features", "held-out", "checkpoints"
HEADS, DRAFT = "heads", "draft"
"""The folders of a run; features are those of the rows to train on, and of the held-out rows. The last is of heads, or
of a draft model."""
LOG = "log.jsonl"
FREE = ("answer_batch", "bad_rows", "max_bad_steps", "save_every", "split")
"""Settings that may change when a run is resumed: no answer, feature or step depends on them, except by the prompts."""
SPLIT = ("distill", "held_out", "row_tokens")
"""Settings that divide texts into rows."""
DATA = {
    "target": "another target, or this one in another dtype",
    "prompts": "other prompts",
    "texts": "other texts",
    "start": "another start",
}
"""The values that are compared by checksum, and the words for a difference."""


def of_answers(settings: Settings) -> dict[str, Any]:
    """Returns the settings that answers depend on."""
    found = {"answer_tokens": settings.answer_tokens, "answer_temperature": settings.answer_temperature}
    return found | ({"seed": settings.seed} if settings.answer_temperature else {})


def of_features(settings: Settings) -> dict[str, Any]:
    """Returns the settings that the division of texts into rows depends on."""
    return {name: getattr(settings, name) for name in SPLIT} | (of_answers(settings) if settings.distill else {})


def of_run(settings: Settings, kind: Any) -> dict[str, Any]:
    """Returns the settings that the result depends on, including those of the kind of heads, but for `start`."""
    every = dataclasses.asdict(kind) | dataclasses.asdict(settings)
    return {name: every[name] for name in every if name not in (*FREE, "start")}


def folder_of(path: str | os.PathLike) -> pathlib.Path:
    """Returns the folder as an absolute path, so that a change of the working directory does not move a run.

    Raises:
        TrainingError: it is not a path, see `jaxspec.storage.reading.check_path`.
    """
    return check_path(path, "the folder of the run", TrainingError).absolute()


def match_run(folder: pathlib.Path, shelf: pathlib.Path, about: dict[str, Any]) -> None:
    """Writes or compares the manifest of a run; it has content as soon as a step was logged or saved.

    Args:
        folder: the folder of the run.
        shelf: the folder of its answers and features.
        about: its settings and the checksums of its data.

    Raises:
        TrainingError, StorageError: see `write_or_match_manifest`.
    """
    log = folder / LOG
    try:
        made = any((folder / name).exists() for name in (HEADS, DRAFT)) or (log.exists() and log.stat().st_size > 0)
        made = made or any("step-" in path.name for path in (folder / CHECKPOINTS).glob("*"))
    except OSError as error:
        raise TrainingError(f"{folder}: cannot be read: {error.strerror}") from None

    def advice(odd: list[str]) -> str:
        other = "go on with those, or name another folder (--out)"
        answers = {"target", "prompts", "answer_tokens", "answer_temperature"}
        if set(odd) & (answers | ({"seed"} if about["answer_temperature"] else set())):
            return other
        if set(odd) & {"texts", *SPLIT}:
            return f"{other}; the answers can be kept: copy {shelf / ANSWERS} into it"
        return f"{other}; the answers and features can be kept (--data {shelf})"

    write_or_match_manifest(folder / "settings.json", about, made, "a run", advice)


def write_or_match_manifest(
    path: pathlib.Path,
    about: dict[str, Any],
    made: bool,
    what: str,
    advice: Callable[[list[str]], str],
    because: dict[str, Any] | None = None,
) -> None:
    """Writes the manifest of a folder without content, and compares that of a folder with content.

    Args:
        path: the file.
        about: the values that the content depends on.
        made: whether the folder has content.
        what: the content, for the error message.
        advice: a function from the names of different values to a suggestion for the user.
        because: settings that explain a difference; if only they differ, the content is the same.

    Raises:
        TrainingError: the content was made with other values, or the file cannot be read.
        StorageError: the file cannot be written.
    """
    because = because or {}
    if not made:
        return write_json(path, about | because)
    try:
        there = json.loads(path.read_text())
        if not isinstance(there, dict):
            raise ValueError(f"expected an object, got {type(there).__name__}")
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise TrainingError(
            f"{path}: cannot be read: {cause}; it holds the settings of what is in this folder: name another one"
        ) from None
    odd = [name for name in about if there.get(name) != about[name]]
    if not odd:
        return None
    odd += [name for name in because if there.get(name) != because[name]]
    now = about | because
    shown = [
        DATA.get(name, f"{name}={there.get(name)!r:.40}, now {now[name]!r:.40}")
        for name in [name for name in odd if name != "texts"] or odd
    ]
    raise TrainingError(f"{path.parent} holds {what} made with {'; '.join(shown)}: {advice(odd)}")
