"""Settings of training that all kinds of heads share: data, loss, optimiser, log. Nothing here imports JAX.

The sizes of a kind of heads are settings of that kind, such as `jaxspec.train.medusa_settings.MedusaSettings`. The
command line has a flag for each field of both, with its description as the help.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from jaxspec.amounts import plural
from jaxspec.core.checks import whole
from jaxspec.errors import InvalidConfig, shown
from jaxspec.storage.prompt_files import SPLITS

LOSSES = ("ce", "kl", "tv", "lk-alpha", "lk-lambda", "ce-l1")
WEIGHTS = ("decay", "acceptance")
BAD_ROWS = ("report", "refuse")
PRECISIONS = ("float32", "bfloat16")


def setting(default: Any, about: str, choices: tuple[str, ...] = (), least: float | None = None) -> Any:
    """Declares a field of a class of settings.

    Args:
        default: the default, whose type is the type of the setting.
        about: the description, for the help of the command and the documentation of `train_heads`.
        choices: the values that a string may have; empty for any.
        least: the smallest value of a number; None for 1 if it is an integer, and for any value above 0 if it is not.
    """
    return dataclasses.field(default=default, metadata={"about": about, "choices": choices, "least": least})


def check_fields(settings: Any) -> None:
    """Checks the type and range of every field that was declared by `setting`.

    Raises:
        InvalidConfig: a field has another type or is out of range.
    """
    for field in dataclasses.fields(settings):
        value, choices, least = getattr(settings, field.name), field.metadata["choices"], field.metadata["least"]
        must = f"{field.name} must be"
        if isinstance(field.default, str):
            if not isinstance(value, str) or (choices and value not in choices):
                allowed = f"one of {', '.join(choices)}" if choices else "a string"
                raise InvalidConfig(f"{must} {allowed}, got {shown(value)}")
        elif isinstance(field.default, bool):
            if not isinstance(value, bool):
                raise InvalidConfig(f"{must} true or false, got {shown(value)}")
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidConfig(f"{must} a number, got {shown(value)}")
        elif isinstance(field.default, int):
            low = 1 if least is None else int(least)
            if not isinstance(value, int):
                raise InvalidConfig(f"{must} a whole number from {low}, got {shown(value)}")
            whole(field.name, value, low)
        elif not 0 <= value < math.inf or (value == 0 and least is None):
            limit = "above" if least is None else "at least"
            raise InvalidConfig(f"{must} finite and {limit} 0, got {shown(value)}")


class OfHeads:
    """What the settings of all kinds of heads share, see `jaxspec.train.trainee.TraineeSettings`."""

    usual_rate = 1e-3
    trains_model = False


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that all kinds of heads share; equal settings, prompts and target give equal bits on one machine.

    Raises:
        InvalidConfig: a setting has an invalid value.
    """

    draft_vocab: int = setting(
        0,
        "number of tokens to draft from, those most frequent in the answers (of all layouts, only vLLM's holds them); "
        "0 for the whole vocabulary",
        least=0,
    )

    distill: bool = setting(True, "whether to train on the target's own answers instead of those in the files")
    answer_tokens: int = setting(192, "maximum number of tokens of each of the target's answers")
    answer_temperature: float = setting(0.0, "temperature of the target's answers", least=0)
    answer_batch: int = setting(32, "number of prompts that are answered at once")
    split: str = setting(
        "line", "what a text of a .txt file is: a line, a part between blank lines (blank), or the whole file", SPLITS
    )
    bad_rows: str = setting(
        "report", "what to do with invalid rows: report them and leave them out, or refuse the file", BAD_ROWS
    )
    held_out: float = setting(0.03, "fraction of the texts that is held out for evaluation", least=0)
    row_tokens: int = setting(512, "number of tokens of each row that texts are packed into")
    cache_features: bool = setting(True, "whether to compute the target's features once and keep them on disk")

    start: str = setting(
        "",
        "what to start from, a directory or a repository: heads of the same kind, with their sizes and drafted "
        "tokens, or for pard the draft model",
    )
    loss: str = setting(
        "auto",
        "cross-entropy (ce), KL divergence from the target's distribution (kl), total variation (tv), an LK loss "
        "(lk-alpha, lk-lambda), or cross-entropy and the sum of absolute differences of the distributions (ce-l1); "
        "auto for ce with Medusa and DFlash heads and PARD models, kl with EAGLE heads, and ce-l1 with DSpark heads",
        (*LOSSES, "auto"),
    )
    ce_share: float = setting(0.1, "share of the cross-entropy in the loss ce-l1", least=0)
    head_weights: str = setting(
        "decay",
        "weight of head i in the loss: decay^i (decay), or the probability that a draft reaches it (acceptance)",
        WEIGHTS,
    )
    decay: float = setting(0.8, "base of the weights decay^i")

    steps: int = setting(1000, "number of optimiser steps")
    batch: int = setting(8, "number of rows of each step")
    accumulate: int = setting(1, "number of parts of each batch whose gradients are added")
    learning_rate: float = setting(
        0.0, "peak learning rate of AdamW; 0 for the usual one, 0.001 for heads and 0.00003 for PARD models", least=0
    )
    matrix_rate: float = setting(1.0, "factor of the learning rate for the matrices of the heads")
    warmup: int = setting(40, "number of steps of linear warm-up, which a cosine decay to 0 follows", least=0)
    weight_decay: float = setting(0.0, "weight decay of AdamW", least=0)
    clip: float = setting(1.0, "maximum norm of the gradient; 0 for no clipping", least=0)
    precision: str = setting(
        "float32", "dtype of the matrix products, float32 or bfloat16; parameters and sums are in float32", PRECISIONS
    )
    devices: int = setting(1, "number of devices that the rows of a batch are sharded over")
    seed: int = setting(0, "seed of the order of the rows and of sampled answers", least=0)
    max_bad_steps: int = setting(10, "number of consecutive steps with a non-finite loss that ends the run")

    log_every: int = setting(10, "steps between lines of the log")
    eval_every: int = setting(200, "steps between evaluations on the held-out texts")
    save_every: int = setting(200, "steps between checkpoints")

    def __post_init__(self):
        check_fields(self)
        if self.ce_share > 1:
            raise InvalidConfig(f"ce_share must be at most 1, got {self.ce_share}")
        if self.held_out >= 1:
            raise InvalidConfig(f"held_out must be below 1, got {self.held_out}")
        if self.batch % (self.accumulate * self.devices):
            raise InvalidConfig(
                f"a batch of {plural(self.batch, 'row')} cannot be read in {plural(self.accumulate, 'part')} over "
                f"{plural(self.devices, 'device')}"
            )


