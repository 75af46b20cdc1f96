"""What all decodes of a benchmark have in common."""

import dataclasses
import statistics
from typing import Any, NamedTuple

from jaxspec.api import generate
from jaxspec.bench.records import PLAIN, Method, Prompt
from jaxspec.core.protocols import ModelDrafter, Rule
from jaxspec.decode.loop import Decoder
from jaxspec.decode.session import Timing
from jaxspec.decode.state import Weights
from jaxspec.errors import CapacityError
from jaxspec.generation.drafting import Drafting
from jaxspec.generation.output import Generation
from jaxspec.models.model import Model

CALL_PROMPTS = 3
"""Prompts on which a draft model is timed alone."""


class Decoded(NamedTuple):
    """What is kept of an output; its session, which holds a cache, is not."""

    text: Generation
    timing: Timing


@dataclasses.dataclass
class Setup:
    """The models, the rule, and the settings.

    Attributes:
        target: the model that decides.
        rule: of all methods but plain decoding, which has nothing to accept.
        common: arguments of `generate` that are the same for everyone.
        capacity: cache slots; None for as many as each prompt needs.
    """

    target: Model
    rule: str | Rule
    common: dict[str, Any]
    capacity: int | None = None

    def decoder(self, method: Method) -> tuple[Decoder, Weights]:
        """Builds what `generate` will make of the method; raises what it would raise."""
        return self._drafting(method).build(self.target)

    def decode(self, method: Method, prompt: Prompt, **options: Any) -> Decoded:
        """Continues one prompt.

        Raises:
            ArithmeticError: the target's logits were not finite.
        """
        output = generate(
            self.target,
            prompt.tokens,
            key=prompt.key[None],
            drafting=self._drafting(method),
            capacity=self.capacity,
            verbose=False,
            **self.common | options,
        )
        if output[0].finish_reason == "error":
            raise ArithmeticError(f"{prompt.task}, {prompt.id}: the target's logits were not finite ({method.label})")
        return Decoded(output[0], output.timing)

    def _drafting(self, method: Method) -> Drafting:
        return dataclasses.replace(method.drafting, rule="coupled" if method.label == PLAIN else self.rule)


def draft_call_s(setup: Setup, decoder: Decoder, weights: Weights, prompts: list[Prompt], repeats: int) -> float | None:
    """Seconds of one call of a drafter's model, decoding by itself; None without one, or where it cannot."""
    if not isinstance(decoder.drafter, ModelDrafter) or not decoder.drafter.calls:
        return None
    params = weights.target if weights.draft is None else weights.draft  # early exit runs on the target's
    alone = Setup(Model(decoder.drafter.model, params), "coupled", setup.common, setup.capacity)
    plain, seconds = Method(PLAIN, Drafting(PLAIN)), []
    try:
        for repeat in range(repeats + 1):
            for prompt in prompts[:CALL_PROMPTS]:
                text, timing = alone.decode(plain, prompt)
                if repeat:  # the first compiles
                    seconds.append(timing.decode_s / text.stats.rounds)
    except CapacityError:  # its context is shorter than the target's
        return None
    return statistics.median(seconds)
