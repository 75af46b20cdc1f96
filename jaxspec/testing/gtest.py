"""G-tests of sampled text against its exact law, and the smallest bias that such a test detects.

If the samples follow the expected law, G = 2 sum observed log(observed / expected) is approximately chi-squared.
`detectable` gives the power of a test that passed.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from jaxspec.core.sampling import Sampling
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Request, Weights


class GTest(NamedTuple):
    """The result of a G-test."""

    p: float  # the p-value; 0 if a sample has probability 0 under the law
    cells: int  # the number of cells after pooling
    samples: int
    impossible: int  # samples with probability 0

    def detectable(self, alpha: float = 1e-6, power: float = 0.999) -> float:
        """Returns the smallest bias that this test detects; see `detectable`."""
        return detectable(self.samples, self.cells, alpha, power)


def g_test(counts: Any, law: Any, *, min_expected: float = 10.0, max_cells: int = 1024, sort_by: Any = None) -> GTest:
    """Tests counts against the probabilities of their cells.

    Cells are sorted, and neighbours are pooled until each pool expects `min_expected` samples and the fraction
    `1 / max_cells` of all samples.

    Args:
        counts: the number of samples in each cell.
        law: the probability of each cell, of the same shape as `counts`; the probabilities sum to 1.
        min_expected: the number of expected samples per pooled cell. Below about 5 the chi-squared approximation is
            poor.
        max_cells: the largest number of pooled cells. Fewer cells make a given bias easier to detect.
        sort_by: values to sort the cells by; None for their probabilities. The ratio of the draft's to the target's
            law keeps a bias towards the draft from averaging out within a pool.
    """
    counts, law = np.asarray(counts, np.float64).ravel(), np.asarray(law, np.float64).ravel()
    samples, possible = counts.sum(), law > 0
    keys = -law if sort_by is None else np.asarray(sort_by, np.float64).ravel()
    order = np.argsort(np.where(possible, keys, np.inf), kind="stable")[: possible.sum()]
    seen, expected = counts[order], samples * law[order] / law[order].sum()
    starts, expected_in_pool = [], np.inf
    for cell, mass in enumerate(expected.tolist()):
        if expected_in_pool >= max(min_expected, samples / max_cells):
            starts.append(cell)
            expected_in_pool = 0.0
        expected_in_pool += mass
    if expected_in_pool < min_expected and len(starts) > 1:  # too few for a cell: merge them into the last one
        starts.pop()
    seen, expected = np.add.reduceat(seen, starts), np.add.reduceat(expected, starts)
    nonzero, impossible = seen > 0, int(counts[~possible].sum())
    g = 2 * (seen[nonzero] * np.log(seen[nonzero] / expected[nonzero])).sum()
    p = 1.0 if seen.size == 1 else float(special.chdtrc(seen.size - 1, max(g, 0.0)))
    return GTest(0.0 if impossible else p, seen.size, int(samples), impossible)


def detectable(samples: int, cells: int, alpha: float = 1e-6, power: float = 0.999) -> float:
    """Returns the total variation that a G-test at significance level `alpha` detects with probability `power`.

    This holds for a bias that makes half of the cells too likely and the other half too unlikely, all by one factor. A
    bias concentrated in a few cells is detected when it is smaller.
    """
    if cells < 2:
        return 1.0
    freedom = cells - 1
    threshold = special.chdtri(freedom, alpha)
    low, high = 0.0, 1e9
    for _ in range(200):  # bisect the noncentrality, samples * (2 total variation)^2
        middle = (low + high) / 2
        low, high = (middle, high) if special.chndtr(threshold, freedom, middle) > 1 - power else (low, middle)
    return float(min(np.sqrt(high / samples) / 2, 1.0))


def holm(values: Iterable[float]) -> list[float]:
    """Returns p-values adjusted for multiple tests (Holm 1979).

    If all null hypotheses are true, the probability that any adjusted value is below alpha is at most alpha.
    """
    values = list(values)
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, i in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        highest = max(highest, min(1.0, (len(values) - rank) * values[i]))
        adjusted[i] = highest
    return adjusted


class SampledTexts(NamedTuple):
    """Counts of the texts sampled under many keys."""

    counts: np.ndarray  # [V] * length; a text that reaches a stop token repeats it to the end
    rounds: float  # rounds per text
    accepted: float  # accepted drafted tokens per round


def sample_texts(
    decoder: Decoder,
    weights: Weights,
    prompt: Sequence[int],
    length: int,
    sampling: Sampling,
    *,
    samples: int,
    seed: int = 0,
    stops: Sequence[int] = (),
    batch: int = 1 << 14,
) -> SampledTexts:
    """Continues one prompt under many keys with the compiled `Decoder.generate`.

    Args:
        decoder: the decoder.
        weights: the parameters of the decoder's target and drafter.
        prompt: token ids.
        length: the number of tokens of every text.
        sampling: the sampling settings of all rows.
        samples: the number of texts, rounded up to whole batches.
        seed: the seed of the keys.
        stops: tokens that end a text.
        batch: the number of texts decoded at a time.
    """
    vocab, batches = decoder.target.vocab, -(-samples // batch)
    counts, rounds, accepted = np.zeros(vocab**length, np.int64), 0, 0
    full = functools.partial(jnp.full, (batch,))
    for keys in jax.random.split(jax.random.key(seed), (batches, batch)):
        request = Request(
            jnp.broadcast_to(jnp.asarray(prompt, jnp.int32), (batch, len(prompt))),
            full(len(prompt)),
            full(length),
            keys,
            jnp.broadcast_to(jnp.asarray([*stops, -1], jnp.int32), (batch, len(stops) + 1)),
            sampling.rows(batch, vocab),
        )
        result = _generate(decoder, weights, request, decoder.slots(len(prompt) + length))
        last = np.asarray(result.length)[:, None] - 1
        positions = np.minimum(len(prompt) + np.arange(length), last)
        text = np.take_along_axis(np.asarray(result.tokens), positions, 1)
        counts += np.bincount(text @ vocab ** np.arange(length)[::-1], minlength=counts.size)
        log = jax.device_get(result.log.part(np.s_[:, :length]))
        rounds, accepted = rounds + int((log.emitted > 0).sum()), accepted + int(log.accepted.sum())
    return SampledTexts(counts.reshape((vocab,) * length), rounds / (batches * batch), accepted / rounds)


@functools.partial(jax.jit, static_argnums=(0, 3), compiler_options={"xla_backend_optimization_level": 1})
def _generate(decoder: Decoder, weights: Weights, request: Request, slots: int) -> Any:
    return decoder.generate(weights, request, slots)
