"""Opens draft heads in files of any layout: headers are checked, no weight is read."""

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxspec.checkpoints import folder, torch_file
from jaxspec.checkpoints.base import StoredTensor, check_shape, finite, refuse_difference
from jaxspec.checkpoints.folder import HeldTensor
from jaxspec.checkpoints.presets import PRESETS, SHIPPED
from jaxspec.checkpoints.source import find_source
from jaxspec.core.tree import Topology, read_parents
from jaxspec.errors import CheckpointError, InvalidConfig, ShapeMismatch
from jaxspec.heads.layouts import FILES, FIRST, MANIFEST, PICKLES, Layout, recognise
from jaxspec.heads.network import (
    HeadsConfig,
    check_target,
    vocabulary,
)
from jaxspec.storage.reading import check_path

TENSORS, VERSION, OURS = "heads.safetensors", 1, "jaxspec"


_IDS = ("I64", "I32")


WHOLE_MODEL = (
    "the heads lie in a model that was trained with them: they draft for that model, and keep its text, not the text "
    "of the model it was made from"
)


@dataclasses.dataclass(frozen=True)
class HeadFile:
    """Heads in files, with the headers checked and no weight read.

    Attributes:
        place: the file or directory.
        layout: "jaxspec", "v0.1", "legacy", "v1.0" or "vllm".
        sizes: keywords of `HeadsConfig`; without `vocab_size` where the files do not say it.
        readers: of every parameter, under our names and in our layout, in the file's dtype.
        stored: the tensors of the heads, under the file's names.
        settings: what config.json, or our manifest, holds.
        tree: that they draft best on, if it is known.
        notes: what one should know, a sentence each.
    """

    place: pathlib.Path
    layout: str
    sizes: Mapping[str, Any]
    readers: Mapping[str, Callable[[], np.ndarray]] = dataclasses.field(repr=False)
    stored: Mapping[str, StoredTensor] = dataclasses.field(repr=False)
    settings: Mapping[str, Any] = dataclasses.field(repr=False)
    tree: Topology | None = None
    notes: tuple[str, ...] = ()

    def config(self, target: Any = None) -> HeadsConfig:
        """The sizes; of a vocabulary that the files do not tell, the target's.

        Raises:
            InvalidConfig: neither tells it.
            ShapeMismatch: the heads are not for this target.
        """
        sizes = dict(self.sizes)
        if "vocab_size" not in sizes:
            if target is None:
                raise InvalidConfig(
                    f"{self.place}: neither the tensors nor config.json tell the size of the vocabulary; give the "
                    "target (target=..., or --target)"
                )
            sizes["vocab_size"] = vocabulary(target)
        try:
            config = HeadsConfig(**sizes)
            if target is not None:
                check_target(config, target)
        except (InvalidConfig, ShapeMismatch) as error:
            raise type(error)(f"{self.place}: {error}") from None
        return config


def open_heads(
    source: str | os.PathLike, *, allow_pickle: bool = False, report: Callable[[str], object] | None = None
) -> HeadFile:
    """Finds heads, and checks their headers; arguments and errors as those of `load_heads`."""
    if isinstance(source, str) and source in PRESETS:
        if not PRESETS[source].heads:
            some = ", ".join(name for name, preset in PRESETS.items() if preset.heads)
            raise CheckpointError(f"no heads for the preset {source} come with jaxspec, only for {some}; train some")
        source = SHIPPED / source
    place = check_path(find_source(source, report=report, pickles=allow_pickle))
    if (place / MANIFEST).exists():
        return _open_ours(place)
    directory, name = (place, _file(place)) if place.is_dir() else (place.parent, place.name)
    where = str(directory / name)
    if pathlib.Path(name).suffix in PICKLES:
        if not allow_pickle:
            raise CheckpointError(
                f"{where}: is a pickle, as torch.save writes; allow_pickle=True (--allow-pickle) reads its tensors, "
                "and runs nothing of it"
            )
        path = folder.inside(directory, name)
        assert path is not None
        tensors = torch_file.open_torch(path)
    elif pathlib.Path(name).suffix == ".safetensors":
        whole = name == folder.WHOLE and not os.path.exists(directory / name)
        tensors = folder.open_tensors(directory) if whole else folder.open_shard(directory, name)
    else:
        raise CheckpointError(f"{where}: holds no heads; expected a directory, a .safetensors or a .pt file")
    layout = recognise(tensors)
    if layout is None:
        shown = ", ".join(sorted(tensors)[:3])
        raise CheckpointError(f"{where}: no tensors of Medusa heads in a layout that is known; it has {shown} ...")
    settings = folder.read_json(directory, "config.json") or {}
    return _open_theirs(place, where, layout, tensors, settings)


