"""Tests the sampler against a sort in float64, and the laws that it draws from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.tiers import with_slow
from helpers.toys import allowed, draw
from jaxspec.core.laws import choose, kth_highest, scores, total, widened
from jaxspec.core.noise import draw_gumbel
from jaxspec.core.sampling import MIN_TEMPERATURE, PreparedSampling, Sampling
from jaxspec.errors import InvalidConfig, TokenOutOfRange
from jaxspec.processors.penalties import FrequencyPenalty, PresencePenalty
from jaxspec.testing import g_test

pytestmark = pytest.mark.quick

N, V = 5, 9
ROWS = 4000


@jax.jit
def pipeline(logits, noise, sampling):
    """What the loop does: scores of a batch, then the draw of every row."""
    tempered = scores(logits, sampling)
    return tempered, choose(tempered, noise, sampling)


def chosen(logits, noise, **settings):
    """Drawn tokens [B, N] for numpy arrays [B, N, V]."""
    sampling = Sampling(**settings).rows(len(logits), logits.shape[-1])
    return np.asarray(pipeline(jnp.asarray(logits), jnp.asarray(noise), sampling)[1])


def doubtful(logits, temperature, top_k, top_p, min_p) -> bool:
    """A threshold is so near to a token's mass that float32 may decide it the other way."""
    nudged = [
        allowed(logits, temperature, top_k, min(top_p + p, 1.0) if top_p < 1 else 1.0, min_p * (1 + m))
        for p in (-1e-5, 1e-5)
        for m in (-1e-5, 1e-5)
    ]
    return any((kept != nudged[0]).any() for kept in nudged)


def test_draws_equal_the_naive_sampler():
    """20,000 draws over random laws, with ties and bans: temperature, top-k, top-p, min-p and all of them."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (ROWS, N, V)).astype(np.float32)
    logits[::2] = np.round(logits[::2])  # ties
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[..., 0] = np.where(np.isinf(logits).all(-1), 0.0, logits[..., 0])
    noise = rng.gumbel(size=logits.shape).astype(np.float32)
    off = rng.random((4, ROWS)) < 0.4
    settings = {
        "temperature": np.where(off[0], rng.choice([0.0, 9.9e-7, 1.0], ROWS), rng.uniform(0.1, 3, ROWS)),
        "top_k": np.where(off[1], 0, rng.integers(1, V + 3, ROWS)),
        "top_p": np.where(off[2], 1.0, rng.uniform(0.01, 1, ROWS)),
        "min_p": np.where(off[3], 0.0, rng.uniform(0, 1, ROWS)),
    }
    tokens = chosen(logits, noise, **settings)
    skipped = 0
    for row in range(ROWS):
        own = [np.float32(v[row]) if v.dtype.kind == "f" else int(v[row]) for v in settings.values()]
        for n in range(N):
            if own[0] >= MIN_TEMPERATURE and doubtful(logits[row, n], *own):
                skipped += 1
                continue
            expected = draw(logits[row, n], noise[row, n], *own)
            assert tokens[row, n] == expected, (logits[row, n], noise[row, n], own)
    assert skipped < 20 * ROWS // 1000


def test_scores_are_tempered_biased_and_limited():
    """In float32: bias first, then the temperature; outside the top k is -inf; greedy rows stay biased."""
    logits = np.array([[[1.0, 2.0, 3.0, 2.0]]], np.float32).repeat(4, 0)
    bias = np.array([0.0, 0.5, -np.inf, 0.0], np.float32)
    sampling = Sampling(temperature=[0.5, 0.5, 0.0, 0.0], top_k=[0, 1, 0, 9], logit_bias=bias)
    rows = sampling.rows(4, 4)
    changed = rows.processors[0].apply((), jnp.zeros((4, 1, 0), jnp.int32), widened(jnp.asarray(logits, jnp.bfloat16)))
    got = np.asarray(scores(changed, rows))
    assert got.dtype == np.float32
    expected = [
        [2, 5, -np.inf, 4],
        [-np.inf, 5, -np.inf, -np.inf],
        [1, 2.5, -np.inf, 2],
        [1, 2.5, -np.inf, 2],
    ]
    np.testing.assert_array_equal(got[:, 0], np.array(expected, np.float32))


def test_ties_are_kept_together():
    """Equal scores stand or fall together at the border of top-k and of top-p."""
    logits = np.log(np.array([[[4, 2, 2, 1, 1]]], np.float32))
    every = np.arange(5)
    noise = np.where(every == np.arange(5)[:, None], 50.0, 0.0)[:, None].astype(np.float32)  # row t wants t

    def kept(**settings):
        tokens = chosen(logits.repeat(5, 0), noise, temperature=1.0, **settings)[:, 0]
        return [t for t in every if tokens[t] == t]

    assert kept(top_k=2) == kept(top_k=3) == [0, 1, 2]
    assert kept(top_k=4) == [0, 1, 2, 3, 4]
    assert kept(top_p=0.45) == kept(top_p=0.79) == [0, 1, 2]
    assert kept(top_p=0.35) == [0]
    assert kept(top_k=3, top_p=0.55) == [0, 1, 2], "top-p is over what top-k left: 4/8 stands above token 1"
    assert kept(top_k=3, top_p=0.45) == [0], "and not over all: 4/10 would"
    assert kept(min_p=0.49) == [0, 1, 2]
    assert kept(min_p=1.0) == [0]


@pytest.mark.parametrize("temperature", [0.0, 9.9e-7])
def test_greedy_is_the_first_argmax_of_the_raw_logits(temperature):
    """Whatever the noise, with gaps too small to survive a division, ties, and tokens of -inf."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(64, N, V)).astype(np.float32)
    logits[:32] = 1e6 + np.round(logits[:32] * 2) / 16
    logits[::3, :, ::2] = -np.inf
    noise = 100 * rng.gumbel(size=logits.shape).astype(np.float32)
    got = chosen(logits, noise, temperature=temperature, top_p=0.3, min_p=0.9, top_k=4)
    np.testing.assert_array_equal(got, logits.argmax(-1))
    noisy = chosen(logits, noise, temperature=1.1e-6)
    assert (noisy[:32] != got[:32]).any(), "from 1e-6 on, ties are broken by the noise"


