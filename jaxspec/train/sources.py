"""Rows with the features that the target computes for them, and the order in which a run reads the rows."""

import functools
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxspec.amounts import plural, size
from jaxspec.backend.processes import alone
from jaxspec.core.mesh import to_host
from jaxspec.core.records import Params
from jaxspec.errors import MissingPackage
from jaxspec.models.model import Model
from jaxspec.train import packing
from jaxspec.train.batch import Batch
from jaxspec.train.features import CachedFeatures, FeatureReader
from jaxspec.train.files import fingerprint
from jaxspec.train.identity import TargetIdentity
from jaxspec.train.log import Watch
from jaxspec.train.manifest import row_settings
from jaxspec.train.placement import Placement
from jaxspec.train.settings import TrainSettings
from jaxspec.train.trainee import Trainee

MAX_DISK_SHARE = 0.5
"""The largest share of the free disk that features take."""


class Source(NamedTuple):
    """Rows to train or evaluate on.

    Attributes:
        rows: the rows.
        features_of: a function from row numbers to the features of these rows.
    """

    rows: packing.Rows
    features_of: Callable[[np.ndarray], Any]

    def batches(self, size: int, placement: Placement | None = None) -> Iterator[Batch]:
        """Yields all rows in order, in batches of one size; the last one is padded. `placement` splits the rows."""
        for at in range(0, len(self.rows.tokens), size):
            index = np.arange(at, min(at + size, len(self.rows.tokens)))
            features = self.features_of(index)
            part = [*(a[index] for a in self.rows), to_host(features)]
            padded: Any = [np.pad(a, ((0, size - len(index)), *[(0, 0)] * (a.ndim - 1))) for a in part]
            if placement is None:
                yield Batch(*map(jnp.asarray, padded))
            else:
                yield placement.put(Batch(*padded), placement.rows)


def compute_features_on_demand(reader: FeatureReader, params: Params, rows: packing.Rows) -> Source:
    """Returns rows whose features are computed with the target whenever they are needed."""
    return Source(rows, lambda index: reader(params, rows.tokens[index], rows.segments[index]))


def suit_disk(reader: FeatureReader, params: Params, rows: packing.Rows, folder: pathlib.Path, watch: Watch) -> bool:
    """Returns whether the features of rows are in a folder already, or leave enough of its disk free."""
    if any(folder.glob("*.npy")):
        return True
    needed = reader.size(params, rows.tokens.size)
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed <= MAX_DISK_SHARE * free:
        return True
    watch.say(
        f"the features of {plural(rows.tokens.size, 'token')} would take {size(needed)} in {folder}, where "
        f"{size(free)} are free, so the target computes them in every step"
    )
    return False


def omit_features(rows: packing.Rows) -> Source:
    """Returns rows for a trainee that reads no features. The features of these rows have the width 0."""
    return Source(rows, lambda index: np.zeros((len(index), rows.tokens.shape[1], 0), np.float32))


def cache_features(
    reader: FeatureReader,
    target: Model,
    identity: TargetIdentity,
    rows: packing.Rows,
    trainee: Trainee,
    settings: TrainSettings,
    folder: pathlib.Path,
    watch: Watch,
) -> Source:
    """Returns rows whose features are on disk, computed first if they are missing.

    Rows of heads that read no context are reduced to the spans that are supervised.
    """
    about = identity.feature_values | {"texts": fingerprint(rows._asdict())}
    about |= {"network": dict(trainee.feature_settings) or None}
    if not alone(lambda: any(folder.glob("*.npy"))):
        num_bytes = reader.size(target.params, rows.tokens.size)
        watch.say(f"the features of {plural(rows.tokens.size, 'token')} take {size(num_bytes)} in {folder}")
    features = CachedFeatures(
        functools.partial(reader, target.params), about, row_settings(settings), rows, folder,
        functools.partial(watch.phase, f"reading {folder.name} with the target"), watch.say,
    )  # fmt: skip
    if trainee.reads_context:
        origins = np.arange(rows.tokens.size).reshape(rows.tokens.shape)
    else:
        rows, origins = packing.pack_supervised_spans(rows, trainee.drafted)
    return Source(rows, lambda index: features.at(origins[index]))


def import_grain() -> Any:
    """Imports grain.

    Raises:
        MissingPackage: grain cannot be imported.
    """
    try:
        import grain
    except ImportError as error:
        raise MissingPackage(
            f"training needs the package grain, which cannot be imported here ({error}); run `pip install grain`"
        ) from None
    return grain


def make_order(rows: int, settings: TrainSettings) -> Any:
    """Returns an endless iterator over batches of row numbers, shuffled in every epoch.

    `get_state` reads the position of the iterator and `set_state` sets it, so that a checkpoint can hold it.
    """
    source = import_grain().MapDataset.source(range(rows)).seed(settings.seed).shuffle().repeat()
    return iter(source.batch(settings.batch, drop_remainder=True).to_iter_dataset())
