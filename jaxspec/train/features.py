"""The target's features of packed rows: computed on the fly, or once for all on disk."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxspec.backend.compilation_cache import keep_compilations
from jaxspec.core.networks import LanguageModel
from jaxspec.core.records import Params
from jaxspec.errors import TrainingError
from jaxspec.storage.writing import write_whole
from jaxspec.train.files import fingerprint
from jaxspec.train.manifest import FEATURES, HELD, of_features, write_or_match_manifest
from jaxspec.train.packing import Rows
from jaxspec.train.settings import Settings
from jaxspec.train.step import read

SHARD = 64
"""Rows of a file."""


class Reader:
    """Reads rows with the target, in batches of one size."""

    def __init__(self, lm: LanguageModel, batch: int):
        self.batch, self._read = batch, _compiled(lm)

    def __call__(self, params: Params, tokens: np.ndarray, segments: np.ndarray) -> Any:
        """`[B, T, E]`; fewer rows than a batch are padded, so that they compile nothing."""
        missing = -len(tokens) % self.batch
        padded = [np.pad(a, ((0, missing), (0, 0))) for a in (tokens, segments)]
        parts = [
            self._read(params, *(a[at : at + self.batch] for a in padded))
            for at in range(0, len(padded[0]), self.batch)
        ]
        return (
            parts[0][: len(tokens)] if len(parts) == 1 else np.concatenate(list(map(np.asarray, parts)))[: len(tokens)]
        )


@functools.lru_cache(maxsize=8)
def _compiled(lm: LanguageModel) -> Callable:
    keep_compilations()
    return jax.jit(functools.partial(read, lm))


class Cached:
    """Features on disk, float16, in files of `SHARD` rows; missing ones are made, damaged ones are refused."""

    def __init__(
        self,
        reader: Callable,
        target_print: str,
        rows: Rows,
        settings: Settings,
        folder: pathlib.Path,
        progress: Callable[[int, int], Any] | None = None,
    ):
        about = {"target": target_print, "texts": fingerprint(rows._asdict())}
        made, again = any(folder.glob("*.npy")), "the answers can be kept, and the target reads their texts again"
        advice = f"remove the folders {FEATURES} and {HELD} in {folder.parent}; {again}"
        write_or_match_manifest(
            folder / "features.json", about, made, "features", lambda odd: advice, of_features(settings)
        )
        self._files: list[np.ndarray] = []
        for at in range(0, len(rows.tokens), SHARD):
            path = folder / f"{at // SHARD:05d}.npy"
            part = rows.tokens[at : at + SHARD], rows.segments[at : at + SHARD]
            if not path.exists():
                with np.errstate(over="ignore"):
                    made = np.asarray(reader(*part), np.float16)
                if not np.isfinite(made).all():
                    raise TrainingError("the target's features do not fit float16; set cache_features to false")
                write_whole(path, lambda file, made=made: np.save(file, made))
            try:
                self._files.append(np.load(path, mmap_mode="r"))
                if self._files[-1].shape[:2] != part[0].shape:
                    raise ValueError(f"shape {self._files[-1].shape}")
            except (OSError, ValueError, EOFError) as error:
                raise TrainingError(f"{path}: is damaged ({error}); remove it, and it will be made again") from None
            if progress:
                progress(min(at + SHARD, len(rows.tokens)), len(rows.tokens))

    def at(self, places: np.ndarray) -> np.ndarray:
        """The features `[*b, E]` of tokens at places `[*b]`: row times T plus place in the row."""
        files = [file.reshape(-1, file.shape[-1]) for file in self._files]
        which, where = np.divmod(places, len(files[0]))
        found = np.empty((*places.shape, files[0].shape[-1]), np.float16)
        for file in np.unique(which):
            found[which == file] = files[file][where[which == file]]
        return found
