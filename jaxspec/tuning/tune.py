"""Measures the cost and the acceptance of drafts of every depth, and derives a schedule from them.

The measured rounds are real rounds of decoding. One executable runs rounds of every depth alternately, and the host
sets the depth. A cost therefore includes everything that a round of that depth does, and drifts of the machine's speed
affect all depths.

If the drafter samples from the law of a network or of heads, and a chain was measured, a static tree is tried as well.
It is the best tree for the costs that were measured on the chain and for the acceptance by rank on the same prompts.
The tree is measured like the chain, and the faster of the two is used.
"""

import dataclasses
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core.checks import check_arguments, whole
from jaxspec.core.drafter import Drafter
from jaxspec.core.sampling import MIN_TEMPERATURE, Sampling
from jaxspec.core.schedule import Constant
from jaxspec.core.topology import Dynamic, Topology, as_topology, chain
from jaxspec.core.tree_search import expected_tokens, fastest_tree
from jaxspec.decode.loop import Decoder
from jaxspec.decode.session import Session
from jaxspec.decode.state import Weights
from jaxspec.decode.stats import Stats
from jaxspec.errors import InvalidConfig, TuningError
from jaxspec.generation import inputs, memory
from jaxspec.generation.drafting import Drafting
from jaxspec.heads.network import DraftHeads
from jaxspec.models.model import Model
from jaxspec.registry import AUTO_DRAFTER
from jaxspec.schedules.adaptive import Adaptive
from jaxspec.tuning import acceptance, auto

DEFAULT_DEPTH = 8
"""The default length of the chain that is measured."""
IDLE_ROUNDS = 24
"""Number of rounds without a draft before the round in which the time of catching up is measured."""
ROUNDS_PER_DEPTH = 3
"""Number of consecutive rounds of one depth. The first of them is not timed, because it follows another depth."""
MAX_CHILDREN = 4
"""Largest number of children of a node in the trees that are tried."""
RANK_RULES = {rule: rule for rule in ("coupled", "deterministic", "rejection")} | {"traversal": "rejection"}
"""The rules for which trees are tried, with the rule whose acceptance by rank is used. Traversal accepts at least as
much as rejection."""


