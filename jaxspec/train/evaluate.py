"""Evaluates trained heads: ranks of the correct tokens, the best trees for them, and tokens per round of decoding."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec.api import generate
from jaxspec.core.mesh import replicate
from jaxspec.core.topology import Topology
from jaxspec.core.tree_search import best_tree, expected_tokens
from jaxspec.decode.stats import Stats
from jaxspec.errors import InvalidConfig
from jaxspec.heads.network import DraftHeads
from jaxspec.models.model import Model
from jaxspec.models.sharding import mesh_of, use_default_kernels
from jaxspec.registry import TRAINEES, find, locate
from jaxspec.train import losses, sources
from jaxspec.train.features import FeatureReader
from jaxspec.train.packing import Text, pack_texts
from jaxspec.train.trainee import Trainee

NUM_RANKS = 16
"""Number of ranks of the correct token that are counted separately."""
NUM_PARENTS = 4
"""Number of ranks of the token before that are counted separately; the last stands for all higher ranks."""
PRIOR_POSITIONS = 100
"""The weight of the ranks after any token, in positions, where the ranks after a token of one rank are counted."""
TREE_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
"""Numbers of nodes of the trees that are tried."""
MIN_SPEED_SHARE = 0.9
"""A larger tree is tried only if it could reach this fraction of the best speed so far."""


def trainee_of(heads: DraftHeads | Model) -> Trainee:
    """Returns the trainee of trained heads, according to the kind of the heads.

    Raises:
        InvalidConfig: no registered kind has such heads, or `heads` is a draft model.
    """
    if not isinstance(heads, DraftHeads):
        raise InvalidConfig(f"{heads.name} is a draft model, whose training is not recorded; pass its trainee")
    for name in TRAINEES:
        kind = find("kind of heads", name)
        if kind.drafter == heads.config.drafter:
            try:
                return locate(kind.trainee_class).of(heads.config)
            except InvalidConfig as error:
                raise InvalidConfig(f"{heads.name}: {error}") from None
    raise InvalidConfig(f"no registered kind of heads has sizes of the type {type(heads.config).__name__}")


class Ranks(NamedTuple):
    """The ranks that the heads give the correct tokens.

    Attributes:
        at: the ranks `[positions, n]`, from 0. NUM_RANKS stands for that rank and all higher ranks, -1 for positions
            past the answer.
    """

    at: np.ndarray

    @property
    def positions(self) -> int:
        """The number of positions where a round could begin."""
        return int((self.at[:, 0] >= 0).sum())

    @property
    def top1(self) -> list[float]:
        """The share of positions where the correct token is the most likely one, by drafted token."""
        return self._share(1)

    @property
    def top5(self) -> list[float]:
        """The share of positions where the correct token is among the five most likely ones, by drafted token."""
        return self._share(5)

    @property
    def accepted(self) -> list[float]:
        """The share of positions where this token and all tokens before it are the most likely ones, by drafted token.

        This is the acceptance of a greedy chain. Positions where the text ends are left out.
        """
        shares, correct = [], np.ones(len(self.at), bool)
        for column in self.at.T:
            correct = correct & (column == 0)
            shares.append(float(correct.sum() / max((column >= 0).sum(), 1)))
        return shares

    def _share(self, below: int) -> list[float]:
        return [float((column[column >= 0] < below).mean()) if (column >= 0).any() else 0.0 for column in self.at.T]

    def by_rank(self) -> np.ndarray:
        """Returns the frequency of each rank, `[n, NUM_RANKS]`, where all earlier tokens had ranks below NUM_RANKS."""
        return np.array([_frequencies(column[counted]) for column, counted in self._columns()])

    def acceptance(self) -> np.ndarray:
        """Returns the frequency of each rank after a token of each rank, `[n, NUM_PARENTS, NUM_RANKS]`.

        It is the input of `best_tree`. Only positions count where all earlier tokens had ranks below NUM_RANKS. Where a
        rank of the token before is rare, the frequencies are drawn towards those after any token.
        """
        tables, before = [], np.zeros(len(self.at), int)  # the root has rank 0
        for column, counted in self._columns():
            after_any, rows = _frequencies(column[counted]), []
            for parent in range(NUM_PARENTS):
                ranks = column[counted & (before == parent)]
                known = len(ranks) / (len(ranks) + PRIOR_POSITIONS)
                rows.append(known * _frequencies(ranks) + (1 - known) * after_any)
            tables.append(rows)
            before = np.minimum(column, NUM_PARENTS - 1)
        return np.array(tables)

    def _columns(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the ranks of each drafted token, and the positions that count."""
        counted = np.ones(len(self.at), bool)
        for column in self.at.T:
            counted = counted & (column >= 0)
            yield column, counted
            counted = counted & (column < NUM_RANKS)


def _frequencies(ranks: np.ndarray) -> np.ndarray:
    """Returns the frequency of each rank, `[NUM_RANKS]`; zeros if there is none."""
    return np.bincount(ranks, minlength=NUM_RANKS + 1)[:NUM_RANKS] / max(len(ranks), 1)


