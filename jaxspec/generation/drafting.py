"""What `jaxspec tune` found out for a pair of models on a machine, and its file.

The file is JSON: a version, the drafter by name, the parents of its tree, and a schedule by name with its fields.
What was measured stands beside them, for people.
"""

import dataclasses
import json
import os
from typing import Any

from jaxspec.core.protocols import Schedule
from jaxspec.core.tree import Topology, read_parents
from jaxspec.errors import InvalidConfig, JaxspecError, TuningError, shown
from jaxspec.registry import SCHEDULES, find
from jaxspec.storage.reading import check_path, read_json

VERSION = 1
_FIELDS = {"version", "drafter", "tree", "exit_layers", "schedule", "measured"}


@dataclasses.dataclass(frozen=True, repr=False)
class Tuned:
    """How to draft; `generate(..., tuned=...)` takes it, or its file.

    Attributes:
        drafter: a registered name.
        tree: the topology.
        schedule: an object of a registered class.
        exit_layers: of the drafter "early-exit", None for others.
        measured: figures, which nothing reads.
    """

    drafter: str
    tree: Topology
    schedule: Schedule
    exit_layers: int | None = None
    measured: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        shape = self.tree.shape
        layers = "" if self.exit_layers is None else f", exit_layers={self.exit_layers}"
        return (
            f"Tuned({self.drafter!r}, a tree of {shape.nodes} nodes, {shape.depth} deep, "
            f"{type(self.schedule).__name__}{layers})"
        )

    def save(self, path: str | os.PathLike) -> None:
        """Writes the file."""
        place = check_path(path, "the file of jaxspec tune")
        names = {find("schedule", name): name for name in SCHEDULES}
        record = {
            "version": VERSION,
            "drafter": self.drafter,
            "tree": self.tree.parents,
            "exit_layers": self.exit_layers,
            "schedule": {"name": names[type(self.schedule)], **dataclasses.asdict(self.schedule)},  # pyright: ignore
            "measured": self.measured,
        }
        place.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Tuned":
        """Reads a file.

        Raises:
            TuningError: it is none, of another version, or does not say what it should; naming the file.
        """
        record = read_json(check_path(path, "the file of jaxspec tune"), TuningError)
        try:
            return cls._parse(record)
        except JaxspecError as error:
            raise TuningError(f"{path}: {error}") from None

    @classmethod
    def _parse(cls, record: dict[str, Any]) -> "Tuned":
        if (got := record.get("version")) != VERSION:
            raise TuningError(f"expected version {VERSION} of what 'jaxspec tune' writes, got {got!r:.40}; tune again")
        if record.keys() != _FIELDS:
            odd = sorted(map(str, record.keys() ^ _FIELDS))
            raise TuningError(f"expected the fields {', '.join(sorted(_FIELDS))}; missing or unknown: {odd[0]:.40}")
        drafter, parents, layers, given = (record[name] for name in ("drafter", "tree", "exit_layers", "schedule"))
        if not isinstance(drafter, str):
            raise TuningError(f"drafter must be a name, got {drafter!r:.40}")
        find("drafter", drafter)
        if not (layers is None or (type(layers) is int and layers > 0)):
            raise TuningError(f"exit_layers must be a whole number from 1, or null, got {layers!r:.40}")
        if not isinstance(given, dict) or not isinstance(given.get("name"), str):
            raise TuningError(f"schedule must be an object with a name, got {given!r:.40}")
        if not isinstance(record["measured"], dict):
            raise TuningError(f"measured must be an object, got {record['measured']!r:.40}")
        member = find("schedule", given["name"])
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if k != "name"}
        if unknown := settings.keys() - {field.name for field in dataclasses.fields(member)}:
            raise TuningError(f"the schedule {given['name']!r} has no {min(unknown)!r}")
        try:
            schedule = member(**settings)
        except (TypeError, OverflowError) as error:  # a text where a number should be, or too large a number
            raise TuningError(f"the schedule {given['name']!r}: {error}") from None
        return cls(drafter, read_parents(parents), schedule, layers, record["measured"])


def as_tuned(given: Any) -> Tuned:
    """What `tuned=` may be: the object, or the path of its file."""
    if isinstance(given, Tuned):
        return given
    if isinstance(given, (str, os.PathLike)):
        return Tuned.load(given)
    raise InvalidConfig(f"tuned must be a jaxspec.Tuned or the path of a file, got {shown(given)}")
