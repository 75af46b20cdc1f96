"""Opens draft heads in files of any layout: the headers are checked, and no weight is read."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxspec.checkpoints import folder, gguf, torch_file
from jaxspec.checkpoints.base import StoredTensor, canonical_tensors
from jaxspec.checkpoints.folder import LazyTensor
from jaxspec.core.sizes import MAX_INT32
from jaxspec.core.topology import Topology, read_parents
from jaxspec.errors import CheckpointError, InvalidConfig, ShapeMismatch
from jaxspec.heads.eagle_layouts import MTP_LAYOUT, mtp_config
from jaxspec.heads.find import HEADS_MANIFEST, HEADS_TENSORS, OWN_LAYOUT, find_gguf, find_heads
from jaxspec.heads.kinds import CONFIG_JSON, PICKLE_SUFFIXES, HeadKind, head_kind
from jaxspec.heads.layouts import HEAD_FILES, TORCH_FILE, recognise_layout
from jaxspec.heads.network import check_target, vocab_size_of
from jaxspec.heads.sizes import HeadSizes
from jaxspec.heads.tensors import check_tensors, finite_reader, read_tokens
from jaxspec.registry import HEADS
from jaxspec.storage.reading import check_path

LAYOUT_VERSION = 1
"""The version of jaxspec's own layout."""
FIRST_KIND = "medusa"
"""The kind of heads in jaxspec's own layout whose `heads.json` does not name a kind."""


@dataclasses.dataclass(frozen=True)
class HeadFile:
    """Draft heads in files, with the headers checked and no weight read.

    Attributes:
        path: the file or directory.
        layout: the name of the layout; "jaxspec" for jaxspec's own.
        kind: the kind of heads.
        sizes: the fields of the sizes (`kind.sizes`), without `vocab_size` if the files do not state it.
        readers: for each name of `param_shapes` of the sizes, a function that reads this parameter in the dtype of the
            file.
        stored: the tensors of the heads, by their names in the file.
        settings: the content of config.json, or of heads.json.
        tree: the topology with which the heads draft best, if it is known.
        notes: what users should know about the heads, one sentence each.
    """

    path: pathlib.Path
    layout: str
    kind: HeadKind
    sizes: Mapping[str, Any]
    readers: Mapping[str, Callable[[], np.ndarray]] = dataclasses.field(repr=False)
    stored: Mapping[str, StoredTensor] = dataclasses.field(repr=False)
    settings: Mapping[str, Any] = dataclasses.field(repr=False)
    tree: Topology | None = None
    notes: tuple[str, ...] = ()

    def config(self, target: Any = None) -> HeadSizes:
        """Returns the sizes; the vocabulary is the target's if the files do not state its size.

        Raises:
            InvalidConfig: the files do not state the size of the vocabulary, and there is no target.
            ShapeMismatch: the heads do not fit the target.
        """
        sizes = dict(self.sizes)
        if self._lacks_vocabulary:
            if target is None:
                raise InvalidConfig(
                    f"{self.path}: neither the tensors nor config.json state the size of the vocabulary; give the "
                    "target (target=..., or --target)"
                )
            sizes["vocab_size"] = vocab_size_of(target)
        try:
            config = self.kind.sizes(**sizes)
            if target is not None:
                check_target(config, target)
        except (InvalidConfig, ShapeMismatch) as error:
            raise type(error)(f"{self.path}: {error}") from None
        return config

    def config_of_any_vocabulary(self) -> HeadSizes:
        """Returns the sizes without a target; a vocabulary of unknown size is assumed to be as large as possible."""
        unknown: dict[str, Any] = {"vocab_size": MAX_INT32} if self._lacks_vocabulary else {}
        return self.kind.sizes(**unknown | dict(self.sizes))

    @property
    def _lacks_vocabulary(self) -> bool:
        return "decoder" not in self.sizes and "vocab_size" not in self.sizes


def open_heads(
    source: str | os.PathLike, *, allow_pickle: bool = False, report: Callable[[str], object] | None = None
) -> HeadFile:
    """Finds heads and checks their headers, with the arguments and errors of `load_heads`."""
    path = check_path(find_heads(source, allow_pickle=allow_pickle, report=report))
    if (path / HEADS_MANIFEST).exists():
        return _open_ours(path)
    if (block := find_gguf(path)) is not None:
        return _open_gguf(path, block)
    directory, name = (path, _file(path)) if path.is_dir() else (path.parent, path.name)
    where = str(directory / name)
    tensors = _open_tensors(directory, name, allow_pickle)
    layout = recognise_layout(tensors)
    if layout is None:
        if block := next((name for name in sorted(tensors) if name.endswith(".eh_proj.weight")), None):
            raise CheckpointError(
                f"{where}: has a layer for multi-token prediction in the layout of DeepSeek and GLM ({block}), which "
                "jaxspec does not read"
            )
        first = ", ".join(sorted(tensors)[:3])
        raise CheckpointError(f"{where}: holds no draft heads in a known layout; its first tensors are {first}")
    settings = folder.read_optional_json(directory, CONFIG_JSON) or {}
    if layout.in_model:
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(layout.prefix)}
    kind = head_kind(layout.drafter)
    heads = kind.open(where, layout, tensors, settings)
    stored = {name: tensor.stored for name, tensor in tensors.items()}
    return HeadFile(path, heads.layout.name, kind, heads.sizes, heads.readers, stored, settings, None, heads.notes)


