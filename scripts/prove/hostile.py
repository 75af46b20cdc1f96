"""Reads damaged and hostile files in every format, and reports each that ends otherwise than in a line or in order.

    PYTHONPATH=tests python -m scripts.prove.hostile --count 2000 --seed 0

Each case damages one file of a small checkpoint: bits are flipped, the file is cut, emptied, deleted or extended, or a
value of its JSON is replaced by an odd one. It must then be refused by an error of jaxspec in one line, or be read: in
a format with checksums with the same weights, in others with the weights that the file holds. A job must resume from
its damaged results file with the same texts, or refuse the file. Nothing may take 5 s of processor time, or 256 MB.
"""

import argparse
import collections
import contextlib
import copy
import json
import pathlib
import random
import resource
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors.numpy import save_file

import jaxspec
from helpers import dflash_heads, eagle_heads, medusa_files
from helpers.checkpoints import VOCABULARY, hf_tensors, leaves, random_params, tiny_config, write_gguf, write_hf
from jaxspec.checkpoints.load import read_params
from jaxspec.checkpoints.source import open_checkpoint, read_headers
from jaxspec.errors import JaxspecError
from jaxspec.generation.drafting import Drafting
from jaxspec.heads.files import save_heads
from jaxspec.heads.headers import open_heads
from jaxspec.schedules.adaptive import Adaptive
from jaxspec.testing import TableLM

SECONDS, KILOBYTES = 5.0, 256 << 10
ODD: list[Any] = [
    {},
    [],
    [[]],
    "",
    "x",
    "\x1b[2J",
    None,
    True,
    -1,
    0,
    1.5,
    1e308,
    2**31,
    2**64,
    [None] * 50,
    {"a": {"b": []}},
]
CONFIG = tiny_config()
PARAMS = random_params(CONFIG)
LETTERS = TableLM(24)
JOB = jaxspec.Model(LETTERS, LETTERS.init_params(jax.random.key(0)))
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]


class Format(NamedTuple):
    """A format: how its files are written, and read to arrays by name.

    `checked` says that a changed weight must be noticed, and `share` how many arrays a changed byte may change.
    """

    write: Callable[[pathlib.Path], Any]
    read: Callable[[pathlib.Path], dict[str, np.ndarray]]
    checked: bool = False
    share: int = 1


def read_model(place: pathlib.Path) -> dict[str, np.ndarray]:
    with contextlib.suppress(JaxspecError):
        read_headers(place)
    return leaves(read_params(open_checkpoint(place)))


def read_heads(place: pathlib.Path) -> dict[str, np.ndarray]:
    file = open_heads(place, allow_pickle=True)
    return {name: np.asarray(read()) for name, read in file.readers.items()}


def read_drafting(place: pathlib.Path) -> dict[str, np.ndarray]:
    drafting = Drafting.load(place / "tuned.json")
    return {"tree": np.asarray(getattr(drafting.tree, "parents", ()))}


def write_parts(place: pathlib.Path) -> None:
    import gguf

    writer = gguf.GGUFWriter
    try:
        gguf.GGUFWriter = lambda path, kind: writer(path, kind, split_max_tensors=6)
        write_gguf(place / "model.gguf", CONFIG, PARAMS, metadata=VOCABULARY)
    finally:
        gguf.GGUFWriter = writer


def write_wrapper(place: pathlib.Path) -> None:
    write_hf(place, CONFIG, PARAMS)
    text = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text}))
    tensors = {f"language_model.{name}": array for name, array in hf_tensors(CONFIG, PARAMS).items()}
    save_file(tensors | {"vision_tower.a.weight": np.zeros((3, 3), np.float32)}, place / "model.safetensors")


