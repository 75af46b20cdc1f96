"""Opens a model in one GGUF file, or in the parts of a split file, which are named `NAME-00001-of-00004.gguf`.

The first part contains the metadata. Each part contains its own number (`split.no`, from 0), the number of parts and
the number of tensors of all parts; see llama.cpp's `llama-gguf-split`.
"""

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxspec.checkpoints.gguf_header import Tensor, map_file, parse_header, parse_tables
from jaxspec.errors import CheckpointError

MAX_PARTS = 4096
PART_PATTERN = re.compile(
    r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.DOTALL | re.IGNORECASE
)
"""The name of a part of a split file."""
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


class LocatedTensor(NamedTuple):
    """A tensor and the file that contains it."""

    where: str
    data: Any
    tensor: Tensor


def part_names(name: str) -> list[str]:
    """Returns the names of all parts of the split file that a name belongs to; only the name itself if the file is not
    split."""
    named = PART_PATTERN.fullmatch(name)
    count = int(named["count"]) if named else 1
    if named is None or count < 2 or count > MAX_PARTS:
        return [name]
    return [f"{named['stem']}-{i + 1:05d}-of-{named['count']}{named['suffix']}" for i in range(count)]


def open_parts(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, LocatedTensor]]:
    """Opens a GGUF file. If the file is a part of a split file, opens all parts.

    Returns:
        The metadata, and the tensors by name.

    Raises:
        CheckpointError: a part is missing or malformed, or the parts do not belong together.
    """
    where = os.fspath(path)
    data = map_file(where)
    metadata, tensors = parse_header(data, where)
    if (split := _split(metadata, where)) is None:
        return metadata, {name: LocatedTensor(where, data, tensor) for name, tensor in tensors.items()}
    number, count = split
    paths = _part_paths(where, number, count)
    metadata_of_all: dict[str, Any] = {}
    located: dict[str, LocatedTensor] = {}
    for i, path in enumerate(paths):
        name = str(path)
        data = map_file(name)
        part_metadata, tensors = parse_header(data, name)
        if _split(part_metadata, name) != (i, count):
            raise CheckpointError(f"{name}: is not part {i + 1} of {count} of a split file, although its name says so")
        if duplicates := sorted(tensors.keys() & located.keys()):
            raise CheckpointError(f"{name}: tensor {duplicates[0]} is also in {located[duplicates[0]].where}")
        _check_same(name, paths[0], metadata_of_all, part_metadata)
        metadata_of_all = metadata_of_all or part_metadata
        located |= {key: LocatedTensor(name, data, tensor) for key, tensor in tensors.items()}
    total = metadata_of_all.get(_TENSORS)
    if total is not None and total != len(located):
        raise CheckpointError(
            f"{paths[0]}: the {count} parts contain {len(located)} tensors, but {_TENSORS} is {total}: the parts do "
            "not belong together"
        )
    return metadata_of_all, located


def read_part_headers(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, tuple]]:
    """Returns the metadata, and the type, shape and offset of each tensor, of a file and its other parts.

    Other parts that cannot be read are left out.

    Raises:
        CheckpointError: the header of the file itself is malformed.
    """
    where = os.fspath(path)
    metadata, entries, _ = parse_tables(map_file(where), where)
    for name in part_names(os.path.basename(where)):
        other = os.path.join(os.path.dirname(where), name)
        if name == os.path.basename(where) or not os.path.isfile(other):
            continue
        try:
            more, others, _ = parse_tables(map_file(other), other)
        except CheckpointError:
            continue
        metadata, entries = more | metadata, others | entries
    return metadata, entries


def find_model(directory: pathlib.Path) -> pathlib.Path | None:
    """Returns the GGUF file of a directory with one model, or the first part of it; None if the directory has no GGUF
    model.

    Projectors of images and sound, which llama.cpp names `*mmproj*.gguf`, are ignored.

    Raises:
        CheckpointError: there are several models; the message names them.
    """
    names = sorted(file.name for file in directory.glob("*.gguf") if "mmproj" not in file.name)
    models = sorted({part_names(name)[0] for name in names})
    if len(models) > 1:
        raise CheckpointError(
            f"{directory}: contains {len(models)} GGUF models; to open one of them, pass its path, such as "
            f"{directory / models[0]}"
        )
    return directory / models[0] if models else None


def _split(metadata: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """Returns the number of a part, from 0, and the number of parts; None if the file is not split."""
    count, number = metadata.get(_COUNT, 1), metadata.get(_NUMBER, 0)
    if type(count) is not int or not 0 <= count <= MAX_PARTS:
        raise CheckpointError(f"{where}: metadata {_COUNT} is {count!r:.80}, expected 1 to {MAX_PARTS}")
    if count < 2:
        return None
    if type(number) is not int or not 0 <= number < count:
        raise CheckpointError(f"{where}: metadata {_NUMBER} is {number!r:.80}, expected 0 to {count - 1}")
    return number, count


def _part_paths(where: str, number: int, count: int) -> list[pathlib.Path]:
    """Returns the paths of all parts, which must exist."""
    path = pathlib.Path(where)
    named = PART_PATTERN.fullmatch(path.name)
    if named is None or (int(named["number"]), int(named["count"])) != (number + 1, count):
        raise CheckpointError(
            f"{where}: is part {number + 1} of {count} of a split GGUF file, whose name must end with "
            f"-{number + 1:05d}-of-{count:05d}.gguf, with the other parts in the same directory; rename it, or merge "
            "the parts with llama-gguf-split --merge"
        )
    paths = [path.with_name(name) for name in part_names(path.name)]
    if missing := [i for i, part in enumerate(paths) if not os.path.isfile(part)]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{where}: is part {number + 1} of {count}, and part {missing[0] + 1}{more} is missing: "
            f"{paths[missing[0]]}; copy all parts into one directory"
        )
    return paths


def _check_same(where: str, first: pathlib.Path, expected: Mapping[str, Any], part_metadata: Mapping[str, Any]) -> None:
    """Raises CheckpointError if the metadata of a part contradicts the metadata of the first part."""
    for key, value in part_metadata.items():
        if key in expected and key != _NUMBER and expected[key] != value:
            raise CheckpointError(
                f"{where}: metadata {key} is {value!r:.80}, but {expected[key]!r:.80} in {first.name}: the parts do "
                "not belong together"
            )
