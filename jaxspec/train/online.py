"""Draft heads that follow a policy: trained inside a program on the texts that the policy draws; `OnlineHeads`."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxspec.errors import InvalidConfig, shown
from jaxspec.generation.inputs import check_model
from jaxspec.generation.rollout import Rollout
from jaxspec.heads.network import DraftHeads
from jaxspec.models.model import Model
from jaxspec.train.batch import Batch
from jaxspec.train.losses import freeze, needs_laws
from jaxspec.train.medusa_settings import MedusaSettings
from jaxspec.train.settings import Settings, check_together
from jaxspec.train.step import Report, Trainable, TrainState, read, start, train_step
from jaxspec.train.trainee import Trainee, TraineeSettings


@dataclasses.dataclass(frozen=True)
class OnlineHeads:
    """Draft heads and how they are trained, as pure functions of arrays; static and hashable. `of` makes it.

    Attributes:
        trainee: the heads.
        settings: loss and optimiser.
    """

    trainee: Trainee
    settings: Settings

    @classmethod
    def of(cls, policy: Model, kind: TraineeSettings = MedusaSettings(), **settings: Any) -> Self:
        """Returns heads for a policy, whose parameters may change later.

        Args:
            policy: the policy.
            kind: the kind of heads and their sizes, such as `MedusaSettings(heads=3)`.
            settings: `steps`, `learning_rate`, `warmup`, `loss` and other settings of `train_heads` that decide a step;
                the learning rate decays to 0 at `steps`.

        Raises:
            InvalidConfig, ShapeMismatch: a setting is invalid, or heads of this kind cannot be trained for this policy.
        """
        check_model("policy", policy)
        if not isinstance(kind, TraineeSettings) or kind.trains_target:
            raise InvalidConfig(f"kind must be settings of heads such as jaxspec.MedusaSettings(), got {shown(kind)}")
        fields = {field.name for field in dataclasses.fields(Settings)} - {"draft_vocab", "accumulate", "start"}
        if unknown := settings.keys() - fields:
            raise InvalidConfig(f"{min(unknown)!r} is no setting of a step of online heads")
        made = check_together(Settings(**settings), kind)
        return cls(kind.trainee(policy), made)

    def init(self, policy: Model) -> TrainState:
        """Returns the state of new heads, which guess what the policy's own projection does."""
        params = jax.tree.map(jnp.copy, self.trainee.init_params(policy, None))  # some are the policy's own arrays
        return start(self.settings, self.trainee, Trainable(params))

    def heads(self, state: TrainState) -> DraftHeads:
        """Returns the heads of a state, for `jaxspec.Drafting(..., heads=...)`; the state may be traced."""
        heads = self.trainee.result(state.params.heads, None, "online")
        assert isinstance(heads, DraftHeads), "`of` takes no start, so that no draft model is trained"
        return heads

    def step(self, policy: Model, state: TrainState, rollout: Rollout) -> tuple[TrainState, Report]:
        """Takes an optimiser step on the new tokens of a rollout, with the features that the policy has for them."""
        lm, params = policy.lm, policy.params
        places = jnp.arange(rollout.tokens.shape[1])
        segments = (places < rollout.length[:, None]).astype(jnp.int32)
        features = read(self.trainee.network(lm), params, rollout.tokens, segments)
        batch = Batch(rollout.tokens, segments, (places >= rollout.start[:, None]) & (segments > 0), features)
        laws = needs_laws(self.settings, self.trainee)
        frozen = freeze(self.trainee, lm, params, laws=laws, dtype=self.settings.precision)
        parts = jax.tree.map(lambda leaf: leaf[None], batch)
        return train_step(self.settings, self.trainee, lm, frozen, state, parts)