def write_saved(place: pathlib.Path) -> None:
    """Moves what `save` writes into an existing directory."""
    model = jaxspec.load(write_hf(place / "hf", CONFIG, PARAMS), kernels=False)
    for file in (jaxspec.save(model, place / "saved")).iterdir():
        file.rename(place / file.name)
    for folder in ("hf", "saved"):
        for file in (place / folder).iterdir():
            file.unlink()
        (place / folder).rmdir()


def write_drafting(place: pathlib.Path) -> None:
    Drafting("prompt-lookup", tree=jaxspec.chain(4), schedule=Adaptive(costs=(1.0, 1.1, 1.2, 1.3, 1.4))).save(
        place / "tuned.json"
    )


def write_own_heads(place: pathlib.Path) -> None:
    """Moves what `save_heads` writes into an existing directory."""
    heads = jaxspec.load_heads(eagle_heads.write(place / "published", "eagle3"))
    for file in save_heads(heads, place / "saved").iterdir():
        file.rename(place / file.name)
    for folder in ("published", "saved"):
        shutil.rmtree(place / folder)


def run_job(out: pathlib.Path | None, count: int = len(PROMPTS)) -> dict[str, np.ndarray]:
    """Runs a job, or resumes it from its results file; returns its texts."""
    texts = jaxspec.generate(JOB, PROMPTS[:count], drafter="none", max_new_tokens=12, stop_ids=[3], out=out)
    return {str(number): np.asarray(text.tokens) for number, text in enumerate(texts)}


def write_results(place: pathlib.Path) -> None:
    for count in range(1, len(PROMPTS)):  # what a resumed job may need is compiled before anything is measured
        run_job(None, count)
    run_job(place / "texts.jsonl")


def resume(place: pathlib.Path) -> dict[str, np.ndarray]:
    """Resumes a job from copies of its files, which it changes."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(place, folder, dirs_exist_ok=True)
        return run_job(pathlib.Path(folder, "texts.jsonl"))


FORMATS = {
    "hf": Format(lambda place: write_hf(place, CONFIG, PARAMS, files={"generation_config.json": {"eos_token_id": [2]},
                 "tokenizer_config.json": {"eos_token": "</s>", "chat_template": "{{ messages }}"}}), read_model),
    "shards": Format(lambda place: write_hf(place, CONFIG, PARAMS, shards=3), read_model),
    "wrapper": Format(write_wrapper, read_model),
    "gguf": Format(lambda place: write_gguf(place / "model.gguf", CONFIG, PARAMS, metadata=VOCABULARY), read_model),
    "gguf q8_0": Format(lambda place: write_gguf(place / "m.gguf", CONFIG, PARAMS, kind="Q8_0"), read_model, share=32),
    "gguf parts": Format(write_parts, read_model),
    "saved": Format(write_saved, read_model, checked=True),
    "medusa": Format(lambda place: medusa_files.write(place, "v0.1"), read_heads),
    "medusa torch": Format(lambda place: medusa_files.write_torch(place / "medusa_lm_head.pt",
                           medusa_files.tensors("v0.1")), read_heads),
    "vllm": Format(lambda place: medusa_files.write(place, "vllm-single"), read_heads),
    "eagle1": Format(lambda place: eagle_heads.write(place, "eagle1"), read_heads),
    "eagle3": Format(lambda place: eagle_heads.write(place, "eagle3"), read_heads),
    "dflash": Format(lambda place: dflash_heads.zlab().write(place), read_heads),
    "dspark": Format(lambda place: dflash_heads.speculators("rnn").write(place), read_heads),
    "own heads": Format(write_own_heads, read_heads),
    "tuned": Format(write_drafting, read_drafting),
    "results": Format(write_results, resume, checked=True),
}  # fmt: skip


def mutate(rng: random.Random, raw: bytes) -> tuple[str, bytes | None]:
    """Returns what was done to a file, and its new content; None to delete it."""
    kind = rng.choice(["flip"] * 4 + ["cut", "empty", "delete", "more", "many"])
    changed = bytearray(raw)
    at = rng.randrange(len(raw)) if raw else 0
    header = rng.random() < 0.5 and len(raw) > 64
    at = rng.randrange(min(len(raw), 2048)) if header else at
    if kind in ("flip", "many") and raw:
        for _ in range(1 if kind == "flip" else 20):
            changed[at] ^= 1 << rng.randrange(8)
            at = rng.randrange(len(raw)) if kind == "many" else at
        return f"{kind} at {at}", bytes(changed)
    if kind == "delete":
        return kind, None
    if kind == "more":
        return kind, raw + rng.randbytes(rng.choice([1, 3, 4096]))
    return f"{kind} at {at}", bytes(changed[:at] if kind == "cut" else b"")


def entries(value: Any, at: tuple = ()) -> Iterator[tuple]:
    """Yields the paths of all values of a JSON text."""
    if at:
        yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from entries(one, (*at, key))


def mutate_json(rng: random.Random, raw: bytes) -> tuple[str, bytes]:
    """Replaces a value of a JSON text by an odd one."""
    value = json.loads(raw)
    path, odd = rng.choice([*entries(value)]), rng.choice(ODD)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = copy.deepcopy(odd)
    return f"{'.'.join(map(str, path))} = {odd!r:.40}", json.dumps(value).encode()


def examine(form: Format, place: pathlib.Path, plain: dict[str, np.ndarray], flipped: bool) -> str | None:
    """Reads a damaged checkpoint; returns what is wrong with the outcome, or None."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    problem = None
    try:
        found = form.read(place)
    except JaxspecError as error:
        if "\n" in str(error) or not str(error):
            problem = f"a message of several lines: {error}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        problem = f"raw {type(error).__name__}: {str(error)[:120]}"
    else:
        same = found.keys() == plain.keys() and all(a.shape == plain[k].shape for k, a in found.items())
        count = sum(int((a != plain[k]).sum()) for k, a in found.items()) if same else 0
        if form.checked and (not same or count):
            problem = f"read with {count} other weights, in a format with checksums"
        elif flipped and same and count > form.share:
            problem = f"one bit changed {count} weights"
    took = time.process_time() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if took > SECONDS or grown > KILOBYTES:
        problem = f"{took:.1f} s, {grown >> 10} MB more; {problem}"
    return problem


