"""Manifests: files that record the settings that the content of a folder was made with, so that no run mixes them.

Answers depend on the settings of answers. Features also depend on the settings that divide and pack the texts.
Checkpoints depend on all settings that change the result. All three depend on the target (`jaxspec.train.identity`). A
manifest is replaced as long as its folder has no content, and compared once the folder has content.

The kind of machine, the versions of JAX and jaxspec, the CPU kernels, the form of attention and the mesh of the target
may change. They change the rounding of sums, and the bits of a run are reproducible only on one machine.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

from jaxspec.errors import TrainingError
from jaxspec.generation.fingerprint import LATER_FIELDS
from jaxspec.storage.reading import check_path
from jaxspec.train.files import write_json
from jaxspec.train.settings import TrainSettings

ANSWERS_FOLDER, FEATURES_FOLDER, HELD_OUT_FOLDER, CHECKPOINTS_FOLDER = "answers", "features", "held-out", "checkpoints"
HEADS_FOLDER, DRAFT_FOLDER = "heads", "draft"
"""The folders of a run. `FEATURES_FOLDER` holds the features of the rows to train on, `HELD_OUT_FOLDER` the features
of the held-out rows. The result is in `HEADS_FOLDER` or `DRAFT_FOLDER`."""
LOG_FILE, SETTINGS_FILE = "log.jsonl", "settings.json"
Say = Callable[[str], Any]
CHANGEABLE_SETTINGS = ("answer_batch", "bad_rows", "max_bad_steps", "mesh", "save_every", "split")
"""Settings that may change when a run is resumed. They affect answers, features and steps only through the prompts."""
ROW_SETTINGS = ("distill", "held_out", "row_tokens")
"""Settings that divide texts into rows."""
CHECKSUM_LABELS = {
    "target": "another target, or this one in another dtype",
    "prompts": "other prompts",
    "texts": "other texts",
    "start": "another start",
    "tokenizer": "another tokenizer",
    "chat_template": "another chat template",
}
"""The values that are compared by checksum, and the description of a difference."""
LATER_LABELS = {
    "target_network": "the sizes and constants of the target",
    "start_network": "the sizes and constants of the start",
    "stop_ids": "the stop tokens of the target",
    "tokenizer": "the tokenizer",
    "chat_template": "the chat template",
}
"""The values that manifests of earlier versions do not hold, and their descriptions."""


def answer_settings(settings: TrainSettings) -> dict[str, Any]:
    """Returns the settings that answers depend on."""
    found = {"answer_tokens": settings.answer_tokens, "answer_temperature": settings.answer_temperature}
    return found | ({"seed": settings.seed} if settings.answer_temperature else {})


def row_settings(settings: TrainSettings) -> dict[str, Any]:
    """Returns the settings that the division of texts into rows depends on."""
    return {name: getattr(settings, name) for name in ROW_SETTINGS} | (
        answer_settings(settings) if settings.distill else {}
    )


def run_settings(settings: TrainSettings) -> dict[str, Any]:
    """Returns the settings that the result depends on, except `start`."""
    return {
        name: value
        for name, value in dataclasses.asdict(settings).items()
        if name not in (*CHANGEABLE_SETTINGS, "start")
    }


def check_folder(path: str | os.PathLike) -> pathlib.Path:
    """Returns the folder as an absolute path, so that a change of the working directory does not move a run.

    Raises:
        TrainingError: it is not a path, see `jaxspec.storage.reading.check_path`.
    """
    return check_path(path, "the folder of the run", TrainingError).absolute()


def match_run(
    folder: pathlib.Path, data_folder: pathlib.Path, about: dict[str, Any], causes: dict[str, Any], say: Say
) -> None:
    """Writes or compares the manifest of a run. A run has content as soon as a step was logged or saved.

    Args:
        folder: the folder of the run.
        data_folder: the folder of the run's answers and features.
        about: the run's settings and the checksums of its data.
        causes: values that explain a difference in `about`.
        say: called with a line of text.

    Raises:
        TrainingError, StorageError: see `write_or_match_manifest`.
    """
    log = folder / LOG_FILE
    try:
        results = [folder / name for name in (HEADS_FOLDER, DRAFT_FOLDER) if (folder / name).exists()]
        has_content = bool(results) or (log.exists() and log.stat().st_size > 0)
        has_content = has_content or any("step-" in path.name for path in (folder / CHECKPOINTS_FOLDER).glob("*"))
    except OSError as error:
        raise TrainingError(f"{folder}: cannot be read: {error.strerror}") from None

    def advice(differing: list[str]) -> str:
        change = "use the same values, or another folder (--out)"
        if results and not {"target", "target_network"} & set(differing):
            change += f"; to continue the training of this result there, add --start {results[0]}"
        answers = {"target", "target_network", "prompts", "answer_tokens", "answer_temperature"}
        if set(differing) & (answers | ({"seed"} if about["answer_temperature"] else set())):
            return change
        if set(differing) & {"texts", *ROW_SETTINGS}:
            return f"{change}; to keep the answers, copy {data_folder / ANSWERS_FOLDER} into it"
        return f"{change}; to keep the answers and features, add --data {data_folder}"

    write_or_match_manifest(folder / SETTINGS_FILE, about, has_content, "a run", advice, causes, say)


def write_or_match_manifest(
    path: pathlib.Path,
    about: dict[str, Any],
    has_content: bool,
    what: str,
    advice: Callable[[list[str]], str],
    causes: dict[str, Any],
    say: Say,
) -> None:
    """Writes the manifest of an empty folder, or compares the manifest of a folder with content.

    A manifest of an earlier version lacks some values (`LATER_LABELS`). They are not compared, and a line says so.

    Args:
        path: the file.
        about: the values that the content depends on, as JSON.
        has_content: whether the folder has content.
        what: the content, for the error message.
        advice: a function from the names of different values to a suggestion for the user.
        causes: values that explain a difference; if only they differ, the content is the same.
        say: called with a line of text.

    Raises:
        TrainingError: the content was made with other values, or the file cannot be read.
        StorageError: the file cannot be written.
    """
    if not has_content:
        return write_json(path, about | causes)
    try:
        recorded = json.loads(path.read_text())
        if not isinstance(recorded, dict):
            raise ValueError(f"expected an object, got {type(recorded).__name__}")
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise TrainingError(
            f"{path}: cannot be read: {cause}. It holds the settings of the files in this folder; use another folder"
        ) from None
    differences, unknown = _compare("", recorded, about)
    if not differences:
        if unknown:
            names = ", ".join(LATER_LABELS.get(name, name) for name in unknown)
            say(f"{path} is from an earlier version of jaxspec and does not record {names}, so they are not compared")
        return None
    differences |= _compare("", recorded, causes)[0]
    reasons = [line for name, line in differences.items() if name != "texts"] or list(differences.values())
    differing = [name.split(".")[0] for name in differences]
    raise TrainingError(f"{path.parent} holds {what} made with {'; '.join(reasons)}: {advice(differing)}")


def _compare(name: str, before: dict[str, Any], now: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Compares the values of a manifest, or of an object in it, with the current values.

    Returns:
        A description of each difference by dotted name, and the names of the values that are not recorded.
    """
    differences: dict[str, str] = {}
    unknown: list[str] = []
    later = set().union(*LATER_FIELDS.values())  # without a description, such a field has its default
    for key in [*now, *(key for key in before if key in later and key not in now)]:
        dotted, old, value = f"{name}{key}", before.get(key), now.get(key)
        if key not in before and key not in later and (name or key in LATER_LABELS):
            unknown.append(dotted)
        elif isinstance(old, dict) and isinstance(value, dict):
            inner, missing = _compare(f"{dotted}.", old, value)
            differences |= inner
            unknown += missing
        elif old != value:
            differences[dotted] = CHECKSUM_LABELS.get(dotted) or f"{dotted}={old!r:.40}, now {value!r:.40}"
    return differences, unknown
