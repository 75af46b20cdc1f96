"""A training run in one folder, which the same call resumes: `train_heads`.

The folder holds `settings.json`; what is computed once (`answers/`, `features/`, and `held-out/`, the features of the
held-out texts); `checkpoints/`; `log.jsonl`, which is the same in every run with the same settings; `speed.jsonl`,
which is not; `undone.jsonl`, lines of steps that were taken again from an earlier checkpoint; and at the end `heads/`,
or `draft/` for a draft model.
"""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.amounts import plural
from jaxspec.core.checks import named
from jaxspec.core.networks import need_members
from jaxspec.errors import InvalidConfig, TrainingError, shown
from jaxspec.generation.inputs import check_model
from jaxspec.heads.network import DraftHeads
from jaxspec.models.kernels import without_kernels
from jaxspec.models.model import Model
from jaxspec.storage.reading import check_path
from jaxspec.text import conversations
from jaxspec.text.conversations import BadRow, Conversation
from jaxspec.train import losses, manifest, sources
from jaxspec.train.checkpoints import Damaged
from jaxspec.train.dataset import Data, prepare
from jaxspec.train.features import Reader
from jaxspec.train.files import digest_of, fingerprint
from jaxspec.train.identity import TargetIdentity, describe_start
from jaxspec.train.log import Watch
from jaxspec.train.loop import Loop, Setup
from jaxspec.train.medusa_settings import MedusaSettings
from jaxspec.train.order import need_grain
from jaxspec.train.settings import Settings, check_together
from jaxspec.train.step import Trainable, TrainState, start
from jaxspec.train.trained import Trained as Trained
from jaxspec.train.trained import begun_from
from jaxspec.train.trainee import Trainee, TraineeSettings


class _Place(NamedTuple):
    """The folder of a run, and the folder of its answers and features."""

    folder: pathlib.Path
    shelf: pathlib.Path


