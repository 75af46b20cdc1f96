"""Regular expressions of JSON numbers, and of integers in a range."""

INTEGER = "-?(?:0|[1-9][0-9]*)"
NUMBER = rf"{INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"


def write_integers(least: int | None, most: int | None) -> str | None:
    """Returns the regular expression of the integers from `least` to `most`, each written in one way.

    Args:
        least: the smallest integer; None for no limit.
        most: the largest integer; None for no limit.

    Returns:
        The regular expression; None if there are no such integers.
    """
    if least is not None and most is not None and least > most:
        return None
    if least is None and most is None:
        return INTEGER
    parts = []
    if least is None or least < 0:
        below = _from_zero(max(1, -min(most, -1)) if most is not None else 1, None if least is None else -least)
        parts.append(f"-(?:{below})")
    if most is None or most >= 0:
        parts.append(_from_zero(max(least or 0, 0), most))
    return f"(?:{'|'.join(parts)})"


def _from_zero(least: int, most: int | None) -> str:
    """Writes the integers of a range that begins at 0 or above."""
    digits = len(str(least))
    if most is None:
        more = "[1-9]" + (f"[0-9]{{{digits},}}" if digits > 1 else "[0-9]+")
        return f"{_from_zero(least, 10**digits - 1)}|{more}"
    parts = []
    for size in range(digits, len(str(most)) + 1):
        low, high = max(least, 10 ** (size - 1) if size > 1 else 0), min(most, 10**size - 1)
        parts.append(_same_size(str(low), str(high)))
    return "|".join(parts)


def _same_size(low: str, high: str) -> str:
    """Writes the numbers between two numbers of the same number of digits."""
    if low == high:
        return low
    if low[0] == high[0]:
        return f"{low[0]}(?:{_same_size(low[1:], high[1:])})"
    if len(low) == 1:
        return f"[{low}-{high}]"
    rest = len(low) - 1
    parts = [f"{low[0]}(?:{_same_size(low[1:], '9' * rest)})"]
    if int(high[0]) - int(low[0]) > 1:
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}][0-9]{{{rest}}}")
    parts.append(f"{high[0]}(?:{_same_size('0' * rest, high[1:])})")
    return "|".join(parts)
