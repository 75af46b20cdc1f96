"""What trained heads are worth: ranks of the right tokens, trees made for them, tokens per round of real decoding."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec.api import generate
from jaxspec.core.tree import Topology
from jaxspec.core.tree_search import best_tree, expected_tokens
from jaxspec.decode.stats import Stats
from jaxspec.heads.network import DraftHeads
from jaxspec.models.model import Model
from jaxspec.train import losses
from jaxspec.train.features import Reader
from jaxspec.train.packing import Text, pack

RANKS = 16
"""Of the right token that are told apart."""
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
"""Nodes of the trees that are tried."""
HOPE = 0.9
"""Of the best speed so far, what a larger tree must be able to reach to be tried."""


class Ranks(NamedTuple):
    """Where the heads place the tokens that came, over all positions of some texts."""

    at: np.ndarray  # [positions, n] the rank, RANKS where it is that or more, -1 past the answer

    @property
    def positions(self) -> int:
        """Where a round could have begun."""
        return int((self.at[:, 0] >= 0).sum())

    @property
    def top1(self) -> list[float]:
        return self._share(1)

    @property
    def top5(self) -> list[float]:
        return self._share(5)

    def _share(self, below: int) -> list[float]:
        return [float((column[column >= 0] < below).mean()) if (column >= 0).any() else 0.0 for column in self.at.T]

    def acceptance(self) -> np.ndarray:
        """`[n, RANKS]`: the share of each rank, where every head before had the token among its ranks."""
        table = np.zeros((self.at.shape[1], RANKS))
        there = np.ones(len(self.at), bool)
        for head, column in enumerate(self.at.T):
            there &= column >= 0
            if not there.any():
                break
            table[head] = np.bincount(column[there], minlength=RANKS + 1)[:RANKS] / there.sum()
            there &= column < RANKS
        return table


def ranks(target: Model, heads: DraftHeads, texts: Sequence[Text], row_tokens: int = 512, batch: int = 4) -> Ranks:
    """The rank of every token that the heads had to guess.

    Args:
        target: whose features the heads read.
        heads: trained ones.
        texts: prompts with the target's own answers.
        row_tokens: the texts are packed into rows of so many.
        batch: rows read together.
    """
    rows, _ = pack(texts, row_tokens)
    frozen = losses.freeze(heads.config, target.lm, target.params, heads.params.get("tokens"))
    reader = Reader(target.lm, batch)

    @jax.jit
    def rank(frozen: losses.Frozen, params: Any, part: losses.Batch) -> Int[Array, "B T n"]:
        found = []
        for head, logits in enumerate(losses.guesses(heads.config, params, frozen, part)):
            token = losses.ahead(part.tokens, 2 + head)
            row = token if frozen.index is None else frozen.index[token]
            own = jnp.take_along_axis(logits, jnp.maximum(row, 0)[..., None], -1)
            place = jnp.where(row >= 0, jnp.minimum((logits > own).sum(-1), RANKS), RANKS)
            found.append(jnp.where(losses.wanted(part, head), place, -1))
        return jnp.stack(found, -1)

    places = []
    for at in range(0, len(rows.tokens), batch):
        part = [np.pad(a[at : at + batch], ((0, max(0, at + batch - len(a))), (0, 0))) for a in rows]
        features = reader(target.params, part[0], part[1])
        found = np.asarray(rank(frozen, heads.params, losses.Batch(*(jnp.asarray(a) for a in (*part, features)))))
        places.append(found.reshape(-1, heads.config.num_heads))
    every = np.concatenate(places)
    return Ranks(every[(every >= 0).any(1)])


class Candidate(NamedTuple):
    """A tree, and what was measured of it on some prompts."""

    tree: Topology
    expected: float  # tokens per round, by the ranks
    tokens_per_round: float  # as decoded
    round_s: float  # median over the prompts

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_round / self.round_s


def candidates(heads: DraftHeads, acceptance: np.ndarray) -> list[tuple[Topology, float]]:
    """The best tree of each size, smallest first, and what it should bring; the first is plain decoding."""
    found: dict[Topology, float] = {}
    for nodes in SIZES:
        tree = best_tree(acceptance, nodes, heads.config.num_heads)
        found.setdefault(tree, expected_tokens(tree, acceptance))
    return list(found.items())


def measure_trees(
    target: Model,
    heads: DraftHeads,
    acceptance: np.ndarray,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int = 96,
    repeats: int = 2,
    progress: Callable[[int, int], Any] | None = None,
) -> list[Candidate]:
    """Decodes the prompts with the best tree of every size, by turns: which is fastest is a matter of the machine.

    Sizes whose rounds take too long for any tree to pay are left out.

    Args:
        target: the model that decides.
        heads: that draft.
        acceptance: see `Ranks.acceptance`.
        prompts: token ids; each is decoded alone, greedily.
        max_new_tokens: per prompt.
        repeats: timed turns, after one that compiles and looks which sizes may pay.
        progress: called with (decodes done, decodes in all).
    """
    capacity = -(-(max(map(len, prompts)) + max_new_tokens + max(SIZES) + 128) // 256) * 256

    def decode(tree: Topology, prompt: list[int]) -> tuple[Stats, float]:
        """Its statistics, and the seconds of a round."""
        drafting: dict[str, Any] = {"drafter": "none"}
        if tree.shape.depth:
            drafting = {"drafter": "medusa", "heads": heads, "tree": tree}
        out = generate(target, prompt, max_new_tokens=max_new_tokens, capacity=capacity, verbose=False, **drafting)
        return out.stats, out.timing.decode_s / max(out.stats.rounds, 1)

    trees, best = [], 0.0
    every = candidates(heads, acceptance)
    most = max(expected for _, expected in every)
    for tree, expected in every:
        decode(tree, prompts[0])  # compiles
        _, seconds = decode(tree, prompts[0])
        trees.append((tree, expected))
        best = max(best, expected / seconds)
        if progress:
            progress(len(trees), (1 + repeats) * len(every))
        if most / seconds < HOPE * best:
            break  # larger ones take longer, and bring no more than `most`
    took: list[list[float]] = [[] for _ in trees]
    counts: list[list[Stats]] = [[] for _ in trees]
    for turn in range(repeats):
        for i, (tree, _) in enumerate(trees):
            for stats, seconds in (decode(tree, prompt) for prompt in prompts):
                if stats.rounds:
                    took[i].append(seconds)
                    counts[i].append(stats)
            if progress:
                progress((1 + turn) * len(trees) + i + 1, (1 + repeats) * len(trees))
    return [
        Candidate(tree, expected, Stats.total(stats).tokens_per_round, statistics.median(seconds))
        for (tree, expected), stats, seconds in zip(trees, counts, took)
    ]
