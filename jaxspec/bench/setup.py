"""What all decodes of a benchmark have in common."""

import dataclasses
import statistics
from typing import Any, NamedTuple

from jaxspec.api import generate
from jaxspec.bench.records import PLAIN, Method, Prompt
from jaxspec.core.protocols import Rule, Setting
from jaxspec.decode.loop import Decoder
from jaxspec.decode.session import Timing
from jaxspec.decode.state import Weights
from jaxspec.errors import CapacityError
from jaxspec.generation import build
from jaxspec.generation.output import Generation
from jaxspec.heads.network import DraftHeads
from jaxspec.models.model import Model
from jaxspec.registry import find

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
        common: arguments of `generate` that are the same for everyone.
        capacity: cache slots; None for as many as each prompt needs.
        heads: of the drafter "medusa".
    """

    target: Model
    draft: Model | None
    exit_layers: int | None
    rule: str | Rule
    common: dict[str, Any]
    capacity: int | None = None
    heads: DraftHeads | None = None

    def decoder(self, method: Method) -> tuple[Decoder, Weights]:
        """What `generate` will make of the method; raises what it would raise."""
        given = self._given(method)
        tree = build.as_topology(given["tree"])
        setting = Setting(self.target, given["draft"], tree, given["exit_layers"], given["heads"])
        return build.make_decoder(self.target, method.drafter, given["rule"], setting, method.params, method.schedule)

    def decode(self, method: Method, prompt: Prompt, **options: Any) -> Decoded:
        """Continues one prompt.

        Raises:
            ArithmeticError: the target's logits were not finite.
        """
        given = self._given(method) | self.common | options
        output = generate(
            self.target,
            prompt.tokens,
            key=prompt.key[None],
            drafter=method.drafter,
            draft_params=method.params,
            schedule=method.schedule,
            capacity=self.capacity,
            verbose=False,
            **given,
        )
        if output[0].finish_reason == "error":
            raise ArithmeticError(f"{prompt.task}, {prompt.id}: the target's logits were not finite ({method.label})")
        return Decoded(output[0], output.timing)

    def _given(self, method: Method) -> dict[str, Any]:
        """Of the models' options those that this drafter takes."""
        takes = find("drafter", method.drafter).takes if isinstance(method.drafter, str) else frozenset()
        return {
            "draft": self.draft if "draft" in takes else None,
            "exit_layers": self.exit_layers if "exit_layers" in takes else None,
            "heads": self.heads if "heads" in takes else None,
            "tree": method.tree,
            "rule": "coupled" if method.label == PLAIN else self.rule,
        }


def draft_call_s(setup: Setup, decoder: Decoder, weights: Weights, prompts: list[Prompt], repeats: int) -> float | None:
    """Seconds of one call of a drafter's model, decoding by itself; None without one, or where it cannot."""
    model = getattr(decoder.drafter, "model", None)
    if model is None or not decoder.drafter.calls:
        return None
    params = weights.target if weights.draft is None else weights.draft  # early exit runs on the target's
    alone = Setup(Model(model, params), None, None, "coupled", setup.common, setup.capacity)
    plain, seconds = Method(PLAIN, PLAIN), []
    try:
        for repeat in range(repeats + 1):
            for prompt in prompts[:CALL_PROMPTS]:
                text, timing = alone.decode(plain, prompt)
                if repeat:  # the first compiles
                    seconds.append(timing.decode_s / text.stats.rounds)
    except CapacityError:  # its context is shorter than the target's
        return None
    return statistics.median(seconds)
