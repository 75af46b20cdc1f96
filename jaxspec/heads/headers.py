"""Opens draft heads in files of any layout: the headers are checked, and no weight is read."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxspec.checkpoints import folder, torch_file
from jaxspec.checkpoints.base import check_names, check_shape
from jaxspec.checkpoints.folder import LazyTensor
from jaxspec.core.topology import read_parents
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.heads.config import HeadsConfig
from jaxspec.heads.dflash_config import DFlashConfig
from jaxspec.heads.dflash_files import open_dflash, parse_dflash
from jaxspec.heads.dflash_layouts import DFlashLayout
from jaxspec.heads.eagle_config import EagleConfig
from jaxspec.heads.eagle_files import open_eagle, parse_eagle
from jaxspec.heads.eagle_layouts import EagleLayout
from jaxspec.heads.find import MANIFEST, OURS, TENSORS, find_heads
from jaxspec.heads.head_file import HeadFile, finite_reader
from jaxspec.heads.layouts import CONFIG, FILES, PICKLES, TORCH, Layout, is_transposed, recognise
from jaxspec.heads.sizes import IDS, find_rows, infer_sizes, read_tokens
from jaxspec.storage.reading import check_path

VERSION = 1
"""The version of jaxspec's own layout."""
WHOLE_MODEL = (
    "the heads are part of a model that was trained with them: they draft for that model, and the text is that "
    "model's, not that of the model from which its training started"
)


def open_heads(
    source: str | os.PathLike, *, allow_pickle: bool = False, report: Callable[[str], object] | None = None
) -> HeadFile:
    """Finds heads and checks their headers; arguments and errors are those of `load_heads`."""
    path = check_path(find_heads(source, allow_pickle=allow_pickle, report=report))
    if (path / MANIFEST).exists():
        return _open_ours(path)
    directory, name = (path, _file(path)) if path.is_dir() else (path.parent, path.name)
    where = str(directory / name)
    tensors = _open_tensors(directory, name, allow_pickle)
    layout = recognise(tensors)
    if layout is None:
        shown = ", ".join(sorted(tensors)[:3])
        raise CheckpointError(f"{where}: no tensors of draft heads in a known layout; it has {shown} ...")
    settings = folder.read_json(directory, CONFIG) or {}
    if isinstance(layout, EagleLayout):
        return open_eagle(path, where, layout, tensors, settings)
    if isinstance(layout, DFlashLayout):
        return open_dflash(path, where, layout, tensors, settings)
    return _open_theirs(path, where, layout, tensors, settings)


def _file(directory: pathlib.Path) -> str:
    """Returns the name of the file in a directory that holds the heads."""
    for name in FILES:
        if os.path.exists(directory / name):
            return name
    if any(os.path.exists(directory / name) for name in (folder.WHOLE, folder.INDEX)):
        return folder.WHOLE
    if not os.path.exists(directory / TORCH):
        raise CheckpointError(
            f"{directory}: holds no heads; expected {MANIFEST}, {FILES[0]}, {FILES[1]} or {folder.WHOLE}"
        )
    return TORCH


def _open_tensors(directory: pathlib.Path, name: str, allow_pickle: bool) -> dict[str, LazyTensor]:
    """Opens a file of tensors in any format, and the shards of `model.safetensors`."""
    where = str(directory / name)
    if pathlib.Path(name).suffix in PICKLES:
        if not allow_pickle:
            raise CheckpointError(
                f"{where}: is a pickle, as torch.save writes; allow_pickle=True (--allow-pickle) reads its tensors, "
                "and executes nothing in it"
            )
        path = folder.inside(directory, name)
        assert path is not None
        return torch_file.open_torch(path)
    if pathlib.Path(name).suffix != ".safetensors":
        raise CheckpointError(f"{where}: holds no heads; expected a directory, a .safetensors or a .pt file")
    if name == folder.WHOLE and not os.path.exists(directory / name):
        return folder.open_tensors(directory)
    return folder.open_shard(directory, name)


