"""The loop over the steps of a run: log, evaluation, checkpoints, and Ctrl-C."""

import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.backend.compilation_cache import keep_compilations
from jaxspec.core.networks import LanguageModel
from jaxspec.errors import TrainingError
from jaxspec.train import losses, packing, sources
from jaxspec.train.checkpoints import Checkpoints, TrainCheckpoint
from jaxspec.train.features import FeatureReader
from jaxspec.train.interrupt import Interrupts
from jaxspec.train.log import Log, Watch
from jaxspec.train.manifest import CHECKPOINTS_FOLDER
from jaxspec.train.placement import Placement
from jaxspec.train.settings import TrainSettings
from jaxspec.train.step import Report, TrainState, learning_rate, train_step
from jaxspec.train.trainee import Trainee


class LoopSetup(NamedTuple):
    """The parts of a run that no step changes.

    Attributes:
        settings: the settings.
        trainee: the heads.
        network: the network that gives the features.
        frozen: the frozen parts of the target.
        rows: the rows to train on.
        held: the held-out rows; None if there are none.
        reader: computes features with the network.
        placement: the places of all arrays.
    """

    settings: TrainSettings
    trainee: Trainee
    network: LanguageModel
    frozen: losses.FrozenTarget
    rows: sources.Source
    held: sources.Source | None
    reader: FeatureReader
    placement: Placement


