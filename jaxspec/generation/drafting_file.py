"""The file of a `Drafting`, which `jaxspec tune` writes.

It is JSON: a version, the name of the drafter, the parents of its tree, the drafter's options, the name of the schedule
with its fields, and the measurements, which are informational. From version 4 on, the tree or the schedule may be null,
for the default of the drafter.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.core.topology import Topology, read_parents
from jaxspec.errors import InvalidConfig, TuningError
from jaxspec.registry import DRAFTERS, SCHEDULES, find

DRAFTING_VERSION = 4
_FIELDS = {"version", "drafter", "tree", "options", "schedule", "measured"}
_ADAPTIVE_BEFORE_3 = {
    "hope": "prior_acceptance",
    "credit": "loss_budget",
    "share": "loss_per_token",
    "memory": "decay_rounds",
    "weight": "prior_rounds",
}
"""Fields of the schedule "adaptive" in files of versions 1 and 2, with their names since version 3."""


def describe(
    drafter: Any, tree: Any, schedule: Any, options: Mapping[str, Any], measured: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the content of a file.

    Args:
        drafter: the name of the drafter.
        tree: a topology; None for the drafter's default.
        schedule: a registered schedule, or its name; None for the drafter's default.
        options: the drafter's options.
        measured: the measurements.

    Raises:
        InvalidConfig: drafter or schedule is an object without a registered name, or the tree is not static.
    """
    names = {find("schedule", name): name for name in SCHEDULES}
    schedule = find("schedule", schedule)() if isinstance(schedule, str) else schedule
    if not isinstance(drafter, str) or drafter not in DRAFTERS.all_names:
        raise InvalidConfig(f"a drafting can be saved if its drafter is a registered name, got {drafter!r:.80}")
    if not isinstance(tree, Topology | None):
        raise InvalidConfig(f"a drafting can be saved if its tree is static, got {tree!r:.80}")
    if schedule is not None and type(schedule) not in names:
        raise InvalidConfig(f"a drafting can be saved if its schedule is registered, got {schedule!r:.80}")
    stored = None if schedule is None else {"name": names[type(schedule)], **dataclasses.asdict(schedule)}
    return {
        "version": DRAFTING_VERSION,
        "drafter": drafter,
        "tree": None if tree is None else tree.parents,
        "options": dict(options),
        "schedule": stored,
        "measured": dict(measured),
    }


def parse(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a `Drafting`, by name, from the content of a file.

    Raises:
        JaxspecError: the content is malformed or of an unsupported version.
    """
    if type(got := record.get("version")) is not int or not 1 <= got <= DRAFTING_VERSION:
        raise TuningError(
            f"expected version 1 to {DRAFTING_VERSION} of a file of 'jaxspec tune', got {got!r:.40}; tune again"
        )
    fields = _FIELDS if got > 1 else _FIELDS - {"options"} | {"exit_layers"}
    if record.keys() != fields:
        odd = sorted(map(str, record.keys() ^ fields))
        raise TuningError(f"expected the fields {', '.join(sorted(fields))}; missing or unknown: {odd[0]:.40}")
    if got == 1:  # had a field for its only option
        layers = record["exit_layers"]
        record = record | {"options": {} if layers is None else {"exit_layers": layers}}
    drafter, parents, options, stored = (record[name] for name in ("drafter", "tree", "options", "schedule"))
    if not isinstance(drafter, str):
        raise TuningError(f"drafter must be a name, got {drafter!r:.40}")
    takes = find("drafter", drafter).takes
    if not isinstance(options, dict):
        raise TuningError(f"options must be an object, got {options!r:.40}")
    if unknown := options.keys() - takes:
        raise TuningError(f"the drafter {drafter!r} has no option {min(unknown)!r:.40}")
    if not isinstance(record["measured"], dict):
        raise TuningError(f"measured must be an object, got {record['measured']!r:.40}")
    default = got > 3
    return {
        "drafter": drafter,
        "tree": None if default and parents is None else read_parents(parents),
        "schedule": None if default and stored is None else _parse_schedule(stored, got),
        "drafter_options": options,
        "measured": record["measured"],
    }


def _parse_schedule(stored: Any, version: int) -> Any:
    """Returns the schedule of a file of this version."""
    if not isinstance(stored, dict) or not isinstance(stored.get("name"), str):
        raise TuningError(f"schedule must be an object with a name, got {stored!r:.40}")
    member = find("schedule", stored["name"])
    names: dict[str, str] = _ADAPTIVE_BEFORE_3 if version < 3 and stored["name"] == "adaptive" else {}
    settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items() if k != "name"}
    settings = {names.get(name, name): value for name, value in settings.items()}
    if unknown := settings.keys() - {field.name for field in dataclasses.fields(member)}:
        raise TuningError(f"the schedule {stored['name']!r} has no field {min(unknown)!r}")
    try:
        return member(**settings)
    except (TypeError, OverflowError) as error:  # a string instead of a number, or too large a number
        raise TuningError(f"the schedule {stored['name']!r}: {error}") from None