@check_arguments
def tune(
    target: Model,
    prompts: inputs.Prompt | Sequence[inputs.Prompt],
    *,
    drafter: str = "prompt-lookup",
    draft: Model | None = None,
    tree: Topology | Dynamic | int | None = None,
    drafter_options: Mapping[str, Any] = MappingProxyType({}),
    heads: DraftHeads | str | os.PathLike | None = None,
    rule: str = "coupled",
    sampling: Sampling = Sampling(),
    key: jax.Array | None = None,
    max_new_tokens: int = 128,
    chat: bool | None = None,
    progress: Callable[[int, int], Any] | None = None,
) -> Drafting:
    """Measures the cost and acceptance of drafting, and returns the fastest tree with an adaptive schedule.

    Args:
        target: target model; see `load`.
        prompts: prompts like those that the result will be used for. Each is decoded alone, past its stop tokens.
        drafter: name of a registered drafter; "auto" for the fastest of all drafters that the target has, on these
            prompts. The result then has its default tree, or a tuned one if that is faster.
        draft: draft model of the drafter "model", of any vocabulary, or "pard"; None for the draft model of
            the target's preset.
        tree: length of the longest chain to try, or a tree, whose shape is kept; None for a chain of 8 tokens, or of
            as many tokens as the drafter drafts by default.
        drafter_options: options of the drafter, by name, such as {"exit_layers": 10} for "early-exit".
        heads: draft heads of "medusa", "eagle" or "dflash", or their location, see `load_heads`; None for the heads of
            the target's preset, if any.
        rule: name of a registered rule.
        sampling: sampling settings, as numbers.
        key: JAX random key; required unless every temperature is 0. The same key gives the same text with any drafter,
            tree and batch size.
        max_new_tokens: number of tokens decoded after each prompt.
        chat: whether to wrap text prompts in the model's chat template, as messages of the user; None to wrap them
            if there is a template. False continues raw text. Token ids and chat messages are not affected.
        progress: called with (prompts done, prompts in all).

    Raises:
        JaxspecError: an argument is invalid; raised before anything compiles.
        TuningError: nothing was drafted on these prompts.
    """
    inputs.check_model("target", target)
    whole("max_new_tokens", max_new_tokens)
    if not isinstance(drafter, str):
        raise InvalidConfig(
            f"drafter must be the name of a registered drafter, because it is written to a file; got {drafter!r:.80}"
        )
    requested = Drafting(drafter, rule=rule, draft=draft, heads=heads, drafter_options=drafter_options)
    if drafter == AUTO_DRAFTER:
        dataclasses.replace(requested, tree=tree).check_auto()
        options = {"sampling": sampling, "key": key, "max_new_tokens": max_new_tokens, "chat": chat}
        return _tune_fastest(target, inputs.as_prompts(prompts), requested, options, progress)
    models = requested.inputs(target)
    requested = dataclasses.replace(requested, draft=models.draft, heads=models.heads)
    longest = as_topology(tree)
    if longest is None:
        depth = requested.build_drafter(target)[0].shape.depth
        longest = chain(
            max(depth, DEFAULT_DEPTH)
            if models.heads is None
            else int(min(DEFAULT_DEPTH, models.heads.config.max_depth))
        )
    if not isinstance(longest, Topology):
        raise InvalidConfig(
            "a dynamic tree cannot be tuned, because it changes every round; use a chain or a static tree"
        )
    ids = inputs.encode_prompts(target, prompts, chat)
    keys = inputs.row_keys(key, len(ids), 1, sampling)
    sampling = inputs.with_defaults(target, sampling)
    settings = inputs.mask_padding(target, sampling, 1)

    def measured(tree: Topology) -> tuple[Drafting, np.ndarray, Drafter]:
        """Returns the drafting, the seconds of a round by depth, and the drafter."""
        constant = dataclasses.replace(requested, tree=tree, schedule=Constant(widths=choose_widths(tree)))
        decoder, weights = constant.build(target)
        seconds, resumed, stats = _measure_rounds(decoder, weights, ids, keys, settings, max_new_tokens, progress)
        tuned = derive_drafting(drafter, tree, drafter_options, seconds, resumed, stats)
        return tuned, interpolate_round_times(seconds, tree.shape.depth), decoder.drafter

    tuned, rounds, drafts = measured(longest)
    more: dict[str, Any] = {"target": target.name} | (
        {} if requested.draft is None else {"draft": requested.draft.name}
    )
    costs = estimate_call_costs(longest, rounds) if longest.is_chain else None
    if costs and rule in RANK_RULES and acceptance.has_laws(drafts):
        kind = acceptance.ANY_RULE if sampling.temperature < MIN_TEMPERATURE else RANK_RULES[rule]
        texts = [(f"prompt {i}", prompt) for i, prompt in enumerate(ids)]
        network, params = acceptance.drafting_model(target, requested)
        positions = acceptance.measure_acceptance(
            target, network, params, texts,
            sampling=sampling, children=min(MAX_CHILDREN, target.lm.vocab), max_new_tokens=max_new_tokens,
            ignore_eos=True,
        )  # fmt: skip
        ranks = acceptance.rank_acceptance(positions)[kind]
        more["acceptance_by_rank"] = np.round(ranks, 4).tolist()
        tree = fastest_tree(ranks, *costs)
        if not tree.is_chain:
            other = measured(tree)[0]
            more["speedups"] = {"chain": _speedup(tuned), "tree": _speedup(other)}
            tuned = max(tuned, other, key=_speedup)
    return dataclasses.replace(tuned, measured=more | tuned.measured)


