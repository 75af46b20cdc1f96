"""Reads the records of measurements that `jaxspec.bench.measurements` writes."""

import dataclasses
import json
import pathlib

from jaxspec.bench.measurements import Measurement
from jaxspec.errors import InvalidConfig

FIELDS = {field.name for field in dataclasses.fields(Measurement)}


def read_records(folder: pathlib.Path) -> list[Measurement]:
    """Returns all records of a folder, ordered by id and machine.

    Raises:
        InvalidConfig: a file is not a record, or its name does not match its id and machine.
    """
    return [read_record(path) for path in sorted(folder.glob("*.json"))]


def read_record(path: pathlib.Path) -> Measurement:
    """Returns the record of one file.

    Raises:
        InvalidConfig: the file is not a record, or its name does not match its id and machine.
    """
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidConfig(f"{path.name} is not JSON: {error}") from None
    if not isinstance(fields, dict) or fields.keys() != FIELDS:
        got = sorted(fields) if isinstance(fields, dict) else type(fields).__name__
        raise InvalidConfig(f"{path.name}: expected the fields {sorted(FIELDS)}, got {got}")
    record = Measurement(**fields)
    if path.name != record.file:
        raise InvalidConfig(f"{path.name}: a record of this id and machine is named {record.file}")
    return record