def _file(directory: pathlib.Path) -> str:
    """The file of a directory that holds its heads."""
    for name in FILES:
        if os.path.exists(directory / name):
            return name
    if not any(os.path.exists(directory / name) for name in (folder.WHOLE, folder.INDEX)):
        raise CheckpointError(
            f"{directory}: holds no heads; expected {MANIFEST}, {FILES[0]}, {FILES[1]} or {folder.WHOLE}"
        )
    return folder.WHOLE


def _open_ours(place: pathlib.Path) -> HeadFile:
    where = place / MANIFEST
    manifest = folder.read_json(place, MANIFEST) or {}
    if manifest.get("format") != "jaxspec-heads" or manifest.get("version") != VERSION:
        raise CheckpointError(f"{where}: expected format jaxspec-heads, version {VERSION}")
    sizes = manifest.get("config")
    known = {field.name for field in dataclasses.fields(HeadsConfig)}
    if not isinstance(sizes, dict) or not {"hidden_size", "vocab_size"} <= sizes.keys() <= known:
        raise CheckpointError(
            f"{where}: config is {sizes!r:.80}, expected an object with hidden_size and vocab_size, and of "
            f"{', '.join(sorted(known))} alone"
        )
    if "tree" not in manifest:
        raise CheckpointError(f"{where}: tree is missing, expected a list of parents or null")
    try:
        config = HeadsConfig(**sizes)
        tree = None if manifest["tree"] is None else read_parents(manifest["tree"])
    except InvalidConfig as error:
        raise CheckpointError(f"{where}: {error}") from None
    tensors = folder.open_shard(place, TENSORS)
    if config.num_heads * max(config.num_layers, 1) > max(len(tensors), 64):  # before anything is made per block
        raise CheckpointError(f"{where}: {config.num_heads} heads and only {len(tensors)} tensors")
    _check(str(place / TENSORS), config.param_shapes(), tensors, "tokens")
    if (
        config.draft_vocab_size is not None
        and (np.diff(_tokens("tokens", tensors["tokens"], config.vocab_size)) < 0).any()
    ):
        raise CheckpointError(f"{place / TENSORS}: tensor tokens is not ascending")
    readers = {name: _reader(name, tensors[name]) for name in config.param_shapes()}
    stored = {name: held.stored for name, held in tensors.items()}
    return HeadFile(place, OURS, dataclasses.asdict(config), readers, stored, manifest, tree)


