"""Reads the record that a command has written, and renders it as a page would show it."""

from jaxspec.bench.measurements import FOLDER, Measurement, read
from scripts.figures.pages import block


def recorded(identity: str) -> tuple[Measurement, str]:
    """The only record below the working directory, and its block of figures."""
    (record,) = read(FOLDER.absolute())
    return record, block(identity, [record])
