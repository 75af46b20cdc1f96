"""Self-distillation: the target's own answers, in batches, on disk as token ids with masks; resumed where it stopped.

What a drafter has to guess is what its target writes, which is rarely what a corpus holds.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.api import generate
from jaxspec.core.sampling import Sampling
from jaxspec.errors import TrainingError
from jaxspec.models.model import Model
from jaxspec.train.disk import claim, digest_of, write_whole
from jaxspec.train.settings import Settings
from jaxspec.train.texts import Text

MANIFEST = "answers.json"


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
    kept = {name: getattr(settings, name) for name in ("answer_tokens", "answer_temperature", "answer_batch", "seed")}
    about = {"target": target_print, "prompts": digest_of(list(prompts)), **kept}
    claim(folder / MANIFEST, about, "answers")
    # Prompts of like length go together: a batch reads as long as its longest one takes.
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    batches = [order[at : at + settings.answer_batch] for at in range(0, len(order), settings.answer_batch)]
    longest = max(map(len, prompts)) + settings.answer_tokens
    found: dict[int, Text] = {}
    for number, members in enumerate(batches):
        path = folder / f"{number:05d}.npz"
        if not path.exists():
            new = _answer(target, [prompts[i] for i in members], members, settings, longest)
            write_whole(
                path, lambda file, new=new: np.savez(file, tokens=np.concatenate(new), sizes=list(map(len, new)))
            )
        found |= zip(members, _read(path, [prompts[i] for i in members]))
        if progress:
            progress(len(found), len(prompts))
    return [found[i] for i in range(len(prompts))]


def _answer(
    target: Model, prompts: list[list[int]], members: list[int], settings: Settings, longest: int
) -> list[np.ndarray]:
    # The last batch is filled up, so that it does not compile anew.
    rows = prompts + [prompts[-1]] * (settings.answer_batch - len(prompts))
    ids = members + [members[-1]] * (len(rows) - len(members))
    key = jax.random.key(settings.seed)
    out = generate(
        target,
        rows,
        key=jax.vmap(lambda i: jax.random.fold_in(key, i))(np.asarray(ids)),
        drafter="none",
        sampling=Sampling(temperature=settings.answer_temperature),
        max_new_tokens=settings.answer_tokens,
        capacity=-(-(longest + 128) // 128) * 128,
    )
    return [np.asarray(row.tokens, np.int32) for row in out][: len(prompts)]


def _read(path: pathlib.Path, prompts: list[list[int]]) -> list[Text]:
    try:
        with np.load(path, allow_pickle=False) as file:
            tokens, sizes = file["tokens"], file["sizes"]
        parts = np.split(tokens, np.cumsum(sizes)[:-1])
        if len(parts) != len(prompts) or sum(sizes) != len(tokens):
            raise ValueError(f"{len(parts)} answers, expected {len(prompts)}")
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise TrainingError(f"{path}: is damaged ({error}); remove it, and it will be made again") from None
    return [
        Text(np.concatenate([prompt, answer]).astype(np.int32), np.arange(len(prompt) + len(answer)) >= len(prompt))
        for prompt, answer in zip(prompts, parts)
    ]
