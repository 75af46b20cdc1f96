"""Finds the fastest drafter of a target on this machine, and keeps the answer in the cache directory.

This is what `drafter="auto"` stands for. Every drafter that the target has, with its default tree, decodes the same
prompts as plain decoding. The drafters take turns, so that drifts of the machine's speed affect all of them. A drafter
that is clearly slower than the fastest so far is not run any further.

On a CPU, the time of wider calls is measured first. The drafters that choose their width by its price (the schedule
"best-width") then know the price on this machine, and not only that of its kind of processor.
"""

import dataclasses
import functools
import math
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxspec.api import generate
from jaxspec.core.drafter import Drafter
from jaxspec.core.records import Params
from jaxspec.core.sampling import Sampling
from jaxspec.core.sizes import round_rows
from jaxspec.core.theory import TokenCost
from jaxspec.decode.session import Timing
from jaxspec.errors import InvalidConfig, JaxspecError, StorageError, TuningError
from jaxspec.generation.drafting import Drafting
from jaxspec.generation.fingerprint import describe_static, digest
from jaxspec.generation.members import make_rule
from jaxspec.heads.companions import release
from jaxspec.heads.files import load_heads
from jaxspec.kernels.library import describe_kernels
from jaxspec.models.model import Model
from jaxspec.models.packed import is_packed, stored_types
from jaxspec.models.sharding import platform_of
from jaxspec.registry import AUTO_DRAFTER, DRAFTERS
from jaxspec.schedules.best_width import BestWidth
from jaxspec.storage.directories import cache_directory
from jaxspec.tuning.trial_prompts import TRIAL_PROMPTS
from jaxspec.version import __version__

FOLDER = "drafting"
"""The folder of the kept answers, in the cache directory."""
PLAIN = "none"
"""The drafter of plain decoding, which is always compared."""
TOKENS = 48
"""The largest number of tokens that are decoded after each prompt."""
FEWEST_TOKENS = 8
"""A batch of texts with fewer tokens than this, on average, is too short to be timed."""
REPEATS = 2
"""The least number of times that each batch is decoded by each drafter. The fastest counts."""
MOST_REPEATS = 8
"""The largest number of times that a batch is decoded by a drafter because it takes little time."""
ENOUGH = 1.0
"""A batch is decoded more often than `REPEATS` until each drafter has decoded for this many seconds, on average."""
CONFIRMED = 3
"""The number of further times that a batch is decoded by a drafter that seems too slow for it: speeds are noisy."""
HOPELESS = 0.6
"""A drafter that has less than this share of the fastest drafter's speed so far is not run any further."""
SLOWEST = 0.9
"""A drafter with a batch of less than this share of the speed of plain decoding is not chosen."""
MOST_ROWS = 64
"""The largest number of texts that are decoded at once to compare drafters."""
PRICED_WIDTHS = (4, 16)
"""The widths of the calls that are timed, besides 1: one that mostly reads weights, and one that mostly multiplies."""

_FOUND: dict[str, Drafting] = {}
"""The answers of this process, by the names of their files."""


class Trial(NamedTuple):
    """What was measured of a drafter.

    Attributes:
        speedups: the speed of each batch, relative to plain decoding of the same batch.
    """

    speedups: list[float]

    @property
    def mean(self) -> float:
        """The geometric mean of the speed-ups."""
        return statistics.geometric_mean(self.speedups)


