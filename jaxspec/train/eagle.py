"""EAGLE heads in training, for any target that gives its residual stream (`jaxspec.core.networks.TappedTarget`).

In step 0, row t reads the target's state at t and the token t + 1, and predicts token t + 2. In step s, row t reads its
own state of step s - 1 and the text's token t + 1 + s, and predicts token t + 2 + s. This is the training-time test of
EAGLE-3 (Li et al. 2025, arXiv:2503.01840, section 3.1), and what the drafter does on a chain of the text's own tokens.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
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
        """Yields the guesses of each step. The backward pass recomputes the layers of each step."""
        features, steps = batch.features.astype(jnp.float32), jnp.arange(batch.tokens.shape[1])
        params = with_ids(params, frozen.ids)
        states = make_network(self.config, params).fuse(self._with_noise(features, batch))
        sees = (batch.segments[:, :, None] == batch.segments[:, None, :]) & (steps[:, None] >= steps)
        kept: list[list[KV]] = []
        for _ in range(self.drafted):
            states, new, projected = self._step(params, frozen, states, batch.tokens, kept, sees)
            kept = [*kept, new]
            yield Guess(projected, self._distance(states, features) if self.feature_loss else None)

    @functools.partial(
        jax.checkpoint, static_argnums=0, policy=jax.checkpoint_policies.save_only_these_names(ATTENTION)
    )
    def _step(
        self,
        params: Params,
        frozen: FrozenTarget,
        states: Float[Array, "B T E"],
        tokens: Int[Array, "B T"],
        kept: list[list[KV]],
        sees: Bool[Array, "B T T"],
    ) -> tuple[Float[Array, "B T E"], list[KV], Float[Array, "B T E"]]:
        """Computes the step after the steps in `kept`.

        Returns:
            Its states, the keys and values of each layer, and the input of the projection to logits.
        """
        head, c, new = make_network(self.config, params), self.config.decoder, []
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]) + len(kept), tokens.shape)
        turned = rotation(positions, c.rope, c.head_dim)
        scale = c.head_dim**-0.5 if c.query_scale is None else c.query_scale

        def attention(layer: int, read: Array) -> Array:
            block = head.layers[layer]
            queries, own, gate = block.heads(read, turned, params["fc"].dtype)
            new.append(own)
            mixed = attend_to_rows_and_chain(queries, [*(step[layer] for step in kept), own], sees, scale)
            return block.join(mixed, gate)

        table = params["embed"] if self.config.own_embedding else frozen.embed
        assert table is not None
        states = head.run(states, look_up(table, shift_left(tokens, 1 + len(kept))), attention)
        return states, new, head.projected(states)

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
    queries: Float[Array, "B H G T K"], seen: Sequence[KV], sees: Bool[Array, "B T T"], scale: float
) -> Float[Array, "B H G T K"]:
    """Computes attention of row t to the rows up to t of step 0, and only to row t of later steps.

    One softmax over T + s scores is enough, without a mask over all steps, because a row of a later step continues its
    own chain and does not attend to other chains.

    Args:
        queries: queries of step s.
        seen: keys and values of the steps 0 to s.
        sees: mask of the rows of step 0 that each row attends to.
        scale: factor that the scores are multiplied by.
    """
    chain = None
    if len(seen) > 1:
        # The conversion to float32 is exact. It is needed because XLA:CPU has no bfloat16 product of so few columns.
        chain = KV(*(jnp.stack(each, axis=3).astype(jnp.float32) for each in zip(*seen[1:])))
    attend = functools.partial(_attend, seen[0], scale)
    if queries.shape[3] <= (size := query_chunks.QUERIES_AT_ONCE):
        return attend(queries, sees, chain)
    mixed = query_chunks.attend_in_chunks(attend, size, (queries, sees, chain), (3, 1, 2), (0, True, 0), out=3)
    return checkpoint_name(mixed, ATTENTION)


def _attend(
    first: KV, scale: float, queries: Float[Array, "B H G C K"], sees: Bool[Array, "B C T"], chain: KV | None
) -> Float[Array, "B H G C K"]:
    """Computes `attend_to_rows_and_chain` for some queries; `chain` has their keys and values `[B, H, C, s, K]`."""
    precision = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    dot = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    scores = jnp.where(sees[:, None, None], dot("bhgtk,bhjk->bhgtj", queries, first.keys) * scale, -jnp.inf)
    if chain is None:
        return dot("bhgtj,bhjk->bhgtk", jax.nn.softmax(scores, -1).astype(queries.dtype), first.values)
    own = dot("bhgtk,bhtsk->bhgts", queries, chain.keys) * scale
    weights, size = jax.nn.softmax(jnp.concatenate([scores, own], -1), -1), scores.shape[-1]
    mixed = dot("bhgtj,bhjk->bhgtk", weights[..., :size].astype(queries.dtype), first.values)
    return mixed + dot("bhgts,bhtsk->bhgtk", weights[..., size:], chain.values)
