"""The schedule "confidence": stops drafting where the draft model is unsure of the next token.

If the drafter has a confidence head (DSpark, 2026, arXiv:2607.05147), confidence is the head's estimate of how much of
the drafter's law the target shares. Otherwise it is the probability of the likeliest token (Hugging Face's assisted
generation; Mamou et al. 2024, arXiv:2405.04304), or a bound from the entropy of the law: AdaEDL (Agrawal et al. 2024,
arXiv:2410.18351), section 3. The last two methods draw a token, look at it, and keep it. This schedule decides before a
token is drawn, so that drafted tokens remain samples of the law.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxspec.core.checks import flag, number
from jaxspec.core.schedule import Constant

ENTROPY_FACTOR = 0.2
"""The factor of the entropy in AdaEDL's bound."""


@dataclasses.dataclass(frozen=True)
class Confidence(Constant):
    """Stops drafting below a node where the draft model is unsure of the next token.

    Attributes:
        threshold: the confidence below which drafting stops, 0 to 1.
        entropy: whether to measure confidence as `1 - sqrt(0.2 H)`, with H the law's entropy in nats, instead of as the
            estimate of a confidence head or, without such a head, as the law's highest probability.
    """

    widths: tuple[int, ...] = (3, 5, 9)
    threshold: float = 0.4
    entropy: bool = False

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "threshold", number("threshold", self.threshold, 0, 1))
        object.__setattr__(self, "entropy", flag("entropy", self.entropy))

    def stop_after(self, law: Float[Array, "*b V"], estimate: Float[Array, "*b"] | None = None) -> Bool[Array, "*b"]:
        if not self.entropy:
            if estimate is not None:
                return estimate < self.threshold
            return jnp.exp(law.max(-1)) < self.threshold
        entropy = -jnp.where(law > -jnp.inf, jnp.exp(law) * law, 0.0).sum(-1)
        return 1 - jnp.sqrt(ENTROPY_FACTOR * jnp.maximum(entropy, 0.0)) < self.threshold