def fastest_drafting(
    target: Model,
    asked: Drafting,
    *,
    sampled: bool = False,
    rows: int = 1,
    mesh: Mesh | None = None,
    report: Callable[[str], Any] = lambda line: None,
) -> Drafting:
    """Returns the fastest drafting of a target on this machine, from an earlier measurement if there is one.

    Args:
        target: the target.
        asked: a drafting with the drafter `AUTO_DRAFTER`: its rule, and a draft model or heads to compare as well.
        sampled: whether texts are sampled. Then the drafters are compared at temperature 1, else at 0.
        rows: the number of texts that are decoded at once; `MOST_ROWS` stands for more.
        mesh: the devices to decode on; None for the default device.
        report: called with a line of text before and after a measurement.

    Raises:
        InvalidConfig: there are several processes, or the target has no tokenizer.
        TuningError: the target's texts are too short to be timed.
    """
    if jax.process_count() > 1:
        raise InvalidConfig(
            f"the drafter {AUTO_DRAFTER!r} is measured by one process, and there are {jax.process_count()}, which may "
            "not agree; choose a drafter, or pass the file of 'jaxspec tune' (drafting=...)"
        )
    rows = round_rows(min(rows, MOST_ROWS))
    asked = _load_heads(target, asked)
    name = digest(_describe(target, asked, sampled, rows, mesh))
    file = cache_directory() / FOLDER / f"{name}.json"
    if name not in _FOUND and file.exists():
        _FOUND[name] = Drafting.load(file)
    if name in _FOUND:
        return _with_models(_FOUND[name], asked)
    if target.tokenizer is None:
        raise InvalidConfig(
            f"the drafter {AUTO_DRAFTER!r} is measured on texts, and {target.name} has no tokenizer; measure it on "
            "your own prompts of token ids with jaxspec.tune(..., drafter='auto'), and pass the result (drafting=...)"
        )
    report(f"measuring the drafters of {target.name}, once for this machine; this takes minutes ...")
    chosen = compare_drafters(
        target, TRIAL_PROMPTS, asked, sampling=Sampling(temperature=float(sampled)), rows=rows, mesh=mesh,
        key=jax.random.key(0), report=report,
    )  # fmt: skip
    _FOUND[name] = Drafting(chosen.drafter, schedule=chosen.schedule, measured=chosen.measured)
    try:
        _FOUND[name].save(file)
    except StorageError as error:
        report(f"the result is kept for this process only: {error}")
    return chosen


