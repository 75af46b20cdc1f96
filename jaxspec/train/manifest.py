"""What a folder is bound by: what was really made in it, and the settings that made that.

Answers are bound by the settings of answers, features also by those that divide and pack the texts, checkpoints by
all that decide what is learnt. Each says so in a file beside it, which is written anew as long as nothing is there.
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

ANSWERS, FEATURES, HELD, CHECKPOINTS, HEADS = "answers", "features", "held-out", "checkpoints", "heads"
"""The folders of a run; features are of what is learnt from, and of what is held out."""
LOG = "log.jsonl"
FREE = ("answer_batch", "bad_rows", "max_bad_steps", "save_every", "split")
"""What may change from one call to the next: no answer, feature or step depends on it, but by the prompts."""
SPLIT = ("distill", "held_out", "row_tokens")
DATA = {"target": "another target, or this one in another dtype", "prompts": "other prompts", "texts": "other texts"}
"""What is compared by checksum, and how a difference is said."""


def of_answers(settings: Settings) -> dict[str, Any]:
    """The settings that answers depend on."""
    found = {"answer_tokens": settings.answer_tokens, "answer_temperature": settings.answer_temperature}
    return found | ({"seed": settings.seed} if settings.answer_temperature else {})


def of_features(settings: Settings) -> dict[str, Any]:
    """The settings that divide texts into rows, learnt from or held out."""
    return {name: getattr(settings, name) for name in SPLIT} | (of_answers(settings) if settings.distill else {})


def of_run(settings: Settings) -> dict[str, Any]:
    """The settings that decide what is learnt."""
    every = dataclasses.asdict(settings)
    return {name: every[name] for name in every if name not in FREE}


def folder_of(path: str | os.PathLike) -> pathlib.Path:
    """The folder as an absolute path: a run stays where it is when the working directory changes.

    Raises:
        TrainingError: it is no path, as `jaxspec.storage.reading.check_path`.
    """
    return check_path(path, "the folder of the run", TrainingError).absolute()


def match_run(folder: pathlib.Path, shelf: pathlib.Path, about: dict[str, Any]) -> None:
    """Binds the folder of a run, as `write_or_match_manifest`, once something was learnt in it.

    Args:
        folder: of the run.
        shelf: where its answers and features are.
        about: its settings, and what it learns from.
    """
    log = folder / LOG
    try:
        made = (folder / HEADS).exists() or (log.exists() and log.stat().st_size > 0)
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
    """Writes down what a folder's content is made with; what is there already must have been made with the same.

    Args:
        path: the file that says so.
        about: what it is made with.
        made: whether there is any content.
        what: the content, for the error.
        advice: from the names of what differs to what a user can do.
        because: settings that explain a difference, though equal content may come of different ones.

    Raises:
        TrainingError: it was made with something else; or the file cannot be read.
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
