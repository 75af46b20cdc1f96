"""Files of draft heads with transformer layers, and checks that hold for all of them."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.errors import CheckpointError
from jaxspec.heads.export import export_heads
from jaxspec.heads.files import load_heads, save_heads
from jaxspec.heads.headers import open_heads
from jaxspec.heads.network import flatten


@dataclasses.dataclass(frozen=True)
class File:
    """The name of a layout, and the tensors and the config.json of a head in this layout."""

    layout: str
    held: Mapping[str, np.ndarray]
    told: Mapping[str, Any]

    def write(self, folder: pathlib.Path) -> pathlib.Path:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({key: np.ascontiguousarray(a) for key, a in self.held.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(dict(self.told)))
        return folder

    def changed(self, held: Mapping[str, Any] | None = None, told: Mapping[str, Any] | None = None) -> "File":
        """Returns a copy with other entries; None removes an entry."""

        def merged(old, new):
            return {key: value for key, value in {**old, **(new or {})}.items() if value is not None}

        return File(self.layout, merged(self.held, held), merged(self.told, told))


def check_round_trip(place: pathlib.Path, file: File, layout: str, notes: Collection[str] = ()) -> None:
    """Checks bits from a file through our own directory to an exported file and back.

    There is no target, which might share its tables. `layout` is the layout of the export, and `notes` are words of the
    notes that loading may give.
    """
    heads = load_heads(file.write(place / "in"), dtype=None)
    again = load_heads(save_heads(heads, place / "ours"), dtype=None)
    assert again.config == heads.config
    assert open_heads(place / "in").layout == file.layout
    chex.assert_trees_all_equal(again.params, heads.params)
    out = export_heads(again, place / "out", layout)
    written = load_file(out / "model.safetensors")
    assert written.keys() == file.held.keys()
    for key, array in file.held.items():
        assert written[key].dtype == array.dtype
        np.testing.assert_array_equal(written[key], array)
    back = load_heads(out, dtype=None)
    assert back.config == heads.config
    assert not [note for note in (*heads.notes, *back.notes) if not any(word in note for word in notes)]
    chex.assert_trees_all_equal(back.params, heads.params)
    assert {a.dtype for key, a in flatten(load_heads(out).params).items() if key != "tokens"} == {np.dtype("float32")}


def refuse(place: pathlib.Path, file: File, said: str) -> None:
    """Checks that loading a file ends in one line with these words, a regular expression."""
    with pytest.raises(CheckpointError, match=said) as caught:
        load_heads(file.write(place))
    assert "\n" not in str(caught.value)


def check_every_tensor(
    place: pathlib.Path, file: File, optional: Collection[str], extensible: Collection[str] = ()
) -> None:
    """Checks that each tensor is missed if it is damaged.

    Each is dropped, renamed, made longer, wider or deeper, of another type, or not a number. Without a tensor of
    `optional`, and with more rows of a tensor of `extensible`, the file holds other heads.
    """
    for key, array in file.held.items():
        if key in ("d2t", "t2d"):
            continue
        floats = array.astype(np.float32)
        damages: dict[str, dict[str, Any]] = {
            "dropped": {key: None},
            "renamed": {key: None, key + "_": array},
            "longer": {key: np.concatenate([array, array[:1]])},
            "deeper": {key: array[None]},
            "retyped": {key: array.astype(np.int16)},
            "not a number": {key: np.where(np.arange(len(floats)) == len(floats) - 1, np.float32("nan"), floats.T).T},
        }
        if array.ndim == 2:
            damages["wider"] = {key: np.concatenate([array, array[:, :1]], 1)}
        for damage, held in damages.items():
            if not (damage == "dropped" and key in optional) and not (damage == "longer" and key in extensible):
                refuse(place, file.changed(held), ".")


def check_our_format(place: pathlib.Path, file: File, kind: str) -> None:
    """Checks that heads.json with any wrong entry is refused, or does not matter."""
    folder = save_heads(load_heads(file.write(place / "in")), place / "ours")
    good = json.loads((folder / "heads.json").read_text())
    assert good["kind"] == kind
    config = good["config"]
    inner = [("config", key) for key in config] + [("config", "decoder", key) for key in config["decoder"]]
    for path in [(key,) for key in good] + inner:
        for value in ("x", -1, 1 << 40, 0.5, [], {}, [[]], True, ...):
            changed = json.loads(json.dumps(good))
            holder = changed
            for key in path[:-1]:
                holder = holder[key]
            if value is ...:
                del holder[path[-1]]
            else:
                holder[path[-1]] = value
            (folder / "heads.json").write_text(json.dumps(changed))
            with contextlib.suppress(CheckpointError):
                assert open_heads(folder).config().hidden_size == config["decoder"]["hidden_size"]