def compare_drafters(
    target: Model,
    prompts: Sequence[Any],
    asked: Drafting,
    *,
    report: Callable[[str], Any] = lambda line: None,
    **options,
) -> Drafting:
    """Decodes prompts with every drafter that a target has, and returns the fastest, which may be plain decoding.

    Args:
        target: the target.
        prompts: the prompts, as `generate` takes them.
        asked: the rule, and a draft model or heads to compare as well.
        report: called with a line of text when all is measured.
        **options: the other arguments of `race`.

    Returns:
        The drafting, with the speed-ups of all drafters that were run to the end in `measured["drafters"]`, and in
        `measured["slowest"]` the speed-ups of their slowest batches.

    Raises:
        TuningError: all texts are too short to be timed.
    """
    asked = _load_heads(target, asked)
    price = measure_token_cost(target, prompts, **options)
    draftings = find_draftings(target, asked, price)
    trials = race(target, prompts, draftings, **options)
    safe = {name: trial for name, trial in trials.items() if min(trial.speedups) >= SLOWEST}
    best = max(safe, key=lambda name: safe[name].mean)
    for name in draftings:
        if name != best:
            release(target, name)
    measured = {
        "drafters": {name: round(trial.mean, 4) for name, trial in trials.items()},
        "slowest": {name: round(min(trial.speedups), 4) for name, trial in trials.items()},
        "token_cost": None if price is None else [round(number, 4) for number in price],
        "stopped_early": sorted(draftings.keys() - trials.keys()),
        "batches": len(trials[PLAIN].speedups),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    others = [f"{name} {trial.mean:.2f}" for name, trial in trials.items() if name not in (best, PLAIN)]
    report(
        f"the fastest drafter is {best}, {trials[best].mean:.2f} times plain decoding"
        + (f" ({', '.join(others)})" if others else "")
    )
    return dataclasses.replace(draftings[best], measured=measured)


def race(
    target: Model,
    prompts: Sequence[Any],
    draftings: Mapping[str, Drafting],
    *,
    sampling: Sampling = Sampling(),
    rows: int = 1,
    key: jax.Array | None = None,
    max_new_tokens: int = TOKENS,
    mesh: Mesh | None = None,
    chat: bool | None = None,
    progress: Callable[[int, int], Any] | None = None,
) -> dict[str, Trial]:
    """Measures the speed of draftings relative to plain decoding, on batches of prompts.

    The speed counts tokens per second of decoding; compilation and the reading of prompts do not count.

    Args:
        target: the target.
        prompts: the prompts, as `generate` takes them.
        draftings: the draftings by name, with plain decoding as `PLAIN`.
        sampling: sampling settings, as numbers.
        rows: the number of texts that are decoded at once; prompts are repeated to fill a batch.
        key: JAX random key; required unless the temperature is 0.
        max_new_tokens: the largest number of tokens that are decoded after each prompt.
        mesh: the devices to decode on; None for the default device.
        chat: whether to wrap text prompts in the model's chat template; None to wrap them if there is a template.
        progress: called with (batches done, batches in all).

    Returns:
        The trials by name, without those that were not run to the end; see `HOPELESS`.

    Raises:
        TuningError: all texts are too short to be timed.
    """
    options: dict[str, Any] = {"sampling": sampling, "key": key, "max_new_tokens": max_new_tokens}
    options |= {"mesh": mesh, "chat": chat, "verbose": False}

    def decode(name: str, batch: list[Any]) -> Timing:
        return generate(target, batch, drafting=draftings[name], **options).timing

    trials, batches = {name: Trial([]) for name in draftings}, _fill_batches(list(prompts), rows)
    for done, batch in enumerate(batches, start=1):
        least = _time_batch(functools.partial(decode, batch=batch), [*trials], FEWEST_TOKENS * rows)
        if least is not None:
            for name, trial in trials.items():
                trial.speedups.append(least[PLAIN] / least[name])
            trials = _without_hopeless(trials)
        if progress is not None:
            progress(done, len(batches))
    if not trials[PLAIN].speedups:
        raise TuningError(
            f"{target.name} ends its texts after fewer than {FEWEST_TOKENS} tokens, which cannot be timed; choose a "
            "drafter, or measure on prompts with longer answers"
        )
    return trials


def _time_batch(decode: Callable[[str], Timing], names: Sequence[str], fewest: int) -> dict[str, float] | None:
    """Returns what `_take_turns` returns; drafters that seem too slow are timed again, together with plain decoding."""
    least = _take_turns(decode, names, fewest)
    if least is None:
        return None
    slow = [name for name in names if HOPELESS * least[name] <= least[PLAIN] < SLOWEST * least[name]]
    again = _take_turns(decode, [PLAIN, *slow], fewest, CONFIRMED) if slow else None
    return {name: min(seconds, (again or least).get(name, seconds)) for name, seconds in least.items()}


def _take_turns(
    decode: Callable[[Any], Timing], names: Sequence[Any], fewest: int, repeats: int = REPEATS
) -> dict[Any, float] | None:
    """Returns the fewest seconds per token of each name; None if a text has fewer tokens than `fewest`.

    Short texts of fast models take more turns than `repeats`: their times are noisier, and cost little.
    """
    least, turns, spent = dict.fromkeys(names, math.inf), 0, 0.0
    while turns < repeats or (turns < MOST_REPEATS and spent < ENOUGH * len(names)):
        for name in names:
            timing = decode(name)
            if timing.tokens < fewest:
                return None
            least[name] = min(least[name], timing.decode_s / timing.tokens)
            spent += timing.decode_s
        turns += 1
    return least


def measure_token_cost(
    target: Model,
    prompts: Sequence[Any],
    *,
    mesh: Mesh | None = None,
    chat: bool | None = None,
    max_new_tokens: int = TOKENS,
    **options: Any,
) -> TokenCost | None:
    """Returns the time that tokens take in a target call on this CPU; None on an accelerator, or if texts are short.

    Plain decoding of one text is timed with calls of one token and of `PRICED_WIDTHS` tokens.

    Args:
        target: the target.
        prompts: the prompts, as `generate` takes them; the first one is decoded.
        mesh: the devices to decode on; None for the default device.
        chat: whether to wrap a text prompt in the model's chat template; None to wrap it if there is a template.
        max_new_tokens: the largest number of tokens that are decoded.
        **options: the other arguments of `race`, which do not change the price.
    """
    if platform_of(mesh) != "cpu":
        return None
    settings: dict[str, Any] = {"drafter": PLAIN, "mesh": mesh, "chat": chat, "max_new_tokens": max_new_tokens}

    def decode(width: bool | int) -> Timing:
        return generate(target, [prompts[0]], width_matched=width, verbose=False, **settings).timing

    least = _take_turns(decode, (False, *PRICED_WIDTHS), FEWEST_TOKENS)
    if least is None:
        return None
    few, many = (least[width] / least[False] for width in PRICED_WIDTHS)
    each = (few - 1) / (PRICED_WIDTHS[0] - 1)
    return TokenCost(min(max(each, 0.0), 1.0), max(PRICED_WIDTHS[1] / many, 1.0))


def find_draftings(target: Model, asked: Drafting, price: TokenCost | None = None) -> dict[str, Drafting]:
    """Returns every drafting that a target has, by the name of its drafter: each drafter with its default tree.

    Of two names of the same drafter with the same parameters, the later is left out.

    Args:
        target: the target.
        asked: the rule, and a draft model or heads.
        price: the time that tokens take in a target call, for drafters that choose their width by it; None for the
            price of this kind of processor.
    """
    found: dict[str, Drafting] = {}
    built: list[tuple[Drafter, Params]] = []
    for name in DRAFTERS.all_names:
        drafting = _with_models(Drafting(name), asked)
        try:
            drafter, params = drafting.build_drafter(target)
            decoder, _ = drafting.build(target)
        except (JaxspecError, jax.errors.JaxRuntimeError):  # or there is no memory for a copy of the target
            continue
        if not any(drafter == other and _same(params, others) for other, others in built):
            if price is not None and isinstance(decoder.schedule, BestWidth):
                drafting = dataclasses.replace(drafting, schedule=dataclasses.replace(decoder.schedule, cpu=price))
            found[name] = drafting
            built.append((drafter, params))
    return found


def _load_heads(target: Model, asked: Drafting) -> Drafting:
    """Returns a drafting whose heads are loaded, if it has the location of heads."""
    if not isinstance(asked.heads, (str, os.PathLike)):
        return asked
    return dataclasses.replace(asked, heads=load_heads(asked.heads, target=target))


def _fill_batches(prompts: list[Any], rows: int) -> list[list[Any]]:
    """Returns batches of as many prompts as there are rows; in at least two batches, every prompt comes up."""
    count = max(2, -(-len(prompts) // rows))
    return [[prompts[(batch * rows + row) % len(prompts)] for row in range(rows)] for batch in range(count)]


def _without_hopeless(trials: dict[str, Trial]) -> dict[str, Trial]:
    """Returns the trials that are continued; see `HOPELESS`."""
    most = max(trial.mean for trial in trials.values())
    return {name: trial for name, trial in trials.items() if name == PLAIN or trial.mean >= HOPELESS * most}


def _with_models(drafting: Drafting, asked: Drafting) -> Drafting:
    """Returns a drafting with the rule that was asked for, and the draft model or heads that its drafter takes.

    A drafter's second name stands for the drafter with a draft model or heads of its own.
    """
    if drafting.drafter not in [*DRAFTERS]:
        return dataclasses.replace(drafting, rule=asked.rule)
    return dataclasses.replace(drafting, rule=asked.rule, draft=asked.draft, heads=asked.heads).without_unused()


def _same(params: Params, others: Params) -> bool:
    """Returns whether two pytrees hold the same arrays."""
    (leaves, structure), (more, other) = jax.tree.flatten(params), jax.tree.flatten(others)
    return structure == other and all(a is b for a, b in zip(leaves, more))


def _describe(target: Model, asked: Drafting, sampled: bool, rows: int, mesh: Mesh | None) -> dict[str, Any]:
    """Describes everything that may change which drafter is the fastest, as JSON."""
    leaves = jax.tree.leaves(target.params, is_leaf=is_packed)
    draft, heads = asked.draft, asked.heads
    return {
        "target": [target.name, describe_static(target.lm), sorted({kind for a in leaves for kind in stored_types(a)})],
        "execution": describe_static(getattr(target.lm, "execution", None)),
        "drafters": list(DRAFTERS.all_names),
        "draft": None if draft is None else [draft.name, describe_static(draft.lm)],
        "heads": None if heads is None else describe_static(getattr(heads, "config", None)),
        "rule": describe_static(make_rule(asked.rule)),
        "texts": [sampled, rows, None if mesh is None else dict(mesh.shape)],
        "machine": [
            jax.devices()[0].device_kind, jax.device_count(), describe_kernels(), os.cpu_count(), platform.machine()
        ],
        "versions": [__version__, jax.__version__],
    }  # fmt: skip
