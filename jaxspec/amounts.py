"""Formats sizes in bytes, counts and numbers for people. All messages and tables use these functions."""

import math

UNITS = ("kB", "MB", "GB", "TB", "PB")
"""Decimal units of 1000 bytes, 1000 kB and so on."""


def size(count: float) -> str:
    """Formats a size in bytes with three significant digits: "1 byte", "512 bytes", "4.61 GB".

    An infinite size is "an unknown amount".
    """
    if not math.isfinite(count):
        return "an unknown amount"
    value = float(count)
    if abs(value) < 999.5:
        return plural(round(value), "byte")
    power = 1
    while power < len(UNITS) and abs(value) / 1000**power >= 999.5:  # it would be rounded to 1000 of this unit
        power += 1
    value /= 1000**power
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {UNITS[power - 1]}"


def plural(count: int, noun: str, several: str | None = None) -> str:
    """Formats a count of things: "1 text", "2 texts", "0 texts".

    Args:
        count: the number.
        noun: the noun in the singular.
        several: the plural of the noun; None for the singular with an s.
    """
    return f"{count} {noun if count == 1 else several or f'{noun}s'}"


def fixed(value: float, digits: int) -> str:
    """Formats a number with a fixed number of digits after the point; a number that rounds to zero has no sign."""
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if not float(text) else text
