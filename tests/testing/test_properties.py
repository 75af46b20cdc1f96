"""Tests the properties of every registered rule and drafter, and that each property can fail."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jaxspec
from helpers.paths import ROOT
from helpers.toys import transformer
from jaxspec.core.draw import Noise
from jaxspec.core.records import StopLaw
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import branching
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Weights
from jaxspec.rules.block import Block
from jaxspec.rules.lenient import Lenient
from jaxspec.rules.rejection import Rejection
from jaxspec.testing import (
    ScriptedDrafter,
    TableLM,
    check_drafter,
    check_rule,
    g_test,
    joint_law,
    model_law,
    properties,
    sample_texts,
)


@pytest.mark.parametrize("name", cases.RULES)
def test_rule(name):
    """All of `check_rule`, on 256 random proposals per tree: chances, zeros, greed, NaN, padding, losslessness."""
    rule = cases.RULES[name]
    assert rule.lossless == (not name.startswith("lossy"))
    check_rule(rule)


# Each property is broken by some rule.


class Leaky(Rejection):
    def __call__(self, law, proposal):
        found = super().__call__(law, proposal)
        return found._replace(node_probs=0.99 * found.node_probs)


class Blind(Rejection):
    """Takes "nothing is proposed" for a token."""

    def __call__(self, law, proposal):
        return super().__call__(law, proposal._replace(tokens=jnp.maximum(proposal.tokens, 0)))


class Generous(Rejection):
    """Keeps with a small chance what is impossible, as `u <= 0` does."""

    def __call__(self, law, proposal):
        return super().__call__(jnp.maximum(law, -9.0), proposal)


class Curious(Rejection):
    """Looks at laws that were not drawn from."""

    def __call__(self, law, proposal):
        draft = proposal.law
        return super().__call__(law if draft is None else law + 0 * draft.sum(), proposal)


class Neighbour(Rejection):
    """Draws by the law of the next row, which may never have been read."""

    def __call__(self, law, proposal):
        return StopLaw(super().__call__(law, proposal).node_probs, lambda node: jnp.roll(law, -1, axis=0)[node])


class Impatient(Rejection):
    """Gives up at the first child that is missing."""

    def __call__(self, law, proposal):
        tree, tokens = proposal.tree, proposal.tokens
        elder = (tree.parents[:, None] == tree.parents) & (tree.ranks < tree.ranks[:, None])
        return super().__call__(law, proposal._replace(tokens=jnp.where((elder & (tokens < 0)).any(-1), -1, tokens)))


class Undeclared(Lenient):
    @property
    def lossless(self) -> bool:
        return True


class Modest(Rejection):
    lossless = False


class AFactorForgotten(Block):
    """Lets a block end without regard to the nodes above."""

    def __call__(self, law, proposal):
        return StopLaw(Rejection()(law, proposal).node_probs, super().__call__(law, proposal).next_logits)


class Single(Rejection):
    """Has one weight for all tokens, which would be broadcast."""

    def __call__(self, law, proposal):
        return StopLaw(super().__call__(law, proposal).node_probs, lambda node: law[node, :1])


class Columnar(Rejection):
    """Has an axis too many."""

    def __call__(self, law, proposal):
        node_probs, next_logits = super().__call__(law, proposal)
        return StopLaw(node_probs[:, None], next_logits)


@dataclasses.dataclass(frozen=True)
class Hesitant:
    """Speculative sampling of chains that accepts less than it could: with `share * min(1, target / draft)`."""

    share: float

    noise = Noise.FRESH
    lossless = True

    def check(self, shape):
        Block().check(shape)

    def __call__(self, law, proposal):
        following = jnp.concatenate([proposal.tokens[1:], jnp.full(1, -1, proposal.tokens.dtype)])
        child, size = jnp.maximum(following, 0), law.shape[0]
        points = jnp.where(jnp.arange(law.shape[1]) == child[:, None], 0.0, -jnp.inf)
        draft = jnp.exp(points if proposal.law is None else proposal.law)
        common = self.share * jnp.minimum(jnp.exp(law), draft)
        rows = jnp.arange(size)
        accepted = jnp.where(following >= 0, common[rows, child] / jnp.maximum(draft[rows, child], 1e-30), 0.0)
        reached = jnp.cumprod(jnp.concatenate([jnp.ones_like(accepted[:1]), accepted[:-1]]))

        def after(node):
            return jnp.log(jnp.exp(law[node]) - jnp.where(following[node] >= 0, common[node], 0.0))

        return StopLaw(reached * (1 - accepted), after)


@dataclasses.dataclass(frozen=True)
class Restless(Hesitant):
    """The same with the wrong residual: what is left of the target's law is emitted as if nothing had been rejected."""

    def __call__(self, law, proposal):
        return StopLaw(super().__call__(law, proposal).node_probs, lambda node: law[node])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.75, 0.95])
