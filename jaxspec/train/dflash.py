"""DFlash, DSpark and JetSpec heads in training, for any target that gives its residual stream (`TappedTarget`).

A block at position t has the token t + 1 as its root, and reads the target's states up to t, as in a round whose last
token is t + 1. The rows of a block attend to these states and to one another, but not to other blocks. The Markov head
reads the text's own tokens (DSpark, arXiv:2607.05147).
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.amounts import plural
from jaxspec.core.networks import need_members, with_taps
from jaxspec.core.records import KV, Params
from jaxspec.errors import InvalidConfig
from jaxspec.heads.dflash_config import DFlashConfig, default_dflash_taps
from jaxspec.heads.network import DraftHeads, check_target, make_network
from jaxspec.models import query_chunks
from jaxspec.models.layers import look_up, matmul, rotation
from jaxspec.models.model import Model
from jaxspec.train.batch import Batch, FrozenTarget, Guess, shift_left, take_anchors
from jaxspec.train.dflash_settings import DFlashSettings, DSparkSettings
from jaxspec.train.head_trainee import HeadTrainee, layers_like, reduced_vocab, with_ids
from jaxspec.train.settings import check_start, parse_taps
from jaxspec.train.trainee import BLOCKS_AT_ONCE, BlockTraining

EVALUATION_BLOCKS = BlockTraining(anchors=1, gamma=1.0)
"""The settings of heads that are only evaluated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashTrainee(HeadTrainee):
    """A DFlash, DSpark or JetSpec head that is trained for a target."""

    config: DFlashConfig

    @classmethod
    def of(cls, config: DFlashConfig, blocks: BlockTraining = EVALUATION_BLOCKS) -> Self:
        """Returns the trainee of a head with these sizes.

        Args:
            config: the sizes.
            blocks: how many blocks a step draws, and the weights of the losses.

        Raises:
            InvalidConfig: the sizes belong to a DFlash 2 head, which cannot be trained.
        """
        if config.is_second:
            raise InvalidConfig(
                f"{config.summary} cannot be trained, and its distributions along a text are not computed"
            )
        layers, taps = plural(config.decoder.num_layers, "decoder layer"), ", ".join(map(str, config.taps or ()))
        markov = f", Markov head: {config.markov}, rank {config.markov_rank}" if config.markov else ""
        sizes = (
            f"{layers} on the target's states after the layers {taps}, blocks of {config.block_size} rows that name "
            f"{config.max_depth} tokens{markov}{', with a confidence head' * config.confidence}, mask token "
            f"{config.mask_token}, {config.rows} of {config.vocab_size} tokens drafted"
        )
        return cls._of(config, f"{config.kind} head", sizes, drafted=config.max_depth, blocks=blocks)

    @classmethod
    def make(cls, settings: DFlashSettings | DSparkSettings, target: Model, start: DraftHeads | None) -> Self:
        """Returns the head to train for a target; see `TrainSettings.trainee`.

        Raises:
            InvalidConfig, ShapeMismatch: the target lacks a method or layers, or the head to start from does not fit
                the settings or the target.
        """
        lm: Any = target.lm
        need_members(lm, ["unembedding", "embedding"], "DFlash heads are trained on a target with a method")
        need_members(lm, ["depth", "taps"], "a DFlash head reads the target's residual stream, which needs")
        if start is not None:
            if not isinstance(start.config, DFlashConfig):
                raise InvalidConfig(f"start: {start.name} is {start.config.summary}, expected a DFlash head")
            if start.config.is_second:
                raise InvalidConfig(f"start: {start.name} is {start.config.summary}, which cannot be trained")
            config = dataclasses.replace(start.config, taps=start.config.taps_of(lm.depth))
            if settings.causal:
                config = dataclasses.replace(config, causal=(True,) * config.decoder.num_layers)
            check_start(settings, config, ("anchors", "gamma", "confidence"))
        else:
            taps = parse_taps(settings.taps) or default_dflash_taps(lm.depth, settings.layers)
            if settings.mask_token >= lm.vocab:
                raise InvalidConfig(
                    f"mask_token must be below the target's {lm.vocab} tokens, got {settings.mask_token}"
                )
            config = DFlashConfig(
                layers_like(target, settings.layers, qk_norm=True),
                block_size=settings.block,
                mask_token=settings.mask_token if settings.mask_token >= 0 else lm.vocab - 1,
                from_anchor=settings.from_anchor,
                causal=(True,) * settings.layers if settings.causal else (),
                taps=taps,
                markov=settings.markov,
                markov_rank=settings.markov_rank,
                confidence=settings.confidence > 0,
                confidence_reads_token=settings.confidence > 0 and settings.markov is not None,
                draft_vocab_size=reduced_vocab(settings, lm),
            )
        check_target(config, target)
        with_taps(lm, config.taps or ())
        return cls.of(config, BlockTraining(settings.anchors, settings.gamma or math.inf, settings.confidence))

    def unroll(self, params: Params, frozen: FrozenTarget, batch: Batch) -> Iterator[Guess]:
        """Yields the guesses of each token of the blocks. The backward pass recomputes attention."""
        c = self.config
        params = with_ids(params, frozen.ids)
        head, states = make_network(c, params), self._states(params, frozen, batch)
        memory = jnp.zeros((*states.shape[:2], c.memory))
        for step in range(self.drafted):
            own, words, followed = states[:, :, step + c.skipped], None, None
            if c.markov:
                words = head.words(take_anchors(batch, shift_left(batch.tokens, 1 + step)))
                followed, memory = head.follow(words, own, memory)
            yield Guess((own, followed), certainty=head.certainty(own, words) if c.confidence else None)

    def projection(self, params: Params) -> dict[str, Array]:
        """Returns the head's own projection and the output matrix of the Markov head, as far as the head has them."""
        return {name: params[name] for name in ("head", "markov_out") if name in params}

    def logits(
        self,
        projection: dict[str, Array],
        rows: Float[Array, "R E"],
        step: int,
        states: tuple[Float[Array, "B A E"], Float[Array, "B A r"] | None],
    ) -> Float[Array, "B A R"]:
        """Returns the logits of a token of the blocks; see `Trainee.logits`."""
        own, followed = states
        logits = matmul(own, projection.get("head", rows), transposed=True)
        return logits if followed is None else logits + matmul(followed, projection["markov_out"], transposed=True)

    def _states(self, params: Params, frozen: FrozenTarget, batch: Batch) -> Float[Array, "B A b E"]:
        """Returns the states of the rows of all blocks."""
        rows, size = batch.tokens.shape
        head, steps = make_network(self.config, params), jnp.broadcast_to(jnp.arange(size), (rows, size))
        context = head.fuse(batch.features.astype(jnp.float32))
        text = head.remember(context, steps, params["fc"].dtype)
        if batch.anchors is not None:
            return self._read(params, frozen, batch, text, batch.anchors)
        padded = jnp.pad(steps, ((0, 0), (0, -size % BLOCKS_AT_ONCE)))
        parts = padded.reshape(rows, -1, BLOCKS_AT_ONCE).swapaxes(0, 1)
        states = lax.map(functools.partial(self._read, params, frozen, batch, text), parts)
        return states.swapaxes(0, 1).reshape(rows, padded.shape[1], *states.shape[3:])[:, :size]

    def _read(
        self, params: Params, frozen: FrozenTarget, batch: Batch, text: KV, anchors: Int[Array, "B A"]
    ) -> Float[Array, "B A b E"]:
        """Returns the states of the rows of the blocks at some positions.

        Args:
            params: the parameters of the head.
            frozen: the target's tables.
            batch: the texts.
            text: keys and values of the context in all layers.
            anchors: the position before the root of each block.
        """
        c, d, head = self.config, self.config.decoder, make_network(self.config, params)
        batch, rows, row = batch._replace(anchors=anchors), anchors.shape, jnp.arange(self.config.block_size)
        root = take_anchors(batch, shift_left(batch.tokens, 1))[..., None]
        table = params["embed"] if c.own_embedding else frozen.embed
        assert table is not None
        x = look_up(table, jnp.where(row == 0, root, c.mask_token).reshape(rows[0], -1))
        positions = anchors[..., None] + 1 + row
        turned = rotation(positions.reshape(rows[0], -1), d.rope, d.head_dim)
        step = jnp.arange(batch.tokens.shape[1])
        same = take_anchors(batch, batch.segments)[..., None] == batch.segments[:, None]
        sees = same & (step <= anchors[..., None])

        def attention(layer: int, read: Array) -> Array:
            queries, own, gate = head.layers[layer].heads(read, turned, params["fc"].dtype)
            mask, near = sees[:, :, None], jnp.tril(jnp.ones((row.size, row.size), bool))
            near = near if c.is_causal(layer) else jnp.ones_like(near)
            if (window := d.window_of(layer)) is not None:
                mask = mask & (step > positions[..., None] - window)
                near = near & (row > row[:, None] - window)
            scale = d.head_dim**-0.5 if d.query_scale is None else d.query_scale
            mixed = attend_to_text_and_block(queries, KV(text.keys[layer], text.values[layer]), own, mask, near, scale)
            return head.layers[layer].join(mixed, gate)

        return head.run(x, attention).reshape(*rows, row.size, -1)


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
        queries: queries of all rows of all blocks, N = A b.
        text: keys and values of the text.
        own: keys and values of all rows of all blocks.
        sees: mask of the tokens of the text that each row attends to.
        near: mask of the rows of its own block that each row attends to.
        scale: factor that the scores are multiplied by.
    """
    (batch, heads, group, _, width), (blocks, rows) = queries.shape, (sees.shape[1], len(near))
    split = queries.reshape(batch, heads, group, blocks, rows, width)
    # The conversion to float32 is exact. It is needed because XLA:CPU has no bfloat16 product of so few columns.
    own = KV(*(a.astype(jnp.float32).reshape(batch, heads, blocks, rows, width) for a in own))
    attend = functools.partial(_attend, text, near, scale)
    size = max(1, query_chunks.QUERIES_AT_ONCE // rows)
    if blocks <= size:
        mixed = jax.checkpoint(attend)(split, own, sees)
    else:
        arrays = (split, own, sees)
        mixed = query_chunks.attend_in_chunks(attend, size, arrays, (3, 2, 1), (0, 0, True), out=3)
    return mixed.reshape(queries.shape)


def _attend(
    text: KV,
    near: Bool[Array, "b b"],
    scale: float,
    queries: Float[Array, "B H G A b K"],
    own: KV,
    sees: Bool[Array, "B A #b T"],
) -> Float[Array, "B H G A b K"]:
    """Computes `attend_to_text_and_block` for some blocks."""
    precision = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    dot = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    far = jnp.where(sees[:, None, None], dot("bhgaik,bhjk->bhgaij", queries, text.keys) * scale, -jnp.inf)
    close = jnp.where(near, dot("bhgaik,bhajk->bhgaij", queries.astype(jnp.float32), own.keys) * scale, -jnp.inf)
    weights, size = jax.nn.softmax(jnp.concatenate([far, close], -1), -1), far.shape[-1]
    mixed = dot("bhgaij,bhjk->bhgaik", weights[..., :size].astype(queries.dtype), text.values)
    return mixed + dot("bhgaij,bhajk->bhgaik", weights[..., size:], own.values)
