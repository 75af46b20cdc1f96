"""Reads the record that a command has written, and renders it as a page would show it."""

from jaxspec.bench.measurements import RECORDS_FOLDER, Measurement
from scripts.figures.pages import block
from scripts.figures.records import read_records


def recorded(identity: str) -> tuple[Measurement, str]:
    """The only record below the working directory, and its block of figures."""
    (record,) = read_records(RECORDS_FOLDER.absolute())
    return record, block(identity, [record])
