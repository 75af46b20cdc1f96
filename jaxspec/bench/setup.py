"""Decodes prompts for a benchmark, with the same models and settings for all methods."""

import dataclasses
import statistics
from typing import Any, NamedTuple

from jaxspec.api import generate
from jaxspec.bench.records import PLAIN_METHOD, BenchPrompt, Method
from jaxspec.core.rule import Rule
from jaxspec.decode.loop import Decoder
from jaxspec.decode.session import Timing
from jaxspec.decode.state import Weights
from jaxspec.errors import CapacityError
from jaxspec.generation.drafting import Drafting
from jaxspec.generation.output import Generation
from jaxspec.models.model import Model

CALL_PROMPTS = 3
"""The number of prompts on which a draft model is timed alone."""


class Decoded(NamedTuple):
    """The parts of an output that are kept. Its session, which holds a cache, is dropped."""

    text: Generation
    timing: Timing


@dataclasses.dataclass
class BenchSetup:
    """The models, the rule and the settings.

    Attributes:
        target: the target model.
        rule: the rule of all methods except plain decoding.
        common: arguments of `generate` that all methods share.
        capacity: the number of cache slots; None for as many as each prompt needs.
    """

    target: Model
    rule: str | Rule
    common: dict[str, Any]
    capacity: int | None = None

    def decoder(self, method: Method) -> tuple[Decoder, Weights]:
        """Builds the decoder that `generate` would use for the method; raises the same errors."""
        return self._drafting(method).build(self.target)

    def decode(self, method: Method, prompt: BenchPrompt, **options: Any) -> Decoded:
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
        return dataclasses.replace(method.drafting, rule="coupled" if method.label == PLAIN_METHOD else self.rule)


def time_draft_call(
    setup: BenchSetup, decoder: Decoder, weights: Weights, prompts: list[BenchPrompt], repeats: int
) -> float | None:
    """Returns the seconds of one call of a drafter's model that decodes alone.

    The result is None if the drafter has no model, or the prompts exceed the model's context.
    """
    model = decoder.drafter.needs.model
    if model is None or not decoder.drafter.calls:
        return None
    params = weights.target if weights.draft is None else weights.draft  # early exit runs on the target's parameters
    alone = BenchSetup(Model(model, params), "coupled", setup.common, setup.capacity)
    plain, seconds = Method(PLAIN_METHOD, Drafting(PLAIN_METHOD)), []
    try:
        for repeat in range(repeats + 1):
            for prompt in prompts[:CALL_PROMPTS]:
                text, timing = alone.decode(plain, prompt)
                if repeat:  # the first repeat compiles
                    seconds.append(timing.decode_s / text.stats.rounds)
    except CapacityError:  # its context is shorter than the target's
        return None
    return statistics.median(seconds)
