"""A training run in one folder, which the same call resumes: `train_heads`.

The folder holds:

- `settings.json`: the manifest of the run.
- `answers/`, `features/`, and `held-out/` with the features of the held-out texts: what is computed once.
- `checkpoints/`.
- `log.jsonl`, which is the same in every run with the same settings.
- `speed.jsonl`, which differs between runs.
- `undone.jsonl`: lines of steps that were taken again from an earlier checkpoint.
- At the end, `heads/`, or `draft/` for a draft model.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.amounts import plural
from jaxspec.backend.processes import alone, count_processes
from jaxspec.core.checks import check_arguments
from jaxspec.core.mesh import DATA, MODEL, to_host
from jaxspec.core.networks import need_members
from jaxspec.errors import InvalidConfig, TrainingError, shown
from jaxspec.generation.inputs import check_model
from jaxspec.heads.network import DraftHeads
from jaxspec.models.columns import gather
from jaxspec.models.kernels import without_kernels
from jaxspec.models.model import Model
from jaxspec.models.sharding import mesh_of
from jaxspec.storage.reading import check_path
from jaxspec.text import conversations
from jaxspec.text.conversations import BadRow, Conversation
from jaxspec.train import losses, manifest, sources
from jaxspec.train.checkpoints import DamagedCheckpoint
from jaxspec.train.dataset import Data, prepare_data
from jaxspec.train.features import FeatureReader
from jaxspec.train.files import digest_of, fingerprint
from jaxspec.train.head_trainee import HeadTrainee, without_ids
from jaxspec.train.identity import TargetIdentity, describe_start
from jaxspec.train.log import Watch
from jaxspec.train.loop import Loop, LoopSetup
from jaxspec.train.medusa_settings import MedusaSettings
from jaxspec.train.placement import Placement, default_mesh
from jaxspec.train.settings import TrainSettings, parse_mesh
from jaxspec.train.step import Trainable, TrainState, init_state
from jaxspec.train.trained import Trained as Trained
from jaxspec.train.trained import load_start
from jaxspec.train.trainee import Trainee


class _Run(NamedTuple):
    """The parts of a run that are known before any text is read.

    Attributes:
        settings: the settings.
        target: the target without kernels, because kernels have no gradient and training multiplies many rows. It is
            placed for training.
        trainee: the heads or the draft model.
        start: what training starts from; None for new heads.
        folder: the folder of the run.
        data_folder: the folder of the run's answers and features.
        watch: callbacks for progress.
        placement: the places of all arrays.
    """

    settings: TrainSettings
    target: Model
    trainee: Trainee
    start: DraftHeads | Model | None
    folder: pathlib.Path
    data_folder: pathlib.Path
    watch: Watch
    placement: Placement


@check_arguments
def train_heads(
    target: Model,
    prompts: Sequence[str | os.PathLike] | str | os.PathLike,
    out: str | os.PathLike,
    settings: TrainSettings = MedusaSettings(),
    *,
    watch: Watch | None = None,
    data: str | os.PathLike | None = None,
) -> Trained:
    """Trains draft heads, or a draft model, for a target, or resumes a run that was interrupted.

    Ctrl-C ends the run after the current step and saves a checkpoint. The same call resumes the run. The result has the
    same bits as the result of a run without an interruption.

    Several processes, which `jaxspec.backend.processes.joined` connects, make the same call with the same folder, which
    all of them can read and write. Each process has the target on its own devices.

    Args:
        target: target model, of any network that is a `HeadTarget`. It is frozen, unless the settings train it as well.
            Without a tokenizer, prompts are token ids. A target that was placed on a mesh
            (`jaxspec.load(..., mesh=mesh)`, `jaxspec.shard`) answers prompts and computes features on that mesh.
        prompts: path of a file of prompts or conversations, or a sequence of paths; see `jaxspec.text.conversations`.
        out: folder of the run.
        settings: what is trained and how. The class decides the kind of heads, such as
            `jaxspec.Eagle3Settings(depth=5, steps=500)`; `help(jaxspec.Eagle3Settings)` lists its settings.
        watch: callbacks for progress, see `jaxspec.train.log.Watch`; None for no callbacks.
        data: folder of answers and features, which several runs can share; None for the folder of the run.

    Returns:
        A `Trained`, with the heads or the draft model, the target, the texts and the log.

    Raises:
        InvalidConfig: a setting does not fit the target or the machine.
        VocabMismatch: the draft model to start from has another vocabulary than the target.
        MissingPackage: grain is not installed.
        TrainingError: the data cannot be used, or the folder holds another run.
        StorageError: a file cannot be written, for example to a full disk; existing files stay intact.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    check_model("target", target)
    given, target = target, without_kernels(target)
    if not isinstance(settings, TrainSettings):
        raise InvalidConfig(f"settings must be of a kind, such as jaxspec.MedusaSettings(); got {shown(settings)}")
    if not isinstance(watch, Watch | None):
        raise InvalidConfig(f"watch must be a jaxspec.train.log.Watch, got {shown(watch)}")
    settings = resolve_settings(settings, given)
    check_machine(settings)
    placement = Placement.of(settings)
    watch, folder = watch or Watch(), manifest.check_folder(out)
    data_folder = folder if data is None else manifest.check_folder(data)
    start = load_start(settings, target)
    trainee = settings.trainee(target, start)
    if losses.has_law(settings, trainee):
        need_members(target.lm, ["unembedding"], f"the loss {settings.loss} needs a target with a method")
    watch.say(trainee.about.serving)
    read = read_prompts(prompts, settings, watch)
    identity = TargetIdentity.of(target)
    run = _Run(settings, placement.target(target), trainee, start, folder, data_folder, watch, placement)
    used = _prepare(run, given, identity, *read)
    loop = Loop(_set_up(run, identity, used), folder, _begin(run, used), watch)
    return _conclude(run, given, used, loop, loop.run())


