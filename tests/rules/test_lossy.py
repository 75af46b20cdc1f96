"""Tests the lossy rules: their formulas, and how far they may deviate from the target."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.analysis.enumeration import apply_to_all, enumerate_proposals
from jaxspec.core.topology import branching, chain, from_paths
from jaxspec.errors import InvalidConfig
from jaxspec.rules.cascade import Cascade, Tolerant
from jaxspec.rules.lenient import Lenient
from jaxspec.rules.rejection import Rejection
from jaxspec.rules.typical import Typical
from jaxspec.testing import accepted_length, bias, joint_law, random_laws, round_law

pytestmark = pytest.mark.quick

RAGGED = from_paths([(0, 0, 0), (0, 1), (1, 0)])


def test_typical_acceptance_is_the_formula(seed):
    """Cai et al. 2024, section 2.3.1: above min(epsilon, delta exp(-H)); of the paths kept, the deepest."""
    rule, kept, either = Typical(epsilon=0.3, delta=0.6), 0, set()
    for case in range(60):
        target = random_laws(7000 * seed + case, 4, ("dense", "peaked", "sparse")[case % 3])
        found = enumerate_proposals(RAGGED, target, random_laws(7000 * seed + case + 100, 4), rule.noise)
        chances, after = apply_to_all(rule, RAGGED, found)
        tokens, depth, end = found.tokens[0], 0, 0
        likely = {0}
        for node in range(1, RAGGED.shape.nodes):
            parent = RAGGED.parents[node]
            law = found.target[0, parent]
            entropy = -sum(p * np.log(p) for p in law if p > 0)
            either.add(0.6 * np.exp(-entropy) > 0.3)
            if parent in likely and law[tokens[node]] > min(0.3, 0.6 * np.exp(-entropy)):
                likely.add(node)
                if RAGGED.tree.depths[node] > depth:
                    depth, end = RAGGED.tree.depths[node], node
        assert chances[0].tolist() == [float(node == end) for node in range(RAGGED.shape.nodes)]
        np.testing.assert_allclose(after[0, end], found.target[0, end])
        kept += depth
    assert 30 < kept < 150
    assert either == {True, False}, "each of the two thresholds is the smaller one somewhere"


def test_lenience_bounds_every_token():
    """No token is emitted with more than 1 / lenience times its probability; with 1 it is rejection."""
    for case in range(20):
        target, draft = random_laws(case, 4), random_laws(case + 100, 4, "peaked")
        for lenience in (0.3, 0.7):
            first = round_law(Lenient(lenience), branching(2), target, draft).sum(1)
            assert (first <= target(()) / lenience + 1e-12).all()
        assert bias(Lenient(1.0), RAGGED, target, draft) < 1e-12
        lengths = [accepted_length(rule, chain(2), target, draft) for rule in (Lenient(0.4), Lenient(0.8), Rejection())]
        assert lengths[0] > lengths[1] > lengths[2]
    assert Lenient(1.0).lossless
    assert not Lenient(0.9).lossless


@pytest.mark.parametrize("transform", [Tolerant(0.3), Tolerant(0.0), lambda target, draft: draft])
def test_a_cascade_follows_its_mixture_exactly(transform):
    """Where there is a draft the law is the transform's, after it the target's."""
    tree = branching(2, 1)
    for case in range(12):
        target, draft = random_laws(case, 3), random_laws(case + 50, 3)

        def mixed(text, target=target, draft=draft):
            if len(text) >= tree.shape.depth:
                return target(text)
            with jax.enable_x64(True):
                return np.exp(transform(jnp.log(jnp.asarray(target(text))), jnp.log(jnp.asarray(draft(text)))))

        kept, _ = apply_to_all(Cascade(transform), tree, enumerate_proposals(tree, target, draft))
        found = enumerate_proposals(tree, target, draft)
        ended_early = (found.probs[:, None] * kept)[:, tree.tree.depths < tree.shape.depth].sum()
        law = round_law(Cascade(transform), tree, target, draft)
        first = law.reshape(3, -1).sum(1)
        np.testing.assert_allclose(first, mixed(()), atol=1e-12)
        if ended_early < 1e-12:  # no round ended before its last draft: the whole text is the mixture's
            np.testing.assert_allclose(law, joint_law(mixed, 3), atol=1e-12)
        np.testing.assert_allclose(mixed(()).sum(), 1, atol=1e-12)


def test_the_tolerant_mixture_is_the_papers():
    """Narasimhan et al. 2025: the draft's law on the good tokens, and the target's law times the draft's other mass."""
    target, draft = np.array([0.5, 0.4, 0.1, 0.0]), np.array([0.1, 0.3, 0.4, 0.2])
    good = np.array([1, 1, 0, 0])  # within 0.3 of the highest: 0.35 and above
    with np.errstate(divide="ignore"):
        got = np.exp(Tolerant(0.3)(jnp.log(jnp.asarray(target)), jnp.log(jnp.asarray(draft))))
    np.testing.assert_allclose(got, draft * good + target * (draft * (1 - good)).sum(), rtol=1e-6)


def test_wrong_settings_are_refused():
    for build in (lambda: Lenient(0.0), lambda: Lenient(1.5), lambda: Typical(0.0), lambda: Tolerant(-0.1)):
        with pytest.raises(InvalidConfig, match="must be"):
            build()
