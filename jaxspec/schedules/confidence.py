"""Stops where the draft model is unsure of the next token, before that token is drawn.

By the probability of its likeliest token (Hugging Face's assisted generation; Mamou et al. 2024, arXiv:2405.04304), or
by the entropy of its law: AdaEDL (Agrawal et al. 2024, arXiv:2410.18351), section 3. Those look at the token that was
drawn and keep it; here the law alone is looked at, so that what is drawn stays a sample of it.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxspec.core.schedule import Constant
from jaxspec.errors import InvalidConfig

SPREAD = 0.2
"""AdaEDL's factor of the entropy."""


@dataclasses.dataclass(frozen=True)
class Confidence(Constant):
    """Withholds the children of nodes whose law promises less acceptance than `threshold`.

    Attributes:
        threshold: 0 to 1.
        entropy: the promise is `1 - sqrt(0.2 H)`, H the law's entropy in nats, instead of its highest probability.
    """

    widths: tuple[int, ...] = (3, 5, 9)
    threshold: float = 0.4
    entropy: bool = False

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, (int, float)):
            raise InvalidConfig(f"threshold must be a number from 0 to 1, got {self.threshold!r}")
        if not isinstance(self.entropy, bool):
            raise InvalidConfig(f"entropy must be true or false, got {self.entropy!r:.80}")
        if not 0 <= self.threshold <= 1:
            raise InvalidConfig(f"threshold must be from 0 to 1, got {self.threshold!r}")

    def doubts(self, law: Float[Array, "*b V"]) -> Bool[Array, "*b"]:
        if not self.entropy:
            return jnp.exp(law.max(-1)) < self.threshold
        entropy = -jnp.where(law > -jnp.inf, jnp.exp(law) * law, 0.0).sum(-1)
        return 1 - jnp.sqrt(SPREAD * jnp.maximum(entropy, 0.0)) < self.threshold