def resolve_settings(settings: TrainSettings, target: Model) -> TrainSettings:
    """Returns the settings with the precision and the mesh that their defaults mean on this machine, for a target.

    Raises:
        InvalidConfig: the batch cannot be divided over the mesh that the target is on.
    """
    mesh = mesh_of(target.params)
    text = default_mesh(settings, jax.device_count())
    if mesh is not None:
        text = f"data={mesh.shape[DATA]},model={mesh.shape[MODEL]}"
    return dataclasses.replace(settings, mesh=settings.mesh or text, precision=losses.product_dtype(settings))


def check_machine(settings: TrainSettings) -> None:
    """Checks the devices and packages that training needs.

    Raises:
        InvalidConfig: there are fewer devices than requested, or a process has no device of the mesh.
        MissingPackage: grain is not installed.
    """
    if (count := math.prod(parse_mesh(settings.mesh))) > jax.device_count():
        raise InvalidConfig(
            f"mesh {settings.mesh!r} needs {count} devices, but JAX has {plural(jax.device_count(), 'device')}"
        )
    taking_part = {device.process_index for device in Placement.of(settings).mesh.devices.flat}
    if settings.mesh and len(taking_part) < count_processes():
        raise InvalidConfig(
            f"mesh {settings.mesh!r} has devices of {plural(len(taking_part), 'process')} of {count_processes()}; use "
            "a larger mesh or a larger batch, so that every process takes part, or fewer processes"
        )
    sources.import_grain()


def read_prompts(prompts: Any, settings: TrainSettings, watch: Watch) -> tuple[list[Conversation], list[BadRow]]:
    """Reads the files of prompts; also returns the rows that cannot be read.

    Raises:
        TrainingError: a file cannot be read, or holds no prompt.
    """
    files = [prompts] if isinstance(prompts, str | os.PathLike) else prompts
    if not isinstance(files, Sequence) or not files:
        raise TrainingError(f"prompts must be the path of a file, or a list of paths, got {shown(prompts)}")
    paths = [check_path(path, "a file of prompts", TrainingError) for path in files]
    read, unread = conversations.read_conversations(paths, settings.bad_rows == "refuse", settings.split)
    watch.say(f"{', '.join(path.name for path in paths)}: {plural(len(read), 'prompt')}")
    return read, unread


