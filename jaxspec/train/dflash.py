"""DFlash and DSpark heads in training, for any target that gives its residual stream (`TappedTarget`).

A block at position t has the token t + 1 as its root, and reads the target's states up to t, as in a round whose last
token is t + 1. Its rows see these and one another, and nothing of other blocks. The Markov head reads the text's own
tokens (DSpark, arXiv:2607.05147).
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.amounts import plural
from jaxspec.core.networks import LanguageModel, TappedTarget, need_members, with_taps
from jaxspec.core.records import KV, Params
from jaxspec.errors import InvalidConfig
from jaxspec.heads.dflash_config import DFlashConfig, default_taps
from jaxspec.heads.network import DraftHeads, check_target, init_params, module
from jaxspec.heads.serving import served_by
from jaxspec.models.layers import look_up, matmul, rotation
from jaxspec.models.model import Model
from jaxspec.models.transformer import TransformerLM
from jaxspec.train.batch import Batch, Frozen, Guess, ahead, here
from jaxspec.train.settings import check_start, parse_taps
from jaxspec.train.target_layers import layers_like
from jaxspec.train.trainee import Blocks

CHUNK = 64
"""Blocks of a row that are read at once in evaluation, which reads one at every position."""
ANY = Blocks(anchors=1, gamma=1.0)
"""The settings of heads that are only evaluated."""


@dataclasses.dataclass(frozen=True)
class DFlashTrainee:
    """A DFlash or DSpark head that is trained for a target; see `jaxspec.train.trainee.Trainee`.

    Attributes:
        config: the sizes.
        blocks: how many blocks a step draws, and the weights of the losses.
    """

    config: DFlashConfig
    blocks: Blocks
    drafter = "dflash"
    reads_features = True
    reads_context = True
    joint = None

    @property
    def drafted(self) -> int:
        """The number of tokens that a block names."""
        return self.config.max_depth

    @property
    def vocab_size(self) -> int:
        """V, the rows of the target's projection."""
        return self.config.vocab_size

    @property
    def reads_tokens(self) -> bool:
        """True if the head reads the target's embeddings, and has none of its own."""
        return not self.config.own_embedding

    @property
    def feature_settings(self) -> Mapping[str, Any]:
        """The taps."""
        return {"taps": list(self.config.taps or ())}

    @property
    def title(self) -> str:
        """The kind of head."""
        return "DSpark head" if self.config.markov or self.config.confidence else "DFlash head"

    @property
    def description(self) -> str:
        """The sizes, for the card."""
        c, layers = self.config, self.config.decoder.num_layers
        markov = f", Markov head: {c.markov}, rank {c.markov_rank}" if c.markov else ""
        return (
            f"{plural(layers, 'decoder layer')} on the target's states after the layers "
            f"{', '.join(map(str, c.taps or ()))}, blocks of {c.block_size} rows that name {c.max_depth} tokens"
            f"{markov}{', with a confidence head' * c.confidence}, mask token {c.mask_token}, {c.rows} of "
            f"{c.vocab_size} tokens drafted"
        )

    @property
    def served_by(self) -> str:
        """A sentence that says which systems can serve the head."""
        return served_by(self.config)

    def network(self, lm: LanguageModel) -> LanguageModel:
        """Returns the target's network with the head's taps."""
        return with_taps(lm, self.config.taps_of(lm.depth if isinstance(lm, TappedTarget) else 0))

    def init_params(self, target: Model, ids: Int[Array | np.ndarray, "R"] | None) -> Params:
        """Returns a head that reads the mean of the taps, norms its states as the target, and corrects no logits."""
        lm: Any = target.lm
        params = init_params(self.config, lm.unembedding(target.params), ids)
        count = self.config.num_taps
        params["fc"] = jnp.tile(jnp.eye(self.config.hidden_size) / count, (count, 1))
        if isinstance(lm, TransformerLM):
            params["norm"] = jnp.asarray(target.params["norm"], jnp.float32)
        for name in ("markov_out", "confidence"):
            if name in params:
                params[name] = jnp.zeros_like(params[name])
        return {name: value for name, value in params.items() if name != "tokens"}

    def unroll(self, params: Params, frozen: Frozen, batch: Batch) -> Iterator[Guess]:
        """Yields the guesses of each token of the blocks. The backward pass computes attention again."""
        c = self.config
        params = params if frozen.ids is None else params | {"tokens": frozen.ids}
        head, states = module(c, params), self._states(params, frozen, batch)
        memory = jnp.zeros((*states.shape[:2], c.memory))
        for step in range(self.drafted):
            own, words = states[:, :, step + c.skipped], None
            logits = head.logits(own) if c.own_projection else matmul(own, frozen.rows, transposed=True)
            if c.markov:
                words = head.words(here(batch, ahead(batch.tokens, 1 + step)))
                followed, memory = head.follow(words, own, memory)
                logits = logits + head.correction(followed)
            yield Guess(logits, certainty=head.certainty(own, words) if c.confidence else None)

    def _states(self, params: Params, frozen: Frozen, batch: Batch) -> Float[Array, "B A b E"]:
        """Returns the states of the rows of all blocks."""
        rows, size = batch.tokens.shape
        head, steps = module(self.config, params), jnp.broadcast_to(jnp.arange(size), (rows, size))
        context = head.fuse(batch.features.astype(jnp.float32))
        text = head.remember(context, steps, params["fc"].dtype)
        if batch.places is not None:
            return self._read(params, frozen, batch, text, batch.places)
        padded = jnp.pad(steps, ((0, 0), (0, -size % CHUNK)))
        parts = padded.reshape(rows, -1, CHUNK).swapaxes(0, 1)
        found = lax.map(functools.partial(self._read, params, frozen, batch, text), parts)
        return found.swapaxes(0, 1).reshape(rows, padded.shape[1], *found.shape[3:])[:, :size]

    def _read(
        self, params: Params, frozen: Frozen, batch: Batch, text: KV, places: Int[Array, "B A"]
    ) -> Float[Array, "B A b E"]:
        """Returns the states of the rows of blocks at some places.

        Args:
            params: those of the head.
            frozen: the target's tables.
            batch: the texts.
            text: keys and values of the context, of all layers.
            places: the position before the root of each block.
        """
        c, d, head = self.config, self.config.decoder, module(self.config, params)
        batch, rows, row = batch._replace(places=places), places.shape, jnp.arange(self.config.block_size)
        root = here(batch, ahead(batch.tokens, 1))[..., None]
        table = params["embed"] if c.own_embedding else frozen.embed
        assert table is not None
        x = look_up(table, jnp.where(row == 0, root, c.mask_token).reshape(rows[0], -1))
        positions = places[..., None] + 1 + row
        turned = rotation(positions.reshape(rows[0], -1), d.rope, d.head_dim)
        step = jnp.arange(batch.tokens.shape[1])
        sees = (here(batch, batch.segments)[..., None] == batch.segments[:, None]) & (step <= places[..., None])

        def attention(layer: int, read: Array) -> Array:
            queries, own = head.layers[layer].heads(read, turned, params["fc"].dtype)
            mask, near = sees[:, :, None], jnp.tril(jnp.ones((row.size, row.size), bool))
            near = near if c.is_causal(layer) else jnp.ones_like(near)
            if (window := d.window_of(layer)) is not None:
                mask = mask & (step > positions[..., None] - window)
                near = near & (row > row[:, None] - window)
            scale = d.head_dim**-0.5 if d.query_scale is None else d.query_scale
            mixed = attend_to_text_and_block(queries, KV(text.keys[layer], text.values[layer]), own, mask, near, scale)
            return head.layers[layer].join(mixed)

        return head.run(x, attention).reshape(*rows, row.size, -1)

    def result(
        self, params: Params, ids: Int[Array | np.ndarray, "R"] | None, name: str, start: Any = None
    ) -> DraftHeads:
        """Returns the trained head."""
        params = params if ids is None else params | {"tokens": ids}
        return DraftHeads(self.config, jax.tree.map(jnp.asarray, params), name=name)