def _open_ours(path: pathlib.Path) -> HeadFile:
    where = path / MANIFEST
    manifest = folder.read_json(path, MANIFEST) or {}
    if manifest.get("format") != "jaxspec-heads" or manifest.get("version") != VERSION:
        raise CheckpointError(f"{where}: expected format jaxspec-heads, version {VERSION}")
    kind = manifest.get("kind", HeadsConfig.drafter)
    parsers = {HeadsConfig.drafter: _parse_medusa, EagleConfig.drafter: parse_eagle, DFlashConfig.drafter: parse_dflash}
    if not isinstance(kind, str) or kind not in parsers:
        raise CheckpointError(f"{where}: kind is {kind!r:.80}, expected one of {', '.join(parsers)}")
    if "tree" not in manifest:
        raise CheckpointError(f"{where}: tree is missing, expected a list of parents or null")
    try:
        config = parsers[kind](str(where), manifest.get("config"))
        tree = None if manifest["tree"] is None else read_parents(manifest["tree"])
    except InvalidConfig as error:
        raise CheckpointError(f"{where}: {error}") from None
    tensors = folder.open_shard(path, TENSORS)
    if config.num_blocks > max(len(tensors), 64):  # before work for each block begins
        raise CheckpointError(f"{where}: {config.summary}, and only {len(tensors)} tensors")
    _check(str(path / TENSORS), config.param_shapes(), tensors, "tokens")
    if (
        config.draft_vocab_size is not None
        and (np.diff(read_tokens("tokens", tensors["tokens"], config.vocab_size)) < 0).any()
    ):
        raise CheckpointError(f"{path / TENSORS}: tensor tokens is not ascending")
    readers = {name: finite_reader(name, tensors[name]) for name in config.param_shapes()}
    stored = {name: held.stored for name, held in tensors.items()}
    return HeadFile(path, OURS, dict(vars(config)), readers, stored, manifest, tree, (), type(config))


def _parse_medusa(where: str, sizes: Any) -> HeadsConfig:
    """Makes a `HeadsConfig` from the JSON of its fields."""
    known = {field.name for field in dataclasses.fields(HeadsConfig)}
    if not isinstance(sizes, dict) or not {"hidden_size", "vocab_size"} <= sizes.keys() <= known:
        raise CheckpointError(
            f"{where}: config is {sizes!r:.80}, expected an object with hidden_size, vocab_size and no "
            f"keys but {', '.join(sorted(known))}"
        )
    return HeadsConfig(**sizes)


def _open_theirs(
    path: pathlib.Path, where: str, layout: Layout, tensors: Mapping[str, LazyTensor], settings: Mapping[str, Any]
) -> HeadFile:
    if layout.in_model:
        tensors = {name: held for name, held in tensors.items() if name.startswith(layout.prefix)}
    stored = {name: held.stored for name, held in tensors.items()}
    try:
        sizes = infer_sizes(layout, where, stored, settings)
        if layout.num_layers not in (None, sizes["num_layers"]):
            raise CheckpointError(
                f"{where}: heads that share the target's projection have one block each in this layout; these have "
                f"{sizes['num_layers']}; are projections such as 0.{sizes['num_layers']}.weight missing?"
            )
        vocab, rows = find_rows(layout, tensors, sizes.pop("rows"), settings)
        if rows.tokens is not None:
            sizes["draft_vocab_size"] = len(rows.tokens)
        # No shape depends on a vocabulary that neither tensors nor settings state: any can be used to check them.
        config = HeadsConfig(vocab_size=vocab or max(rows.stored, 1), **sizes)
    except InvalidConfig as error:
        raise CheckpointError(f"{where}: {error}") from None
    shapes = config.param_shapes()
    names = {ours: layout.tensor(config, ours) for ours in shapes}
    if rows.tokens is not None and layout.tokens not in tensors:
        del names["tokens"]
    if config.projection == "single" and names["projections.0"] not in tensors:
        first = layout.tensor(dataclasses.replace(config, projection="own"), "projections.0")  # vLLM reads it, too
        names["projections.0"] = first if first in tensors else names["projections.0"]
    expected = {}
    for ours, theirs in names.items():
        shape = (rows.stored, config.hidden_size) if ours.startswith("projections") else shapes[ours]
        expected[theirs] = shape[::-1] if is_transposed(ours) else shape
    _check(where, expected, tensors, layout.tokens)

    def reader(ours: str) -> Callable[[], np.ndarray]:
        if ours == "tokens":
            return lambda: np.asarray(rows.tokens, np.int32)
        read = finite_reader(names[ours], tensors[names[ours]])
        if is_transposed(ours):
            return lambda: np.ascontiguousarray(read().T)
        selected = rows.selected if ours.startswith("projections") else None
        return read if selected is None else lambda: read()[selected]

    comparable, kept = dict(settings), dataclasses.asdict(config)
    if not vocab:
        comparable.pop("vocab_size", None)
        del kept["vocab_size"]
    notes = [*layout.differences(comparable, config), *([WHOLE_MODEL] if layout.in_model else [])]
    readers = {ours: reader(ours) for ours in shapes}
    return HeadFile(path, layout.name, kept, readers, stored, settings, None, tuple(notes))


def _check(
    where: str, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, LazyTensor], tokens: str | None
) -> None:
    """Refuses the file unless it has exactly these tensors, each of its shape and of a type that is read."""
    check_names(where, shapes, tensors)
    for name, shape in shapes.items():
        check_shape(tensors[name].where, name, tensors[name].stored.shape, shape)
        folder.check_types({name: tensors[name]}, IDS if name == tokens else folder.FLOATS)