def _prepare(
    run: _Run, answerer: Model, identity: TargetIdentity, read: list[Conversation], unread: list[BadRow]
) -> Data:
    """Lets the target answer the prompts, and writes or compares the manifest of the run."""
    about = identity.feature_values | {
        "prompts": digest_of([(row.messages, row.text, row.ids, *row.tools) for row in read])
    }
    about |= manifest.run_settings(run.settings) | describe_start(run.start)
    causes, say = identity.encoding_values, run.watch.say
    alone(lambda: manifest.match_run(run.folder, run.data_folder, about, causes, lambda line: None))
    used = prepare_data(answerer, identity, read, unread, run.data_folder, run.settings, run.trainee.drafted, run.watch)
    if run.start is not None and "tokens" in run.start.params:
        used = used._replace(ids=np.asarray(run.start.params["tokens"]))
    texts = fingerprint((used.rows._asdict(), used.held._asdict()))
    alone(lambda: manifest.match_run(run.folder, run.data_folder, about | {"texts": texts}, causes, say))
    return used


def _set_up(run: _Run, identity: TargetIdentity, used: Data) -> LoopSetup:
    """Computes or opens the features, and places the frozen arrays on the devices."""
    settings, trainee, params = run.settings, run.trainee, run.target.params
    lm: Any = run.target.lm
    placement = run.placement
    laws, reads = losses.needs_laws(settings, trainee), losses.needs_features(settings, trainee)
    frozen = losses.FrozenTarget.empty()
    if reads:
        frozen = losses.freeze(trainee, lm, params, used.ids, laws, losses.product_dtype(settings))
    frozen = placement.put(frozen, placement.whole)
    network = trainee.network(lm)
    reader = FeatureReader(network, max(1, settings.batch // settings.accumulate), placement)

    def source(rows: Any, name: str) -> sources.Source:
        if not reads:
            return sources.omit_features(rows)
        folder = run.data_folder / name
        if not settings.cache_features or not alone(lambda: sources.suit_disk(reader, params, rows, folder, run.watch)):
            return sources.compute_features_on_demand(reader, params, rows)
        return sources.cache_features(reader, run.target, identity, rows, trainee, settings, folder, run.watch)

    rows = source(used.rows, manifest.FEATURES_FOLDER)
    held = source(used.held, manifest.HELD_OUT_FOLDER) if len(used.held.tokens) else None
    return LoopSetup(settings, trainee, network, frozen, rows, held, reader, placement)


def _begin(run: _Run, used: Data) -> TrainState:
    """Returns the state before the first step."""
    if run.start is None:
        assert isinstance(run.trainee, HeadTrainee), "a draft model is trained from a start"
        heads = run.trainee.init_params(run.target, used.ids)
    else:
        heads = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), without_ids(run.start.params))
    trained = run.target.params if run.settings.trains_target else None
    return init_state(run.settings, run.trainee, Trainable(heads, trained))


def _conclude(run: _Run, given: Model, used: Data, loop: Loop, state: TrainState) -> Trained:
    """Returns the result of the run, with the heads of the best step, and the target as it was given."""
    params, target, trainee = state.params, run.target, run.trainee
    if loop.best is not None and loop.best[0] != int(state.step):
        try:
            params = loop.store.load(loop.best[0], state).state.params
        except DamagedCheckpoint as error:
            run.watch.say(f"{error}. It was the best step; the heads of step {int(state.step)} are used instead")
    # Heads are small beside the target, so the result is on one device.
    heads = params.heads if run.placement.mesh.size == 1 else jax.tree.map(to_host, params.heads)
    result = trainee.result(heads, loop.setup.frozen.ids, f"{target.name}-{trainee.drafter}", run.start)
    own = without_kernels(given)
    if params.target is not None:
        lm, trained = target.lm, params.target
        if count_processes() > 1:  # a program of one process can read it
            lm, trained = gather(lm, jax.tree.map(to_host, trained))
        own = dataclasses.replace(target, lm=lm, params=trained)
    return Trained(
        result, own, used, loop.log.records, int(state.step), int(state.skipped), trainee, run.settings
    )  # fmt: skip
