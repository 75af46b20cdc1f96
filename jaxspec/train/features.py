"""The target's features of packed rows: computed when they are needed, or once and kept on disk."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.backend.compilation_cache import keep_compilations
from jaxspec.backend.processes import alone, count_processes, process_number, wait_for_all
from jaxspec.core.mesh import to_host
from jaxspec.core.networks import LanguageModel, empty_feature
from jaxspec.core.records import Params
from jaxspec.errors import TrainingError
from jaxspec.storage.writing import write_whole
from jaxspec.train.manifest import FEATURES_FOLDER, HELD_OUT_FOLDER, Say, write_or_match_manifest
from jaxspec.train.packing import Rows
from jaxspec.train.placement import Placement
from jaxspec.train.step import compute_features

ROWS_PER_FILE = 64
"""Number of rows of each file."""


class FeatureReader:
    """Computes the features of rows, in batches of one size."""

    def __init__(self, lm: LanguageModel, batch: int, placement: Placement | None = None):
        """Takes a network, the number of rows of a batch, and the places of rows and of the target; None for none."""
        self.lm, self.batch, self._placement, self._read = lm, batch, placement, _compiled(lm, placement)

    def size(self, params: Params, tokens: int) -> int:
        """Returns the number of bytes that the features of `tokens` tokens take in float16."""
        return 2 * tokens * empty_feature(self.lm, params, self.lm.init_cache(1, 0)).shape[-1]

    def __call__(self, params: Params, tokens: np.ndarray, segments: np.ndarray) -> Any:
        """Returns features `[B, T, E]`; the last batch is padded, so that only one batch size is compiled."""
        missing = -len(tokens) % self.batch
        padded = [np.pad(a, ((0, missing), (0, 0))) for a in (tokens, segments)]
        parts = []
        for at in range(0, len(padded[0]), self.batch):
            rows = tuple(a[at : at + self.batch] for a in padded)
            if self._placement is not None:
                rows = self._placement.put(rows, self._placement.rows)
            parts.append(self._read(params, *rows))
        whole = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        return whole if len(whole) == len(tokens) else whole[: len(tokens)]


@functools.lru_cache(maxsize=8)
def _compiled(lm: LanguageModel, placement: Placement | None) -> Callable:
    keep_compilations()
    return jax.jit(functools.partial(compute_features, lm, placement=placement))


class CachedFeatures:
    """Features on disk, float16, in files of `ROWS_PER_FILE` rows."""

    def __init__(
        self,
        reader: Callable,
        about: dict[str, Any],
        causes: dict[str, Any],
        rows: Rows,
        folder: pathlib.Path,
        progress: Callable[[int, int], Any],
        say: Say = lambda line: None,
    ):
        """Opens the files, and computes those that are missing.

        Args:
            reader: a function from tokens and segments to features.
            about: the values that the features depend on.
            causes: the settings that explain a difference in these values.
            rows: the rows.
            folder: the folder of the files.
            progress: called with (rows done, rows in all).
            say: called with a line of text.

        Raises:
            TrainingError: the folder holds other features, a file is damaged, or a feature does not fit float16.
            StorageError: a file cannot be written.
        """
        has_content = alone(lambda: any(folder.glob("*.npy")))
        remove = (
            f"remove the folders {FEATURES_FOLDER} and {HELD_OUT_FOLDER} in {folder.parent}. The answers are kept, and "
            "the target reads their texts again"
        )
        change = "use the same values, or another folder (--data, or --out)"

        def advice(differing: list[str]) -> str:
            return change if {"target", "target_network"} & set(differing) else remove

        alone(
            lambda: write_or_match_manifest(
                folder / "features.json", about, has_content, "features", advice, causes, say
            )
        )
        begins = range(0, len(rows.tokens), ROWS_PER_FILE)
        paths = [folder / f"{at // ROWS_PER_FILE:05d}.npy" for at in begins]
        parts = [tuple(a[at : at + ROWS_PER_FILE] for a in (rows.tokens, rows.segments)) for at in begins]
        missing = alone(lambda: [not path.exists() for path in paths])
        for number, path in enumerate(paths):
            if missing[number]:
                self._compute(reader, parts[number], path, number)
            progress(min(begins[number] + ROWS_PER_FILE, len(rows.tokens)), len(rows.tokens))
        wait_for_all()
        self._files = [self._open(path, part[0].shape) for path, part in zip(paths, parts)]

    @staticmethod
    def _compute(reader: Callable, part: tuple, path: pathlib.Path, number: int) -> None:
        """Computes a file with the devices of all processes; one process writes it."""
        with np.errstate(over="ignore"):
            features = reader(*part)
            made = np.asarray(to_host(features), np.float16)
        if not np.isfinite(made).all():
            raise TrainingError("the target's features do not fit into float16; set cache_features to false")
        if number % count_processes() == process_number():
            write_whole(path, lambda file: _save(file, made))

    @staticmethod
    def _open(path: pathlib.Path, shape: tuple[int, ...]) -> np.ndarray:
        """Opens a file of rows of this shape."""
        try:
            file = np.load(path, mmap_mode="r")
            if file.shape[:2] != shape:
                raise ValueError(f"unexpected shape {file.shape}")
        except (OSError, ValueError, EOFError) as error:
            raise TrainingError(f"{path}: is damaged ({error}); remove it to have it computed again") from None
        return file

    def at(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the features `[*b, E]` of the tokens with these numbers `[*b]`: row times T plus position."""
        files = [file.reshape(-1, file.shape[-1]) for file in self._files]
        numbers, offsets = np.divmod(tokens, len(files[0]))
        features = np.empty((*tokens.shape, files[0].shape[-1]), np.float16)
        for number in np.unique(numbers):
            features[numbers == number] = files[number][offsets[numbers == number]]
        return features


def _save(file: Any, array: np.ndarray) -> None:
    """Writes an array in the format of `np.save`, whose error on a full disk does not say that the disk is full."""
    array = np.ascontiguousarray(array)
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(array.data)
