"""A training run: data, steps, log and checkpoints in one folder; the same command goes on where it was ended.

The folder holds `settings.json`, what is made once (`answers/`, `features/`, and `held-out/`, which are features, too),
`checkpoints/`, `log.jsonl` (what is the same in every run of the same settings) beside `speed.jsonl` (what is not),
`undone.jsonl` (lines of steps that a checkpoint came before, and that were taken again), and at the end `heads/`.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.backend.compilation_cache import keep_compilations
from jaxspec.errors import InvalidConfig, MissingPackage, TrainingError
from jaxspec.heads.network import DraftHeads, HeadsConfig, init_params
from jaxspec.heads.serving import served_by
from jaxspec.models.model import Model
from jaxspec.models.out_major import OutMajor, to_in_out
from jaxspec.storage.reading import check_path
from jaxspec.text import conversations
from jaxspec.train import losses, manifest, packing
from jaxspec.train.checkpoints import Checkpoint, Checkpoints, Damaged
from jaxspec.train.dataset import Data, prepare
from jaxspec.train.features import Cached, Reader
from jaxspec.train.files import digest_of, fingerprint
from jaxspec.train.interrupt import Interrupts
from jaxspec.train.log import Log, Watch
from jaxspec.train.manifest import CHECKPOINTS, FEATURES, HELD
from jaxspec.train.settings import Settings
from jaxspec.train.step import Trainable, TrainState, learning_rate, start, train_step
from jaxspec.train.target import sizes_for

DEFAULTS = Settings()


class Trained(NamedTuple):
    """What a run ends with."""

    heads: DraftHeads
    target: Model  # the given one, but for Medusa-2
    data: Data
    log: list[dict]
    step: int
    skipped: int


def train(
    target: Model,
    prompts: Sequence[str | os.PathLike] | str | os.PathLike,
    out: str | os.PathLike,
    settings: Settings = DEFAULTS,
    watch: Watch | None = None,
    data: str | os.PathLike | None = None,
) -> Trained:
    """Trains heads for a target, or goes on with a run that was ended.

    Ctrl-C ends it after the step that is under way, and saves a checkpoint of that first.

    Args:
        target: frozen, but for Medusa-2; any model whose network is a `HeadTarget`: those of `load`, and your own. One
            without a tokenizer needs prompts of token ids.
        prompts: files of conversations, or one, see `jaxspec.text.conversations`.
        out: the run's folder.
        settings: all else.
        watch: who is told how it goes.
        data: where answers and features are kept, for several runs to share; None for the run's folder.

    Raises:
        TrainingError: the data, or a folder of another run.
        StorageError: a file cannot be written, for example to a full disk; what is there stays whole.
        InvalidConfig: settings that do not go with the target or with the machine.
        MissingPackage: grain is not installed.
        KeyboardInterrupt: Ctrl-C was pressed; the same call goes on.
    """
    watch, folder = watch or Watch(), manifest.folder_of(out)
    shelf = folder if data is None else manifest.folder_of(data)
    files = [prompts] if isinstance(prompts, str | os.PathLike) else prompts
    lm: Any = target.lm
    config = sizes_for(target, settings)
    if settings.devices > jax.device_count():
        raise InvalidConfig(f"{settings.devices} devices are wanted, there are {jax.device_count()}")
    if settings.medusa2 and isinstance(lm.unembedding(target.params), OutMajor):
        raise InvalidConfig("medusa2 trains the target, whose weights have no gradient in int8; use another dtype")
    if settings.medusa2 and settings.draft_vocab:
        raise InvalidConfig("medusa2 trains the target's own projection, too: give it the whole vocabulary")
    watch.say(served_by(config, settings.medusa2))
    _grain()
    paths = [check_path(path, "a file of prompts", TrainingError) for path in files]
    read, unread = conversations.read(paths, settings.bad_rows == "refuse", settings.split)
    watch.say(f"{', '.join(path.name for path in paths)}: {len(read)} prompt{'s' * (len(read) > 1)}")
    print_of_target = fingerprint(to_in_out(target.params))
    about = {"target": print_of_target, "prompts": digest_of([(one.messages, one.text, one.ids) for one in read])}
    about |= manifest.of_run(settings)
    manifest.match_run(folder, shelf, about)
    used = prepare(target, print_of_target, read, unread, shelf, settings, watch)
    manifest.match_run(folder, shelf, about | {"texts": fingerprint((used.rows._asdict(), used.held._asdict()))})
    table = lm.unembedding(target.params)
    config = dataclasses.replace(config, draft_vocab_size=None if used.ids is None else len(used.ids))
    mesh = jax.make_mesh((settings.devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, spread = (jax.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P(None, "data")))
    laws = settings.loss not in ("ce", "kl")
    frozen = losses.freeze(config, lm, target.params, used.ids, laws, settings.precision)
    frozen = jax.device_put(frozen, whole)
    reader = Reader(lm, max(1, settings.batch // settings.accumulate))

    def source(rows: packing.Rows, name: str, params: Any = target.params) -> tuple[packing.Rows, Callable]:
        """What is learnt from, and the function that gives the features of some of these rows by number."""
        if not settings.cache_features:
            return rows, lambda index: reader(params, rows.tokens[index], rows.segments[index])
        told = functools.partial(watch.phase, f"reading {name} with the target")
        cached = Cached(functools.partial(reader, target.params), print_of_target, rows, settings, shelf / name, told)
        few, places = packing.pack_supervised_spans(rows, settings.heads)  # prompts need not be gone through again
        return few, lambda index: cached.at(places[index])

    rows, features_of = source(used.rows, FEATURES)
    held = source(used.held, HELD) if len(used.held.tokens) else None

    heads = init_params(config, table, used.ids)
    heads.pop("tokens", None)
    begun = start(settings, config, Trainable(heads, target.params if settings.medusa2 else None))
    store = Checkpoints(folder / CHECKPOINTS)
    found, wrong = store.newest(begun)
    for line in wrong:
        watch.say(line)
    order = _order(len(rows.tokens), settings)
    if found is None:
        found = Checkpoint(begun, order.get_state(), None)
    else:
        try:
            order.set_state(found.order)
        except Exception as error:  # of another version of grain
            raise TrainingError(f"{store.folder}: the order of the data cannot be set: {error!s:.200}") from None
        watch.say(f"goes on after step {int(found.state.step)}")
    ids = None if used.ids is None else jnp.asarray(used.ids)
    state: TrainState = jax.tree.map(jnp.copy, jax.device_put(found.state, whole))  # a step gives its buffers back
    best = found.best
    log = Log(folder, int(state.step))
    step, judge = _compiled(settings, config, lm)

    def evaluated(state: TrainState) -> dict[str, Any]:
        now, tables, part = state.params.target, frozen, held
        assert part is not None
        if now is not None:  # trained, too
            tables, part = losses.freeze(config, lm, now, dtype=settings.precision), source(used.held, HELD, now)
        return evaluate(functools.partial(judge, ids, tables, state.params.heads), *part, reader.batch)

    def batch_of(index: np.ndarray) -> losses.Batch:
        shape = (settings.accumulate, len(index) // settings.accumulate)
        part = packing.Rows(*(a[index] for a in rows))
        features = np.zeros((*part.tokens.shape, 0), np.float32) if settings.medusa2 else features_of(index)
        parts = (jnp.asarray(a).reshape(*shape, *a.shape[1:]) for a in (*part, features))
        return jax.device_put(losses.Batch(*parts), spread)

    def save(state: TrainState, extra: bool = False) -> None:
        with interrupts.saving():
            store.save(Checkpoint(jax.device_get(state), order.get_state(), best), extra)

    clock, since = time.perf_counter(), int(state.step)
    with Interrupts(watch.say) as interrupts:
        for now in range(int(state.step) + 1, settings.steps + 1):
            state, report = step(ids, frozen, state, batch_of(next(order)))
            if int(state.bad) >= settings.max_bad_steps:
                raise TrainingError(
                    f"step {now}: the loss was not finite {settings.max_bad_steps} times in a row; lower the learning "
                    f"rate, and begin in another folder (the checkpoint of step {max(store.steps() or [0])} is whole)"
                )
            last = now == settings.steps
            if now % settings.log_every == 0 or last:
                record = {
                    "step": now,
                    "loss": _number(report.loss),
                    "learning_rate": _number(learning_rate(settings)(now - 1)),
                    "gradient": _number(report.gradient),
                    **shares(state.window),
                    "skipped": int(state.skipped),
                }
                state = state._replace(window=jax.tree.map(jnp.zeros_like, state.window))
                log.add(record)
                took, clock = time.perf_counter() - clock, time.perf_counter()
                tokens = (now - since) * settings.batch * settings.row_tokens
                since = now
                log.speed({"step": now, "tokens_per_s": tokens / took, "s": took})
                watch.step(now, settings.steps, record | {"tokens_per_s": tokens / took})
            if held is not None and (now % settings.eval_every == 0 or last):
                record = {"step": now, "held_out": evaluated(state)}
                log.add(record)
                score = record["held_out"]["accepted_length"]
                if best is None or score > best[1]:
                    best = (now, score)
                watch.step(now, settings.steps, record)
            regular = now % settings.save_every == 0 or last or (best is not None and best[0] == now)
            if regular or interrupts.wanted:
                save(state, not regular)
            if interrupts.wanted:
                watch.say(f"interrupted after step {now}, which is saved in {store.folder}")
                raise KeyboardInterrupt
    params = state.params
    if best is not None and best[0] != int(state.step):
        try:
            params = store.load(best[0], begun).state.params
        except Damaged as error:
            watch.say(f"{error}; it was the best, and the heads are those of step {int(state.step)}")
    final = params.heads if used.ids is None else params.heads | {"tokens": ids}
    own = target if params.target is None else dataclasses.replace(target, params=params.target)
    made = DraftHeads(config, jax.tree.map(jnp.asarray, final), name=f"{target.name}-medusa")
    return Trained(made, own, used, log.records, int(state.step), int(state.skipped))


def _number(value: Any) -> float | None:
    """For JSON, which has no NaN."""
    return float(value) if np.isfinite(value) else None


def shares(found: losses.Sums) -> dict[str, Any]:
    """Sums as the figures of a log line."""
    seen = np.maximum(np.asarray(found.seen), 1)
    return {
        "loss_by_head": (np.asarray(found.loss) / np.maximum(np.asarray(found.counted), 1)).tolist(),
        "top1": (np.asarray(found.top1) / seen).tolist(),
        "top5": (np.asarray(found.top5) / seen).tolist(),
        "accepted_length": float(losses.accepted_length(found)),
    }


@functools.lru_cache(maxsize=8)
def _compiled(settings: Settings, config: HeadsConfig, lm: Any) -> tuple[Callable, Callable]:
    """A step and an evaluation, shared by the runs of a process."""

    def judge(ids: Any, frozen: losses.Frozen, params: Any, batch: losses.Batch) -> losses.Sums:
        heads = params if ids is None else params | {"tokens": ids}
        return losses.sums(settings, config, heads, frozen, batch)

    keep_compilations()
    return jax.jit(functools.partial(train_step, settings, config, lm), donate_argnums=2), jax.jit(judge)


def evaluate(judge: Callable, rows: packing.Rows, features_of: Callable, size: int) -> dict[str, Any]:
    """The heads on the held-out rows, so many at a time."""
    total = None
    for at in range(0, len(rows.tokens), size):
        index = np.arange(at, min(at + size, len(rows.tokens)))
        part = [np.asarray(a) for a in (*(a[index] for a in rows), features_of(index))]
        padded = (np.pad(a, ((0, size - len(index)), *[(0, 0)] * (a.ndim - 1))) for a in part)
        found = judge(losses.Batch(*map(jnp.asarray, padded)))
        total = found if total is None else jax.tree.map(jnp.add, total, found)
    assert total is not None
    return shares(total)


def _grain() -> Any:
    try:
        import grain
    except ImportError:
        raise MissingPackage("training needs the package grain: pip install grain") from None
    return grain


def _order(rows: int, settings: Settings) -> Any:
    """Batches of row numbers, shuffled anew every epoch, for ever; `get_state` and `set_state` are of its position."""
    source = _grain().MapDataset.source(range(rows)).seed(settings.seed).shuffle().repeat()
    return iter(source.batch(settings.batch, drop_remainder=True).to_iter_dataset())
