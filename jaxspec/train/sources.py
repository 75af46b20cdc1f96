"""Rows together with the target's features of them."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxspec.core.records import Params
from jaxspec.models.model import Model
from jaxspec.train import packing
from jaxspec.train.features import Cached, Reader
from jaxspec.train.files import fingerprint
from jaxspec.train.log import Watch
from jaxspec.train.manifest import of_features
from jaxspec.train.settings import Settings
from jaxspec.train.trainee import Trainee


class Source(NamedTuple):
    """Rows to train or evaluate on.

    Attributes:
        rows: the rows.
        features_of: a function from row numbers to the features of these rows.
    """

    rows: packing.Rows
    features_of: Callable[[np.ndarray], Any]


def computed(reader: Reader, params: Params, rows: packing.Rows) -> Source:
    """Returns rows whose features are computed with the target whenever they are needed."""
    return Source(rows, lambda index: reader(params, rows.tokens[index], rows.segments[index]))


def cached(
    reader: Reader,
    target: Model,
    target_print: str,
    rows: packing.Rows,
    trainee: Trainee,
    settings: Settings,
    folder: pathlib.Path,
    watch: Watch,
) -> Source:
    """Returns rows whose features are on disk, computed first if they are missing.

    Rows of heads that read no context are reduced to the spans that are supervised.
    """
    about = {"target": target_print, "texts": fingerprint(rows._asdict())}
    about |= {"network": dict(trainee.feature_settings) or None}
    if not any(folder.glob("*.npy")):
        size = reader.size(target.params, rows.tokens.size)
        watch.say(f"the features of {rows.tokens.size} tokens take {size / 1e9:.2f} GB in {folder}")
    features = Cached(
        functools.partial(reader, target.params), about, of_features(settings), rows, folder,
        functools.partial(watch.phase, f"reading {folder.name} with the target"),
    )  # fmt: skip
    if trainee.reads_context:
        places = np.arange(rows.tokens.size).reshape(rows.tokens.shape)
    else:
        rows, places = packing.pack_supervised_spans(rows, trainee.drafted)
    return Source(rows, lambda index: features.at(places[index]))
