"""Tests the taps of a target: what they hold, that nothing else changes, and what is refused."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.toys import decoder, transformer
from jaxspec.core.drafter import Needs
from jaxspec.core.networks import TappedTarget, empty_feature, with_taps
from jaxspec.core.records import Window
from jaxspec.drafters.none import NoDraft
from jaxspec.errors import InvalidConfig
from jaxspec.kernels.library import kernels_available
from jaxspec.models.packed import pack_params
from jaxspec.models.quantized import quantize
from jaxspec.testing import TableLM
from jaxspec.train.features import FeatureReader

LM = transformer()
PARAMS = LM.init_params(jax.random.key(0))
WIDTH, LAYERS = LM.config.hidden_size, LM.config.num_layers


@dataclasses.dataclass(frozen=True)
class Tapping(NoDraft):
    """A drafter that reads taps, and drafts nothing."""

    taps: tuple[int, ...] = (2, 1, 2)

    @property
    def needs(self) -> Needs:
        return Needs(taps=self.taps)


def window(tokens) -> Window:
    batch, size = tokens.shape
    places = jnp.broadcast_to(jnp.arange(size), tokens.shape)
    return Window(tokens, places, jnp.broadcast_to(jnp.tri(size, dtype=bool), (batch, size, size)))


def features(lm, params, tokens):
    return lm.apply(params, window(tokens), lm.init_cache(len(tokens), 0))[0]


def stream(layers: int, params, tokens):
    """The residual stream after some layers: the features of these layers alone, with a final norm that is undone."""
    lm = dataclasses.replace(LM, layers=layers)
    x = features(lm, params | {"norm": jnp.ones(WIDTH)}, tokens)
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True))


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 7)))


def test_features_begin_with_those_of_the_target():
    assert isinstance(LM, TappedTarget)
    taps = (2, 1, LAYERS, 2)
    tapped = with_taps(LM, taps)
    whole = np.split(np.asarray(features(tapped, PARAMS, TOKENS)), 1 + len(taps), axis=-1)
    np.testing.assert_array_equal(whole[0], features(LM, PARAMS, TOKENS))
    np.testing.assert_array_equal(whole[1], whole[4])
    for tap, found in zip(taps, whole[1:]):
        normed = found / np.sqrt(np.mean(found**2, -1, keepdims=True))
        np.testing.assert_allclose(normed, stream(tap, PARAMS, TOKENS), atol=2e-5)
    np.testing.assert_array_equal(tapped.head(PARAMS, jnp.asarray(np.concatenate(whole, -1))),
                                  LM.head(PARAMS, jnp.asarray(whole[0])))  # fmt: skip
    cache = tapped.init_cache(1, 1)
    assert empty_feature(tapped, PARAMS, cache).shape == (1, WIDTH * (1 + len(taps)))


@pytest.mark.parametrize("kind", ["int8", "packed", "packed int8"])
def test_other_weights_give_taps(kind):
    if "packed" in kind and not kernels_available():
        pytest.skip("no kernels")
    params = quantize(PARAMS) if "int8" in kind else PARAMS
    lm = LM.with_execution(kernels="packed" in kind)
    params = pack_params(params) if "packed" in kind else params
    found = features(with_taps(lm, (1, 3)), params, TOKENS)
    np.testing.assert_array_equal(found[..., :WIDTH], features(lm, params, TOKENS))
    expected = features(with_taps(LM, (1, 3)), PARAMS, TOKENS)
    np.testing.assert_allclose(found[..., WIDTH:], expected[..., WIDTH:], atol=0.3 if "int8" in kind else 1e-5)


def test_without_taps_the_program_is_the_same():
    def program(lm):
        return str(jax.make_jaxpr(lambda params, tokens: features(lm, params, tokens))(PARAMS, TOKENS))

    assert with_taps(LM, ()) is LM
    assert program(dataclasses.replace(LM, taps=())) == program(LM)
    assert program(with_taps(LM, (1,))) != program(LM)


def test_a_decoder_sets_the_taps_that_its_drafter_declares():
    assert decoder(LM, NoDraft()).network is LM
    network: Any = decoder(LM, Tapping()).network
    assert network == dataclasses.replace(LM, taps=(2, 1, 2))


def test_the_reader_of_training_gives_them():
    tokens, segments = np.asarray(TOKENS), np.zeros((2, 7), np.int32)
    found = FeatureReader(with_taps(LM, (2,)), 2)(PARAMS, tokens, segments)
    np.testing.assert_allclose(found, features(with_taps(LM, (2,)), PARAMS, TOKENS), atol=1e-5)


@pytest.mark.parametrize(
    ("lm", "taps", "message"),
    [
        (LM, (1, 4), "taps must be whole numbers from 1 to 3"),
        (LM, (0,), "taps must be whole numbers from 1 to 3"),
        (LM, (True,), "taps must be whole numbers"),
        (dataclasses.replace(LM, layers=1), (2,), "from 1 to 1, since the target has 1 layers"),
        (TableLM(8), (1,), "TableLM has no 'taps' and 'depth'"),
    ],
)
def test_taps_that_do_not_fit_are_refused(lm, taps, message):
    with pytest.raises(InvalidConfig, match=message):
        decoder(lm, Tapping(taps=taps))


def test_a_target_of_your_own_can_give_them():
    @dataclasses.dataclass(frozen=True)
    class Own(TableLM):
        taps: tuple[int, ...] = ()
        depth: int = 2

        def apply(self, params, window, cache, past=None):
            features, new = super().apply(params, window, cache, past)
            return jnp.concatenate([features, *(tap * features for tap in self.taps)], axis=-1), new

        def head(self, params, features):
            return super().head(params, features[..., : self.vocab])

    target = Own(8)
    network: Any = decoder(target, Tapping(taps=(2, 1))).network
    found = features(network, network.init_params(jax.random.key(0)), TOKENS % 8)
    np.testing.assert_array_equal(found[..., 8:16], 2 * found[..., :8])
