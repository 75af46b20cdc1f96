"""Self-distillation: the target's own answers, in batches, on disk as token ids; resumed where it stopped.

What a drafter has to guess is what its target writes, which is rarely what a corpus holds.
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
from jaxspec.storage.writing import reason
from jaxspec.train.files import digest_of
from jaxspec.train.manifest import of_answers, write_or_match_manifest
from jaxspec.train.packing import Text
from jaxspec.train.settings import Settings

MANIFEST, TEXTS = "answers.json", "answers.jsonl"


def answers(
    target: Model,
    target_print: str,
    prompts: Sequence[list[int]],
    settings: Settings,
    folder: pathlib.Path,
    progress: Callable[[int, int], Any] | None = None,
) -> list[Text]:
    """Every prompt with its answer, in the prompts' order; what is on disk already is not answered again.

    Args:
        target: who answers.
        target_print: its fingerprint, so that no other target's answers are taken for its own.
        prompts: token ids.
        settings: those of the answers.
        folder: where they are kept.
        progress: called with (prompts answered, prompts).

    Raises:
        TrainingError: the folder holds other answers.
        StorageError: the folder cannot be written.
    """
    about = {"target": target_print, "prompts": digest_of(list(prompts)), **of_answers(settings)}
    because = {"row_tokens": settings.row_tokens, "heads": settings.heads}  # which prompts are short enough
    made = _any_answer(folder / TEXTS)
    advice = "go on with what made them, or name another folder (--data, or --out)"
    try:
        if not made:
            for left in folder.glob(f"*{TEXTS}*"):  # of a run that ended before the first answer
                left.unlink()
    except OSError as error:
        raise StorageError(f"{folder / TEXTS} cannot be written: {reason(error, folder)}") from None
    write_or_match_manifest(folder / MANIFEST, about, made, "answers", lambda odd: advice, because)
    try:
        found = generate(
            target,
            prompts,
            key=jax.random.key(settings.seed if settings.answer_temperature else 0),  # greedy answers use none
            drafter="none",
            sampling=Sampling(temperature=settings.answer_temperature),
            max_new_tokens=settings.answer_tokens,
            batch=settings.answer_batch,
            out=folder / TEXTS,
            progress=progress,
            verbose=False,
        )
    except (InvalidConfig, StorageError) as error:
        raise TrainingError(str(error)) from None
    return [
        Text(np.asarray([*prompt, *row.tokens], np.int32), np.arange(len(prompt) + len(row.tokens)) >= len(prompt))
        for prompt, row in zip(prompts, found)
    ]


def _any_answer(path: pathlib.Path) -> bool:
    """Whether a file holds more than the line that says what its answers are of."""
    try:
        with path.open("rb") as file:
            return b'"tokens"' in file.readline() or bool(file.readline())
    except FileNotFoundError:
        return False
    except OSError as error:
        raise TrainingError(f"{path}: cannot be read: {error.strerror}") from None