@named()
def train_heads(
    target: Model,
    prompts: Sequence[str | os.PathLike] | str | os.PathLike,
    out: str | os.PathLike,
    kind: TraineeSettings = MedusaSettings(),
    *,
    draft_vocab: int = 0,
    distill: bool = True,
    answer_tokens: int = 192,
    answer_temperature: float = 0.0,
    answer_batch: int = 32,
    split: str = "line",
    bad_rows: str = "report",
    held_out: float = 0.03,
    row_tokens: int = 512,
    cache_features: bool = True,
    start: str = "",
    loss: str = "auto",
    ce_share: float = 0.1,
    head_weights: str = "decay",
    decay: float = 0.8,
    steps: int = 1000,
    batch: int = 8,
    accumulate: int = 1,
    learning_rate: float = 0.0,
    matrix_rate: float = 1.0,
    warmup: int = 40,
    weight_decay: float = 0.0,
    clip: float = 1.0,
    precision: str = "float32",
    devices: int = 1,
    seed: int = 0,
    max_bad_steps: int = 10,
    log_every: int = 10,
    eval_every: int = 200,
    save_every: int = 200,
    watch: Watch | None = None,
    data: str | os.PathLike | None = None,
) -> Trained:
    """Trains draft heads, or a draft model, for a target, or resumes a run that was interrupted.

    Ctrl-C ends the run after the current step and saves a checkpoint. The same call resumes it, to the same bits as
    without an interruption.

    Args:
        target: target model, of any network that is a `HeadTarget`. It is frozen, unless `kind` trains it, too. Without
            a tokenizer, prompts are token ids. A target that was placed on a mesh (`jaxspec.load(..., mesh=mesh)`,
            `jaxspec.shard`) answers and is read on that mesh.
        prompts: path of a file of prompts or conversations, or a sequence of paths; see `jaxspec.text.conversations`.
        out: folder of the run.
        kind: kind of heads and their sizes, such as `jaxspec.MedusaSettings(heads=4)`.
        draft_vocab: number of tokens to draft from, those most frequent in the answers (of all layouts, only vLLM's
            holds them); 0 for the whole vocabulary.
        distill: whether to train on the target's own answers instead of those in the files.
        answer_tokens: maximum number of tokens of each of the target's answers.
        answer_temperature: temperature of the target's answers.
        answer_batch: number of prompts that are answered at once.
        split: what a text of a .txt file is: a line, a part between blank lines (blank), or the whole file.
        bad_rows: what to do with invalid rows: report them and leave them out, or refuse the file.
        held_out: fraction of the texts that is held out for evaluation.
        row_tokens: number of tokens of each row that texts are packed into.
        cache_features: whether to compute the target's features once and keep them on disk.
        start: what to start from, a directory or a repository: heads of the same kind, with their sizes and drafted
            tokens, or for pard the draft model.
        loss: cross-entropy (ce), KL divergence from the target's distribution (kl), total variation (tv), an LK loss
            (lk-alpha, lk-lambda), or cross-entropy and the sum of absolute differences of the distributions (ce-l1);
            auto for ce with Medusa and DFlash heads and PARD models, kl with EAGLE heads, and ce-l1 with DSpark heads.
        ce_share: share of the cross-entropy in the loss ce-l1.
        head_weights: weight of head i in the loss: decay^i (decay), or the probability that a draft reaches it
            (acceptance).
        decay: base of the weights decay^i.
        steps: number of optimiser steps.
        batch: number of rows of each step.
        accumulate: number of parts of each batch whose gradients are added.
        learning_rate: peak learning rate of AdamW; 0 for the usual one, 0.001 for heads and 0.00003 for PARD models.
        matrix_rate: factor of the learning rate for the matrices of the heads.
        warmup: number of steps of linear warm-up, which a cosine decay to 0 follows.
        weight_decay: weight decay of AdamW.
        clip: maximum norm of the gradient; 0 for no clipping.
        precision: dtype of the matrix products, float32 or bfloat16; parameters and sums are in float32.
        devices: number of devices that the rows of a batch are sharded over.
        seed: seed of the order of the rows and of sampled answers.
        max_bad_steps: number of consecutive steps with a non-finite loss that ends the run.
        log_every: steps between lines of the log.
        eval_every: steps between evaluations on the held-out texts.
        save_every: steps between checkpoints.
        watch: callbacks for progress, see `jaxspec.train.log.Watch`; None for none.
        data: folder of answers and features, which several runs can share; None for the folder of the run.

    Returns:
        A `Trained`, with the heads or the draft model, the target, the texts and the log.

    Raises:
        InvalidConfig: a setting is invalid, or does not fit the target or the machine.
        VocabMismatch: the draft model to start from has another vocabulary than the target.
        MissingPackage: grain is not installed.
        TrainingError: the data cannot be used, or the folder holds another run.
        StorageError: a file cannot be written, for example to a full disk; existing files stay intact.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    settings = Settings(
        draft_vocab=draft_vocab, distill=distill, answer_tokens=answer_tokens, answer_temperature=answer_temperature,
        answer_batch=answer_batch, split=split, bad_rows=bad_rows, held_out=held_out, row_tokens=row_tokens,
        cache_features=cache_features, start=start, loss=loss, ce_share=ce_share, head_weights=head_weights,
        decay=decay, steps=steps, batch=batch, accumulate=accumulate, learning_rate=learning_rate,
        matrix_rate=matrix_rate, warmup=warmup, weight_decay=weight_decay, clip=clip, precision=precision,
        devices=devices, seed=seed, max_bad_steps=max_bad_steps, log_every=log_every, eval_every=eval_every,
        save_every=save_every,
    )  # fmt: skip
    check_model("target", target)
    answerer, target = target, without_kernels(target)  # kernels have no gradient, and training multiplies many rows
    if not isinstance(kind, TraineeSettings):
        raise InvalidConfig(f"kind must be settings such as jaxspec.MedusaSettings(), got {shown(kind)}")
    if not isinstance(watch, Watch | None):
        raise InvalidConfig(f"watch must be a jaxspec.train.log.Watch, got {shown(watch)}")
    settings = check_together(settings, kind)
    watch, folder = watch or Watch(), manifest.folder_of(out)
    place = _Place(folder, folder if data is None else manifest.folder_of(data))
    begun = begun_from(settings, kind, target)
    trainee = kind.trainee(target, settings.draft_vocab, begun)
    if losses.has_law(settings, trainee):
        need_members(target.lm, ["unembedding"], f"the loss {settings.loss} needs a target with a method")
    check_machine(settings)
    watch.say(trainee.served_by)
    read = read_prompts(prompts, settings, watch)
    identity = TargetIdentity.of(target)
    used = _prepare(answerer, identity, read, place, kind, trainee.drafted, begun, settings, watch)
    setup = _set_up(target, identity, used, place, trainee, settings, watch)
    loop = Loop(setup, folder, _begin(target, used, trainee, begun, settings), watch)
    return _conclude(target, used, kind, begun, loop, loop.run(), watch)


def check_machine(settings: Settings) -> None:
    """Checks the devices and packages that training needs.

    Raises:
        InvalidConfig: there are fewer devices than requested.
        MissingPackage: grain is not installed.
    """
    if settings.devices > jax.device_count():
        raise InvalidConfig(f"{plural(settings.devices, 'device')} requested, and there are {jax.device_count()}")
    need_grain()


def read_prompts(prompts: Any, settings: Settings, watch: Watch) -> tuple[list[Conversation], list[BadRow]]:
    """Reads the files of prompts, and returns the rows that cannot be read, too.

    Raises:
        TrainingError: a file cannot be read, or holds no prompt.
    """
    files = [prompts] if isinstance(prompts, str | os.PathLike) else prompts
    if not isinstance(files, Sequence) or not files:
        raise TrainingError(f"prompts must be the path of a file, or a list of paths, got {shown(prompts)}")
    paths = [check_path(path, "a file of prompts", TrainingError) for path in files]
    read, unread = conversations.read(paths, settings.bad_rows == "refuse", settings.split)
    watch.say(f"{', '.join(path.name for path in paths)}: {plural(len(read), 'prompt')}")
    return read, unread


def _prepare(
    target: Model,
    identity: TargetIdentity,
    rows: tuple[list[Conversation], list[BadRow]],
    place: _Place,
    kind: TraineeSettings,
    drafted: int,
    begun: DraftHeads | Model | None,
    settings: Settings,
    watch: Watch,
) -> Data:
    """Lets the target answer the prompts, and writes or compares the manifest of the run."""
    read, unread = rows
    about = identity.of_features | {
        "prompts": digest_of([(one.messages, one.text, one.ids, *one.tools) for one in read])
    }
    about |= manifest.of_run(settings, kind) | describe_start(begun)
    manifest.match_run(*place, about, identity.of_encoding, lambda line: None)
    used = prepare(target, identity, read, unread, place.shelf, settings, drafted, watch)
    if begun is not None and "tokens" in begun.params:
        used = used._replace(ids=np.asarray(begun.params["tokens"]))
    texts = fingerprint((used.rows._asdict(), used.held._asdict()))
    manifest.match_run(*place, about | {"texts": texts}, identity.of_encoding, watch.say)
    return used


def _set_up(
    target: Model,
    identity: TargetIdentity,
    used: Data,
    place: _Place,
    trainee: Trainee,
    settings: Settings,
    watch: Watch,
) -> Setup:
    """Computes or opens the features, and places the frozen arrays on the devices."""
    lm: Any = target.lm
    mesh = jax.make_mesh((settings.devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, spread = (jax.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P(None, "data")))
    laws, reads = losses.needs_laws(settings, trainee), losses.needs_features(settings, trainee)
    frozen = losses.Frozen.nothing()
    if reads:
        frozen = losses.freeze(trainee, lm, target.params, used.ids, laws, settings.precision)
    frozen = jax.device_put(frozen, whole)
    network = trainee.network(lm)
    reader = Reader(network, max(1, settings.batch // settings.accumulate))

    def source(rows: Any, name: str) -> sources.Source:
        if not reads:
            return sources.without_features(rows)
        if not settings.cache_features:
            return sources.computed(reader, target.params, rows)
        return sources.cached(reader, target, identity, rows, trainee, settings, place.shelf / name, watch)

    rows = source(used.rows, manifest.FEATURES)
    held = source(used.held, manifest.HELD) if len(used.held.tokens) else None
    return Setup(settings, trainee, network, frozen, rows, held, reader, whole, spread)


def _begin(
    target: Model, used: Data, trainee: Trainee, begun: DraftHeads | Model | None, settings: Settings
) -> TrainState:
    """Returns the state before the first step."""
    if begun is None:
        heads = trainee.init_params(target, used.ids)
    else:
        kept = {name: value for name, value in begun.params.items() if name != "tokens"}
        heads = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), kept)
    return start(settings, trainee, Trainable(heads, None if trainee.joint is None else target.params))


def _conclude(
    target: Model,
    used: Data,
    kind: TraineeSettings,
    begun: DraftHeads | Model | None,
    loop: Loop,
    state: TrainState,
    watch: Watch,
) -> Trained:
    """Returns the heads of the best step."""
    params, trainee = state.params, loop.setup.trainee
    if loop.best is not None and loop.best[0] != int(state.step):
        try:
            params = loop.store.load(loop.best[0], state).state.params
        except Damaged as error:
            watch.say(f"{error}; it was the best, and the heads are those of step {int(state.step)}")
    result = trainee.result(params.heads, loop.setup.frozen.ids, f"{target.name}-{trainee.drafter}", begun)
    own = target if params.target is None else dataclasses.replace(target, params=params.target)
    step, skipped = int(state.step), int(state.skipped)
    return Trained(result, own, used, loop.log.records, step, skipped, trainee, kind, loop.setup.settings)