def run(count: int, seed: int) -> tuple[collections.Counter, list[str]]:
    """Runs the cases; returns how many of each format there were, and what went wrong."""
    rng, done, wrong = random.Random(seed), collections.Counter(), []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        places, plain = {}, {}
        for name, form in FORMATS.items():
            places[name] = pathlib.Path(folder) / name.replace(" ", "-")
            places[name].mkdir()
            form.write(places[name])
            plain[name] = form.read(places[name])
        weights = [1 if form.checked else 4 for form in FORMATS.values()]  # those with checksums take their time
        for name in rng.choices(list(FORMATS), weights, k=count):
            files = sorted(file for file in places[name].rglob("*") if file.is_file())
            file = rng.choice(files)
            raw = file.read_bytes()
            structured = file.suffix == ".json" and rng.random() < 0.7
            what, new = mutate_json(rng, raw) if structured else mutate(rng, raw)
            file.unlink()
            if new is not None:
                file.write_bytes(new)
            try:
                one_bit = what.startswith("flip") and file.suffix in (".safetensors", ".gguf")
                problem = examine(FORMATS[name], places[name], plain[name], one_bit)
            finally:
                file.unlink(missing_ok=True)
                file.write_bytes(raw)
            done[name] += 1
            if problem is not None:
                wrong.append(f"{name}, {file.name}: {what}: {problem}")
    return done, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="number of damaged files (default: 2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the damage (default: 0)")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    done, wrong = run(args.count, args.seed)
    print(", ".join(f"{name}: {number}" for name, number in sorted(done.items())))
    print("\n".join(wrong))
    print(f"{args.count} files, {len(wrong)} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
