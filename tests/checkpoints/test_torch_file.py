"""Tests the reader of torch.save files, which works without torch and refuses hostile files."""

import zipfile

import numpy as np
import pytest

from helpers import medusa_files as files
from helpers.bounds import bounded
from helpers.medusa_files import name, pair, state_dict, tensor, text, whole, write_zip
from jaxspec.checkpoints.torch_file import open_torch
from jaxspec.errors import CheckpointError
from jaxspec.heads.files import load_heads
from jaxspec.heads.headers import open_heads

pytestmark = pytest.mark.quick

RAW = np.arange(12, dtype=np.float32).tobytes()
GOOD = state_dict({"w": tensor("FloatStorage", "0", 12, (3, 4), (4, 1))})


def refused(path, said: str) -> None:
    with bounded(), pytest.raises(CheckpointError, match=said) as caught:
        {key: held.read() for key, held in open_torch(path).items()}
    assert path.name in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("dtype", [np.float32, np.float16, files.BF16])
def test_tensors_are_those_that_were_saved(tmp_path, dtype):
    held = files.tensors("v0.1", dtype=dtype)
    held["0.0.linear.weight"] = np.asarray(held["0.0.linear.weight"]).T  # strides the other way round
    read = open_torch(files.write_torch(tmp_path / "m.pt", held))
    assert read.keys() == held.keys()
    for key, array in held.items():
        assert read[key].stored.shape == array.shape
        assert read[key].stored.bytes == array.nbytes
        got = read[key].read()
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, array if key != "0.0.linear.weight" else strided(array))


def strided(array: np.ndarray) -> np.ndarray:
    """What the strides of a view say of its bytes in the order that `tobytes` wrote them."""
    flat = np.frombuffer(array.tobytes(), array.dtype)
    return np.lib.stride_tricks.as_strided(flat, array.shape, array.strides)


def test_heads_of_a_pickle(tmp_path):
    """Only when asked for; then the same as those of safetensors. One block may stand there twice."""
    held = files.tensors("v0.1")
    for i in range(3):
        for part in ("weight", "bias"):
            held[f"{i}.1.linear.{part}"] = held[f"{i}.0.linear.{part}"]
    files.write_torch(tmp_path / "medusa_lm_head.pt", held)
    for source in (tmp_path, tmp_path / "medusa_lm_head.pt"):
        with pytest.raises(CheckpointError, match=r"medusa_lm_head\.pt: is a pickle.*--allow-pickle"):
            load_heads(source)
    heads = load_heads(tmp_path, allow_pickle=True)
    same = load_heads(files.write(tmp_path / "same", "v0.1", held))
    assert heads.config == same.config
    for i in range(3):
        np.testing.assert_array_equal(heads.params["projections"][i], same.params["projections"][i])
        for j in range(2):
            np.testing.assert_array_equal(heads.params["blocks"][i][j]["kernel"], held[f"{i}.0.linear.weight"].T)
    broken = files.tensors("v0.1") | {"1.2.weight": np.zeros((60, 64), np.float32)}
    files.write_torch(tmp_path / "medusa_lm_head.pt", broken)
    with pytest.raises(CheckpointError, match=r"medusa_lm_head\.pt: tensor 1\.2\.weight has shape \[60, 64\]"):
        open_heads(tmp_path, allow_pickle=True)


def test_views_of_one_storage(tmp_path):
    items = {
        "a": tensor("FloatStorage", "0", 12, (2, 3), (3, 1), 6),
        "b": tensor("FloatStorage", "0", 12, (3,), (4,), 1),
        "none": tensor("FloatStorage", "0", 12, (0, 5), (5, 1), 12),
    }
    read = open_torch(write_zip(tmp_path / "m.pt", state_dict(items), {"0": RAW}))
    assert read["a"].read().tolist() == [[6, 7, 8], [9, 10, 11]]
    assert read["b"].read().tolist() == [1, 5, 9]
    assert read["none"].read().shape == (0, 5)


def put(value: bytes) -> bytes:
    return state_dict({"w": value})