def check_together(settings: Settings, kind: Any) -> Settings:
    """Checks shared settings and those of a kind of heads (`jaxspec.train.trainee.TraineeSettings`) together.

    Returns:
        The shared settings, with the kind's loss in place of "auto", and its learning rate in place of 0.

    Raises:
        InvalidConfig: they cannot be combined.
    """
    if settings.row_tokens < kind.drafted + 3:
        raise InvalidConfig(f"rows of {settings.row_tokens} tokens have no place for {kind.drafted} drafted tokens")
    kind.check(settings)
    if settings.start and settings.draft_vocab:
        raise InvalidConfig("the heads to start from have drafted tokens of their own: leave draft_vocab at 0")
    loss = kind.usual_loss if settings.loss == "auto" else settings.loss
    return dataclasses.replace(settings, loss=loss, learning_rate=settings.learning_rate or kind.usual_rate)


def check_start(kind: Any, config: Any, free: Iterable[str]) -> None:
    """Refuses sizes that differ from those of the heads to start from.

    Args:
        kind: the settings of a kind of heads.
        config: the sizes of the heads to start from.
        free: names of the settings that are not sizes.

    Raises:
        InvalidConfig: a setting is neither at its default nor that of the heads.
    """
    for field in dataclasses.fields(kind):
        given = getattr(kind, field.name)
        if field.name in free or given == field.default:
            continue
        held = _size_of(config, field.name)
        if held != given:
            raise InvalidConfig(
                f"leave out {field.name} (--{field.name.replace('_', '-')}): the heads to start from have "
                f"{field.name} {held!r}, got {given!r}"
            )


def _size_of(config: Any, name: str) -> Any:
    """Returns a size of heads by the name of its setting, as the setting holds it; None if they have no such size."""
    for holder in (config, getattr(config, "decoder", None)):
        for attribute in (name, f"num_{name}", f"{name}_size"):
            if hasattr(holder, attribute):
                value = getattr(holder, attribute)
                return ",".join(map(str, value)) if isinstance(value, tuple) else value
    return None