def _open_gguf(path: pathlib.Path, file: pathlib.Path) -> HeadFile:
    """Opens the block for multi-token prediction of a GGUF file."""
    target, names, stored, shapes, read = gguf.open_drafting_block(file)
    config = mtp_config(target)
    readers = canonical_tensors(str(file), config.decoder, names, shapes, read, config.param_shapes())
    return HeadFile(path, MTP_LAYOUT, head_kind(config.drafter), dict(vars(config)), readers, stored, {})


def _file(directory: pathlib.Path) -> str:
    """Returns the name of the file in a directory that holds the heads."""
    for name in HEAD_FILES:
        if os.path.exists(directory / name):
            return name
    if any(os.path.exists(directory / name) for name in (folder.WEIGHTS_FILE, folder.INDEX_FILE)):
        return folder.WEIGHTS_FILE
    if not os.path.exists(directory / TORCH_FILE):
        expected = ", ".join((HEADS_MANIFEST, *HEAD_FILES[:2]))
        raise CheckpointError(f"{directory}: holds no heads; expected {expected} or {folder.WEIGHTS_FILE}")
    return TORCH_FILE


def _open_tensors(directory: pathlib.Path, name: str, allow_pickle: bool) -> dict[str, LazyTensor]:
    """Opens a file of tensors in any format, and the shards of `model.safetensors`."""
    where = str(directory / name)
    if pathlib.Path(name).suffix in PICKLE_SUFFIXES:
        if not allow_pickle:
            raise CheckpointError(
                f"{where}: is a pickle file of torch.save; set allow_pickle=True (--allow-pickle) to read its tensors. "
                "No code in the file is executed"
            )
        path = folder.inside(directory, name)
        assert path is not None
        return torch_file.open_torch(path)
    if pathlib.Path(name).suffix != ".safetensors":
        raise CheckpointError(f"{where}: holds no heads; expected a directory, a .safetensors or a .pt file")
    if name == folder.WEIGHTS_FILE and not os.path.exists(directory / name):
        return folder.open_tensors(directory)
    return folder.open_shard(directory, name)


def _open_ours(path: pathlib.Path) -> HeadFile:
    where = path / HEADS_MANIFEST
    manifest = folder.read_optional_json(path, HEADS_MANIFEST) or {}
    if manifest.get("format") != "jaxspec-heads" or manifest.get("version") != LAYOUT_VERSION:
        raise CheckpointError(f"{where}: expected format jaxspec-heads, version {LAYOUT_VERSION}")
    name = manifest.get("kind", FIRST_KIND)
    if not isinstance(name, str) or name not in HEADS:
        raise CheckpointError(f"{where}: kind is {name!r:.80}, expected one of {', '.join(HEADS)}")
    if "tree" not in manifest:
        raise CheckpointError(f"{where}: tree is missing, expected a list of parents or null")
    config = head_kind(name).sizes.from_json(str(where), manifest.get("config"))
    try:
        tree = None if manifest["tree"] is None else read_parents(manifest["tree"])
    except InvalidConfig as error:
        raise CheckpointError(f"{where}: {error}") from None
    tensors = folder.open_shard(path, HEADS_TENSORS)
    if config.num_blocks > max(len(tensors), 64):  # before work for each block begins
        raise CheckpointError(
            f"{where}: config is {config.summary}, but {HEADS_TENSORS} has only {len(tensors)} tensors"
        )
    check_tensors(str(path / HEADS_TENSORS), config.param_shapes(), tensors, "tokens")
    if (
        config.draft_vocab_size is not None
        and (np.diff(read_tokens("tokens", tensors["tokens"], config.vocab_size)) < 0).any()
    ):
        raise CheckpointError(f"{path / HEADS_TENSORS}: tensor tokens must be ascending")
    readers = {name: finite_reader(name, tensors[name]) for name in config.param_shapes()}
    stored = {name: tensor.stored for name, tensor in tensors.items()}
    return HeadFile(path, OWN_LAYOUT, head_kind(name), dict(vars(config)), readers, stored, manifest, tree)
