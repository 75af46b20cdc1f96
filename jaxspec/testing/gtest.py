"""G-tests of sampled text against its exact law, and how small a bias they would have found.

G = 2 sum observed log(observed / expected) follows a chi-squared law if the text follows the expected one; what may
be believed of a test that passed is said by `detectable`.
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
    """What a G-test found."""

    p: float  # the probability of a deviation like this if the law is right; 0 if something impossible was seen
    cells: int  # after pooling
    samples: int
    impossible: int  # samples whose probability is 0

    def detectable(self, alpha: float = 1e-6, power: float = 0.999) -> float:
        """The bias that this test would have found, see `detectable`."""
        return detectable(self.samples, self.cells, alpha, power)


def g_test(counts: Any, law: Any, *, least: float = 10.0, most: int = 1024, along: Any = None) -> GTest:
    """Tests counts against the probabilities of their cells, in arrays of one shape.

    Cells are sorted and neighbours pooled until each holds `least` expected samples and `1 / most` of all: the
    likeliest stand alone, the others fall together with their like.

    Args:
        counts: samples in every cell.
        law: the probability of every cell, in sum 1.
        least: expected samples per cell; below some 5 the chi-squared law is no good approximation.
        most: cells that are kept apart, at most; a bias is the easier found the fewer they are.
        along: what the cells are sorted by, instead of their probability. The ratio of the draft's law to the
            target's pools a bias towards the draft instead of averaging it out.
    """
    counts, law = np.asarray(counts, np.float64).ravel(), np.asarray(law, np.float64).ravel()
    samples, possible = counts.sum(), law > 0
    keys = -law if along is None else np.asarray(along, np.float64).ravel()
    order = np.argsort(np.where(possible, keys, np.inf), kind="stable")[: possible.sum()]
    seen, expected = counts[order], samples * law[order] / law[order].sum()
    starts, held = [], np.inf
    for cell, mass in enumerate(expected.tolist()):
        if held >= max(least, samples / most):
            starts.append(cell)
            held = 0.0
        held += mass
    if held < least and len(starts) > 1:  # the rest goes to its neighbours
        starts.pop()
    seen, expected = np.add.reduceat(seen, starts), np.add.reduceat(expected, starts)
    some, impossible = seen > 0, int(counts[~possible].sum())
    g = 2 * (seen[some] * np.log(seen[some] / expected[some])).sum()
    p = 1.0 if seen.size == 1 else float(special.chdtrc(seen.size - 1, max(g, 0.0)))
    return GTest(0.0 if impossible else p, seen.size, int(samples), impossible)


def detectable(samples: int, cells: int, alpha: float = 1e-6, power: float = 0.999) -> float:
    """The total variation that a G-test at the level `alpha` finds with probability `power`.

    For a bias that is spread over the cells, half of them too likely by one factor and half too unlikely; one that
    is concentrated in few cells is found when it is smaller.
    """
    if cells < 2:
        return 1.0
    freedom = cells - 1
    threshold = special.chdtri(freedom, alpha)
    low, high = 0.0, 1e9
    for _ in range(200):  # the noncentrality: samples * (2 total variation)^2
        middle = (low + high) / 2
        low, high = (middle, high) if special.chndtr(threshold, freedom, middle) > 1 - power else (low, middle)
    return float(min(np.sqrt(high / samples) / 2, 1.0))


def holm(values: Iterable[float]) -> list[float]:
    """The p-values of several tests, each multiplied so that the chance of any below alpha is alpha (Holm 1979)."""
    values = list(values)
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, i in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        highest = max(highest, min(1.0, (len(values) - rank) * values[i]))
        adjusted[i] = highest
    return adjusted


class Texts(NamedTuple):
    """How often each text was written, over many keys."""

    counts: np.ndarray  # [V] * length; a text that met a stop token repeats it to the end
    rounds: float  # per text
    accepted: float  # drafted tokens per round


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
) -> Texts:
    """Continues one prompt under many keys, by the compiled `Decoder.generate`.

    Args:
        decoder: of any members, with its `weights`.
        prompt: ids.
        length: tokens of every text.
        sampling: settings, one for all.
        samples: texts, rounded up to whole batches.
        seed: of the keys.
        stops: tokens that end a text.
        batch: texts decoded at a time.
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
        places = np.minimum(len(prompt) + np.arange(length), last)
        text = np.take_along_axis(np.asarray(result.tokens), places, 1)
        counts += np.bincount(text @ vocab ** np.arange(length)[::-1], minlength=counts.size)
        log = np.asarray(result.log[:, :length])
        rounds, accepted = rounds + int((log[:, :, 0] > 0).sum()), accepted + int(log[:, :, 1].sum())
    return Texts(counts.reshape((vocab,) * length), rounds / (batches * batch), accepted / rounds)


@functools.partial(jax.jit, static_argnums=(0, 3), compiler_options={"xla_backend_optimization_level": 1})
def _generate(decoder: Decoder, weights: Weights, request: Request, slots: int) -> Any:
    return decoder.generate(weights, request, slots)
