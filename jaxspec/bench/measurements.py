"""Records of measurements: one JSON file each, written by the command that measured.

A file `measurements/ID@MACHINE.json` holds the newest measurement of that name on that machine. Git keeps the earlier
measurements. `make figures` renders them into the documentation.
"""

import dataclasses
import datetime
import json
import os
import pathlib
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxspec.errors import InvalidConfig

RECORDS_FOLDER = pathlib.Path("measurements")
"""The folder of records, in the working directory. Records to commit are written from the root of the checkout."""

ID_PATTERN = r"[a-z0-9]+(-[a-z0-9]+)*"

INSTRUCTION_SETS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2", "sve": "SVE", "asimd": "NEON"}
"""Names of instruction sets in file names, best first, by their flag in `environment.describe_machine()`."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One measurement, and all that is needed to repeat it.

    Attributes:
        id: the name by which a page refers to it.
        kind: what was measured, such as "widths" or "bench". It decides how the record is rendered.
        command: the command line, without `--record` and without folders of the machine.
        machine: CPU model, usable cores, memory, instruction sets and JAX's device; no name of a host.
        versions: the versions of Python and of packages.
        commit: the commit of the checkout that measured; None outside of a checkout.
        dirty: whether the package or the scripts had changes that were not committed.
        date: the date in UTC, as YYYY-MM-DD.
        values: the figures: medians, quartiles and counts, not raw samples.
    """

    id: str
    kind: str
    command: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    commit: str | None
    dirty: bool
    date: str
    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not re.fullmatch(ID_PATTERN, self.id):
            raise InvalidConfig(
                f"the id of a record must consist of lower-case letters, digits and hyphens, got {self.id!r}"
            )
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", self.date):
            raise InvalidConfig(f"record {self.id}: the date must be YYYY-MM-DD, got {self.date!r}")
        if not self.values:
            raise InvalidConfig(f"record {self.id} has no values")

    @property
    def instruction_set(self) -> str | None:
        """The best instruction set of the CPU; None if it has none of `INSTRUCTION_SETS`."""
        return next((name for flag, name in INSTRUCTION_SETS.items() if flag in self.machine["flags"]), None)

    @property
    def file(self) -> str:
        """The name of the file: the id and the properties that distinguish machines."""
        machine = self.machine
        kind = self.instruction_set if machine["platform"] == "cpu" else machine["kind"]
        parts = filter(None, (machine["cpu"], str(machine["cores"]), kind))
        return f"{self.id}@{re.sub(r'[^a-z0-9]+', '-', ' '.join(parts).lower()).strip('-')}.json"


def add_record(add: Callable) -> None:
    """Adds `--record` to a parser's or a group's `add_argument`."""
    add(
        "--record",
        metavar="ID",
        type=_id,
        help=f"for maintainers: write the figures to {RECORDS_FOLDER}/ID@MACHINE.json, from which "
        "'make figures' makes the tables of the documentation",
    )


def _id(text: str) -> str:
    if not re.fullmatch(ID_PATTERN, text):
        raise ValueError
    return text


_id.__name__ = "id of lower-case letters, digits and hyphens"  # argparse shows this name in its message


def write_record(
    identity: str, kind: str, words: Sequence[str], values: Mapping[str, Any], versions: Mapping[str, str] | None = None
) -> pathlib.Path:
    """Writes a record of this machine in its current state, and returns the file's path.

    Args:
        identity: the record's id.
        kind: what was measured.
        words: the program and its arguments.
        values: the figures.
        versions: the versions of packages other than Python, JAX, jaxlib and jaxspec.

    Raises:
        InvalidConfig: the id cannot name a file, or there are no values.
    """
    from jaxspec.bench import environment  # imports JAX

    commit, dirty = environment.find_commit()
    made = Measurement(
        identity, kind, describe_command(words), environment.describe_machine(),
        environment.read_versions() | dict(versions or {}), commit, dirty,
        datetime.datetime.now(datetime.UTC).date().isoformat(), values,
    )  # fmt: skip
    RECORDS_FOLDER.mkdir(exist_ok=True)
    path = RECORDS_FOLDER / made.file
    path.write_text(json.dumps(dataclasses.asdict(made), indent=1, allow_nan=False) + "\n")
    return path


def describe_command(words: Sequence[str]) -> str:
    """Returns a command line without details of this machine: without its folders, and without `--record`."""
    program, *rest = words
    script = re.search(r"scripts/.*\.py$", os.path.abspath(program).replace(os.sep, "/"))
    shown, skip = (["python", script[0]] if script else [program]), False
    for word in rest:
        if not skip and word != "--record" and not word.startswith("--record="):
            option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
            shown.append(option + equals + (os.path.basename(value.rstrip("/")) if os.path.isabs(value) else value))
        skip = word == "--record"
    return shlex.join(shown)


def quartiles(values: Iterable[float], digits: int = 4) -> list[float]:
    """Returns the first quartile, the median and the third quartile, rounded to significant digits."""
    import numpy as np

    return [round_significant(value, digits) for value in np.percentile(list(values), (25, 50, 75))]


def round_significant(value: float, digits: int = 4) -> float:
    """Returns a number rounded to `digits` significant digits."""
    return float(f"{float(value):.{digits}g}")
