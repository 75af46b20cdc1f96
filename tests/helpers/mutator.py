"""Seeded damage to files: to their bytes, and to the values of JSON."""

import copy
import json
import pathlib
import random
import struct
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, "", "x", "\0", "\ud800", "a\nb", "../x", "x" * 5000, -1, 0, 1, 2, 7, 10**9, 2**31, 2**32, 2**63,
    2**64, 10**30, -(10**30), 0.0, -0.5, 0.5, 1e-300, 1e308, [], [[]], [1], [-1], ["x"], [2**31], [None], [True], [0.5],
    [[1]] * 3, {}, {"a": 1}, {"": []}, list(range(300)),
)  # fmt: skip
TEXTS = ("NaN", "-Infinity", "1e999", "9" * 4000, "-" + "9" * 5000, "[" * 3000, '"\\ud800"', "{", "'x'", "")
"""What takes the place of a value as it is written, which no JSON value can say."""
MARK = "@mutant@"


def places(content: Any, at: tuple = ()) -> list[tuple]:
    """The paths of all values but the whole."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [path for key, value in items for path in ((*at, key), *places(value, (*at, key)))]


def mutate_json(raw: bytes, rng: random.Random) -> bytes:
    """One to three changes of a JSON text. Places near the top are as likely as all those far below together."""
    content = json.loads(raw)
    mark = None
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = places(content)
        if not found:
            break
        depth = rng.choice(sorted({len(path) for path in found}))
        *above, key = rng.choice([path for path in found if len(path) == depth])
        holder = content
        for step in above:
            holder = holder[step]
        match rng.randrange(8):
            case 0 | 1 | 2:
                holder[key] = copy.deepcopy(rng.choice(ODD))
            case 3:
                holder[key] = mark = MARK
            case 4:
                del holder[key]
            case 5 if isinstance(holder, dict):
                holder[rng.choice((key + "_", key.upper(), "", "x"))] = holder.pop(key)
            case 5:
                holder[key:key] = [copy.deepcopy(holder[key])] * rng.choice((1, 2, 50))
            case 6:
                value = holder[key]
                number = isinstance(value, (int, float)) and not isinstance(value, bool)
                holder[key] = value * rng.choice((-1, 2, 10**6, 10**12)) if number else [value]
            case 7:
                value = holder[key]
                holder[key] = type(value)() if isinstance(value, (list, dict, str)) else str(value)
    text = json.dumps(content)
    if mark is not None:
        text = text.replace(f'"{MARK}"', rng.choice(TEXTS))
    if rng.random() < 0.1 and text.startswith("{") and isinstance(content, dict) and content:
        key = rng.choice(sorted(content))
        text = f"{{{json.dumps(key)}: {json.dumps(rng.choice(ODD))}, {text[1:]}"
    return text.encode()


def mutate_bytes(raw: bytes, rng: random.Random, head: int = 1 << 62) -> bytes:
    """One to four changes of bytes, most of them among the first `head`."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4))):
        size = min(len(data), head) if rng.random() < 0.8 else len(data)
        at = rng.randrange(size) if size else 0
        match rng.randrange(7):
            case 0 | 1 if data:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                del data[at:]
            case 3:
                data[at:at] = rng.randbytes(rng.choice((1, 2, 8, 100)))
            case 4:
                del data[at : at + rng.choice((1, 2, 8, 100))]
            case 5:
                odd = rng.choice((0, 1, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1))
                word = struct.pack("<Q", odd)[: rng.choice((4, 8))]
                data[at : at + len(word)] = word
            case 6:
                other = rng.randrange(size) if size else 0
                data[at : at + 16] = data[other : other + 16]
    return bytes(data)


def mutate_file(path: pathlib.Path, rng: random.Random, head: int = 1 << 62) -> None:
    """Damages one file in place, one of JSON mostly in what it says."""
    raw = path.read_bytes()
    as_json = path.suffix in (".json", ".jsonl", "") and raw[:1] == b"{" and rng.random() < 0.8
    if as_json and path.suffix == ".jsonl":
        lines = raw.splitlines()
        at = rng.randrange(len(lines))
        lines[at] = mutate_json(lines[at], rng)
        path.write_bytes(b"\n".join(lines))
    elif as_json:
        path.write_bytes(mutate_json(raw, rng))
    else:
        path.write_bytes(mutate_bytes(raw, rng, head))