PLAIN = tensor("FloatStorage", "0", 12, (3, 4), (4, 1))
DEEP = b"\x80\x02)" + b"".join(b"q\x01h\x01\x86" for _ in range(60)) + b"."
CALLS = {
    "os.system": b"\x80\x02" + name("os", "system") + b"(" + text("touch /tmp/x") + b"tR.",
    "posix.system": put(name("posix", "system") + b"(" + text("id") + b"tR"),
    "builtins.eval": put(name("builtins", "eval") + b"(" + text("1") + b"tR"),
    "torch.load": put(name("torch", "load") + b")R"),
    "torch.LongStorage": put(tensor("LongStorage", "0", 12, (3, 4), (4, 1))),
    "torch.storage._load_from_bytes": put(name("torch.storage", "_load_from_bytes") + b")R"),
    "os.system by the stack": (b"\x80\x04" + text("os") + text("system") + b"\x93)R.", "os.system"),
    "a dotted name": (b"\x80\x04" + text("collections") + text("OrderedDict.fromkeys") + b"\x93)R.", "fromkeys"),
    "INST": b"\x80\x02(ios\nsystem\n.",
    "OBJ": b"\x80\x02(o.",
    "NEWOBJ": b"\x80\x02" + name("collections", "OrderedDict") + b")\x81.",
    "EXT1": b"\x80\x02\x82\x01.",
    "BYTEARRAY8": (b"\x80\x05\x96" + b"\xff" * 7 + b"\x7f.", "cannot be read|not a valid torch.save file"),
    "BINUNICODE8": (b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f.", "not a valid torch.save file"),
    "a far memo": (b"\x80\x02}r\xff\xff\xff\x7f.", None),
    "a memo that is not there": (b"\x80\x02h\x07.", "not a valid torch.save file"),
    "an empty stack": (b"\x80\x02.", "not a valid torch.save file"),
    "no end": (b"\x80\x02}", "not a valid torch.save file"),
    "nothing": (b"", "not a valid torch.save file"),
    "noise": (b"\xff\xfe\xfd", "not a valid torch.save file"),
    "a decimal": (b"\x80\x02L" + b"9" * 100_000 + b"L\n.", "not a valid torch.save file"),
    "tuples of tuples": (DEEP, "not a dict"),
    "tuples of tuples as a key": (b"\x80\x02}" + DEEP[2:-1] + b"Ns.", "a key is not a string"),
    "tuples of tuples as a shape": (put(PLAIN.replace(pair((3, 4)), DEEP[2:-1])), "whole numbers from 0"),
    "a list": (b"\x80\x02].", "not a dict"),
    "a number for a tensor": (put(whole(3)), "'w' is not a tensor"),
    "a name twice": (state_dict({"w": PLAIN}).replace(b"u}", text("w") + PLAIN + b"u}"), "duplicated"),
    "a state for a tuple": (b"\x80\x02)}b.", "other than a dict"),
    "a call of a tensor": (put(PLAIN + b")R"), "does not make a tensor"),
    "a tensor without strides": (put(name("torch._utils", "_rebuild_tensor_v2") + b")R"), "does not make a tensor"),
    "a storage of text": (put(text("storage") + b"Q"), "not a tuple of five"),
    "a path for a storage": (put(tensor("FloatStorage", "../../etc/passwd", 12, (3, 4), (4, 1))), "invalid key"),
    "a storage that is not there": (put(tensor("FloatStorage", "7", 12, (3, 4), (4, 1))), "has no bytes, expected 48"),
    "a longer storage": (put(tensor("FloatStorage", "0", 1 << 40, (3, 4), (4, 1))), "48 bytes, expected 4398"),
    "a shorter storage": (put(tensor("FloatStorage", "0", 11, (3, 3), (3, 1))), "has 48 bytes, expected 44"),
    "another width": (put(tensor("HalfStorage", "0", 12, (3, 4), (4, 1))), "has 48 bytes, expected 24"),
    "a negative size": (put(tensor("FloatStorage", "0", -12, (3, 4), (4, 1))), "invalid key or size"),
    "a negative shape": (put(tensor("FloatStorage", "0", 12, (-3, -4), (4, 1))), "whole numbers from 0"),
    "a negative stride": (put(tensor("FloatStorage", "0", 12, (3, 4), (-4, 1))), "whole numbers from 0"),
    "a negative offset": (put(tensor("FloatStorage", "0", 12, (3, 4), (4, 1), -1)), "whole numbers from 0"),
    "an offset": (put(tensor("FloatStorage", "0", 12, (3, 4), (4, 1), 1)), "exceeds its storage"),
    "a stride": (put(tensor("FloatStorage", "0", 12, (3, 4), (5, 1))), "exceeds its storage"),
    "a huge shape": (put(tensor("FloatStorage", "0", 12, (1 << 40, 1 << 40), (0, 0))), "exceeds its storage"),
    "a huge stride": (put(tensor("FloatStorage", "0", 12, (3, 4), (1 << 61, 1))), "exceeds its storage"),
    "more axes than strides": (put(tensor("FloatStorage", "0", 12, (3, 4), (1,))), "whole numbers from 0"),
    "many axes": (put(tensor("FloatStorage", "0", 12, (1,) * 99, (1,) * 99)), "whole numbers from 0"),
    "a long one": (b"\x80\x02" + b"N" * (1 << 21) + b".", "at most 1048576 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
def test_pickles(tmp_path, what, monkeypatch):
    """Nothing is called, whatever is asked for."""
    import os

    monkeypatch.setattr(os, "system", lambda *_: pytest.fail("was run"))
    given = CALLS[what]
    pickle, said = given if isinstance(given, tuple) else (given, what)
    if said is None:  # an odd memo is harmless here: no tensor, no heads
        with bounded():
            assert open_torch(write_zip(tmp_path / "m.pt", pickle, {"0": RAW})) == {}
        return
    refused(write_zip(tmp_path / "m.pt", pickle, {"0": RAW}), said)


def test_one_storage_for_many(tmp_path):
    size = 1 << 16
    items = {f"w{i}": tensor("FloatStorage", "0", size, (size,), (1,)) for i in range(500)}
    refused(
        write_zip(tmp_path / "m.pt", state_dict(items), {"0": b"\0" * 4 * size}), "its tensors take 131072000 bytes"
    )


def test_zips(tmp_path):
    path = write_zip(tmp_path / "m.pt", GOOD, {"0": RAW})
    assert open_torch(path)["w"].read().shape == (3, 4)
    raw = path.read_bytes()
    for size in range(0, len(raw), 7):
        path.write_bytes(raw[:size])
        refused(path, "torch")
    path.write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + raw)  # torch before 1.6
    refused(path, "since PyTorch 1.6")
    refused(write_zip(path, GOOD, {"0": RAW}, compression=zipfile.ZIP_DEFLATED), "is compressed")
    refused(write_zip(path, GOOD, {"0": b"\0" * (1 << 26)}, compression=zipfile.ZIP_BZIP2), "is compressed")
    refused(write_zip(path, GOOD, {"0": RAW}, root=".."), "outside the root directory")
    refused(write_zip(path, GOOD, {"../../0": RAW}), "outside the root directory")
    refused(write_zip(path, GOOD, {"0": RAW}, root="/abs"), "outside the root directory")
    for odd in ("other/data/0", "alone", "medusa_lm_head/C:x", "medusa_lm_head/..\\x"):
        write_zip(path, GOOD, {"0": RAW})
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(odd, b"")
        refused(path, "outside the root directory")
    write_zip(path, GOOD, {"0": RAW})
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("medusa_lm_head/data/0", RAW)
    refused(path, "is duplicated")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", GOOD)
        archive.writestr("a/byteorder", b"big")
        archive.writestr("a/data/0", RAW)
    refused(path, "little-endian")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data/0", RAW)
    refused(path, "data.pkl")
    flipped = bytearray(raw)
    flipped[raw.index(RAW) + 5] ^= 1
    path.write_bytes(flipped)
    refused(path, "cannot be read")
