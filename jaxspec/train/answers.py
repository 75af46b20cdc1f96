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
from jaxspec.errors import InvalidConfig, TrainingError
from jaxspec.models.model import Model
from jaxspec.train.disk import claim, digest_of
from jaxspec.train.settings import Settings
from jaxspec.train.texts import Text

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
        TrainingError: the folder holds other answers, or cannot be written.
    """
    kept = {name: getattr(settings, name) for name in ("answer_tokens", "answer_temperature", "seed")}
    claim(folder / MANIFEST, {"target": target_print, "prompts": digest_of(list(prompts)), **kept}, "answers")
    try:
        found = generate(
            target,
            prompts,
            key=jax.random.key(settings.seed),
            drafter="none",
            sampling=Sampling(temperature=settings.answer_temperature),
            max_new_tokens=settings.answer_tokens,
            batch=settings.answer_batch,
            out=folder / TEXTS,
            progress=progress,
        )
    except InvalidConfig as error:
        raise TrainingError(str(error)) from None
    except OSError as error:
        raise TrainingError(f"{folder / TEXTS}: cannot be written: {error.strerror or error}") from None
    return [
        Text(np.asarray([*prompt, *row.tokens], np.int32), np.arange(len(prompt) + len(row.tokens)) >= len(prompt))
        for prompt, row in zip(prompts, found)
    ]
