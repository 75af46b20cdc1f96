"""Measures on a machine with one GPU what only a GPU can show: one command, parts in order of value, one deadline.

    python -m scripts.measure.gpu_day OUT                       # at most 22 minutes
    python -m scripts.measure.gpu_day OUT --parts products widths --minutes 5
    python -m scripts.measure.gpu_day OUT --small               # toy sizes, on a CPU: does everything run?
    python -m scripts.measure.gpu_day --pack DIR                # what to carry to a machine without a network
    python -m scripts.measure.gpu_day OUT --carried DIR         # uses what was carried
    python -m scripts.measure.gpu_day --unpack OUT              # writes the records to measurements/

Each part is a process of its own with a limit in seconds, so that a crash or a hang loses nothing else. OUT has three
files, which are up to date while a part runs: the journal `day.json`, the records `records.json`, and `log.txt`.
Nothing is left out silently: the journal has a line for every part, with a reason if the part was cut or skipped.
`exact=True` is measured beside XLA's own kernels; where it is refused, such as for float32, the records say why.
"""

import argparse
import json
import os
import pathlib
import platform
import sys
import tempfile
from typing import Any

from jaxspec.bench import environment
from jaxspec.bench.measurements import RECORDS_FOLDER
from scripts.figures.records import read_record
from scripts.library import carrying, day
from scripts.library.carrying import ROOT
from scripts.library.day import Part

MINUTES, SMALL_MINUTES = 22.0, 75.0
SMALL_TIMES = 8
"""Factor of the limits of parts at toy sizes: a CPU compiles more slowly, and other programs may use it."""
BITS_DRAFTERS = (
    "prompt-lookup", "medusa, the heads' own tree", "eagle, dynamic tree of 64 nodes", "model, chain 4"
)  # fmt: skip
"""Drafters whose texts are compared: a copy, heads with a static tree and with a dynamic one, and a model."""
TRANSFER_MIB = 64.0


def parts(small: bool, needs: dict[str, pathlib.Path]) -> list[Part]:
    """Returns the parts, the most valuable first.

    Args:
        small: toy sizes, for a CPU.
        needs: the files without which SmolLM2 cannot be loaded, by what they are.
    """
    rounds = ("--layers", "4", "--repeats", "2", "--small") if small else ("--layers", "32")
    few_layers = rounds if small else ("--layers", "8")  # each layer in Pallas takes seconds to lower
    bits = (
        ("--dtypes", "float32", "--layers", "2", "--prompts", "2", "--tokens", "6", "--batches", "2",
         "--drafters", "prompt-lookup")
        if small else
        ("--dtypes", "bfloat16", "float32", "--prompts", "8", "--tokens", "48", "--batches", "3",
         "--drafters", *BITS_DRAFTERS, "--threads", "8")
    )  # fmt: skip
    texts = (
        ("--dtypes", "float32", "--methods", "none", "prompt-lookup", "--temperatures", "0", "--limit", "1",
         "--repeats", "1", "--tokens", "8", "--tasks", "copy")
        if small else ("--dtypes", "bfloat16", "--temperatures", "0", "--repeats", "2")
    )  # fmt: skip
    size = ("--small",) if small else ()

    def part(name: str, seconds: float, answers: str, module: str, *arguments: str, **more: Any) -> Part:
        limit = seconds * (SMALL_TIMES if small else 1)
        return Part(name, answers, (f"scripts.{module}", "--record", name, *arguments), limit, **more)

    return [
        part("products", 80, "do rows of a product have the same bits for any number of rows?", "measure.products",
             *size),
        part("text-bits", 135, "do texts have the same bits with any drafter, tree, batch and session?", "prove.bits",
             "--exact", "both", "--report-only", *bits, needs=needs),
        part("exact-widths", 85, "what does a round cost by width, exact and not?", "measure.rounds",
             "--exact", "both", "--parts", "widths", *rounds),
        part("exact-products", 50, "what does a round cost with exact products by XLA?", "measure.rounds",
             "--exact", "both", "--parts", "products", *few_layers),
        part("exact-drafters", 120, "what does a round cost by drafter, exact and not?", "measure.rounds",
             "--exact", "both", "--parts", "drafters", "--at-once", "14", *rounds),
        part("exact-batch", 60, "what does a round of 16 rows cost, exact and not?", "measure.rounds",
             "--exact", "both", "--parts", "batch", *rounds),
        part("expert-forms", 40, "what does a mixture of experts cost by its form?", "measure.expert_forms", *size),
        part("training-steps", 70, "how many steps of training heads does a second have?", "measure.training_steps",
             *size),
        part("training-steps-1b", 50, "the same for a smaller target", "measure.training_steps", "--target", "1B",
             *size),
        part("texts", 80, "how many tokens of SmolLM2's text does a second have?", "measure.texts", *texts,
             needs=needs),
        part("train-minutes", 490, "how far does an EAGLE-3 head of SmolLM2 come in eight minutes?",
             "measure.train_minutes", *(("--small", "--minutes", "2") if small else ("--minutes", "8")),
             needs={} if small else needs),
    ]  # fmt: skip


