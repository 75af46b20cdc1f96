"""What `make tpu` and `make gpu` look for in a compiled loop, and the table that they print and record."""

import argparse
import collections
import dataclasses
import importlib.metadata
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax

from jaxspec.bench.measurements import add_record, round_significant, write_record
from jaxspec.models.config import EXPERT_MATRICES, FLOAT32_MATRICES
from jaxspec.models.experts import count_bytes
from scripts.library import hlo, kernels, loops
from scripts.library.loops import Case, Program

LARGE = 1_000_000  # bytes; what is smaller may be copied
COMPUTED = ("dot", "convolution", "slice", "dynamic-slice")  # results and parts, which may be as large by chance
REFERENCES: dict[Case, list[kernels.Kernel]] = {}  # kernels before the logits without a drafter
AN_EXPERT = "the matrix of an expert"
COPIES = ("copy", "copy-start", "transpose")
HOST = ("infeed", "outfeed", "send", "recv", "send-done", "recv-done")


def findings(
    parts: dict[str, list[hlo.Instruction]],
    weights: Any,
    caches: Any,
    share: int = 1,
    tables: Any = (),
    ignored: Collection[int] = (),
) -> list[str]:
    """What must not be in the program, and is.

    Of caches a device holds its share, of a matrix at least the half, and half of the rows of a drafter's tables.
    Arrays with numbers of elements that are `ignored` may be written.
    """
    wrong = []
    loops = sum(one.op == "while" for one in parts["ENTRY"])
    if loops != 1:
        wrong.append(f"{loops} loops at the top, expected the one of the rounds")
    # A router may have as many elements as a state, and the matrix of a shared expert as many as rows of experts.
    named = jax.tree_util.tree_leaves_with_path(weights)
    keys = [({getattr(key, "key", None) for key in path}, leaf) for path, leaf in named]
    matrices = [leaf for names, leaf in keys if not names & {*FLOAT32_MATRICES, "shared_down"}]
    experts = [leaf for names, leaf in keys if EXPERT_MATRICES[0] in names and leaf.ndim == 3]
    large = {leaf.size // part: "a matrix" for leaf in matrices for part in {1, min(share, 2)}}
    large |= {leaf.size // leaf.shape[0] // part: AN_EXPERT for leaf in experts for part in {1, min(share, 2)}}
    large |= {leaf.size // share: "a whole cache" for leaf in jax.tree.leaves(caches)}
    large = {size: what for size, what in large.items() if size not in ignored}
    kept = {(leaf.shape[0] // min(share, 2), *leaf.shape[1:]) for leaf in jax.tree.leaves(tables)}
    for name in hlo.reached(parts):
        for one in parts[name]:
            if one.op in HOST:
                wrong.append(f"it speaks to the host: {one.op}")
            if re.search(r'custom_call_target="[^"]*(host|callback)', one.rest, re.IGNORECASE):
                wrong.append(f"it calls the host: {one.rest[:120]}")
            for op, type in hlo.written(parts, one):
                big = op not in COMPUTED and hlo.size(type, anywhere=True) >= LARGE
                table = "a drafter's table" if hlo.shape(type) in kept else None
                what = large.get(hlo.elements(type), table)
                # Rows of an expert may have as many elements as its matrix.
                if big and what and (what != AN_EXPERT or op in (*COPIES, "convert")):
                    where = "before the loop" if name == "ENTRY" else "inside the loop"
                    wrong.append(f"a {op} of {what} {where}: {one.name} = {type}")
    return wrong


def state_writes(parts: dict[str, list[hlo.Instruction]], body: str, states: Any, share: int = 1) -> dict[str, int]:
    """Returns how often a round writes an array of the shape of a state of a recurrent layer, by operation.

    A commit must write each state once; a copy of a state is waste. On a mesh, rows and heads of a state are split in
    `share` parts each. Axes of one entry do not count.
    """
    counts: collections.Counter = collections.Counter()
    split = [(leaf.shape[0] // share, leaf.shape[1] // share, *leaf.shape[2:]) for leaf in states]
    shapes = {tuple(n for n in shape if n > 1) for shape in split}
    for name in hlo.reached(parts, body):
        for one in parts[name]:
            for op, type in hlo.written(parts, one):
                if tuple(n for n in hlo.shape(type) if n > 1) in shapes:
                    counts[op] += 1
    return dict(counts)


def report(case: Case, chip: "Chip", program: Program) -> dict[str, Any]:
    """What every tier says about a program."""
    done, weights, state = program.done, program.weights, program.state
    memory, share = done.memory_analysis(), 4 if case.mesh else 1
    assert memory is not None
    caches = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state.cache.stores,))) // share
    matrices = {name: part for name, part in weights.target.items() if name != "embed"}  # of that a row is read
    read = int(count_bytes(matrices, program.target.config.experts, program.tokens)) // (2 if case.mesh else 1)
    held = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 5]
    tables = [leaf for leaf in jax.tree.leaves(state.draft) if leaf.ndim < 5 and leaf.size > LARGE / 4]
    wrong = findings(program.parts, weights, held, share, tables, program.outputs_of_experts)
    if memory.alias_size_in_bytes < caches:
        wrong.append(f"{memory.alias_size_in_bytes} bytes are updated in place, the caches have {caches}")
    loop = next(one for one in program.parts["ENTRY"] if one.op == "while")
    states = [leaf for leaf in jax.tree.leaves(state.cache.stores) if leaf.ndim == 4]
    writes = state_writes(program.parts, hlo.called(loop, "body"), states, 2 if case.mesh else 1)
    wrong += [f"{count} times a {op} of a state" for op, count in writes.items() if op in COPIES]
    own = {"state_writes": sum(writes.values()) / len(states)} if states else {}
    moved = hlo.moved(program.parts, hlo.called(loop, "body"), program.experts_read)
    kernels = {"attention_mb": max(hlo.moved_by_kernels(program.parts)) / 1e6} if case.attention == "pallas" else {}
    return (
        case.named
        | kernels
        | own
        | {
            "fits": True,
            "wrong": wrong,
            "compile_s": round(program.seconds, 1),
            "weights_gb": read / 1e9,
            "moved_gb": moved / 1e9,
            "cache_mb": caches / 1e6,
            "temporary_mb": memory.temp_size_in_bytes / 1e6,
            "ms_by_bytes": moved / chip.bandwidth * 1e3,
            "ms_weights_alone": read / chip.bandwidth * 1e3,
        }
    )


def compare_with_plain(case: Case, program: Program, compile_case: Callable[[Case], Program]) -> kernels.Difference:
    """Returns how the kernels before the logits differ from the kernels without a drafter, at the same width."""
    own = kernels.before_logits(program.parts, loops.VOCAB)
    plain = dataclasses.replace(case, drafter=loops.PLAIN)
    if case == plain:
        REFERENCES[plain] = own
    elif plain not in REFERENCES:
        REFERENCES[plain] = kernels.before_logits(compile_case(plain).parts, loops.VOCAB)
    return kernels.compare(own, REFERENCES[plain])


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures of one chip: bytes of memory per second, bfloat16 FLOPs per second, bytes of memory."""

    topology: str
    bandwidth: float
    flops: float
    memory: float


@dataclasses.dataclass(frozen=True)
class Tier:
    """A kind of devices.

    Attributes:
        kind: of its records.
        look: compiles a case, and returns its line of the table.
        capacity: slots of the cache for a target of so many layers.
        shown: what a line shows beside what both tiers do.
        kept: what a record keeps of a line beside what both tiers do.
        packages: those that compile, whose versions are recorded.
    """

    kind: str
    look: Callable[[Case], dict[str, Any]]
    capacity: Callable[[int], int]
    shown: Callable[[dict[str, Any]], str]
    kept: tuple[str, ...]
    packages: tuple[str, ...]

    def run(self, arguments: argparse.Namespace) -> int:
        """Compiles the cases that are asked for, prints and writes the table, and returns the exit status."""
        rows = []
        for case in loops.cases(arguments.chips.split(","), arguments.layers, arguments.all, self.capacity):
            if arguments.drafters and arguments.drafters not in case.drafter:
                continue
            try:
                row = self.look(case)
            except jax.errors.JaxRuntimeError as error:
                if "memory" not in str(error).lower():
                    raise
                row = case.named | {"fits": False, "why": " ".join(str(error).split())[:200]}
            rows.append(row)
            print(self.line(row), flush=True)
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump({"jax": jax.__version__, "rows": rows}, file, indent=1)
        if arguments.record:
            versions = {name: importlib.metadata.version(name) for name in self.packages}
            words = ["python", "-m", f"scripts.prove.{self.kind}", *sys.argv[1:]]
            print(f"written: {write_record(arguments.record, self.kind, words, self.recorded(rows), versions)}")
        return int(any(row.get("wrong") for row in rows))

    def line(self, row: dict[str, Any]) -> str:
        head = " ".join((f"{row['chip']:4} {row['mesh']:10} {row['drafter']:36}", f"x{row['batch']:<2}", row["dtype"]))
        if not row["fits"]:
            return f"{head} does not fit: {row['why']}"
        own, layer = row.get("attention_mb"), row["cache_mb"] / row["layers"]
        kernel = "" if own is None else f"attention moves {own:.2f} MB a layer (cache {layer:.2f}), "
        if "state_writes" in row:
            kernel += f"each state written {row['state_writes']:g} times, "
        if "kernels" in row:
            kernel += (
                f"{row['same_kernels']} of {row['kernels']} kernels before the logits are those of plain decoding, "
            )
        return (
            f"{head} weights {row['weights_gb']:6.2f} GB, moved {row['moved_gb']:6.2f} GB, {kernel}{self.shown(row)}, "
            f"temporaries {row['temporary_mb']:6.1f} MB (cache {row['cache_mb']:.0f}), {row['ms_by_bytes']:.2f} ms by "
            f"bytes, {row['ms_weights_alone']:.2f} for the weights alone, compiled in {row['compile_s']} s; "
            f"{'; '.join(row['wrong']) or 'all as it should be'}"
        )

    def recorded(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns the figures of a record."""
        names = ("chip", "mesh", "drafter", "batch", "dtype", "layers", "weights_gb", "moved_gb", "ms_by_bytes",
                 "ms_weights_alone", "temporary_mb", "attention_mb", "state_writes",
                 "kernels", "same_kernels", *self.kept)  # fmt: skip
        kept = [{name: row[name] for name in names if name in row} for row in rows]
        return {
            "sound": sum(row["fits"] and not row["wrong"] for row in rows),
            "wrong": sum(row["fits"] and bool(row["wrong"]) for row in rows),
            "rows": [
                {key: round_significant(v) if isinstance(v, float) else v for key, v in row.items()} for row in kept
            ],
        }


def parser(about: str | None, chips: Iterable[str]) -> argparse.ArgumentParser:
    """Returns a parser of what both tiers ask for."""
    jax.config.update("jax_platforms", "cpu")  # a compiler needs no device
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--chips", default=",".join(chips))
    made.add_argument("--drafters", help="only those whose name holds this")
    made.add_argument("--layers", type=int, default=2, help="of the target")
    made.add_argument("--all", action="store_true", help="every combination")
    made.add_argument("--json", metavar="FILE")
    add_record(made.add_argument)
    return made