def rank_tokens(
    target: Model,
    drafts: DraftHeads | Model,
    texts: Sequence[Text],
    row_tokens: int = 512,
    batch: int = 4,
    trainee: Trainee | None = None,
) -> Ranks:
    """Returns the ranks of all correct tokens of some texts.

    Args:
        target: the target.
        drafts: the heads, or the draft model.
        texts: prompts with the target's own answers.
        row_tokens: number of tokens of each row that the texts are packed into.
        batch: number of rows read at once.
        trainee: the trainee of `drafts`; None for the trainee that heads of this kind have.
    """
    rows, _ = pack_texts(texts, row_tokens)
    trainee = trainee or trainee_of(drafts)
    frozen, source = losses.FrozenTarget.empty(), sources.omit_features(rows)
    if trainee.reads_features:
        frozen = losses.freeze(trainee, target.lm, target.params, drafts.params.get("tokens"))
        source = sources.compute_features_on_demand(
            FeatureReader(trainee.network(target.lm), batch), target.params, rows
        )

    @jax.jit
    def rank(frozen: losses.FrozenTarget, params: Any, part: losses.Batch) -> Int[Array, "B T n"]:
        ranks = []
        for step, logits in enumerate(trainee.unroll_logits(params, frozen, part)):
            token = losses.shift_left(part.tokens, 2 + step)
            row = token if frozen.index is None else frozen.index[token]
            own = jnp.take_along_axis(logits, jnp.maximum(row, 0)[..., None], -1)
            position = jnp.where(row >= 0, jnp.minimum((logits > own).sum(-1), NUM_RANKS), NUM_RANKS)
            ranks.append(jnp.where(losses.find_supervised(part, step, trainee.blocks is not None), position, -1))
        return jnp.stack(ranks, -1)

    parts, mesh = [], mesh_of(target.params)
    params = drafts.params if mesh is None else replicate(drafts.params, mesh)
    for part in source.batches(batch):
        parts.append(np.asarray(rank(frozen, params, part)).reshape(-1, trainee.drafted))
    ranks = np.concatenate(parts)
    return Ranks(ranks[(ranks >= 0).any(1)])


class Candidate(NamedTuple):
    """A tree and its measurements on some prompts.

    Attributes:
        tree: the tree.
        expected: tokens per round, estimated from the ranks.
        tokens_per_round: tokens per round of decoding.
        round_s: seconds of a round, the median over the prompts.
    """

    tree: Topology
    expected: float
    tokens_per_round: float
    round_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second."""
        return self.tokens_per_round / self.round_s


def find_trees(acceptance: np.ndarray) -> list[tuple[Topology, float]]:
    """Returns the best tree of each size and its expected tokens per round; the first is plain decoding."""
    trees: dict[Topology, float] = {}
    for nodes in TREE_SIZES:
        tree = best_tree(acceptance, nodes, len(acceptance))
        trees.setdefault(tree, expected_tokens(tree, acceptance))
    return list(trees.items())


def measure_trees(
    target: Model,
    drafts: DraftHeads | Model,
    acceptance: np.ndarray,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int = 96,
    repeats: int = 2,
    progress: Callable[[int, int], Any] | None = None,
) -> list[Candidate]:
    """Measures the best tree of every size, since the fastest one depends on the machine.

    Models are measured as `jaxspec.load` places them by default: on a CPU with jaxspec's kernels, which training does
    not use. A target that is split over devices is measured on its mesh. Sizes whose rounds are too slow for any tree
    to be the fastest are left out.

    Args:
        target: the target.
        drafts: the heads, or the model of the drafter "pard".
        acceptance: see `Ranks.acceptance`.
        prompts: token ids; each prompt is decoded alone, greedily.
        max_new_tokens: number of new tokens of each prompt.
        repeats: number of timed repetitions, after a first one that compiles and finds the sizes that may be fastest.
        progress: called with (decodes done, decodes in all).
    """
    target, mesh = use_default_kernels(target), mesh_of(target.params)
    if isinstance(drafts, DraftHeads):
        drafter: dict[str, Any] = {"drafter": drafts.config.drafter, "heads": drafts}
    else:
        drafter = {"drafter": "pard", "draft": use_default_kernels(drafts)}
    capacity = -(-(max(map(len, prompts)) + max_new_tokens + max(TREE_SIZES) + 128) // 256) * 256

    def decode(tree: Topology, prompt: list[int]) -> tuple[Stats, float]:
        """Returns the statistics, and the seconds of a round."""
        drafting: dict[str, Any] = {"drafter": "none"}
        if tree.shape.depth:
            drafting = drafter | {"tree": tree}
        shared: dict[str, Any] = {"max_new_tokens": max_new_tokens, "capacity": capacity, "mesh": mesh}
        out = generate(target, prompt, verbose=False, **shared, **drafting)
        return out.stats, out.timing.decode_s / max(out.stats.rounds, 1)

    trees, best = [], 0.0
    candidates = find_trees(acceptance)
    most = max(expected for _, expected in candidates)
    for tree, expected in candidates:
        decode(tree, prompts[0])  # compiles
        _, seconds = decode(tree, prompts[0])
        trees.append((tree, expected))
        best = max(best, expected / seconds)
        if progress:
            progress(len(trees), (1 + repeats) * len(candidates))
        if most / seconds < MIN_SPEED_SHARE * best:
            break  # larger trees take longer, and none has more than `most` tokens per round
    round_s: list[list[float]] = [[] for _ in trees]
    counts: list[list[Stats]] = [[] for _ in trees]
    for repeat in range(repeats):
        for i, (tree, _) in enumerate(trees):
            for stats, seconds in (decode(tree, prompt) for prompt in prompts):
                if stats.rounds:
                    round_s[i].append(seconds)
                    counts[i].append(stats)
            if progress:
                progress((1 + repeat) * len(trees) + i + 1, (1 + repeats) * len(trees))
    return [
        Candidate(tree, expected, Stats.total(stats).tokens_per_round, statistics.median(seconds))
        for (tree, expected), stats, seconds in zip(trees, counts, round_s)
    ]
