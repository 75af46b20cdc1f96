"""Self-distillation: the target's own answers are kept on disk as token ids, so that an interrupted job resumes.

A drafter has to predict the text of its target, which a corpus rarely contains.

Several processes divide the prompts: of P files, file i holds the answers to the prompts i, i + P, i + 2 P and so on.
The first run decides the number of files. Other numbers of processes, or one process, continue the same files.
"""

import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.api import generate
from jaxspec.backend.processes import alone, count_processes, process_number, wait_for_all
from jaxspec.core.sampling import Sampling
from jaxspec.errors import InvalidConfig, StorageError, TrainingError
from jaxspec.generation.inputs import row_keys
from jaxspec.models.model import Model
from jaxspec.models.sharding import mesh_of
from jaxspec.storage.writing import reason
from jaxspec.train.files import digest_of
from jaxspec.train.identity import TargetIdentity
from jaxspec.train.manifest import Say, answer_settings, write_or_match_manifest
from jaxspec.train.packing import Text
from jaxspec.train.settings import TrainSettings

ANSWERS_MANIFEST, ANSWERS_FILE = "answers.json", "answers.jsonl"
PART_FILE = re.compile(r"\d{5}-of-(\d{5})\.jsonl")
"""The name of the file of one of several processes."""


def answer_prompts(
    target: Model,
    identity: TargetIdentity,
    prompts: Sequence[list[int]],
    settings: TrainSettings,
    drafted: int,
    folder: pathlib.Path,
    progress: Callable[[int, int], Any] | None = None,
    say: Say = lambda line: None,
) -> list[Text]:
    """Returns every prompt with its answer, in order. Answers on disk are not generated again.

    Args:
        target: the model that answers, on the mesh that its parameters were placed on.
        identity: what a manifest records of the target, so that answers of another target are refused.
        prompts: token ids.
        settings: the settings.
        drafted: number of tokens that are guessed from each position, which limits the length of a prompt.
        folder: the folder of the answers.
        progress: called with (prompts answered, prompts).
        say: called with a line of text.

    Raises:
        TrainingError: the folder holds other answers.
        StorageError: the folder cannot be written.
    """
    about = identity.answer_values | {"prompts": digest_of(list(prompts))} | answer_settings(settings)
    # `row_tokens` and `heads` limit the length of a prompt.
    causes = {"row_tokens": settings.row_tokens, "heads": drafted} | identity.encoding_values
    advice = "use the same values, or another folder (--data, or --out)"

    def open_folder() -> int:
        """Returns the number of files of answers."""
        files = _count_files(folder)
        try:
            if not files:
                for left in folder.glob("*.jsonl*"):  # left by a run that ended before the first answer
                    left.unlink()
        except OSError as error:
            raise StorageError(f"{folder / ANSWERS_FILE} cannot be written: {reason(error, folder)}") from None
        write_or_match_manifest(
            folder / ANSWERS_MANIFEST, about, files > 0, "answers", lambda differing: advice, causes, say
        )
        return files or count_processes()

    count = alone(open_folder)
    files = [folder / (ANSWERS_FILE if count == 1 else f"{i:05d}-of-{count:05d}.jsonl") for i in range(count)]
    sampling = Sampling(temperature=settings.answer_temperature)
    key = jax.random.key(settings.seed if settings.answer_temperature else 0)  # greedy answers use no key
    keys = row_keys(key, len(prompts), 1, sampling)
    answers: list[list[int]] = [[]] * len(prompts)
    for number in range(process_number(), min(count, len(prompts)), count_processes()):
        try:
            output = generate(
                target,
                prompts[number::count],
                key=keys[number::count],
                drafter="none",
                sampling=sampling,
                max_new_tokens=settings.answer_tokens,
                batch=settings.answer_batch,
                mesh=mesh_of(target.params),
                out=files[number],
                progress=progress,
                verbose=False,
            )
        except (InvalidConfig, StorageError) as error:
            raise TrainingError(str(error)) from None
        answers[number::count] = [list(row.tokens) for row in output]
    wait_for_all()
    for number in range(min(count, len(prompts))):
        if number % count_processes() != process_number():
            answers[number::count] = _read_answers(files[number], len(prompts[number::count]))
    return [
        Text(np.asarray([*prompt, *answer], np.int32), np.arange(len(prompt) + len(answer)) >= len(prompt))
        for prompt, answer in zip(prompts, answers)
    ]


def _count_files(folder: pathlib.Path) -> int:
    """Returns the number of files over which the answers of a folder are divided; 0 if it holds no answer."""
    if _has_answer(folder / ANSWERS_FILE):
        return 1
    parts = (PART_FILE.fullmatch(path.name) for path in sorted(folder.glob("*-of-*.jsonl")))
    return next((int(part[1]) for part in parts if part and _has_answer(folder / part[0])), 0)


def _read_answers(path: pathlib.Path, count: int) -> list[list[int]]:
    """Returns the answers that another process has written.

    Raises:
        TrainingError: the file does not hold them.
    """
    try:
        tokens = [json.loads(line)["tokens"] for line in path.read_text().splitlines()]
        if len(tokens) != count:
            raise ValueError(f"{len(tokens)} answers of {count}")
    except (OSError, ValueError, KeyError) as error:
        cause = getattr(error, "strerror", None) or error
        raise TrainingError(
            f"{path}: cannot be read: {cause}; another process has written it, so all hosts must share the folder"
        ) from None
    return tokens


def _has_answer(path: pathlib.Path) -> bool:
    """Returns whether a file holds an answer, and not only the first line that describes its answers."""
    try:
        with path.open("rb") as file:
            return b'"tokens"' in file.readline() or bool(file.readline())
    except FileNotFoundError:
        return False
    except OSError as error:
        raise TrainingError(f"{path}: cannot be read: {error.strerror}") from None
