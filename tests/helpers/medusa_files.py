"""Medusa heads as other systems write them, made here by hand: names, torch's [out, in], files of torch.save."""

import json
import pathlib
import struct
import zipfile

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

HIDDEN, VOCAB = 64, 61
BF16 = np.dtype(ml_dtypes.bfloat16)
_STORAGES = {
    np.dtype(np.float32): "FloatStorage",
    np.dtype(np.float16): "HalfStorage",
    BF16: "BFloat16Storage",
    np.dtype(np.int64): "LongStorage",
    np.dtype(np.bool_): "BoolStorage",
}


def tensors(layout: str, heads: int = 3, layers: int = 2, hidden: int = HIDDEN, vocab: int = VOCAB, dtype=np.float32):
    """The tensors of a layout under its names; "vllm-single" has one projection, "vllm-reduced" a vocabulary of 20."""
    rng = np.random.default_rng(len(layout))

    def random(*shape):
        return (rng.normal(size=shape) * 0.3).astype(dtype)

    held = {}
    layers = 1 if layout == "legacy" else layers
    rows = 20 if layout == "vllm-reduced" else vocab
    for i in range(heads):
        for j in range(layers):
            name = f"blocks.{i}.layers.{j}" if layout.startswith("vllm") else f"{i}.{j}.linear"
            held[f"{name}.weight"], held[f"{name}.bias"] = random(hidden, hidden), random(hidden)
        if layout in ("vllm", "vllm-reduced"):
            held[f"lm_heads.{i}.weight"] = random(rows, hidden)
        elif layout in ("v0.1", "v1.0"):
            held[f"{i}.{layers}.weight"] = random(rows, hidden)
    if layout == "vllm-single":
        held["lm_head.weight"] = random(vocab, hidden)
    if layout == "vllm-reduced":
        held["token_map"] = np.arange(0, 60, 3)
    return {f"medusa_head.{name}": a for name, a in held.items()} if layout == "v1.0" else held


def settings(layout: str, **changes) -> dict:
    """A config.json."""
    if layout.startswith("vllm"):
        told = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 2, "hidden_size": HIDDEN,
                "vocab_size": VOCAB, "medusa_fc_bias": True, "original_lm_head": layout == "vllm-single"}  # fmt: skip
    else:
        told = {"medusa_num_heads": 3, "medusa_num_layers": 1 if layout == "legacy" else 2, "vocab_size": VOCAB}
    return told | changes


def write(directory: pathlib.Path, layout: str, held: dict | None = None, told: dict | None = None) -> pathlib.Path:
    """Writes a directory of the layout and gives its path."""
    directory.mkdir(parents=True, exist_ok=True)
    name = "medusa_lm_head" if layout in ("v0.1", "legacy") else "model"
    save_file(tensors(layout) if held is None else held, directory / f"{name}.safetensors")
    (directory / "config.json").write_text(json.dumps(settings(layout) if told is None else told))
    return directory


# --- torch.save, opcode by opcode ------------------------------------------------------------------------------


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def whole(value: int) -> bytes:
    return b"\x8a\x09" + struct.pack("<q", value) + b"\0" if abs(value) >= 1 << 31 else b"J" + struct.pack("<i", value)


def pair(values) -> bytes:
    return b"(" + b"".join(map(whole, values)) + b"t"


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def tensor(kind: str, key: str, size: int, shape, strides, offset: int = 0, call: bytes | None = None) -> bytes:
    """`_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, backward_hooks)`."""
    storage = b"(" + text("storage") + name("torch", kind) + text(key) + text("cpu") + whole(size) + b"tQ"
    call = name("torch._utils", "_rebuild_tensor_v2") if call is None else call
    hooks = name("collections", "OrderedDict") + b")R"
    return call + b"(" + storage + whole(offset) + pair(shape) + pair(strides) + b"\x89" + hooks + b"tR"


def state_dict(items: dict[str, bytes]) -> bytes:
    """With the metadata that a module's state dict has."""
    filled = b"".join(text(key) + value for key, value in items.items())
    metadata = b"}" + text("_metadata") + name("collections", "OrderedDict") + b")Rsb"
    return b"\x80\x02" + name("collections", "OrderedDict") + b")Rq\x00(" + filled + b"u" + metadata + b"."


def write_zip(path: pathlib.Path, pickle: bytes, storages: dict[str, bytes], root: str = "medusa_lm_head", **options):
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr(f"{root}/data.pkl", pickle)
        archive.writestr(f"{root}/byteorder", b"little")
        for key, raw in storages.items():
            archive.writestr(f"{root}/data/{key}", raw)
        archive.writestr(f"{root}/version", b"3\n")
    return path


def write_torch(path: pathlib.Path, held: dict[str, np.ndarray]) -> pathlib.Path:
    """What torch.save would write of these tensors."""
    items, storages = {}, {}
    for i, (key, array) in enumerate(held.items()):
        strides = [stride // array.itemsize for stride in array.strides]
        items[key] = tensor(_STORAGES[array.dtype], str(i), array.size, array.shape, strides)
        storages[str(i)] = array.tobytes()
    return write_zip(path, state_dict(items), storages)