def _tune_fastest(
    target: Model,
    prompts: list[Any],
    asked: Drafting,
    options: dict[str, Any],
    progress: Callable[[int, int], Any] | None,
) -> Drafting:
    """Returns the fastest drafting of a target: a drafter with its default tree, or tuned if that is faster."""
    best = auto.compare_drafters(target, prompts, asked, progress=progress, **options)
    if best.drafter == auto.PLAIN:
        return best
    try:
        tuned = tune(
            target, prompts, drafter=str(best.drafter), draft=best.draft, heads=best.heads, rule=cast(Any, best.rule),
            progress=progress, **options,
        )  # fmt: skip
    except TuningError:  # nothing to tune
        return best
    tuned = dataclasses.replace(tuned, rule=best.rule, draft=best.draft, heads=best.heads)
    plain = Drafting(auto.PLAIN)
    trials = auto.race(target, prompts, {auto.PLAIN: plain, "default": best, "tuned": tuned}, **options)
    means = {name: round(trial.mean, 4) for name, trial in trials.items() if name != auto.PLAIN}
    chosen = tuned if max(means, key=lambda name: means[name]) == "tuned" else best
    return dataclasses.replace(chosen, measured=chosen.measured | best.measured | {"shapes": means})


def _speedup(tuned: Drafting) -> float:
    return max(tuned.measured["speedup_by_depth"])


def _measure_rounds(
    decoder: Decoder,
    weights: Weights,
    prompts: list[list[int]],
    keys: jax.Array,
    settings: Sampling,
    max_new_tokens: int,
    progress: Callable[[int, int], Any] | None,
) -> tuple[dict[int, list[float]], list[tuple[int, float]], Stats]:
    """Decodes all prompts. Returns the seconds by depth, `resumed` and the statistics, for `derive_drafting`."""
    stops = jnp.full((1, 8), -1, jnp.int32)
    slots = memory.fit_capacity(decoder, weights, max(map(len, prompts)) + max_new_tokens, 1, None)
    seconds: dict[int, list[float]] = {}
    resumed, stats = [], []
    for i, prompt in enumerate(prompts):
        request = inputs.make_request([prompt], keys[i : i + 1], settings, max_new_tokens, stops, slots)
        rounds = _Rounds(Session(decoder, weights, request, slots))
        if not i:
            rounds.play(0)  # compiles
        rounds.measure_depths(seconds)
        resumed += rounds.resumed
        stats.append(rounds.stats())
        if progress:
            progress(i + 1, len(prompts))
    return seconds, resumed, Stats.total(stats)


class _Rounds:
    """Decodes one row round by round; the caller chooses the depth of each round.

    Attributes:
        resumed: pairs of a number of rounds without a draft, and the seconds of the round of depth 1 after them.
    """

    def __init__(self, session: Session):
        self._session = session
        self.resumed: list[tuple[int, float]] = []

    def play(self, depth: int) -> tuple[float, bool]:
        """Runs one round; returns its seconds, and whether anything was drafted."""
        session = self._session
        before, at = session.timing.decode_s, int(session.state.round[0])
        session.run(1, max_depth=depth)
        return session.timing.decode_s - before, bool(session.state.log.drafted[0, at] > 0)

    def measure_depths(self, seconds: dict[int, list[float]]) -> None:
        """Runs rounds of all depths until the text ends, and adds their seconds by depth; see `order_depths`."""
        idle = False
        while self._session.running:
            for depth in order_depths(self._session.decoder.drafter.shape.depth):
                for repeat in range(ROUNDS_PER_DEPTH):
                    if not self._session.running:
                        return
                    took, drafted = self.play(depth)
                    if repeat and drafted == (depth > 0):
                        seconds.setdefault(depth, []).append(took)
            if not idle:
                idle = True
                for _ in range(IDLE_ROUNDS):
                    if self._session.running:
                        self.play(0)
                if self._session.running:
                    took, drafted = self.play(1)
                    self.resumed += [(IDLE_ROUNDS + ROUNDS_PER_DEPTH, took)] * drafted

    def stats(self) -> Stats:
        return Stats.from_log(self._session.state.log.part(0), self._session.decoder.drafter.calls)


def choose_widths(tree: Topology) -> tuple[int, ...]:
    """Returns the widths to compile: the widths of the tree cut at the depths 1, 2, 4, 8, ..."""
    depths = [1 << i for i in range(tree.shape.depth.bit_length())]
    return tuple(int((tree.tree.depths <= d).sum()) for d in depths if d < tree.shape.depth)