@functools.partial(jax.checkpoint, static_argnums=5)
def attend_to_text_and_block(
    queries: Float[Array, "B H G N K"],
    text: KV,
    own: KV,
    sees: Bool[Array, "B A #b T"],
    near: Bool[Array, "b b"],
    scale: float,
) -> Float[Array, "B H G N K"]:
    """Computes attention of the rows of A blocks to the text and to their own block, in one softmax over T + b scores.

    Args:
        queries: of all rows, N = A b.
        text: keys and values of the text.
        own: keys and values of all rows.
        sees: the tokens of the text that each row sees.
        near: the rows of its block that each row sees.
        scale: factor of the scores.
    """
    (batch, heads, group, _, width), (blocks, rows) = queries.shape, (sees.shape[1], len(near))
    precision = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    dot = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    split = queries.reshape(batch, heads, group, blocks, rows, width)
    # In float32, which is exact: XLA:CPU has no bfloat16 product of so few columns.
    keys, values = (a.astype(jnp.float32).reshape(batch, heads, blocks, rows, width) for a in own)
    far = jnp.where(sees[:, None, None], dot("bhgaik,bhjk->bhgaij", split, text.keys) * scale, -jnp.inf)
    close = jnp.where(near, dot("bhgaik,bhajk->bhgaij", split.astype(jnp.float32), keys) * scale, -jnp.inf)
    weights, size = jax.nn.softmax(jnp.concatenate([far, close], -1), -1), far.shape[-1]
    mixed = dot("bhgaij,bhjk->bhgaik", weights[..., :size].astype(queries.dtype), text.values)
    return (mixed + dot("bhgaij,bhajk->bhgaik", weights[..., size:], values)).reshape(queries.shape)


