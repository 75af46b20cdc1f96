"""Tests how amounts are written: sizes, counts and numbers."""

import math
import random
import re

import pytest

from jaxspec.amounts import UNITS, fixed, plural, size

pytestmark = pytest.mark.quick

RANDOM = random.Random(0)
SIZES = [0, 1, 2, 999, 1000, 1001, 9_994, 9_996, 99_940, 99_960, 999_499, 999_500, 999_999, 1_000_000, 4_613_734_400]
SIZES += [int(10 ** RANDOM.uniform(0, 17)) for _ in range(60)]
UNIT = {"byte": 1, "bytes": 1} | {unit: 1000 ** (i + 1) for i, unit in enumerate(UNITS)}


@pytest.mark.parametrize("count", SIZES)
def test_a_size_is_near_and_short(count):
    """It is never "0.00 GB", has three digits, and is right to them."""
    text = size(count)
    number, unit = text.split(" ")
    assert float(number) * UNIT[unit] == pytest.approx(count, rel=0.0051)
    assert len(re.sub(r"\D", "", number)) <= 3
    assert float(number) < 1000
    assert count == 0 or float(number) >= 1
    assert (unit == "byte") == (count == 1)
    assert size(float(count)) == text


def test_sizes():
    assert [size(n) for n in (0, 1, 512, 1536, 98_362_432, 4_613_734_400)] == [
        "0 bytes", "1 byte", "512 bytes", "1.54 kB", "98.4 MB", "4.61 GB",
    ]  # fmt: skip
    assert size(math.inf) == "an unknown amount"
    assert size(999_600) == "1.00 MB"


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 11, 21, 101, 1000, 1 << 20])
@pytest.mark.parametrize("noun", ["text", "row", "drafted token", "device"])
def test_a_count_agrees_with_its_noun(count, noun):
    assert plural(count, noun) == f"{count} {noun}" + "s" * (count != 1)


def test_irregular_plurals():
    assert [plural(n, "entry", "entries") for n in (0, 1, 2)] == ["0 entries", "1 entry", "2 entries"]


@pytest.mark.parametrize("digits", [0, 1, 2, 4])
@pytest.mark.parametrize(
    "value", [0.0, -0.0, -1e-17, 1e-17, -0.00001, -0.49, -0.5, -0.51, 1.25, -1.25, 1e6, -1e-4, 0.99999]
)
def test_zero_has_no_sign(value, digits):
    text = fixed(value, digits)
    assert float(text) == pytest.approx(value, abs=0.5001 * 10**-digits)
    assert text.startswith("-") == (float(text) < 0)
    assert len(text.partition(".")[2]) == digits
