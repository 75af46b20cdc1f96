"""The sizes of decoder layers that are trained for a target."""

from jaxspec.core.networks import no_feature
from jaxspec.heads.network import vocabulary
from jaxspec.models.config import ModelConfig
from jaxspec.models.model import Model
from jaxspec.models.rope import Rope
from jaxspec.models.transformer import TransformerLM


def layers_like(target: Model, layers: int, qk_norm: bool) -> ModelConfig:
    """Returns the sizes of decoder layers as wide as a target's features, and as its own layers if they are known."""
    lm, rows = target.lm, vocabulary(target)
    if isinstance(lm, TransformerLM):
        c = lm.config
        return ModelConfig(
            rows, c.hidden_size, c.intermediate_size, layers, c.num_heads, c.num_kv_heads, c.head_dim, c.norm_eps,
            max_position=c.max_position, rope=Rope(c.rope.theta), activation=c.activation, qk_norm=qk_norm,
        )  # fmt: skip
    width = no_feature(lm, target.params, lm.init_cache(1, 0)).shape[-1]
    heads = max(1, width // 64)
    return ModelConfig(
        rows, width, 3 * width, layers, heads, heads, 2 * (width // (2 * heads)), max_position=lm.context,
        qk_norm=qk_norm,
    )  # fmt: skip