def make_trainee(settings: Any, target: Model, start: DraftHeads | None) -> DFlashTrainee:
    """Returns a DFlash or DSpark head to train for a target.

    Args:
        settings: a `DFlashSettings` or a `DSparkSettings`.
        target: the target.
        start: the head to start from, whose sizes are taken; None for a new one.

    Raises:
        InvalidConfig, ShapeMismatch: the target lacks a method or layers, or the head to start from is another one.
    """
    lm: Any = target.lm
    need_members(lm, ["unembedding", "embedding"], "DFlash heads are trained on a target with a method")
    need_members(lm, ["depth", "taps"], "a DFlash head reads the target's residual stream, which needs")
    if start is not None:
        if not isinstance(start.config, DFlashConfig):
            raise InvalidConfig(f"start: {start.name} is {start.config.summary}, and a DFlash head is trained")
        if start.config.is_second:
            raise InvalidConfig(f"start: {start.name} is {start.config.summary}, which is not trained here")
        config = dataclasses.replace(start.config, taps=start.config.taps_of(lm.depth))
        check_start(settings, config, ("anchors", "gamma", "confidence"))
    else:
        taps = parse_taps(settings.taps) or default_taps(lm.depth, settings.layers)
        if settings.mask_token >= lm.vocab:
            raise InvalidConfig(f"mask_token must be below the target's {lm.vocab} tokens, got {settings.mask_token}")
        config = DFlashConfig(
            layers_like(target, settings.layers, qk_norm=True),
            block_size=settings.block,
            mask_token=settings.mask_token if settings.mask_token >= 0 else lm.vocab - 1,
            from_anchor=settings.from_anchor,
            taps=taps,
            markov=settings.markov,
            markov_rank=settings.markov_rank,
            confidence=settings.confidence > 0,
            confidence_reads_token=settings.confidence > 0 and settings.markov is not None,
            draft_vocab_size=settings.draft_vocab if 0 < settings.draft_vocab < lm.vocab else None,
        )
    check_target(config, target)
    with_taps(lm, config.taps or ())
    return DFlashTrainee(config, Blocks(settings.anchors, settings.gamma, settings.confidence))


def trainee_of(heads: DraftHeads) -> DFlashTrainee | None:
    """Returns the trainee that a DFlash or DSpark head comes from; None for heads of another kind.

    Raises:
        InvalidConfig: it is a DFlash 2 head, which is not trained here.
    """
    if not isinstance(heads.config, DFlashConfig):
        return None
    if heads.config.is_second:
        raise InvalidConfig(f"{heads.name} is {heads.config.summary}, whose laws along a text are not computed")
    return DFlashTrainee(heads.config, ANY)
