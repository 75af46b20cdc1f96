"""Opens EAGLE heads in files of other systems: the headers are checked, and of the weights only token ids are read."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.checkpoints.base import canonical_tensors, check_finite, parse_config
from jaxspec.checkpoints.folder import LazyTensor, check_types
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.heads.eagle_config import EagleConfig
from jaxspec.heads.eagle_layouts import EagleLayout
from jaxspec.heads.eagle_sizes import SizeReader
from jaxspec.heads.head_file import HeadFile
from jaxspec.heads.reduced_vocab import MEMBERS, OFFSETS, read_ids

_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq", re.DOTALL)
"""Rotary frequencies in some old files, which follow from rope_theta."""


def open_eagle(
    path: pathlib.Path, where: str, layout: EagleLayout, tensors: Mapping[str, LazyTensor], settings: Mapping[str, Any]
) -> HeadFile:
    """Checks the headers of a file of EAGLE heads.

    Args:
        path: the file or directory, as the user named it.
        where: the file, for messages.
        layout: its layout, with the prefix of its names.
        tensors: its tensors.
        settings: the content of config.json.

    Raises:
        CheckpointError: a tensor is missing, not expected, or of the wrong type or shape, or sizes are missing.
    """
    stored = {name: held.stored for name, held in tensors.items()}
    plain = {name.removeprefix(layout.prefix): held for name, held in tensors.items() if not _IGNORED.fullmatch(name)}
    maps = {OFFSETS, MEMBERS} if layout.version == 3 else set()
    kept = {name: held for name, held in plain.items() if name not in maps}
    check_types(kept)
    shapes = {name: held.stored.shape for name, held in kept.items()}
    reader, ids = SizeReader(where, layout, shapes, settings), None
    vocab = next(iter(shapes.get("embed_tokens.weight", ())), None)
    if maps:
        rows = next(iter(shapes.get("lm_head.weight", ())), None)
        vocab, ids = read_ids(where, plain, vocab or reader.vocab, rows)
    config = reader.read(vocab, None if ids is None else len(ids))

    def read(name: str) -> np.ndarray:
        return check_finite(kept[name].where, name, kept[name].read())

    parameters = {name: shape for name, shape in config.param_shapes().items() if name != "tokens"}
    names = layout.names_for(config)
    readers = canonical_tensors(where, config.decoder, names, shapes, read, parameters)
    if ids is not None:
        readers["tokens"] = lambda: ids
    notes = tuple(reader.notes)
    return HeadFile(path, layout.name, dict(vars(config)), readers, stored, settings, None, notes, EagleConfig)


def parse_eagle(where: str, sizes: Any) -> EagleConfig:
    """Makes an `EagleConfig` from the JSON of its fields.

    Raises:
        CheckpointError: a field is missing, unknown, or invalid.
    """
    known = {field.name for field in dataclasses.fields(EagleConfig)}
    if not isinstance(sizes, dict) or not {"decoder"} <= sizes.keys() <= known:
        raise CheckpointError(
            f"{where}: config is {sizes!r:.80}, expected an object with decoder and no keys but "
            f"{', '.join(sorted(known))}"
        )
    taps = sizes.get("taps")
    try:
        decoder = parse_config(where, sizes["decoder"])
        return EagleConfig(**sizes | {"decoder": decoder, "taps": tuple(taps) if isinstance(taps, list) else taps})
    except InvalidConfig as error:
        raise CheckpointError(f"{where}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{where}: config is not valid: {type(error).__name__}: {error}") from None
