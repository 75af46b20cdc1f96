"""EAGLE heads in training, for any target that gives its residual stream (`jaxspec.core.networks.TappedTarget`).

In step 0, row t reads the target's state at t and the token t + 1, and predicts token t + 2. In step s, row t reads its
own state of step s - 1 and the text's token t + 1 + s, and predicts token t + 2 + s. This is the training-time test of
EAGLE-3 (Li et al. 2025, arXiv:2503.01840, section 3.1), and what the drafter does on a chain of the text's own tokens.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxspec.amounts import plural
from jaxspec.core.networks import need_members, with_taps
from jaxspec.core.records import KV, Params
from jaxspec.errors import InvalidConfig
from jaxspec.heads.eagle_config import EagleConfig, default_eagle_taps
from jaxspec.heads.network import DraftHeads, check_target, make_network
from jaxspec.models import query_chunks
from jaxspec.models.layers import look_up, matmul, rotation
from jaxspec.models.model import Model
from jaxspec.train.batch import Batch, FrozenTarget, Guess, shift_left
from jaxspec.train.eagle_settings import Eagle1Settings, Eagle3Settings
from jaxspec.train.head_trainee import HeadTrainee, layers_like, reduced_vocab, taps_of, with_ids
from jaxspec.train.settings import check_start, parse_taps

EVALUATION_STEPS = 7
"""Number of steps in which heads are evaluated, whatever their number in training: EAGLE's own trees are as deep."""
NOISE_LENGTH = 512
"""Text length at which the noise has the width of the setting."""
ATTENTION = "attention"
"""Name of the outputs of attention in chunks. The backward pass keeps them, because it recomputes the scores of a chunk
already."""
SWITCHES = ("fc_bias", "fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "own_projection")
"""Settings that are fields of `EagleConfig`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleTrainee(HeadTrainee):
    """An EAGLE head that is trained for a target.

    Attributes:
        feature_loss: weight of the smooth L1 distance of EAGLE-1's features.
        noise: width of the uniform noise on EAGLE-1's features.
    """

    config: EagleConfig
    feature_loss: float = 0.0
    noise: float = 0.0

    @classmethod
    def of(
        cls, config: EagleConfig, depth: int = EVALUATION_STEPS, feature_loss: float = 0.0, noise: float = 0.0
    ) -> Self:
        """Returns the trainee of a head with these sizes.

        Args:
            config: the sizes.
            depth: number of steps.
            feature_loss: see `EagleTrainee`.
            noise: see `EagleTrainee`.
        """
        layers, taps = plural(config.decoder.num_layers, "decoder layer"), config.taps
        reads = f"after the layers {', '.join(map(str, taps))}" if taps else "before the projection"
        sizes = (
            f"{layers} on the target's states {reads}, projection: {'own' if config.own_projection else 'shared'}, "
            f"{config.rows} of {config.vocab_size} tokens drafted, {plural(depth, 'step')} in training"
        )
        title, loss = f"EAGLE-{config.version} head", {"feature_loss": feature_loss, "noise": noise}
        return cls._of(config, title, sizes, drafted=depth, **loss)

    @classmethod
    def make(cls, settings: Eagle1Settings | Eagle3Settings, target: Model, start: DraftHeads | None) -> Self:
        """Returns the head to train for a target; see `TrainSettings.trainee`.

        Raises:
            InvalidConfig, ShapeMismatch: the target lacks a method or layers, or the head to start from does not fit
                the settings or the target.
        """
        lm: Any = target.lm
        version, taps, given = 1, None, vars(settings)
        need_members(lm, ["unembedding", "embedding"], "EAGLE heads are trained on a target with a method")
        if isinstance(settings, Eagle3Settings):
            version, taps = 3, parse_taps(settings.taps)
        if start is not None:
            config = start.config
            if not isinstance(config, EagleConfig) or config.version != version:
                raise InvalidConfig(f"start: {start.name} is {config.summary}, expected an EAGLE-{version} head")
            config = dataclasses.replace(config, taps=taps_of(config, lm) or None)
            check_start(settings, config, ("depth", "feature_loss", "noise"))
        else:
            if version == 3:
                need_members(lm, ["depth", "taps"], "an EAGLE-3 head reads the target's residual stream, which needs")
                taps = taps or default_eagle_taps(lm.depth)
            decoder = layers_like(target, settings.layers, given.get("qk_norm", False))
            switches = {name: given[name] for name in SWITCHES if name in given}
            config = EagleConfig(decoder, version, taps=taps, draft_vocab_size=reduced_vocab(settings, lm), **switches)
        check_target(config, target)
        with_taps(lm, config.taps or ())
        return cls.of(config, settings.drafted, given.get("feature_loss", 0.0), given.get("noise", 0.0))

    def unroll(self, params: Params, frozen: FrozenTarget, batch: Batch) -> Iterator[Guess]:
        """Yields the guesses of each step. The backward pass recomputes the layers of each step.

        The steps are a loop in the program. Otherwise XLA would take minutes to compile some steps of large heads.
        """
        rows, c = batch.tokens.shape, self.config.decoder
        features, places = batch.features.astype(jnp.float32), jnp.arange(rows[1])
        params = with_ids(params, frozen.ids)
        states = make_network(self.config, params).fuse(self._with_noise(features, batch))
        sees = (batch.segments[:, :, None] == batch.segments[:, None, :]) & (places[:, None] >= places)
        table = params["embed"] if self.config.own_embedding else frozen.embed
        assert table is not None
        words = look_up(table, jnp.pad(batch.tokens[:, 1:], ((0, 0), (0, self.drafted))))
        empty = jnp.zeros((self.drafted, rows[0], c.num_kv_heads, rows[1], c.head_dim), params["fc"].dtype)
        seen = [KV(empty, empty) for _ in range(c.num_layers)]
        policy = jax.checkpoint_policies.save_only_these_names(ATTENTION)

        @functools.partial(jax.checkpoint, prevent_cse=False, policy=policy)
        def take_step(carry: tuple[Array, list[KV]], step: Array) -> tuple[tuple[Array, list[KV]], tuple[Array, Any]]:
            read = lax.dynamic_slice_in_dim(words, step, rows[1], axis=1)
            states, seen, projected = self._step(params, *carry, read, step, sees)
            distance = self._distance(states, features) if self.feature_loss else None
            return (states, seen), (projected, distance)

        _, guesses = lax.scan(take_step, (states, seen), jnp.arange(self.drafted))
        for step in range(self.drafted):
            yield Guess(*jax.tree.map(lambda leaf, step=step: leaf[step], guesses))

    def _step(
        self,
        params: Params,
        states: Float[Array, "B T E"],
        seen: list[KV],
        words: Float[Array, "B T E"],
        step: Int[Array, ""],
        sees: Bool[Array, "B T T"],
    ) -> tuple[Float[Array, "B T E"], list[KV], Float[Array, "B T E"]]:
        """Computes a step.

        Args:
            params: the parameters, with the ids of a reduced vocabulary.
            states: the states of the step before.
            seen: for each layer, keys and values `[S, B, H, T, K]` of the steps before this step.
            words: the embeddings of the tokens that the rows read.
            step: the number of the step.
            sees: mask of the rows of step 0 that each row attends to.

        Returns:
            Its states, keys and values with those of this step, and the input of the projection to logits.
        """
        head, c = make_network(self.config, params), self.config.decoder
        positions = jnp.broadcast_to(jnp.arange(words.shape[1]) + step, words.shape[:2])
        turned, kept = rotation(positions, c.rope, c.head_dim), list(seen)
        scale = c.head_dim**-0.5 if c.query_scale is None else c.query_scale

        def attention(layer: int, read: Array) -> Array:
            block = head.layers[layer]
            queries, own, gate = block.heads(read, turned, params["fc"].dtype)
            kept[layer] = jax.tree.map(
                lambda every, new: lax.dynamic_update_index_in_dim(every, new, step, 0), kept[layer], own
            )
            return block.join(attend_to_rows_and_chain(queries, kept[layer], step, sees, scale), gate)

        states = head.run(states, words, attention)
        return states, kept, head.projected(states)

    def projection(self, params: Params) -> list[Array]:
        """Returns the head's own projection in a list, which is empty if the head uses the target's projection."""
        return [params["head"]] if self.config.own_projection else []

    def logits(
        self, projection: list[Array], rows: Float[Array, "R E"], step: int, states: Float[Array, "B A E"]
    ) -> Float[Array, "B A R"]:
        """Returns the logits of a step; see `Trainee.logits`."""
        return matmul(states, *projection or [rows], transposed=True)

    def _with_noise(self, features: Float[Array, "B T F"], batch: Batch) -> Float[Array, "B T F"]:
        """Adds the noise of a training step. Evaluation has no key, and therefore no noise."""
        if not self.noise or batch.key is None:
            return features
        length = (batch.segments[:, :, None] == batch.segments[:, None, :]).sum(-1, keepdims=True)
        draw = functools.partial(jax.random.uniform, shape=features.shape[1:], minval=-0.5, maxval=0.5)
        drawn = jax.vmap(draw)(batch.key)
        return features + self.noise * NOISE_LENGTH / length * drawn

    def _distance(self, states: Float[Array, "B T E"], features: Float[Array, "B T E"]) -> Float[Array, "B T"]:
        """Returns the weighted smooth L1 distance of states from the target's next features."""
        apart = jnp.abs(states - shift_left(features, 1))
        return self.feature_loss * jnp.where(apart < 1, 0.5 * apart**2, apart - 0.5).mean(-1)


def attend_to_rows_and_chain(
    queries: Float[Array, "B H G T K"], seen: KV, step: Int[Array, ""] | int, sees: Bool[Array, "B T T"], scale: float
) -> Float[Array, "B H G T K"]:
    """Computes attention of row t to the rows up to t of step 0, and only to row t of later steps.

    One softmax over T + S - 1 scores is enough, without a mask over all steps, because a row of a later step continues
    its own chain and does not attend to other chains.

    Args:
        queries: queries of a step.
        seen: keys and values `[S, B, H, T, K]` of all steps. The entries of steps after this step are not read.
        step: the number of the step.
        sees: mask of the rows of step 0 that each row attends to.
        scale: factor that the scores are multiplied by.
    """
    # The conversion to float32 is exact. It is needed because XLA:CPU has no bfloat16 product of so few columns.
    first, chain = KV(*(every[0] for every in seen)), KV(*(every[1:].astype(jnp.float32) for every in seen))
    attend = functools.partial(_attend, first, step, scale)
    if queries.shape[3] <= (size := query_chunks.QUERIES_AT_ONCE):
        return attend(queries, sees, chain)
    mixed = query_chunks.attend_in_chunks(attend, size, (queries, sees, chain), (3, 1, 3), (0, True, 0), out=3)
    return checkpoint_name(mixed, ATTENTION)


def _attend(
    first: KV,
    step: Int[Array, ""] | int,
    scale: float,
    queries: Float[Array, "B H G C K"],
    sees: Bool[Array, "B C T"],
    chain: KV,
) -> Float[Array, "B H G C K"]:
    """Computes `attend_to_rows_and_chain` for some queries; `chain` has their keys and values `[S - 1, B, H, C, K]`.

    The scores of both parts are not concatenated, because T + S - 1 scores would have a layout with padding on a TPU.
    """
    precision = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    dot = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    rows = jnp.where(sees[:, None, None], dot("bhgtk,bhjk->bhgtj", queries, first.keys) * scale, -jnp.inf)
    own = dot("bhgtk,sbhtk->sbhgt", queries, chain.keys) * scale
    reached = jnp.arange(len(own)) < step
    own = jnp.where(reached[:, None, None, None, None], own, -jnp.inf)
    top = lax.stop_gradient(jnp.maximum(rows.max(-1), own.max(0, initial=-jnp.inf)))
    rows, own = jnp.exp(rows - top[..., None]), jnp.exp(own - top)
    mixed = dot("bhgtj,bhjk->bhgtk", rows.astype(queries.dtype), first.values)
    mixed = mixed + dot("sbhgt,sbhtk->bhgtk", own, chain.values)
    return mixed / (rows.sum(-1) + own.sum(0))[..., None]
