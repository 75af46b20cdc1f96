"""Self-distillation: the target's own answers are kept on disk as token ids, so that an interrupted job resumes.

A drafter has to predict the text of its target, which a corpus rarely contains.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.api import generate
from jaxspec.core.sampling import Sampling
from jaxspec.errors import InvalidConfig, StorageError, TrainingError
from jaxspec.models.model import Model
from jaxspec.models.sharding import mesh_of
from jaxspec.storage.writing import reason
from jaxspec.train.files import digest_of
from jaxspec.train.identity import TargetIdentity
from jaxspec.train.manifest import Say, answer_settings, write_or_match_manifest
from jaxspec.train.packing import Text
from jaxspec.train.settings import TrainSettings

ANSWERS_MANIFEST, ANSWERS_FILE = "answers.json", "answers.jsonl"


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
    has_content = _has_answer(folder / ANSWERS_FILE)
    advice = "use the same values, or another folder (--data, or --out)"
    try:
        if not has_content:
            for left in folder.glob(f"*{ANSWERS_FILE}*"):  # left by a run that ended before the first answer
                left.unlink()
    except OSError as error:
        raise StorageError(f"{folder / ANSWERS_FILE} cannot be written: {reason(error, folder)}") from None
    write_or_match_manifest(
        folder / ANSWERS_MANIFEST, about, has_content, "answers", lambda differing: advice, causes, say
    )
    try:
        output = generate(
            target,
            prompts,
            key=jax.random.key(settings.seed if settings.answer_temperature else 0),  # greedy answers use no key
            drafter="none",
            sampling=Sampling(temperature=settings.answer_temperature),
            max_new_tokens=settings.answer_tokens,
            batch=settings.answer_batch,
            mesh=mesh_of(target.params),
            out=folder / ANSWERS_FILE,
            progress=progress,
            verbose=False,
        )
    except (InvalidConfig, StorageError) as error:
        raise TrainingError(str(error)) from None
    return [
        Text(np.asarray([*prompt, *row.tokens], np.int32), np.arange(len(prompt) + len(row.tokens)) >= len(prompt))
        for prompt, row in zip(prompts, output)
    ]


def _has_answer(path: pathlib.Path) -> bool:
    """Returns whether a file holds an answer, and not only the first line that describes its answers."""
    try:
        with path.open("rb") as file:
            return b'"tokens"' in file.readline() or bool(file.readline())
    except FileNotFoundError:
        return False
    except OSError as error:
        raise TrainingError(f"{path}: cannot be read: {error.strerror}") from None
