"""What the training of all kinds of heads shares: their parameters before training, and their sizes for a target."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec.core.networks import LanguageModel, TappedTarget, empty_feature, with_taps
from jaxspec.core.records import Params
from jaxspec.heads.network import DraftHeads, init_params, vocab_size_of
from jaxspec.heads.serving import describe_serving
from jaxspec.heads.sizes import HeadSizes, TappedSizes
from jaxspec.models.config import ModelConfig
from jaxspec.models.model import Model
from jaxspec.models.rope import Rope
from jaxspec.models.transformer import TransformerLM
from jaxspec.train.settings import TrainSettings
from jaxspec.train.trainee import About, Trainee

ZERO_PARAMS = ("markov_out", "confidence")
"""Parameters that are 0 before training, so that they correct no logits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadTrainee(Trainee):
    """Draft heads that are trained for a target.

    Attributes:
        config: the sizes.
    """

    config: Any

    @classmethod
    def _of(cls, config: Any, title: str, sizes: str, **fields: Any) -> Self:
        """Returns the trainee of heads of these sizes; `fields` are the fields that the kind of heads decides."""
        about = About(title, sizes, describe_serving(config, fields.get("joint") is not None))
        reads_tokens = "embedding" in config.tables
        return cls(config=config, about=about, drafter=config.drafter, vocab_size=config.vocab_size,
                   reads_tokens=reads_tokens, **fields)  # fmt: skip

    def init_params(self, target: Model, ids: Int[Array | np.ndarray, "R"] | None) -> Params:
        """Returns the float32 parameters before training, with which heads predict much as the target does.

        Projections start as copies of the target's projection. Heads with taps start by reading the mean of the taps,
        and norm their states with the target's last norm.

        Args:
            target: the target.
            ids: the drafted tokens, ascending; None for the whole vocabulary.
        """
        lm: Any = target.lm
        params = init_params(self.config, lm.unembedding(target.params), ids)
        if isinstance(self.config, TappedSizes) and (count := self.config.num_taps):
            params["fc"] = jnp.tile(jnp.eye(self.config.hidden_size) / count, (count, 1))
            if isinstance(lm, TransformerLM):
                params["norm"] = jnp.asarray(target.params["norm"], jnp.float32)
        params |= {name: jnp.zeros_like(params[name]) for name in ZERO_PARAMS if name in params}
        return without_ids(params)

    def result(
        self, params: Params, ids: Int[Array | np.ndarray, "R"] | None, name: str, start: Any = None
    ) -> DraftHeads:
        """Returns the trained heads."""
        return DraftHeads(self.config, jax.tree.map(jnp.asarray, with_ids(params, ids)), name=name)

    def network(self, lm: LanguageModel) -> LanguageModel:
        """Returns the target's network with the taps of the heads."""
        return with_taps(lm, taps_of(self.config, lm))

    @property
    def feature_settings(self) -> Mapping[str, Any]:
        """The taps; empty for heads that read the target's own features."""
        taps = self.config.taps if isinstance(self.config, TappedSizes) else None
        return {"taps": list(taps)} if taps else {}


def with_ids(params: Params, ids: Int[Array | np.ndarray, "R"] | None) -> Params:
    """Returns the parameters of heads with the ids of a reduced vocabulary. `ids` is None for the whole vocabulary."""
    return params if ids is None else params | {"tokens": ids}


def without_ids(params: Params) -> Params:
    """Returns the parameters of heads that are trained: all but the ids of a reduced vocabulary."""
    return {name: value for name, value in params.items() if name != "tokens"}


def taps_of(config: HeadSizes, lm: LanguageModel) -> tuple[int, ...]:
    """Returns the layers of a target that heads read; empty for heads that read the target's own features."""
    if not isinstance(config, TappedSizes):
        return ()
    return config.taps_of(lm.depth if isinstance(lm, TappedTarget) else 0)


def reduced_vocab(settings: TrainSettings, lm: LanguageModel) -> int | None:
    """Returns the number of tokens to draft from; None for the whole vocabulary."""
    return settings.draft_vocab if 0 < settings.draft_vocab < lm.vocab else None


def layers_like(target: Model, layers: int, qk_norm: bool) -> ModelConfig:
    """Returns the sizes of decoder layers as wide as a target's features, and like its own layers if they are known."""
    lm, rows = target.lm, vocab_size_of(target)
    if isinstance(lm, TransformerLM):
        c = lm.config
        return ModelConfig(
            rows, c.hidden_size, c.intermediate_size, layers, c.num_heads, c.num_kv_heads, c.head_dim, c.norm_eps,
            max_position=c.max_position, rope=Rope(c.rope.theta), activation=c.activation, qk_norm=qk_norm,
        )  # fmt: skip
    width = empty_feature(lm, target.params, lm.init_cache(1, 0)).shape[-1]
    heads = max(1, width // 64)
    return ModelConfig(
        rows, width, 3 * width, layers, heads, heads, 2 * (width // (2 * heads)), max_position=lm.context,
        qk_norm=qk_norm,
    )  # fmt: skip