def order_depths(depth: int) -> list[int]:
    """Returns all depths in the order in which they are measured: the greatest, 0, powers of two, then the others.

    If the text ends early, the costs of the other depths are interpolated.
    """
    first = [depth, 0, *(1 << i for i in range(depth.bit_length()))]
    return list(dict.fromkeys(d for d in (*first, *range(depth)) if d <= depth))


def interpolate_round_times(seconds: dict[int, list[float]], depth: int) -> np.ndarray:
    """Returns the seconds of a round of depth 0, 1, ...: medians, interpolated and made non-decreasing."""
    timed = {drafted: statistics.median(took) for drafted, took in sorted(seconds.items()) if took}
    return np.maximum.accumulate(np.interp(np.arange(depth + 1), list(timed), list(timed.values())))


def estimate_call_costs(tree: Topology, rounds: np.ndarray) -> tuple[dict[int, float], float] | None:
    """Returns the seconds of a target call by width, and of one draft call; None if the chain is too short.

    Rounds of neighbouring depths whose windows have the same width differ by one draft call. There are such pairs in
    chains of at least 4 tokens.
    """
    widths = sorted({1, *choose_widths(tree), tree.shape.nodes})
    at = [next(width for width in widths if width > depth) for depth in range(tree.shape.nodes)]
    steps = [rounds[d + 1] - rounds[d] for d in range(tree.shape.depth) if at[d] == at[d + 1]]
    if not steps:
        return None
    draft = statistics.median(steps)
    target = {width: rounds[at.index(width)] - at.index(width) * draft for width in widths}
    return {width: float(max(cost, rounds[0])) for width, cost in target.items()}, float(draft)


def derive_drafting(
    drafter: str,
    tree: Topology,
    options: Mapping[str, Any],
    seconds: dict[int, list[float]],
    resumed: list[tuple[int, float]],
    stats: Stats,
) -> Drafting:
    """Derives the schedule from the measurements.

    Args:
        drafter: the drafter's name.
        tree: the measured tree.
        options: the drafter's own options.
        seconds: seconds of rounds by depth.
        resumed: pairs of a number of rounds without a draft, and the seconds of the round of depth 1 after them.
        stats: the statistics of all rounds. A depth that no round reached has the acceptance of the depth before it.

    Raises:
        TuningError: no round drafted.
    """
    timed = {depth: took for depth, took in sorted(seconds.items()) if took}
    if 0 not in timed or len(timed) < 2:
        raise TuningError(
            f"the drafter {drafter!r} drafted too little on these prompts; use other prompts, or raise max_new_tokens"
        )
    rounds = interpolate_round_times(timed, tree.shape.depth)
    accepted: list[float] = []
    for tried, count in zip(stats.tested_at, stats.accepted_at):
        accepted.append(count / tried if tried else (accepted or [0.0])[-1])
    costs = rounds / rounds[0]
    speedups = np.array([expected_tokens(chain(d), np.array(accepted)[:, None]) for d in range(costs.size)]) / costs
    best = int(speedups.argmax())
    resume = max(statistics.median([(took - rounds[1]) / idle for idle, took in resumed]), 0.0) if resumed else 0.0
    # Acceptance varies between texts and within a text. Where it is above average, deeper drafts are faster.
    used = chain(min(tree.shape.depth, max(2 * best, 1))) if tree.is_chain else tree
    schedule = Adaptive(
        costs=tuple(round(float(cost), 4) for cost in costs[: used.shape.depth + 1]),
        resume=round(float(resume / rounds[0]), 4),
        prior_acceptance=round(float(np.clip(accepted[0], 0.05, 0.95)), 4),
        widths=choose_widths(used),
    )
    measured = {
        "round_s": {str(depth): round(statistics.median(took), 6) for depth, took in timed.items()},
        "rounds_timed": {str(depth): len(took) for depth, took in timed.items()},
        "acceptance_by_depth": [round(share, 4) for share in accepted],
        "speedup_by_depth": [round(float(speedup), 4) for speedup in speedups],
        "best_depth": best,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    return Drafting(drafter, tree=used, schedule=schedule, drafter_options=dict(options), measured=measured)
