"""Medusa heads in training, for any target that gives features and a projection (`HeadTarget`)."""

import dataclasses
from collections.abc import Iterator
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxspec.amounts import plural
from jaxspec.core.networks import ProjectedTarget, empty_feature, need_members
from jaxspec.core.records import Params
from jaxspec.errors import InvalidConfig, ShapeMismatch
from jaxspec.heads.medusa import normalize_embeddings
from jaxspec.heads.medusa_config import HeadsConfig
from jaxspec.heads.network import DraftHeads, check_kind, check_target, make_network, vocab_size_of
from jaxspec.models.layers import matmul
from jaxspec.models.model import Model
from jaxspec.models.quantized import Quantized
from jaxspec.models.transformer import TransformerLM
from jaxspec.train.batch import Batch, FrozenTarget, Guess, shift_left
from jaxspec.train.head_trainee import HeadTrainee, reduced_vocab, with_ids
from jaxspec.train.medusa_settings import MedusaSettings
from jaxspec.train.settings import check_start
from jaxspec.train.trainee import Joint

TOLERANCE = 0.02
"""Largest accepted difference between `head` and features times projection, relative to the largest logit; bfloat16
rounds to about 0.004."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaTrainee(HeadTrainee):
    """Medusa heads that are trained for a target, with the target if `joint` is not None (Cai et al. 2024, 2.2.2)."""

    config: HeadsConfig

    @classmethod
    def of(cls, config: HeadsConfig, joint: Joint | None = None) -> Self:
        """Returns the trainee of heads with these sizes.

        Args:
            config: the sizes.
            joint: the settings of the target's training (Medusa-2); None if the target is frozen.
        """
        blocks = plural(config.num_layers, "block")
        network = f" in one network of {blocks}" if config.inputs == "recurrent" else f" of {blocks} each"
        sizes = (
            f"{plural(config.num_heads, 'head')}{network}, inputs: {config.inputs}, projection: {config.projection}, "
            f"{config.rows} of {config.vocab_size} tokens drafted"
        )
        return cls._of(config, "Medusa heads", sizes, drafted=config.num_heads, reads_context=False, joint=joint)

    @classmethod
    def make(cls, settings: MedusaSettings, target: Model, start: DraftHeads | None) -> Self:
        """Returns the heads to train for a target; see `TrainSettings.trainee`.

        Raises:
            InvalidConfig: the target lacks a method, its `head` computes something other than features times
                projection, or the target is to be trained and its weights are int8.
            ShapeMismatch: a table has the wrong shape.
        """
        lm, params, joint = target.lm, target.params, None
        if settings.medusa2:
            joint = Joint(settings.medusa2_warmup, settings.medusa2_heads, settings.medusa2_rate)
        if start is not None:
            check_kind(start, "medusa")
            check_start(settings, start.config, [name for name in vars(settings) if name.startswith("medusa2")])
        inputs = settings.inputs if start is None else start.config.inputs
        tables = ["unembedding"] if inputs == "hidden" else ["unembedding", "embedding"]
        need_members(lm, tables, f"heads with inputs {inputs!r} are trained on a target with a method")
        no_text = empty_feature(lm, params, lm.init_cache(1, 0))
        width = no_text.shape[-1]
        for name in tables:
            shape = tuple(getattr(getattr(lm, name)(params), "shape", ()))
            if len(shape) != 2 or shape[0] < lm.vocab or shape[1] != width:
                raise ShapeMismatch(
                    f"{type(lm).__name__}.{name}(params) must have the shape [{lm.vocab}, {width}]: a row for each "
                    f"token, as wide as the features of apply; got {list(shape)}"
                )
        if not isinstance(lm, TransformerLM):
            _check_projection(target, no_text)
        assert isinstance(lm, ProjectedTarget)
        if joint is not None and isinstance(lm.unembedding(params), Quantized):
            raise InvalidConfig("medusa2 trains the target, but int8 weights have no gradient; use another dtype")
        if start is not None:
            check_target(start.config, target)
            return cls.of(start.config, joint)
        config = HeadsConfig(
            hidden_size=width,
            vocab_size=vocab_size_of(target),
            num_heads=settings.heads,
            num_layers=settings.layers,
            inputs=inputs,
            projection=settings.projection,
            draft_vocab_size=reduced_vocab(settings, lm),
        )
        return cls.of(config, joint)

    def unroll(self, params: Params, frozen: FrozenTarget, batch: Batch) -> Iterator[Guess]:
        """Yields the input of each head's projection after every token t, for token t + 2 + head."""
        heads, words = make_network(self.config, with_ids(params, frozen.ids)), []
        if self.config.reads_words:
            assert frozen.embed is not None
            words = [
                normalize_embeddings(frozen.embed[shift_left(batch.tokens, 1 + j)])
                for j in range(self.config.num_heads)
            ]
        yield from map(Guess, heads.each_feature(batch.features.astype(jnp.float32), words))

    def projection(self, params: Params) -> list[Array]:
        """Returns the projections of the heads, or the one projection that they share; empty if it is the target's."""
        return [params["projections"][i] for i in range(self.config.num_projections)]

    def logits(
        self, projection: list[Array], rows: Float[Array, "R E"], step: int, states: Float[Array, "B A E"]
    ) -> Float[Array, "B A R"]:
        """Returns the logits of a head; see `Trainee.logits`."""
        return matmul(states, projection[min(step, len(projection) - 1)] if projection else rows, transposed=True)


def _check_projection(target: Model, no_text: jax.Array) -> None:
    """Compares `head` with the projection on a random feature, as heads would not learn a bias, a cap or a scale."""
    lm = target.lm
    assert isinstance(lm, ProjectedTarget)
    feature = jax.random.normal(jax.random.key(0), (1, 1, no_text.shape[-1])).astype(no_text.dtype)
    logits = np.asarray(lm.head(target.params, feature), np.float32)
    table = lm.unembedding(target.params)
    expected = np.asarray(matmul(feature.astype(jnp.float32), table, transposed=True))[..., : lm.vocab]
    if logits.shape != (1, 1, lm.vocab):
        raise ShapeMismatch(
            f"{type(lm).__name__}.head must return [1, 1, {lm.vocab}] for one feature, got {logits.shape}"
        )
    difference = np.abs(logits - expected).max()
    if not difference <= TOLERANCE * np.abs(logits).max():
        raise InvalidConfig(
            f"{type(lm).__name__}.head must return the features times unembedding(params), but differs by "
            f"{difference:.3g}. Write a bias as a column of the table, with a 1 at the end of the features, and "
            "multiply the table or the features by a scale"
        )
