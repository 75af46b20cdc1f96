"""Opens DFlash and DSpark heads in files of other systems: headers are checked, and only token ids are read."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.checkpoints.base import canonical_tensors, check_finite, parse_config
from jaxspec.checkpoints.folder import LazyTensor, check_types
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.heads.dflash_config import DFlashConfig
from jaxspec.heads.dflash_layouts import NAMES, DFlashLayout, layout_of, mix_names
from jaxspec.heads.dflash_sizes import SizeReader
from jaxspec.heads.head_file import HeadFile
from jaxspec.heads.reduced_vocab import MEMBERS, OFFSETS, read_ids

_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq|verifier_(norm|lm_head)\.weight", re.DOTALL)
"""Rotary frequencies, which follow from rope_theta, and copies of the target's tensors that only training reads."""
_KNOWN = re.compile(
    "|".join(
        re.escape(name).replace(r"\{\}", r"\d{1,4}")
        for names in (*NAMES.values(), *mix_names("gated").values(), *mix_names("rnn").values(), (MEMBERS, OFFSETS))
        for name in names
    )
)


def open_dflash(
    path: pathlib.Path, where: str, layout: DFlashLayout, tensors: Mapping[str, LazyTensor], settings: Mapping[str, Any]
) -> HeadFile:
    """Checks the headers of a file of a DFlash or DSpark head.

    Args:
        path: the file or directory, as the user named it.
        where: the file, for messages.
        layout: any layout of such heads, with the prefix of the file's names.
        tensors: its tensors.
        settings: the content of config.json, which tells the layouts apart.

    Raises:
        CheckpointError: a tensor is missing, not understood, or of the wrong type or shape, or sizes are missing.
    """
    layout = dataclasses.replace(layout_of(settings), prefix=layout.prefix)
    stored = {name: held.stored for name, held in tensors.items()}
    plain = {name.removeprefix(layout.prefix): held for name, held in tensors.items()}
    plain = {name: held for name, held in plain.items() if not _IGNORED.fullmatch(name)}
    if unknown := sorted(name for name in plain if not _KNOWN.fullmatch(name)):
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise CheckpointError(
            f"{where}: this DFlash head has tensors that are not understood, without which it drafts badly: "
            f"{', '.join(unknown[:3])}{more}"
        )
    kept = {name: held for name, held in plain.items() if name not in (OFFSETS, MEMBERS)}
    check_types(kept)
    shapes = {name: held.stored.shape for name, held in kept.items()}
    reader = SizeReader(where, layout, shapes, settings)
    vocab = next(iter(shapes.get("embed_tokens.weight", ())), None) or reader.vocab
    vocab, ids = read_ids(where, plain, vocab, next(iter(shapes.get("lm_head.weight", ())), None))
    config = reader.read(vocab, None if ids is None else len(ids))

    def read(name: str) -> np.ndarray:
        return check_finite(kept[name].where, name, kept[name].read())

    parameters = {name: shape for name, shape in config.param_shapes().items() if name != "tokens"}
    readers = canonical_tensors(where, config.decoder, layout.names_for(config), shapes, read, parameters)
    if ids is not None:
        readers["tokens"] = lambda: ids
    sizes, notes = dict(vars(config)), tuple(reader.notes)
    return HeadFile(path, layout.name, sizes, readers, stored, settings, None, notes, DFlashConfig)


def parse_dflash(where: str, sizes: Any) -> DFlashConfig:
    """Makes a `DFlashConfig` from the JSON of its fields.

    Raises:
        CheckpointError: a field is missing, unknown, or invalid.
    """
    known = {field.name for field in dataclasses.fields(DFlashConfig)}
    required = {"decoder", "block_size", "mask_token"}
    if not isinstance(sizes, dict) or not required <= sizes.keys() <= known:
        raise CheckpointError(
            f"{where}: config is {sizes!r:.80}, expected an object with {', '.join(sorted(required))} and no keys but "
            f"{', '.join(sorted(known))}"
        )
    read: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in sizes.items()}
    try:
        read["decoder"] = parse_config(where, sizes["decoder"])
        return DFlashConfig(**read)
    except InvalidConfig as error:
        raise CheckpointError(f"{where}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{where}: config is not valid: {type(error).__name__}: {error}") from None
