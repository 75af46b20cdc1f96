"""Damage to the files of a folder, the same for the same seed: bits flipped, files cut short, emptied or deleted."""

import pathlib
import random
from collections.abc import Iterator


def damaged(folder: pathlib.Path, count: int, seed: int) -> Iterator[str]:
    """Damages one file after the other, and mends it again; gives what was done, while it is done."""
    rng = random.Random(seed)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for number in range(count):
        path = files[number % len(files)]
        whole = path.read_bytes()
        kind = rng.choice(["flip", "flip", "flip", "cut", "empty", "delete", "more"] if whole else ["delete", "more"])
        at = rng.randrange(len(whole)) if whole else 0
        bytes_ = bytearray(whole)
        if kind == "flip":
            bytes_[at] ^= 1 << rng.randrange(8)
        elif kind == "more":
            bytes_ += rng.randbytes(3)
        else:
            bytes_ = bytes_[: at if kind == "cut" else 0]
        path.unlink()
        if kind != "delete":
            path.write_bytes(bytes_)
        yield f"{kind} {path.relative_to(folder)} at {at}"
        path.write_bytes(whole)