def test_kth_highest_is_exact():
    """Negative values, ties, zeros, -inf and the extremes of float32, against a sort."""
    rng = np.random.default_rng(2)
    values = rng.normal(size=(300, 17)).astype(np.float32) * 10.0 ** rng.integers(-30, 30, (300, 1))
    values = values.astype(np.float32)
    values[::2] = np.round(values[::2])
    values[::3, ::4] = -np.inf
    values[::5, 1] = np.finfo(np.float32).max
    values[::7, 2] = -np.finfo(np.float32).max
    k = rng.integers(1, 18, 300)
    expected = np.sort(values, -1)[np.arange(300), -k]
    np.testing.assert_array_equal(jax.jit(kth_highest)(jnp.asarray(values), jnp.asarray(k)), expected)


def test_more_than_the_vocabulary_is_no_limit():
    """A top-k larger than the vocabulary keeps every token."""
    logits = np.random.default_rng(3).normal(size=(3, N, V)).astype(np.float32)
    sampling = Sampling(temperature=1.0, top_k=[V, V + 1, 2**31 - 1]).rows(3, V)
    np.testing.assert_array_equal(scores(jnp.asarray(logits), sampling), logits)


def test_top_p_of_one_drops_nothing():
    """A token of probability 1e-30 is drawn if its noise is high enough, though sums round to one before."""
    logits = np.array([[[0.0, -10.0, -70.0]]], np.float32)
    noise = np.array([[[0.0, 0.0, 90.0]]], np.float32)
    assert chosen(logits, noise, temperature=1.0, top_p=1.0)[0, 0] == 2
    assert chosen(logits, noise, temperature=1.0, top_p=0.999)[0, 0] == 0


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.7}, {"top_k": 4, "min_p": 0.2, "temperature": 1.7}])
def test_the_law_of_the_draws(settings):
    """G-test of 200,000 draws. A law off by 1 % at a token of mass 0.3 is found with probability 0.95."""
    count, vocab = 200_000, 6
    logits = np.array([1.0, 0.3, 0.2, -0.5, -1.0, -2.5], np.float32)
    settings = {"temperature": 1.0} | settings
    noise = draw_gumbel(jax.random.split(jax.random.key(5), 1), jnp.arange(count)[None], vocab)
    tokens = chosen(np.broadcast_to(logits, (1, count, vocab)), noise, **settings)[0]
    kept = allowed(logits, **settings)
    law = np.where(kept, np.exp(logits / settings["temperature"]), 0.0)
    counts = np.bincount(tokens, minlength=vocab)
    assert g_test(counts, law).p > 1e-3


