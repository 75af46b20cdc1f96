"""Tests the wrapping of streamed text: between words, at any width, with colours, and nothing lost."""

import random
import re

import pytest
from rich.cells import cell_len

from jaxspec.cli.wrap import Wrapper, wrap

pytestmark = pytest.mark.quick

ENGLISH = (
    "Light of short waves is scattered more strongly than light of long ones,\nso the sky is blue.\n\n  - and red\n"
)
MIXED = "天空は青い。「光」が散乱する(scattering)から。 Naïve cafe\u0301s 👩\u200d🚀 fly;"
MIXED += " \tdef f(x):\n\treturn x\n한국어 텍스트"


def streamed(text: str, width: int, seed: int) -> str:
    """The text in random pieces."""
    rng, wrapper, written = random.Random(seed), Wrapper(lambda: width), ""
    while text:
        size = rng.randint(1, 6)
        written, text = written + wrapper.feed(text[:size]), text[size:]
    return written + wrapper.end()


def bare(text: str) -> str:
    return re.sub(r"\s", "", text)


@pytest.mark.parametrize("text", [ENGLISH, MIXED], ids=["english", "mixed"])
@pytest.mark.parametrize("width", [16, 20, 33, 60])
def test_pieces_do_not_matter_and_lines_fit(text, width):
    whole = streamed(text, width, 0)
    assert all(streamed(text, width, seed) == whole for seed in range(1, 20))
    assert bare(whole) == bare(text)
    for line in whole.splitlines():
        assert cell_len(line.expandtabs()) <= width


@pytest.mark.parametrize("width", [16, 20, 33, 60])
def test_words_are_whole(width):
    assert streamed(ENGLISH, width, 1).split() == ENGLISH.split()
    for line, following in zip(wrap(ENGLISH, width), wrap(ENGLISH, width)[1:]):
        if line and following and f"{line} {following}" in ENGLISH:
            assert len(f"{line} {following.split()[0]}") > width, "no line ends before it must"


def test_lines_of_the_text_stay():
    assert wrap(ENGLISH, 80) == ENGLISH.split("\n")
    assert wrap("a  b\n    c", 80) == ["a  b", "    c"]
    assert wrap("a" * 10 + " " + "b" * 10, 10) == ["a" * 10, "b" * 10]


def test_wide_characters_part_anywhere_but_before_closing_punctuation():
    assert wrap("天空は青い。", 10) == ["天空は青", "い。"]
    assert wrap("「光」が", 6) == ["「光」", "が"]
    assert wrap("ab天空", 4) == ["ab天", "空"]
    assert "👩\u200d🚀" in wrap("x 👩\u200d🚀 y", 3)


def test_a_word_wider_than_the_line_stays_whole():
    address = "https://example.org/" + "a" * 30
    assert wrap(f"see {address} and thereafter", 20) == ["see", f"{address} and", "thereafter"], (
        "ten cells of it are on the last line"
    )


def test_colours_take_no_room():
    green, back = "\x1b[32m", "\x1b[39m"
    coloured = "".join(f"{green}{word}{back}" for word in re.findall(r"\s*\S+", ENGLISH))
    for width in (12, 20, 60):
        shown = streamed(coloured, width, 3)
        assert re.sub(r"\x1b\[\d+m", "", shown) == streamed(ENGLISH.rstrip(), width, 3)
        assert shown.count(green) == shown.count(back) == coloured.count(green)


def test_a_terminal_that_changes_its_size():
    widths = iter([40] * 4 + [10] * 99)
    wrapper = Wrapper(lambda: next(widths))
    text = "one two three four five six seven"
    assert wrapper.feed(text) + wrapper.end() == "one two three four\nfive six\nseven"
