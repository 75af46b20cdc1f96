"""Explains the figures of the demo: where drafting pays, by how much, and why it does not pay elsewhere."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxspec.generation.output import Output

PLAIN_DRAFTER = "none"
MIN_DIFFERENCE = 0.05
"""The relative difference below which speeds are called equal; short runs cannot resolve less."""
MIN_TOKENS_PER_ROUND = 1.2
"""The tokens per round below which hardly any draft was accepted."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """The speed of decoding a text.

    Attributes:
        tokens_per_s: tokens per second of decoding, without compilation and prefill.
        tokens_per_round: the mean number of tokens per round.
        round_s: the mean seconds per round.
    """

    tokens_per_s: float
    tokens_per_round: float
    round_s: float

    @classmethod
    def of(cls, output: "Output") -> "Speed":
        """Returns the speed of a call with one prompt."""
        rounds = max(output.stats.rounds, 1)
        return cls(output.timing.tokens_per_s, output.stats.tokens_per_round, output.timing.decode_s / rounds)

    def times(self, plain: "Speed") -> float:
        """Returns the speedup over plain decoding."""
        return self.tokens_per_s / plain.tokens_per_s

    def cost(self, plain: "Speed") -> float:
        """Returns the time of a round, in plain rounds."""
        return self.round_s / plain.round_s


Speeds = Mapping[str, Speed]
"""The speeds by drafter; the speed of plain decoding has the key `PLAIN_DRAFTER`."""


def find_fastest(speeds: Speeds) -> str:
    """Returns the name of the fastest drafter."""
    return max((name for name in speeds if name != PLAIN_DRAFTER), key=lambda name: speeds[name].tokens_per_s)


def explain_speeds(tasks: Mapping[str, Speeds], platform: str) -> Iterator[str]:
    """Yields paragraphs that explain the speeds.

    Args:
        tasks: the measured speeds by task.
        platform: the platform of the device, as JAX names it.
    """
    for task, speeds in tasks.items():
        yield f"{task[:1].upper()}{task[1:]}: {_verdict(speeds)}"
    slower = [(speeds[name], speeds[PLAIN_DRAFTER], name, task)
              for task, speeds in tasks.items() for name in speeds
              if speeds[name].times(speeds[PLAIN_DRAFTER]) < 1 - MIN_DIFFERENCE]  # fmt: skip
    if slower:
        yield _reason(*max(slower, key=lambda one: one[0].tokens_per_round), platform)


def _verdict(speeds: Speeds) -> str:
    name, plain = find_fastest(speeds), speeds[PLAIN_DRAFTER]
    speed, times = speeds[name], speeds[name].times(plain)
    measured = f"{speed.tokens_per_s:.1f} instead of {plain.tokens_per_s:.1f} tokens/s"
    if times > 1 + MIN_DIFFERENCE:
        return (
            f"drafting pays. The best drafter, {name}, is {times:.2f} times as fast as plain decoding ({measured}): "
            f"each of its rounds brings {speed.tokens_per_round:.2f} tokens and costs {speed.cost(plain):.2f} plain "
            "rounds."
        )
    if times >= 1 - MIN_DIFFERENCE:
        return (
            f"drafting makes no difference. The best drafter, {name}, is {times:.2f} times as fast as plain decoding "
            f"({measured}), which is within the noise of so short a measurement."
        )
    return (
        f"drafting does not pay here. Even the best drafter, {name}, is slower than plain decoding: {times:.2f} times "
        f"as fast ({measured})."
    )


def _reason(speed: Speed, plain: Speed, name: str, task: str, platform: str) -> str:
    """Returns a paragraph that explains why a drafter is slower than plain decoding."""
    cost = f"{speed.tokens_per_round:.2f} tokens at the cost of {speed.cost(plain):.2f} plain rounds"
    said = (
        "Why a drafter can be slower: it pays only if a round brings more tokens than it costs plain rounds. "
        f"In {task}, {name} brings {cost}"
    )
    if speed.tokens_per_round < MIN_TOKENS_PER_ROUND:
        return f"{said}: hardly any of its guesses are accepted, and making and checking them takes time."
    if platform == "cpu":
        return (
            f"{said}: on this CPU, a round that checks several tokens costs more than one that writes a single token. "
            "On an accelerator both cost almost the same, so more of the tokens per round becomes speed."
        )
    return f"{said}: on this machine, drafting and checking take that long."
