"""PARD models in training: a draft model that reads the text, and masks after many of its positions, in one call.

A block at position t has the token t + 1 as its root, as in a round whose last token is t + 1. The masks of the block
follow the root. Each mask attends to the text up to the root, and to the earlier masks of its block. The row of the
root predicts the first token of the block, and each mask predicts one further token, as in the drafter "pard" (PARD,
arXiv:2504.18583).
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.checkpoints.pard2 import is_pard2
from jaxspec.core.drafter import DrafterInputs
from jaxspec.core.networks import LanguageModel
from jaxspec.core.records import Params, Window
from jaxspec.core.topology import chain
from jaxspec.drafters.pard import Pard
from jaxspec.errors import InvalidConfig, shown
from jaxspec.models.layers import matmul
from jaxspec.models.model import Model
from jaxspec.models.transformer import TransformerLM
from jaxspec.train.batch import Batch, FrozenTarget, Guess, limit_anchors, positions_of, shift_left, take_anchors
from jaxspec.train.pard_settings import PardSettings
from jaxspec.train.trainee import BLOCKS_AT_ONCE, About, BlockTraining, Trainee

BLOCKS_EVERYWHERE = BlockTraining(anchors=None, gamma=float("inf"))
"""Blocks at all positions, whose tokens all have the same weight."""
PARD_SYSTEMS = (
    "A draft model with the entry pard_token in its config.json is served by jaxspec, and by other systems that draft "
    "with PARD models, such as vLLM."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PardTrainee(Trainee):
    """A draft model that is trained for a target.

    Its blocks begin at all positions, and all their tokens have the same weight. The draft model may have more rows
    than `vocab_size`; the additional rows are padding.

    Attributes:
        model: the draft model.
        token: the mask token.
    """

    model: LanguageModel
    token: int
    blocks: BlockTraining = BLOCKS_EVERYWHERE

    @classmethod
    def make(cls, settings: PardSettings, target: Model, start: Any) -> Self:
        """Returns the draft model to train for a target; see `TrainSettings.trainee`.

        Raises:
            InvalidConfig: there is no draft model, it is a PARD-2 model, or it has no such mask token.
            VocabMismatch: its vocabulary is not the target's.
        """
        if not isinstance(start, Model):
            raise InvalidConfig(f"a PARD model is trained from a draft model: set start (--start); got {shown(start)}")
        if is_pard2(start.settings):
            raise InvalidConfig(
                f"start: {start.name} is a PARD-2 model, which cannot be trained; use another draft model"
            )
        token = start.settings.get("pard_token") if settings.pard_token < 0 else settings.pard_token
        if token is None:
            token = (start.lm.config.vocab_size if isinstance(start.lm, TransformerLM) else start.lm.vocab) - 1
        draft = dataclasses.replace(start, settings={**start.settings, "pard_token": token})
        drafter, _ = Pard.build(DrafterInputs(target, draft, chain(settings.depth)))
        shares = tuple(max(settings.retention**i, settings.retention_min) if i else 1.0 for i in range(settings.depth))
        sizes = f"A draft model that names {settings.depth} tokens in one call, mask token {drafter.token}"
        return cls(
            about=About("PARD model", sizes, PARD_SYSTEMS),
            drafter="pard",
            drafted=settings.depth,
            vocab_size=drafter.vocab,
            reads_features=False,
            blocks=BLOCKS_EVERYWHERE._replace(shares=shares),
            model=drafter.network,
            token=drafter.token,
        )

    def unroll(self, params: Params, frozen: FrozenTarget, batch: Batch) -> Iterator[Guess]:
        """Yields the guesses of each token of the blocks."""
        yield from map(Guess, self._states(params, batch))

    def projection(self, params: Params) -> Params:
        """Returns the table of the draft model's projection; all parameters if the network has no such table."""
        return self.model.unembedding(params) if isinstance(self.model, TransformerLM) else params

    def logits(
        self, projection: Params, rows: Float[Array, "_ _"], step: int, states: Float[Array, "B A E"]
    ) -> Float[Array, "B A R"]:
        """Returns the logits of a token of the blocks; see `Trainee.logits`."""
        if isinstance(self.model, TransformerLM):
            return matmul(states, projection, transposed=True)[..., : self.vocab_size]
        return self.model.head(projection, states)[..., : self.vocab_size]

    def _states(self, params: Params, batch: Batch) -> list[Float[Array, "B A E"]]:
        """Returns, for each token of a block, the features of the rows that predict it."""
        if batch.anchors is not None:
            anchors = (limit_anchors(batch, self.blocks.shares, step).anchors for step in range(self.drafted))
            return self._read(params, batch, tuple(each.shape[1] for each in anchors if each is not None))
        rows, size = batch.tokens.shape
        chunk = min(BLOCKS_AT_ONCE, size)
        steps = jnp.broadcast_to(jnp.arange(size), (rows, size))
        padded = jnp.pad(steps, ((0, 0), (0, -size % chunk)))

        def read(anchors: Int[Array, "B A"]) -> list[Float[Array, "B A E"]]:
            return self._read(params, batch._replace(anchors=anchors), (chunk,) * self.drafted)

        chunks = lax.map(read, padded.reshape(rows, -1, chunk).swapaxes(0, 1))
        return [states.swapaxes(0, 1).reshape(rows, padded.shape[1], -1)[:, :size] for states in chunks]

    def _read(self, params: Params, batch: Batch, counts: tuple[int, ...]) -> list[Float[Array, "B A E"]]:
        """Returns, for token i of a block, the features of its rows at the first `counts[i]` of `batch.anchors`."""
        rows, size = batch.tokens.shape
        assert batch.anchors is not None
        block = np.concatenate([np.arange(count) for count in counts])[counts[0] :]  # the block of each mask
        depth = np.repeat(np.arange(len(counts)), counts)[counts[0] :]
        masks = batch._replace(anchors=batch.anchors[:, block])
        anchors, positions, step = masks.anchors, positions_of(batch.segments), jnp.arange(size)
        assert anchors is not None
        same = take_anchors(masks, batch.segments)[:, :, None] == batch.segments[:, None]
        text = (batch.segments[:, :, None] == batch.segments[:, None]) & (step[:, None] >= step)
        behind = same & (step <= anchors[:, :, None] + 1)
        own = jnp.broadcast_to((block[:, None] == block) & (depth[:, None] >= depth), (rows, block.size, block.size))
        seen = jnp.concatenate([jnp.concatenate([text, behind], 1), jnp.pad(own, ((0, 0), (size, 0), (0, 0)))], 2)
        window = Window(
            jnp.pad(batch.tokens, ((0, 0), (0, block.size)), constant_values=self.token),
            jnp.concatenate([positions, take_anchors(masks, positions) + 1 + depth], 1),
            seen,
        )
        model = self._of_dtype(params)
        features, _ = model.apply(params, window, model.init_cache(rows, 0))
        first = take_anchors(batch, shift_left(features[:, :size], 1))[:, : counts[0]]
        return [first, *jnp.split(features[:, size:], np.cumsum(counts[1:])[:-1], axis=1)][: len(counts)]

    def _of_dtype(self, params: Params) -> LanguageModel:
        """Returns the model with keys and values in the dtype of its parameters."""
        if not isinstance(self.model, TransformerLM):
            return self.model
        return dataclasses.replace(self.model, dtype=str(params["embed"].dtype))

    def result(self, params: Params, ids: Int[Array | np.ndarray, "R"] | None, name: str, start: Any = None) -> Model:
        """Returns the trained model, with the tokenizer of the model that it started from."""
        params = jax.tree.map(jnp.asarray, params)
        settings = {**start.settings, "pard_token": self.token}
        return dataclasses.replace(start, params=params, name=name, preset=None, settings=settings)