class Loop:
    """A run from its newest checkpoint to its last step.

    Attributes:
        setup: the parts that no step changes.
        store: the checkpoints.
        log: the log.
        best: step and score of the best evaluation on the held-out texts; None before the first.
    """

    def __init__(self, setup: LoopSetup, folder: pathlib.Path, initial: TrainState, watch: Watch):
        """Opens the folder of the run.

        Args:
            setup: the parts that no step changes.
            folder: the folder.
            initial: the state before the first step.
            watch: callbacks for progress.
        """
        self.setup, self._watch, self.store = setup, watch, Checkpoints(folder / CHECKPOINTS_FOLDER)
        placement = setup.placement
        checkpoint, problems = self.store.load_newest(placement.describe(initial))
        for line in problems:
            watch.say(line)
        self._order = sources.make_order(len(setup.rows.rows.tokens), setup.settings)
        if checkpoint is None:
            checkpoint = TrainCheckpoint(initial, self._order.get_state(), None)
        else:
            try:
                self._order.set_state(checkpoint.order)
            except Exception as error:  # the state is of another version of grain
                raise TrainingError(
                    f"{self.store.folder}: the order of the rows cannot be restored, possibly because "
                    f"grain has another version: {error!s:.200}"
                ) from None
            watch.say(f"resumes after step {int(checkpoint.state.step)}")
            if checkpoint.devices not in ("", placement.devices):
                watch.say(f"that step was saved on {checkpoint.devices}; sums on {placement.devices} round differently")
        # A copy, because a step donates the buffers of its state.
        state = placement.put(checkpoint.state, placement.split(checkpoint.state))
        self._state: TrainState = jax.tree.map(jnp.copy, state)
        self.best, self.log = checkpoint.best, Log(folder, int(checkpoint.state.step))
        self._take_step, self._sum_losses = _compiled(setup.settings, setup.trainee, setup.network, placement)
        self._timed = (time.perf_counter(), int(checkpoint.state.step))  # when the last line was logged, and its step
        self._reports: list[tuple[int, Report, losses.LossSums, jax.Array]] = []  # lines that are not written yet
        self._bad: tuple[int, jax.Array] | None = None  # the last step, and its count of steps that were not finite

    def run(self) -> TrainState:
        """Takes the remaining steps, and returns the last state.

        Raises:
            TrainingError: the loss was not finite too many times in a row.
            KeyboardInterrupt: Ctrl-C was pressed; a checkpoint is saved first.
        """
        settings = self.setup.settings
        self._timed = (time.perf_counter(), int(self._state.step))
        first = int(self._state.step) + 1
        ahead = self._next() if first <= settings.steps else None
        with Interrupts(self._watch.say) as interrupts:
            for now in range(first, settings.steps + 1):
                assert ahead is not None
                batch, order = ahead
                self._state, report = self._take_step(self.setup.frozen, self._state, batch)
                last = now == settings.steps
                if now % settings.log_every == 0 or last:
                    self._keep_report(now, report)
                # The devices compute the step while the host loads the next batch and looks at the step before.
                bad, self._bad = self._bad, (now, jnp.copy(self._state.bad))
                ahead = None if last else self._next()
                self._check_finite(bad)
                self._write_reports(before=now)
                if self.setup.held is not None and (now % settings.eval_every == 0 or last):
                    self._settle(now)
                    self._evaluate(now, self.setup.held)
                regular = now % settings.save_every == 0 or last or (self.best is not None and self.best[0] == now)
                ends = interrupts.ends_after(now)
                if regular or ends:
                    self._settle(now)
                    with interrupts.saving():
                        devices = self.setup.placement.devices
                        saved = TrainCheckpoint(self._state, order, self.best, devices)
                        self.store.save(saved, extra=not regular)
                if ends:
                    self._watch.say(f"interrupted after step {now}, which is saved in {self.store.folder}")
                    raise KeyboardInterrupt
        return self._state

    def _next(self) -> tuple[losses.Batch, dict]:
        """Returns the next batch, and the state of the order after it."""
        index = next(self._order)
        return self._batch(index), self._order.get_state()

    def _batch(self, index: np.ndarray) -> losses.Batch:
        """Returns the rows with these numbers, divided into parts, on the devices."""
        settings, source = self.setup.settings, self.setup.rows
        shape = (settings.accumulate, len(index) // settings.accumulate)
        part = packing.Rows(*(a[index] for a in source.rows))
        if self.setup.trainee.joint is None:
            features = source.features_of(index)
        else:  # the step computes the features with the target that it trains
            features = np.zeros((*part.tokens.shape, 0), np.float32)
        parts: Any = [a.reshape(*shape, *a.shape[1:]) for a in (*part, features)]
        placement = self.setup.placement
        return placement.put(losses.Batch(*parts), placement.parts)

    def _check_finite(self, bad: tuple[int, jax.Array] | None) -> None:
        """Raises TrainingError if the steps up to a step, which is given with its count, were not finite."""
        most = self.setup.settings.max_bad_steps
        if bad is not None and int(bad[1]) >= most:
            raise TrainingError(
                f"step {bad[0]}: the loss was not finite {most} times in a row; lower learning_rate (--learning-rate), "
                f"and use another folder. The checkpoint of step {max(self.store.steps() or [0])} is intact"
            )

    def _keep_report(self, now: int, report: Report) -> None:
        """Keeps the values of a line of the log, which are still being computed, and resets the window of sums."""
        self._reports.append((now, report, self._state.window, jnp.copy(self._state.skipped)))
        self._state = self._state._replace(window=jax.tree.map(jnp.zeros_like, self._state.window))

    def _write_reports(self, before: int) -> None:
        """Adds the lines of earlier steps to the log."""
        while self._reports and self._reports[0][0] < before:
            self._report(*self._reports.pop(0))

    def _settle(self, now: int) -> None:
        """Waits for the last step, and adds its line to the log."""
        self._check_finite(self._bad)
        self._write_reports(before=now + 1)

    def _report(self, now: int, report: Report, window: losses.LossSums, skipped: jax.Array) -> None:
        """Adds a line to the log."""
        settings = self.setup.settings
        record = {
            "step": now,
            "loss": _number(report.loss),
            "learning_rate": _number(learning_rate(settings)(now - 1)),
            "gradient": _number(report.gradient),
            **average_sums(window),
            "skipped": int(skipped),
        }
        self.log.add(record)
        clock, since = self._timed
        self._timed = (time.perf_counter(), now)
        seconds = self._timed[0] - clock
        speed = (now - since) * settings.batch * settings.row_tokens / seconds
        self.log.speed({"step": now, "tokens_per_s": speed, "s": seconds})
        self._watch.step(now, settings.steps, record | {"tokens_per_s": speed})

    def _evaluate(self, now: int, held: sources.Source) -> None:
        """Adds the held-out accuracies to the log, and keeps the best step."""
        setup, params = self.setup, self._state.params
        frozen = setup.frozen
        if params.target is not None:
            frozen = losses.freeze(
                setup.trainee, setup.network, params.target, dtype=losses.product_dtype(setup.settings)
            )
            held = sources.compute_features_on_demand(setup.reader, params.target, held.rows)
        sum_batch = functools.partial(self._sum_losses, frozen, params.heads)
        record = {"step": now, "held_out": evaluate(sum_batch, held, setup.reader.batch, setup.placement)}
        self.log.add(record)
        score = record["held_out"]["accepted_length"]
        if self.best is None or score > self.best[1]:
            self.best = (now, score)
        self._watch.step(now, setup.settings.steps, record)


def _number(value: Any) -> float | None:
    """Returns a number for JSON; None if it is not finite, because JSON has no NaN."""
    return float(value) if np.isfinite(value) else None


def average_sums(sums: losses.LossSums) -> dict[str, Any]:
    """Returns sums as the values of a line of the log."""
    seen = np.maximum(np.asarray(sums.seen), 1)
    return {
        "loss_by_token": (np.asarray(sums.loss) / np.maximum(np.asarray(sums.counted), 1)).tolist(),
        "top1": (np.asarray(sums.top1) / seen).tolist(),
        "top5": (np.asarray(sums.top5) / seen).tolist(),
        "accepted": np.asarray(losses.estimate_accepted_shares(sums)).tolist(),
        "accepted_length": float(losses.estimate_accepted_length(sums)),
        **({} if sums.blocks is None else sums.blocks.average(seen)),
    }


@functools.lru_cache(maxsize=8)
def _compiled(
    settings: TrainSettings, trainee: Trainee, network: LanguageModel, placement: Placement
) -> tuple[Callable, Callable]:
    """Returns a compiled step and a compiled evaluation, which the runs of a process share."""
    keep_compilations()
    step = jax.jit(functools.partial(train_step, settings, trainee, network, placement=placement), donate_argnums=1)

    @jax.jit
    def sum_losses(frozen: losses.FrozenTarget, params: Any, batch: losses.Batch) -> losses.LossSums:
        return losses.sum_losses(settings, trainee, placement.collect_heads(params), frozen, batch)

    return step, sum_losses


def evaluate(
    sum_batch: Callable, source: sources.Source, size: int, placement: Placement | None = None
) -> dict[str, Any]:
    """Evaluates heads on rows, in batches of one size.

    Args:
        sum_batch: a function from a batch to its sums.
        source: the rows.
        size: rows of each batch; the last one is padded.
        placement: the places of rows on several devices; None for one device.
    """
    total = None
    for batch in source.batches(size, placement):
        sums = sum_batch(batch)
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    assert total is not None
    return average_sums(total)