def test_a_lossless_rule_that_accepts_less_than_it_could_passes(share):
    check_rule(Hesitant(share))


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        (Restless(0.75), "not lossless: a round has a bias of"),
        (Leaky(), "do not sum to 1"),
        (Blind(), "where nothing is proposed"),
        (Generous(), "whose probability is 0"),
        (Curious(), "cannot be reached|not finite"),
        (Neighbour(), "whose probability is 0|cannot be reached|not greedy"),
        (Impatient(), "padding"),
        (Undeclared(), "not lossless: a round has a bias of"),
        (Modest(), "seems to be lossless"),
        (AFactorForgotten(), "not lossless"),
        (Single(), "next_logits of a wrong shape"),
        (Columnar(), "node_probs of a wrong shape"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_rule_without_a_property_is_found(rule, fault):
    with pytest.raises(AssertionError, match=f"{type(rule).__name__} .*({fault})"):
        check_rule(rule)


def test_a_rule_that_cares_where_padding_stands_is_found():
    cases = properties.random_cases(properties.RAGGED)
    properties.check_padding_order_is_ignored(Rejection(), cases, properties.RAGGED)
    with pytest.raises(AssertionError, match="Impatient depends on the order of padding"):
        properties.check_padding_order_is_ignored(Impatient(), cases, properties.RAGGED)


def test_the_lines_of_contributing(capsys):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (block,) = (b for b in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if "check_rule" in b)
    exec(compile(block, "CONTRIBUTING.md", "exec"), {})
    off, kept = map(float, capsys.readouterr().out.split())
    assert off < 1e-12 < 0.5 < kept < 2


# Drafters.

LM = transformer(vocab_size=7, hidden_size=24, intermediate_size=32, num_layers=2)
TARGET = jaxspec.Model(LM, LM.init_params(jax.random.key(0)))
PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3]


@pytest.mark.parametrize("name", cases.DRAFTERS)
def test_drafter(name):
    """Proposals are trees of the shape that was said, of distinct siblings, and of tokens that their laws allow."""
    drafter, params = cases.drafting(name, TARGET).build_drafter(TARGET)
    prompts = [PROMPT, [5], [1, 2], [6, 6, 6, 6, 6, 6, 6]]
    proposal = check_drafter(drafter, params, LM, TARGET.params, prompts)
    drafted = np.asarray(proposal.tokens)[:, 1:] >= 0
    assert drafted.any() == (name != "none")
    assert (proposal.law is not None) == (drafter.draws and not drafter.needs.observed)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(cases.DRAFTERS.keys() - {"none"}))
def test_text_of_a_drafter_under_rejection(name):
    """G-test of 6,000 texts of two tokens: the law handed over is that of the tokens. Greedy text is the plain one."""
    drafter, params = cases.drafting(name, TARGET).build_drafter(TARGET)
    decoder = Decoder(LM, drafter, Rejection(), chunk=16, width_matched=True)
    for sampling, samples in ((Sampling(temperature=1.5), 6000), (Sampling(), 1)):
        law = joint_law(model_law(LM, TARGET.params, PROMPT, sampling), 2)
        texts = sample_texts(decoder, Weights(TARGET.params, params), PROMPT, 2, sampling, samples=samples, batch=1000)
        found = g_test(texts.counts, law)
        assert found.impossible == 0
        assert found.p > 1e-4
        assert texts.accepted > 0.02 or sampling.temperature == 0


class Twice(ScriptedDrafter):
    """Says of every token that it was drawn from the same law, which has no place for it."""

    def propose(self, params, state, context, draw):
        proposal, state = super().propose(params, state, context, draw)
        law = jnp.where(jnp.arange(4) == 3, 0.0, -jnp.inf)
        return proposal._replace(law=jnp.broadcast_to(law, (*proposal.tokens.shape, 4))), state


def test_a_drafter_without_a_property_is_found():
    lm = TableLM(4)
    params, prompts = lm.init_params(jax.random.key(0)), [[1], [2, 3]]

    def script(*tokens):
        return jnp.tile(jnp.asarray([-1, *tokens]), (4, 1))

    check_drafter(ScriptedDrafter(branching(2)), script(2, 1), lm, params, prompts)
    with pytest.raises(AssertionError, match="twice"):
        check_drafter(ScriptedDrafter(branching(2)), script(2, 2), lm, params, prompts)
    with pytest.raises(AssertionError, match="outside the vocabulary"):
        check_drafter(ScriptedDrafter(branching(2)), script(2, 4), lm, params, prompts)
    with pytest.raises(AssertionError, match="number of nodes"):
        check_drafter(ScriptedDrafter(branching(2)), script(2), lm, params, prompts)
    with pytest.raises(AssertionError, match="law excludes"):
        check_drafter(Twice(branching(2)), script(2, 3), lm, params, prompts)
