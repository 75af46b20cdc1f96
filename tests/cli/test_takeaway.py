"""Tests the demo's summary: where drafting pays, by how much, and why not elsewhere."""

import pytest

from jaxspec.cli.demo import wrap_command
from jaxspec.cli.takeaway import Speed, explain_speeds, find_fastest

pytestmark = pytest.mark.quick

PLAIN = Speed(tokens_per_s=40.0, tokens_per_round=1.0, round_s=0.025)


def speed(times: float, tokens: float) -> Speed:
    """A speedup at so many tokens per round."""
    return Speed(40.0 * times, tokens, 0.025 * tokens / times)


def said(platform: str = "cpu", **drafters: Speed) -> list[str]:
    return list(explain_speeds({"repeating code": {"none": PLAIN, **drafters}}, platform))


def test_where_it_pays_it_says_by_how_much_and_with_which_drafter():
    first, why = said(lookup=speed(2.5, 4.0), medusa=speed(0.8, 2.2))
    assert first == (
        "Repeating code: drafting pays. The best drafter, lookup, is 2.50 times as fast as plain decoding (100.0 "
        "instead of 40.0 tokens/s): each of its rounds brings 4.00 tokens and costs 1.60 plain rounds."
    )
    assert "In repeating code, medusa brings 2.20 tokens at the cost of 2.75 plain rounds" in why


@pytest.mark.parametrize("times", [0.96, 1.0, 1.04])
def test_what_is_within_the_noise_is_no_gain(times):
    (only,) = said(lookup=speed(times, 1.1))
    assert f"drafting makes no difference. The best drafter, lookup, is {times:.2f} times as fast" in only


def test_where_it_does_not_pay_it_says_so_and_why():
    """By the drafter whose guesses were good: that they were bad explains less."""
    first, why = said(model=speed(0.9, 3.0), lookup=speed(0.8, 1.05))
    assert first == (
        "Repeating code: drafting does not pay here. Even the best drafter, model, is slower than plain decoding: 0.90 "
        "times as fast (36.0 instead of 40.0 tokens/s)."
    )
    assert "model brings 3.00 tokens at the cost of 3.33 plain rounds: on this CPU" in why
    assert "On an accelerator" in why
    assert "On an accelerator" not in said("gpu", model=speed(0.9, 3.0))[1]
    assert "hardly any of its guesses are accepted" in said(lookup=speed(0.8, 1.05))[1]


def test_the_best_is_never_plain_decoding():
    assert find_fastest({"none": PLAIN, "a": speed(0.5, 1), "b": speed(0.7, 1)}) == "b"


def test_a_long_command_is_one_for_a_shell():
    words = ["jaxspec", "generate", "--drafter model", "--draft-model smollm2-135m-instruct", '"Write a haiku."']
    lines = wrap_command(words, 44)
    assert max(map(len, lines)) <= 44
    assert all(line.endswith(" \\") for line in lines[:-1])
    assert " ".join(line.removesuffix("\\").strip() for line in lines) == " ".join(words)