@pytest.mark.parametrize(("kind", "seed"), with_slow([("threefry2x32", 0), ("rbg", 6)], ("rbg",)))
def test_the_tail_of_a_large_vocabulary_is_drawn(kind, seed):
    """150,000 tokens of 1e-8 each: 1000 draws bring 1.5 of them; 1 to 7 are accepted.

    More than 7 has probability 2e-4. None has 0.22, but the key is fixed, and is one that draws a tail token:
    with noise that ends at 15.95, as the default mode of JAX has it, none would be in a million such tests.
    """
    vocab, tail, count, chunk = 151_936, 150_000, 1000, 50
    logits = np.full(vocab, np.log(1e-8), np.float32)
    logits[: vocab - tail] = np.log((1 - tail * 1e-8) / (vocab - tail))
    sampling = Sampling(temperature=1.0).rows(1, vocab)

    @jax.jit
    def draws(key, start):
        noise = draw_gumbel(key, start + jnp.arange(chunk)[None], vocab)
        return choose(jnp.broadcast_to(jnp.asarray(logits), (1, chunk, vocab)), noise, sampling)[0]

    keys = jax.random.split(jax.random.key(seed, impl=kind), 1)
    tokens = np.concatenate([draws(keys, jnp.int32(at)) for at in range(0, count, chunk)])
    assert 1 <= (tokens >= vocab - tail).sum() <= 7


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_the_draw_ends_whatever_the_scores(top_p):
    """NaN, infinities and no token at all: the loop ends; what was drawn is judged elsewhere."""
    rows = np.zeros((6, V), np.float32)
    rows[0] = np.nan
    rows[1, 3] = np.nan
    rows[2] = -np.inf
    rows[3, 2] = np.inf
    rows[4, :] = np.inf
    rows[5, 1:] = [np.nan, np.inf, -np.inf, *[0] * (V - 4)]
    noise = np.random.default_rng(4).gumbel(size=(1, 6, V)).astype(np.float32)
    for settings in (
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 2, "min_p": 0.3},
    ):
        tokens = chosen(rows[None], noise, top_p=top_p, **settings)
        assert ((tokens >= 0) & (tokens < V)).all()


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", v) for v in (-0.1, NAN, INF, "1", None, True, [1.0, NAN], [1.0] * 3, [[1.0, 1.0]], 1j)),
        *(("top_k", v) for v in (-1, 1.0, NAN, "3", None, True, [1, -1], [1] * 3)),
        *(("top_p", v) for v in (0.0, -0.1, 1.01, NAN, INF, None, "0.9", [0.5, 0.0], [0.5] * 3)),
        *(("min_p", v) for v in (-0.01, 1.01, NAN, INF, None, [0.1, NAN], [0.1] * 3)),
        *(("logit_bias", v) for v in ([0.0] * 3, np.zeros((3, 4)), [NAN, 0, 0, 0], [INF, 0, 0, 0], [-INF] * 4)),
        ("logit_bias", {0: NAN}),
    ],
)
def test_settings_out_of_range_are_refused(field, value):
    """With the name of the setting, and what was got."""
    with pytest.raises(InvalidConfig, match=field):
        Sampling(**{field: value}).rows(2, 4)


@pytest.mark.parametrize("token", [-1, 4, 1.0, "1", True])
def test_a_bias_for_a_token_that_does_not_exist_is_refused(token):
    with pytest.raises(TokenOutOfRange, match="logit_bias has a token id"):
        Sampling(logit_bias={token: 1.0}).rows(2, 4)


def test_settings_become_one_value_per_row():
    rows = Sampling(temperature=[0.5, 1], top_k=np.int64(3), logit_bias={np.int32(1): -INF, 2: 1}).rows(2, 4)
    np.testing.assert_array_equal(rows.temperature, np.asarray([0.5, 1], np.float32))
    np.testing.assert_array_equal(rows.top_k, np.asarray([3, 3], np.int32))
    np.testing.assert_array_equal(rows.top_p, np.asarray([1, 1], np.float32))
    np.testing.assert_array_equal(rows.processors[0].bias, [[0, -INF, 1, 0]] * 2)
    assert [a.dtype for a in (rows.temperature, rows.top_k, rows.min_p)] == [np.float32, np.int32, np.float32]
    assert Sampling().rows(2, 4).processors == ()


@pytest.mark.parametrize("size", [1, 2, 61, 50_257])
def test_sums_over_the_vocabulary_have_one_order(size):
    """By halves, whatever the number of rows: NumPy's float32 additions, to the bit."""
    values = np.random.default_rng(0).exponential(size=(9, size)).astype(np.float32)
    expected = values
    while expected.shape[1] > 1:
        half = -(-expected.shape[1] // 2)
        expected = expected[:, :half] + np.pad(expected[:, half:], ((0, 0), (0, expected.shape[1] % 2)))
    for rows in (1, 2, 8, 9):
        np.testing.assert_array_equal(jax.jit(total)(values[:rows]), expected[:rows, 0])


def test_programs_know_the_classes_of_processors():
    """Two registered dataclasses with one field each are of one structure to JAX, so settings name the classes."""
    presence, frequency = (Sampling(processors=[one(0.5)]).rows(2, V) for one in (PresencePenalty, FrequencyPenalty))
    for prepare in (lambda rows: rows, PreparedSampling.of):
        one, other = prepare(presence), prepare(frequency)
        assert jax.tree.structure(one) == jax.tree.structure(jax.tree.map(lambda a: a + 1, one))
        assert jax.tree.structure(one) != jax.tree.structure(other)
