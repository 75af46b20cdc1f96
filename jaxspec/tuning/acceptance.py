"""Computes the acceptance of every rule from the laws of target and draft, along texts that the target has written.

The target decodes each text without a draft. Then target and draft read the text (teacher forcing), and
`jaxspec.analysis` compares their laws after every token. All rules and numbers of children are therefore measured on
the same positions. The law of heads and of PARD models depends on how many tokens they have drafted since the root, so
each drafted token has figures of its own.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec import analysis
from jaxspec.analysis.along import iterate_features
from jaxspec.analysis.bootstrap import ratio_interval
from jaxspec.api import generate
from jaxspec.core import sizes
from jaxspec.core.checks import whole
from jaxspec.core.drafter import Drafter
from jaxspec.core.laws import log_law, scores, temper_logits, widened
from jaxspec.core.networks import LanguageModel
from jaxspec.core.noise import seed_key
from jaxspec.core.processor import Beginning, process_prefixes
from jaxspec.core.records import Params
from jaxspec.core.sampling import MIN_TEMPERATURE, Sampling
from jaxspec.drafters.pard import Pard
from jaxspec.errors import CapacityError, InvalidConfig
from jaxspec.generation import inputs
from jaxspec.generation.drafting import Drafting
from jaxspec.heads.sizes import HeadSizes
from jaxspec.models.model import Model
from jaxspec.tuning.head_laws import HeadLaws, build_head_laws
from jaxspec.tuning.mask_laws import MaskLaws

TokenLaws = HeadLaws | MaskLaws

TEXTS_PER_BATCH = 8
"""Number of texts that the target decodes in one batch."""

POSITIONS_AT_ONCE = 16
"""Number of positions whose laws are in memory at the same time."""

ANY_RULE = "every rule"
"""Stands for the rule's name at temperature 0, where every rule accepts the target's token if it is a candidate."""


@dataclasses.dataclass(frozen=True)
class Positions:
    """Sums over the positions of one prompt's text.

    Attributes:
        name: the prompt's name.
        count: the number of positions.
        kept: the sum of acceptance probabilities by rule, with 1, 2, ... children, `[K]`.
        optimum: the same sums for an optimal rule with these candidates.
        token: the number of the drafted token, from 1. It is 1 with a draft model, which has one law for all tokens.
    """

    name: str
    count: int
    kept: dict[str, np.ndarray]
    optimum: dict[str, np.ndarray]
    token: int = 1


@dataclasses.dataclass(frozen=True)
class Figure:
    """The mean acceptance of one rule with a number of children, over all positions.

    Attributes:
        rule: the rule's name, or `ANY_RULE`.
        children: the number of candidates.
        acceptance: the probability that one of the candidates is accepted.
        low, high: the 95 % interval of the acceptance by bootstrap over the prompts; None with one prompt.
        optimum: an upper bound for any lossless rule with the same candidates.
        token: the number of the drafted token; see `Positions`. All tokens before it count as accepted.
    """

    rule: str
    children: int
    acceptance: float
    low: float | None
    high: float | None
    optimum: float
    token: int = 1

    @property
    def gap(self) -> float:
        """The optimum minus the acceptance."""
        return self.optimum - self.acceptance


def has_laws(drafter: Drafter) -> bool:
    """Returns whether `drafting_model` gives the laws that a drafter samples from.

    It does not for PARD-2 and DFlash 2.
    """
    if isinstance(drafter, Pard):
        return not drafter.states
    sizes = _sizes(drafter)
    return drafter.needs.model is not None if sizes is None else sizes.has_laws


def _sizes(drafter: Any) -> HeadSizes | None:
    """Returns the sizes of the heads of a drafter; None if the drafter has no heads."""
    config = getattr(drafter, "config", None)
    return config if isinstance(config, HeadSizes) else None


def drafting_model(target: Model, drafting: Drafting) -> tuple[LanguageModel | TokenLaws, Params]:
    """Returns the network or the heads whose laws a drafter samples from, and the parameters.

    Raises:
        InvalidConfig: the drafter has neither a network nor heads, or its laws along a text are not computed.
    """
    built, params = drafting.build_drafter(target)
    if not has_laws(built):
        raise InvalidConfig(
            f"the acceptance of the drafter {drafting.drafter!r} cannot be computed: its distributions along a text "
            "are not known"
        )
    if isinstance(built, Pard):
        return MaskLaws(built), params
    if (sizes := _sizes(built)) is not None:
        heads: Any = drafting.inputs(target).heads
        changed = {name: getattr(sizes, name) for name in ("decoder", "taps") if hasattr(sizes, name)}
        return build_head_laws(target, heads, dataclasses.replace(heads.config, **changed))
    assert built.needs.model is not None
    return built.needs.model, target.params if params is None else params


def measure_acceptance(
    target: Model,
    draft: LanguageModel | TokenLaws,
    draft_params: Params,
    prompts: Sequence[tuple[str, list[int]]],
    *,
    sampling: Sampling = Sampling(temperature=1.0),
    children: int = 4,
    draws: int = analysis.DRAWS,
    max_new_tokens: int = 64,
    seed: int = 0,
    ignore_eos: bool = False,
    progress: Callable[[int, int], Any] | None = None,
) -> list[Positions]:
    """Computes the sums of every prompt, and of every drafted token if the draft is heads.

    Args:
        target: the model that writes the texts.
        draft: the network or the heads of the drafter; see `drafting_model`.
        draft_params: the parameters of the draft.
        prompts: pairs of a name and token ids.
        sampling: sampling settings, as numbers.
        children: K, the largest number of candidates.
        draws: Monte Carlo samples per position; see `jaxspec.analysis`.
        max_new_tokens: the largest number of tokens of a text.
        seed: prompt `i` has the key `fold_in(key(seed), i)`.
        ignore_eos: whether to continue past the model's own stop tokens.
        progress: called with (steps done, all steps); every text is one step to decode and one to compare.

    Raises:
        JaxspecError: an argument is invalid; raised before anything compiles.
        ArithmeticError: a model's logits were not finite.
    """
    whole("children", children)
    whole("draws", draws)
    whole("max_new_tokens", max_new_tokens)
    if children > target.lm.vocab:
        raise InvalidConfig(f"children is {children}, but the vocabulary has only {target.lm.vocab} tokens")
    longest = max(len(ids) for _, ids in prompts) + max_new_tokens
    if longest > min(target.lm.context, draft.context):
        raise CapacityError(
            f"the longest prompt and its new tokens make {longest} tokens, but the target reads at most "
            f"{target.lm.context} and the draft {draft.context}; leave out long prompts or lower max_new_tokens"
        )
    slots = sizes.round_to_bucket(sizes.required_slots(longest, sizes.PROMPT_CHUNK))
    sampling = inputs.with_defaults(target, sampling)
    rows = inputs.mask_padding(target, sampling, POSITIONS_AT_ONCE)
    stops = inputs.stop_array(target, (), ignore_eos, POSITIONS_AT_ONCE)
    limited = bool(sampling.top_k) or sampling.top_p < 1 or sampling.min_p > 0
    compare = functools.partial(
        _compare, target.lm, draft, children, draws, limited, sampling.temperature < MIN_TEMPERATURE
    )
    key = seed_key(seed)
    keys = jax.vmap(lambda i: jax.random.split(jax.random.fold_in(key, i)))(np.arange(len(prompts)))
    texts = generate(target, [ids for _, ids in prompts], key=keys[:, 0], drafter="none", sampling=sampling,
                     batch=min(len(prompts), TEXTS_PER_BATCH), max_new_tokens=max_new_tokens, ignore_eos=ignore_eos,
                     verbose=False,
                     progress=progress and (lambda done, total: progress(done, 2 * total)))  # fmt: skip
    positions = []
    for i, (name, ids) in enumerate(prompts):
        written, noise = texts[i].tokens, keys[i, 1]
        text = [*ids, *written[:-1]]
        padded = jnp.asarray(np.pad(text, (0, slots - len(text))), jnp.int32)
        theirs = np.stack([*iterate_features(target.lm, target.params, text, slots)])
        drafted = _along(draft, draft_params, text, len(ids) - 1, max_new_tokens + 1, slots)
        for token, (first, ours) in enumerate(drafted, 1):
            sums: dict[str, np.ndarray] = {}
            both = theirs[first:], ours[: len(text) - first]
            for start in range(0, len(both[0]), POSITIONS_AT_ONCE):
                size = min(POSITIONS_AT_ONCE, len(both[0]) - start)
                parts = [
                    np.pad(a[start : start + size], ((0, POSITIONS_AT_ONCE - size), (0, 0)), mode="edge") for a in both
                ]
                key = jax.random.fold_in(noise, start + ((token - 1) << 20))
                prefixes = jnp.minimum(first + 1 + start + jnp.arange(POSITIONS_AT_ONCE), len(text))
                settings = rows, padded, prefixes, len(ids), stops
                for rule, kept in compare(target.params, draft_params, *parts, *settings, key).items():
                    sums[rule] = sums.get(rule, 0.0) + np.asarray(kept, np.float64)[:, :size].sum(1)  # [2, K]
            if not written or not all(np.isfinite(a).all() for a in sums.values()):
                raise ArithmeticError(f"{name}: the logits of a model were not finite")
            kept, optimum = ({rule: a[i] for rule, a in sums.items()} for i in range(2))
            if sums:
                positions.append(Positions(name, len(both[0]), kept, optimum, token))
        if progress:
            progress(len(prompts) + i + 1, 2 * len(prompts))
    return positions


def _along(
    draft: LanguageModel | TokenLaws, params: Params, text: list[int], first: int, most: int, slots: int
) -> list[tuple[int, np.ndarray]]:
    """Returns, for each drafted token, the first position that it can follow, and the features from there on.

    Args:
        draft: the draft.
        params: the parameters of the draft.
        text: the tokens.
        first: the position of the prompt's last token, which is the root of the first round.
        most: the largest number of positions, from `first` on.
        slots: the padded length of the text.
    """
    if not isinstance(draft, TokenLaws):
        return [(first, np.stack([*iterate_features(draft, params, text, slots)])[first:])]
    root = max(first, 1)  # the text's first token has no state before it
    return [(root + i, rows) for i, rows in enumerate(draft.along(params, text, root, most, slots))]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def _compare(
    target: LanguageModel,
    draft: LanguageModel | TokenLaws,
    children: int,
    draws: int,
    limited: bool,
    greedy: bool,
    target_params: Params,
    draft_params: Params,
    target_features: Float[Array, "n E"],
    draft_features: Float[Array, "n F"],
    rows: Sampling,
    text: Int[Array, "S"],
    prefixes: Int[Array, "n"],
    start: Array | int,
    stops: Int[Array, "n M"],
    key: Array,
) -> dict[str, Array]:
    """Returns acceptance and optimum of every rule, `[2, n, K]`, under the laws that decoding uses."""
    beginning = Beginning(target.vocab, len(text), stops)
    ours, theirs = (
        process_prefixes(
            rows.processors, beginning, text, prefixes, start, widened(lm.head(params, features[:, None]))[:, 0]
        )[:, None]
        for lm, params, features in ((draft, draft_params, draft_features), (target, target_params, target_features))
    )

    def law(logits: Array) -> Array:
        return jnp.exp(log_law(scores(logits, rows), rows))[:, 0]

    free = jax.nn.softmax(temper_logits(ours, rows), -1)[:, 0]
    if greedy:
        kept = analysis.deterministic_acceptance(law(theirs), free, children)
        return {ANY_RULE: jnp.stack([kept, kept])}
    by_rule = analysis.acceptance_by_rule(law(theirs), law(ours), children, key, draws, free if limited else None)
    return {rule: jnp.stack([kept.acceptance, kept.optimum]) for rule, kept in by_rule.items()}


def average_acceptance(positions: Sequence[Positions], children: Sequence[int], seed: int = 0) -> list[Figure]:
    """Returns the mean over all positions for every drafted token, number of children and rule."""
    averages = []
    for token, count in itertools.product(sorted({prompt.token for prompt in positions}), children):
        group = [prompt for prompt in positions if prompt.token == token]
        counts = np.array([prompt.count for prompt in group])
        for rule in sorted(group[0].kept):
            kept, optimum = (
                np.array([getattr(p, name)[rule][count - 1] for p in group]) for name in ("kept", "optimum")
            )
            low, high = ratio_interval(np.stack([kept, counts], axis=1), seed) if len(group) > 1 else (None, None)
            shares = float(kept.sum() / counts.sum()), low, high, float(optimum.sum() / counts.sum())
            averages.append(Figure(rule, count, *shares, token))
    return averages


def rank_acceptance(positions: Sequence[Positions]) -> dict[str, list]:
    """Returns, by rule, the probability that the child of each rank is accepted, which is the input of `best_tree`.

    With heads, there is a list for each drafted token.
    """
    by_rule: dict[str, list] = {}
    for token in sorted({prompt.token for prompt in positions}):
        group = [prompt for prompt in positions if prompt.token == token]
        total = sum(prompt.count for prompt in group)
        for rule in group[0].kept:
            share = np.sum([prompt.kept[rule] for prompt in group], 0) / total
            increasing = np.maximum.accumulate(share).clip(max=1.0)  # Monte Carlo estimates may decrease
            by_rule.setdefault(rule, []).append(np.diff(increasing, prepend=0.0).tolist())
    return {rule: ranks[0] if len(ranks) == 1 else ranks for rule, ranks in by_rule.items()}