def main() -> int:
    names = [part.name for part in parts(False, {})]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=pathlib.Path, metavar="OUT", help="folder of the results")
    parser.add_argument("--parts", nargs="*", choices=names, default=names, help="the parts to run, in their own order")
    parser.add_argument(
        "--minutes", type=float, help=f"of the whole run (default: {MINUTES:g}, small {SMALL_MINUTES:g})"
    )
    parser.add_argument("--small", action="store_true", help="toy sizes, to test the script on a CPU")
    parser.add_argument("--carried", type=pathlib.Path, metavar="DIR", help="folder that --pack made")
    parser.add_argument("--wheels", type=pathlib.Path, metavar="DIR", help="folder of wheels to install, if missing")
    parser.add_argument("--pack", type=pathlib.Path, metavar="DIR", help="write what to carry to DIR, and end")
    parser.add_argument("--transfer-mib", type=float, default=TRANSFER_MIB, help="the largest transfer of --pack")
    parser.add_argument(
        "--unpack", type=pathlib.Path, metavar="OUT", help=f"write the records of OUT to {RECORDS_FOLDER}/"
    )
    arguments = parser.parse_args()
    given = [one for one in (arguments.out, arguments.pack, arguments.unpack) if one is not None]
    if len(given) != 1:
        parser.error("give one of OUT, --pack DIR and --unpack OUT")
    if arguments.minutes is None:
        arguments.minutes = SMALL_MINUTES if arguments.small else MINUTES
    if arguments.minutes <= 0:
        parser.error(f"--minutes must be positive, got {arguments.minutes:g}")
    try:
        if arguments.pack:
            return pack(arguments.pack, int(arguments.transfer_mib * 2**20))
        if arguments.unpack:
            return unpack(arguments.unpack)
        return measure(arguments)
    except ValueError as error:
        parser.error(str(error))


def measure(arguments: argparse.Namespace) -> int:
    """Runs the parts; returns 1 if a part was not done."""
    out: pathlib.Path = arguments.out.resolve()
    carried = arguments.carried.resolve() if arguments.carried else None
    cache = carried / "cache" if carried else None
    needs = {"the weights of SmolLM2": carrying.weights_path(cache)} if cache else {}
    chosen = [part for part in parts(arguments.small, needs) if part.name in arguments.parts]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if not arguments.small:
        own.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    about = {"small": arguments.small, "python": platform.python_version()}
    run = day.Day(out, chosen, arguments.minutes * 60, about, own)
    with tempfile.TemporaryDirectory(prefix="gpu-day-site-") as site:
        wheels = [wheel for folder in (carried, arguments.wheels) if folder for wheel in carrying.wheels_of(folder)]
        if wheels:
            run.describe(wheels=carrying.install_wheels(wheels, pathlib.Path(site)))
            run.environment["PYTHONPATH"] = os.pathsep.join([*paths, site])
            sys.path.append(site)
        if carried and cache:
            run.describe(weights=carrying.join_weights(carried, cache), carried=carrying.read_manifest(carried))
            run.environment["JAXSPEC_CACHE"] = str(cache)
        commit, dirty = environment.find_commit()
        run.describe(commit=commit, dirty=dirty, missing_packages=carrying.missing_packages())
        return 0 if run.run() else 1


def pack(folder: pathlib.Path, limit_bytes: int) -> int:
    """Writes what to carry, and prints how to use it."""
    folders = carrying.pack(folder, limit_bytes)
    for number, own in enumerate(folders, 1):
        size = sum(path.stat().st_size for path in own.iterdir())
        print(f"transfer {number}: the checkout and {own} ({size / 2**20:.1f} MiB)")
    print(f"after the first:  python -m scripts.measure.gpu_day OUT --carried {folder} --minutes 3 --parts products")
    print(f"after the last:   python -m scripts.measure.gpu_day OUT --carried {folder} --minutes 9 --parts ...")
    return 0


def unpack(out: pathlib.Path) -> int:
    """Writes the records of a run to the folder of records, each with the commit that was carried.

    Raises:
        ValueError: the folder holds no records, or those of a run at toy sizes.
    """
    if not (out / day.RECORDS).exists():
        raise ValueError(f"{out} has no {day.RECORDS}: no part of this run wrote a record")
    journal, records = (json.loads((out / name).read_text()) for name in (day.JOURNAL, day.RECORDS))
    if journal["small"]:
        raise ValueError(f"{out} holds a run with --small, whose figures mean nothing")
    carried = journal.get("carried") or {}
    RECORDS_FOLDER.mkdir(exist_ok=True)
    for name, record in records.items():
        if record["commit"] is None:
            record |= {"commit": carried.get("commit"), "dirty": carried.get("dirty", True)}
        (RECORDS_FOLDER / name).write_text(json.dumps(record, indent=1) + "\n")
        read_record(RECORDS_FOLDER / name)
        print(RECORDS_FOLDER / name)
    for line in journal["parts"]:
        if line["status"] != "done":
            print(f"{line['part']}: {line['status']}: {line['reason']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