def _open_theirs(
    place: pathlib.Path, where: str, layout: Layout, tensors: Mapping[str, HeldTensor], settings: Mapping[str, Any]
) -> HeadFile:
    if layout.name == "v1.0":
        tensors = {name: held for name, held in tensors.items() if name.startswith(layout.prefix)}
    stored = {name: held.stored for name, held in tensors.items()}
    try:
        sizes = layout.sizes(where, stored, settings)
        if layout.name == "legacy" and sizes["num_layers"] != 1:
            raise CheckpointError(
                f"{where}: heads that share the target's projection have one block each in this layout, these have "
                f"{sizes['num_layers']}; are projections such as 0.{sizes['num_layers']}.weight missing?"
            )
        vocab, rows = _rows(layout, tensors, sizes.pop("rows"), settings)
        if rows.tokens is not None:
            sizes["draft_vocab_size"] = len(rows.tokens)
        # No shape depends on a vocabulary that neither tensors nor settings tell: any is good enough to check them.
        config = HeadsConfig(vocab_size=vocab or max(rows.held, 1), **sizes)
    except InvalidConfig as error:
        raise CheckpointError(f"{where}: {error}") from None
    names = {ours: layout.tensor(config, ours) for ours in config.param_shapes()}
    if rows.tokens is not None and layout.tokens not in tensors:
        del names["tokens"]
    if config.projection == "single" and names["projections.0"] not in tensors and layout.prefix + FIRST in tensors:
        names["projections.0"] = layout.prefix + FIRST  # as vLLM takes it
    shapes = {ours: shape[::-1] if ours.endswith("kernel") else shape for ours, shape in config.param_shapes().items()}
    shapes |= {ours: (rows.held, config.hidden_size) for ours in shapes if ours.startswith("projections")}
    _check(where, {theirs: shapes[ours] for ours, theirs in names.items()}, tensors, layout.tokens)

    def reader(ours: str) -> Callable[[], np.ndarray]:
        if ours == "tokens":
            return lambda: np.asarray(rows.tokens, np.int32)
        read = _reader(names[ours], tensors[names[ours]])
        if ours.endswith("kernel"):
            return lambda: np.ascontiguousarray(read().T)
        taken = rows.taken if ours.startswith("projections") else None
        return read if taken is None else lambda: read()[taken]

    told = dict(settings) if vocab else {key: value for key, value in settings.items() if key != "vocab_size"}
    notes = [*layout.differences(told, config), *([WHOLE_MODEL] if layout.name == "v1.0" else [])]
    kept = dataclasses.asdict(config)
    if not vocab:
        del kept["vocab_size"]
    readers = {ours: reader(ours) for ours in config.param_shapes()}
    return HeadFile(place, layout.name, kept, readers, stored, settings, None, tuple(notes))


def _reader(name: str, held: HeldTensor) -> Callable[[], np.ndarray]:
    return lambda: finite(held.where, name, held.read())


class _Rows(NamedTuple):
    """The rows of a projection.

    `held` are in the file; `taken` of them, in this order (None: all), are those of `tokens` (None: of all).
    """

    held: int
    taken: np.ndarray | None = None
    tokens: np.ndarray | None = None


def _rows(
    layout: Layout, tensors: Mapping[str, HeldTensor], held: int, settings: Mapping[str, Any]
) -> tuple[int | None, _Rows]:
    """The vocabulary (None: not told), and the rows of a projection, of which the file has `held`."""
    said = settings.get("vocab_size")
    said = said if type(said) is int and said > 0 else None
    if not held:
        return said, _Rows(0)
    if layout.name != "vllm":
        return held, _Rows(held)
    if layout.tokens not in tensors:
        if said is not None and held < said and settings.get("truncated_vocab_size") == held:
            return said, _Rows(held, None, np.arange(held))
        return held, _Rows(held)
    vocab = held if held > math.prod(tensors[layout.tokens].stored.shape) else said
    tokens = _tokens(layout.tokens, tensors[layout.tokens], vocab)
    order = np.argsort(tokens, kind="stable")
    if held > tokens.size:
        return vocab, _Rows(held, tokens[order], tokens[order])
    return vocab, _Rows(tokens.size, None if (np.diff(order) > 0).all() else order, tokens[order])


def _tokens(name: str, held: HeldTensor, vocab: int | None) -> np.ndarray:
    """A reduced vocabulary's ids, as they stand in the file."""
    if held.stored.type not in _IDS or len(held.stored.shape) != 1:
        raise CheckpointError(
            f"{held.where}: tensor {name} has type {held.stored.type} and shape {list(held.stored.shape)}, expected "
            f"one of {_IDS} and one axis"
        )
    tokens = held.read()
    if tokens.size != np.unique(tokens).size or (tokens < 0).any() or (vocab and (tokens >= vocab).any()):
        below = "" if vocab is None else f" to {vocab - 1}"
        raise CheckpointError(f"{held.where}: tensor {name} must hold ids from 0{below}, each once")
    return tokens


def _check(where: str, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, HeldTensor], tokens: str) -> None:
    """Every tensor is there, none is left over, and each has its shape and a type that is read."""
    refuse_difference(where, shapes, tensors)
    for name, shape in shapes.items():
        check_shape(tensors[name].where, name, tensors[name].stored.shape, shape)
        folder.check_types({name: tensors[name]}, _IDS if name == tokens else folder.FLOATS)
