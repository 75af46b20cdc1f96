"""What heads may be trained for: any network with features, an embedding and a projection (`HeadTarget`)."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core.networks import need_members, no_feature
from jaxspec.errors import InvalidConfig, ShapeMismatch
from jaxspec.heads.network import HeadsConfig, vocabulary
from jaxspec.models.model import Model
from jaxspec.models.transformer import TransformerLM, matmul
from jaxspec.train.settings import Settings

TOLERANCE = 0.02
"""Of the largest logit, how far `head` may be from features times projection; bfloat16 rounds to some 0.004."""


def sizes_for(target: Model, settings: Settings) -> HeadsConfig:
    """Gives the sizes of the heads that are trained for a target, before anything of it is computed.

    The reduced vocabulary has the wished size here; answers that use fewer tokens make it smaller.

    Raises:
        InvalidConfig: the target lacks a method, or its projection is not what its `head` computes.
        ShapeMismatch: a table has not the vocabulary's rows, or not the features' width.
    """
    lm, params = target.lm, target.params
    tables = ["unembedding"] if settings.inputs == "hidden" else ["unembedding", "embedding"]
    need_members(lm, tables, f"heads with inputs {settings.inputs!r} are trained on a target with a method")
    no_text = no_feature(lm, params, lm.init_cache(1, 0))
    width = no_text.shape[-1]
    for name in tables:
        shape = tuple(getattr(getattr(lm, name)(params), "shape", ()))
        if len(shape) != 2 or shape[0] < lm.vocab or shape[1] != width:
            raise ShapeMismatch(
                f"{type(lm).__name__}.{name}(params) must be [{lm.vocab}, {width}], a row for every token, as wide as "
                f"the features of apply; got {list(shape)}"
            )
    if not isinstance(lm, TransformerLM):
        _check_projection(target, no_text)
    return HeadsConfig(
        hidden_size=width,
        vocab_size=vocabulary(target),
        num_heads=settings.heads,
        num_layers=settings.layers,
        inputs=settings.inputs,
        projection=settings.projection,
        draft_vocab_size=settings.draft_vocab if 0 < settings.draft_vocab < lm.vocab else None,
    )


def _check_projection(target: Model, no_text: jax.Array) -> None:
    """Compares `head` with the projection on a random feature: a bias, a cap or a scale would be learnt wrongly."""
    lm = target.lm
    feature = jax.random.normal(jax.random.key(0), (1, 1, no_text.shape[-1])).astype(no_text.dtype)
    said = np.asarray(lm.head(target.params, feature), np.float32)
    table = lm.unembedding(target.params)  # pyright: ignore[reportAttributeAccessIssue]
    computed = np.asarray(matmul(feature.astype(jnp.float32), table, transposed=True))[..., : lm.vocab]
    if said.shape != (1, 1, lm.vocab):
        raise ShapeMismatch(f"{type(lm).__name__}.head must give [1, 1, {lm.vocab}] of one feature, got {said.shape}")
    apart = np.abs(said - computed).max()
    if not apart <= TOLERANCE * np.abs(said).max():
        raise InvalidConfig(
            f"{type(lm).__name__}.head must give its features times unembedding(params), and differs by {apart:.3g}; "
            "a bias becomes a column of the table, and a 1 at the end of the features; a scale goes into either"
        )
