"""Tests Gated DeltaNet over trees against the recurrence on each path, in float64: outputs, entries, commits."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.records import Window
from jaxspec.errors import InvalidConfig
from jaxspec.kernels.library import kernels_available
from jaxspec.models import delta
from jaxspec.models.config import DeltaSizes
from jaxspec.models.delta import DeltaParams, DeltaStore
from jaxspec.models.execution import Execution

EPSILON = 1e-6
SIZES = {
    "one value head for each key": DeltaSizes(2, 2, 8, 8),
    "two": DeltaSizes(2, 4, 8, 12),
    "three, tiled": DeltaSizes(2, 6, 4, 8, tiled=True),
    "three, two taps": DeltaSizes(1, 3, 8, 4, taps=2),
}
TREE = [-1, 0, 0, 1, 1, 2, 3, 3, 6, 8, 5]
"""The parent of each node."""
B = 3
FORMS = {"XLA": Execution(), "kernel": Execution(kernels=True)}


@pytest.fixture(params=FORMS)
def form(request):
    if request.param == "kernel" and not kernels_available():
        pytest.skip("needs the CPU kernels")
    return FORMS[request.param]


@pytest.fixture
def kernel():
    if not kernels_available():
        pytest.skip("needs the CPU kernels")
    return FORMS["kernel"]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@dataclasses.dataclass
class Reader:
    """One row that reads its text token by token, in float64."""

    sizes: DeltaSizes
    params: DeltaParams

    def __post_init__(self):
        s = self.sizes
        self.inputs = [np.zeros(s.channels)] * (s.taps - 1)
        self.state = np.zeros((s.value_heads, s.key_width, s.value_width))

    def copy(self):
        other = Reader(self.sizes, self.params)
        other.inputs, other.state = list(self.inputs), self.state.copy()
        return other

    def read(self, projected, rates):
        s, p = self.sizes, self.params
        u, z = projected[: s.channels], projected[s.channels :].reshape(s.value_heads, s.value_width)
        self.inputs.append(u)
        mixed = sum(p.conv[:, 0, j] * self.inputs[j - s.taps] for j in range(s.taps))
        mixed = mixed * sigmoid(mixed)
        q, k = mixed[: 2 * s.keys].reshape(2, s.key_heads, s.key_width)
        q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
        v = mixed[2 * s.keys :].reshape(s.value_heads, s.value_width)
        b, g = (
            sigmoid(rates[: s.value_heads]),
            -np.exp(p.decay) * np.log1p(np.exp(rates[s.value_heads :] + p.decay_bias)),
        )
        out = np.zeros_like(v)
        for h in range(s.value_heads):
            at = h % s.key_heads if s.tiled else h // (s.value_heads // s.key_heads)
            self.state[h] *= np.exp(g[h])
            self.state[h] += np.outer(k[at], b[h] * (v[h] - k[at] @ self.state[h]))
            out[h] = q[at] @ self.state[h] / np.sqrt(s.key_width)
        out = out / np.sqrt((out * out).mean(-1, keepdims=True) + EPSILON) * p.gate_norm
        return (out * z * sigmoid(z)).reshape(-1)


@dataclasses.dataclass
class Case:
    """Random projections of a window on top of texts of some lengths."""

    sizes: DeltaSizes
    lengths: tuple[int, ...]
    parents: list[int]

    def __post_init__(self):
        s, rng = self.sizes, np.random.default_rng(sum(self.lengths) + len(self.parents))
        vectors: Any = (
            rng.normal(size=(s.channels, 1, s.taps)),
            np.log(rng.uniform(0.1, 8, s.value_heads)),
            rng.normal(size=s.value_heads),
            rng.normal(1, 0.3, s.value_width),
        )
        self.params = DeltaParams(*vectors)
        tokens = max(self.lengths) + len(self.parents)
        self.projected = rng.normal(size=(len(self.lengths), tokens, s.channels + s.values)).astype(np.float32)
        self.rates = rng.normal(size=(len(self.lengths), tokens, 2 * s.value_heads)).astype(np.float32)
        mask = np.zeros((len(self.parents),) * 2, bool)
        for node, parent in enumerate(self.parents):
            mask[node] = mask[parent] if parent >= 0 else False
            mask[node, node] = True
        self.mask = mask

    def window(self, mask):
        size = mask.shape[0]
        tokens = jnp.zeros((len(self.lengths), size), jnp.int32)
        return Window(tokens, tokens, jnp.broadcast_to(jnp.asarray(mask), (len(self.lengths), *mask.shape)))

    @functools.cached_property
    def readers(self):
        """Each row after its text."""
        found = []
        for row, length in enumerate(self.lengths):
            found.append(Reader(self.sizes, self.params))
            for t in range(length):
                found[-1].read(self.projected[row, t], self.rates[row, t])
        return found

    @functools.cached_property
    def store(self):
        states = jnp.asarray([reader.state for reader in self.readers], jnp.float32)
        inputs = jnp.asarray([reader.inputs[len(reader.inputs) - self.sizes.taps + 1 :] for reader in self.readers])
        return DeltaStore(inputs.astype(jnp.float32), states)

    def nodes(self, some=slice(None)):
        at = np.arange(len(self.parents))[some] + max(self.lengths)
        return jnp.asarray(self.projected[:, at]), jnp.asarray(self.rates[:, at])

    def path(self, node):
        return [] if node < 0 else [*self.path(self.parents[node]), node]

    @functools.cached_property
    def expected(self):
        """The outputs of all nodes, and the row after each of them."""
        outs, after = [], []
        for row, reader in enumerate(self.readers):
            rows = []
            for node, parent in enumerate(self.parents):
                own = (reader if parent < 0 else rows[parent]).copy()
                at = max(self.lengths) + node
                outs.append(own.read(self.projected[row, at], self.rates[row, at]))
                rows.append(own)
            after.append(rows)
        return np.asarray(outs).reshape(len(self.lengths), len(self.parents), -1), after

    def mix(self, form, projected, rates, mask, past=None, store=None, lengths=None):
        params = DeltaParams(*(jnp.asarray(a, jnp.float32) for a in self.params))
        lengths = jnp.asarray(self.lengths) if lengths is None else lengths
        store = self.store if store is None else store
        read = jax.jit(delta.mix, static_argnames=("sizes", "epsilon", "execution"))
        window = self.window(mask)
        window = window._replace(mask=window.mask[: len(projected)])
        return read(projected, rates, params, self.sizes, window, store, lengths, past, EPSILON, form)

    def commit(self, form, store, entries, nodes, count, lengths=None):
        lengths = jnp.asarray(self.lengths) if lengths is None else lengths
        write = jax.jit(delta.commit, static_argnames=("tiled", "execution"))
        return write(store, entries, nodes, jnp.asarray(count), lengths, tiled=self.sizes.tiled, execution=form)


@pytest.mark.parametrize("lengths", [(0, 1, 2), (3, 70, 0)])
@pytest.mark.parametrize("name", SIZES)
def test_every_node_is_its_path_read_token_by_token(form, name, lengths):
    case = Case(SIZES[name], lengths, TREE)
    out, _ = case.mix(form, *case.nodes(), case.mask)
    np.testing.assert_allclose(out, case.expected[0], atol=2e-5)


@pytest.mark.parametrize("tokens", [1, 64, 65, 150])
def test_chains_of_any_length(form, tokens):
    case = Case(SIZES["two"], (0, 5), [*range(-1, tokens - 1)])
    out, _ = case.mix(form, *case.nodes(), case.mask)
    np.testing.assert_allclose(out, case.expected[0], atol=1e-4)


@pytest.mark.parametrize("name", SIZES)
def test_levels_with_their_past_are_one_window(form, name):
    case, past, found = Case(SIZES[name], (4, 0, 9), TREE), None, []
    whole, entries = case.mix(form, *case.nodes(), case.mask)
    for some in (slice(0, 1), slice(1, 3), slice(3, 8), slice(8, 11)):
        out, new = case.mix(form, *case.nodes(some), case.mask[some, : some.stop], past)
        past = new if past is None else jax.tree.map(lambda a, b: jnp.concatenate([a, b], 3), past, new)
        found.append(out)
    np.testing.assert_allclose(jnp.concatenate(found, 1), whole, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), past, entries)


def test_long_windows_read_their_past(form):
    case = Case(SIZES["two"], (2, 0), [*range(-1, 99)])
    whole, _ = case.mix(form, *case.nodes(), case.mask)
    _, past = case.mix(form, *case.nodes(slice(0, 20)), case.mask[:20, :20])
    out, _ = case.mix(form, *case.nodes(slice(20, 100)), case.mask[20:], past)
    np.testing.assert_allclose(out, whole[:, 20:], atol=1e-5)


@pytest.mark.parametrize("name", SIZES)
def test_a_commit_adds_a_path_to_the_text(form, name):
    """Rows commit four, no and one token; padding has index -1. The text then goes on as on a fresh prefill."""
    case = Case(SIZES[name], (4, 5, 0), TREE)
    _, entries = case.mix(form, *case.nodes(), case.mask)
    nodes, count = jnp.asarray([[0, 1, 3, 6], [0, 2, 5, -1], [0, -1, -1, -1]]), jnp.asarray([4, 0, 1])
    entries = entries._replace(deltas=entries.deltas.at[:, 0, :, 10].set(jnp.nan))  # not on the path
    store = case.commit(form, case.store, entries, nodes, count)
    ends = [case.expected[1][0][6], case.readers[1], case.expected[1][2][0]]
    np.testing.assert_allclose(store.state, [end.state for end in ends], atol=1e-5)
    for row, end in enumerate(ends):
        np.testing.assert_allclose(store.inputs[row], end.inputs[len(end.inputs) - case.sizes.taps + 1 :], atol=1e-6)
    np.testing.assert_array_equal(store.inputs[1], case.store.inputs[1])
    np.testing.assert_array_equal(store.state[1], case.store.state[1])


def test_a_row_of_length_0_is_empty_whatever_its_store_holds(form):
    case = Case(SIZES["two"], (0, 3), TREE)
    full = jax.tree.map(lambda a: a.at[0].set(7.0), case.store)
    out, entries = case.mix(form, *case.nodes(), case.mask, store=full)
    np.testing.assert_allclose(out, case.expected[0], atol=2e-5)
    store, expected = (case.commit(form, each, entries, None, [2, 0]) for each in (full, case.store))
    jax.tree.map(np.testing.assert_array_equal, store, expected)


@pytest.mark.parametrize("bad", ["projected", "rates"])
def test_a_token_that_is_not_finite_spoils_its_descendants_alone(form, bad):
    case = Case(SIZES["two"], (4, 0, 1), TREE)
    projected, rates = case.nodes()
    if bad == "projected":
        projected = projected.at[1, 2].set(jnp.nan)
    else:
        rates = rates.at[1, 2].set(jnp.inf * 0)
    out, entries = case.mix(form, projected, rates, case.mask)
    spoiled = np.zeros((B, len(TREE)), bool)
    spoiled[1] = case.mask[:, 2]
    assert np.isnan(np.asarray(out)).any(-1).tolist() == spoiled.tolist()
    np.testing.assert_allclose(np.asarray(out)[~spoiled], case.expected[0][~spoiled], atol=2e-5)
    assert (~np.isfinite(np.asarray(entries.deltas[0])).all((1, 3))).tolist() == spoiled.tolist()


def assert_same_bits(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("name", SIZES)
def test_bits_depend_neither_on_the_window_nor_on_the_batch_nor_on_the_commit(kernel, name):
    """Each node of a tree has the bits of one token after its path was committed, one token after the other."""
    case = Case(SIZES[name], (4, 0, 9), TREE)
    out, entries = case.mix(kernel, *case.nodes(), case.mask)
    for node in (0, 4, 9, 10):
        store, lengths, path = case.store, jnp.asarray(case.lengths), case.path(node)
        for at in path:
            one, new = case.mix(kernel, *case.nodes(slice(at, at + 1)), np.ones((1, 1), bool), None, store, lengths)
            assert_same_bits(one[:, 0], out[:, at])
            assert_same_bits(new, jax.tree.map(lambda a, at=at: a[:, :, :, at : at + 1], entries))
            store, lengths = case.commit(kernel, store, new, None, [1] * B, lengths), lengths + 1
        at_once = case.commit(kernel, case.store, entries, jnp.asarray([path] * B), [len(path)] * B)
        assert_same_bits(at_once, store)
    for row in range(B):
        projected, rates = (a[row : row + 1] for a in case.nodes())
        store = jax.tree.map(lambda a, row=row: a[row : row + 1], case.store)
        lengths = jnp.asarray(case.lengths[row : row + 1])
        found, _ = case.mix(kernel, projected, rates, case.mask, None, store, lengths)
        assert_same_bits(found[0], out[row])


def test_bits_of_levels_with_their_past(kernel):
    case, past = Case(SIZES["two"], (4, 0, 9), TREE), None
    whole, _ = case.mix(kernel, *case.nodes(), case.mask)
    for some in (slice(0, 1), slice(1, 3), slice(3, 8), slice(8, 11)):
        out, new = case.mix(kernel, *case.nodes(some), case.mask[some, : some.stop], past)
        past = new if past is None else jax.tree.map(lambda a, b: jnp.concatenate([a, b], 3), past, new)
        assert_same_bits(out, whole[:, some])


@pytest.mark.parametrize("parents", [TREE, [*range(-1, 63)], [*range(-1, 70)]], ids=["tree", "chain", "long"])
def test_gradients(parents):
    """Of the form for windows against those of the recurrence, token by token."""
    case = Case(SIZES["two"], (3, 0), parents)
    params = DeltaParams(*(jnp.asarray(a, jnp.float32) for a in case.params))
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(2, len(parents), case.sizes.values)), jnp.float32)
    lengths = jnp.asarray(case.lengths)

    def whole(projected, rates, params, store):
        window = case.window(case.mask)
        return (
            weight * delta.mix(projected, rates, params, case.sizes, window, store, lengths, None, EPSILON)[0]
        ).sum()

    def step(projected, rates, params, store, length):
        window = case.window(np.ones((1, 1), bool))
        out, new = delta.mix(projected, rates, params, case.sizes, window, store, length, None, EPSILON)
        return out, delta.commit(store, new, None, jnp.ones_like(length), length)

    def by_paths(projected, rates, params, store):
        outs, after = [], []
        for node, parent in enumerate(parents):
            before, length = (store, lengths) if parent < 0 else (after[parent], lengths + len(case.path(parent)))
            out, new = step(projected[:, node : node + 1], rates[:, node : node + 1], params, before, length)
            outs.append(out)
            after.append(new)
        return (weight * jnp.concatenate(outs, 1)).sum()

    def as_chain(projected, rates, params, store):
        def token(carry, inputs):
            projected, rates = (a[:, None] for a in inputs)
            out, new = step(projected, rates, params, *carry)
            return (new, carry[1] + 1), out[:, 0]

        _, outs = jax.lax.scan(token, (store, lengths), (projected.swapaxes(0, 1), rates.swapaxes(0, 1)))
        return (weight * outs.swapaxes(0, 1)).sum()

    given, forms = (*case.nodes(), params, case.store), (whole, by_paths if parents is TREE else as_chain)
    found, expected = (jax.jit(jax.grad(form, argnums=(0, 1, 2, 3)))(*given) for form in forms)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, atol=2e-4 * np.abs(b).max())


def test_bad_sizes_are_refused():
    with pytest.raises(InvalidConfig, match=r"value_heads \(3\) must be a multiple of key_heads \(2\)"):
        DeltaSizes(2, 3, 8, 8)
    with pytest.raises(InvalidConfig, match="taps must be a whole number from 2"):
        DeltaSizes(2, 2, 8, 8, taps=1)
    with pytest.raises(InvalidConfig, match="taps must be at most 16, got 17"):
        DeltaSizes(2, 2, 8, 8, taps=17)
