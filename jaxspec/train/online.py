"""`OnlineHeads`: draft heads that follow a policy, trained inside a program on the texts that the policy draws."""

import dataclasses
import os
from typing import Self

import jax
import jax.numpy as jnp

from jaxspec.errors import InvalidConfig, shown
from jaxspec.generation.inputs import check_model
from jaxspec.generation.rollout import Rollout
from jaxspec.heads.files import load_heads
from jaxspec.heads.network import DraftHeads
from jaxspec.models.model import Model
from jaxspec.train.batch import Batch
from jaxspec.train.head_trainee import HeadTrainee, without_ids
from jaxspec.train.losses import freeze, needs_laws, product_dtype
from jaxspec.train.medusa_settings import MedusaSettings
from jaxspec.train.placement import Placement
from jaxspec.train.settings import TrainSettings
from jaxspec.train.step import Report, Trainable, TrainState, compute_features, init_state, train_step


@dataclasses.dataclass(frozen=True)
class OnlineHeads:
    """Draft heads and how they are trained, as pure functions of arrays; static and hashable. `of` creates an instance.

    Attributes:
        trainee: the heads.
        settings: the settings. Only the loss, the optimiser and the mesh are used.
        placement: the places of the heads and the rows on several devices; None for one device.
        start: the heads that training starts from, compared by identity; None for new heads.
    """

    trainee: HeadTrainee
    settings: TrainSettings
    placement: Placement | None = None
    start: DraftHeads | None = None

    @classmethod
    def of(
        cls,
        policy: Model,
        settings: TrainSettings = MedusaSettings(),
        start: DraftHeads | str | os.PathLike | None = None,
    ) -> Self:
        """Returns heads for a policy, whose parameters may change later.

        Args:
            policy: the policy.
            settings: the heads and their training, such as `MedusaSettings(heads=3, steps=60)`. Only the
                settings of a step are used: the loss, the optimiser, and `steps`, at which the learning rate has
                decayed to 0. With `mesh`, such as "data=8", the rows of a step, the heads and their moments are split
                over the devices, as by `train_heads`. Use the mesh of the rollouts.
            start: heads of the kind of the settings to start from, or their location as `load_heads` takes it. Their
                sizes and drafted tokens are kept. None for new heads, which draft from the whole vocabulary.

        Raises:
            InvalidConfig, ShapeMismatch: a setting is invalid, or heads of this kind cannot be trained for this policy.
            CheckpointError: there are no heads at the location.
        """
        check_model("policy", policy)
        if not isinstance(settings, TrainSettings) or settings.trains_target or settings.trains_model:
            raise InvalidConfig(f"settings must be of heads, such as jaxspec.MedusaSettings(); got {shown(settings)}")
        for name in ("draft_vocab", "accumulate"):
            if getattr(settings, name) != getattr(TrainSettings, name):
                raise InvalidConfig(f"online heads do not support {name}; leave it at its default")
        if settings.start:
            raise InvalidConfig("the heads to start from are the argument start of OnlineHeads.of, not a setting")
        if isinstance(start, (str, os.PathLike)):
            start = load_heads(start, target=policy)
        if start is not None and not isinstance(start, DraftHeads):
            raise InvalidConfig(f"start must be DraftHeads, as jaxspec.load_heads returns them; got {shown(start)}")
        trainee = settings.trainee(policy, start)
        assert isinstance(trainee, HeadTrainee), "no draft model is trained"
        return cls(trainee, settings, Placement.of(settings) if settings.mesh else None, start)

    @property
    def _ids(self) -> jax.Array | None:
        """The drafted tokens; None for the whole vocabulary."""
        return None if self.start is None else self.start.params.get("tokens")

    def init(self, policy: Model) -> TrainState:
        """Returns the state before the first step. New heads make the same guesses as the policy's own projection."""
        params = self.trainee.init_params(policy, None) if self.start is None else without_ids(self.start.params)
        # The copies can be donated. Some parameters are arrays of the policy, or of the heads to start from.
        params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params)
        state = init_state(self.settings, self.trainee, Trainable(params))
        return state if self.placement is None else self.placement.put(state, self.placement.split(state))

    def heads(self, state: TrainState) -> DraftHeads:
        """Returns the heads of a state, for `jaxspec.Drafting(..., heads=...)`; the state may be traced."""
        heads = self.trainee.result(state.params.heads, self._ids, "online")
        return heads if self.start is None else dataclasses.replace(heads, tree=self.start.tree)

    def step(self, policy: Model, state: TrainState, rollout: Rollout) -> tuple[TrainState, Report]:
        """Takes an optimiser step on the new tokens of a rollout, with the policy's features of these tokens.

        Raises:
            InvalidConfig: the rows of the rollout cannot be split evenly over the devices.
        """
        lm, params, here = policy.lm, policy.params, self.placement
        rows = len(rollout.tokens)
        if rows % self.settings.groups:
            raise InvalidConfig(f"a rollout of {rows} rows cannot be split over mesh {self.settings.mesh!r} evenly")
        positions = jnp.arange(rollout.tokens.shape[1])
        segments = (positions < rollout.length[:, None]).astype(jnp.int32)
        features = compute_features(self.trainee.network(lm), params, rollout.tokens, segments, here)
        batch = Batch(rollout.tokens, segments, (positions >= rollout.start[:, None]) & (segments > 0), features)
        laws = needs_laws(self.settings, self.trainee)
        frozen = freeze(self.trainee, lm, params, self._ids, laws, product_dtype(self.settings))
        parts = jax.tree.map(lambda leaf: leaf[None], batch)
        return train_step(self.settings, self.trainee, lm, frozen, state, parts, here)
