"""Tests dynamic trees: EAGLE-2's expansion against one written in Python, the drafts, and the rules that take them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers.narrow import not_none
from helpers.tiers import with_slow
from helpers.toys import decoder, eagle2, generate, log_softmax, noisy, request, start, texts
from jaxspec.cli.options import UsageError
from jaxspec.cli.tree import parse_tree
from jaxspec.core.draw import Draw, Noise
from jaxspec.core.noise import RoundNoise, draw_gumbel
from jaxspec.core.records import Context
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import branching, chain, dynamic
from jaxspec.core.tree import TreeShape
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Weights
from jaxspec.drafters.early_exit import EarlyExit
from jaxspec.drafters.model import ModelDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.errors import InvalidConfig
from jaxspec.registry import RULES, find
from jaxspec.testing import TableLM, g_test

V, BATCH = 8, 64
LM = TableLM(V)
PARAMS = LM.init_params(jax.random.key(0))


def proposals(tree, params, noise: Noise, temperature):
    """What model and early-exit drafters propose below random texts; and the texts, keys and round's noise."""
    texts = np.random.default_rng(0).integers(0, V, (BATCH, 3)).tolist()
    asked = request(texts, 8, vocab=V, temperature=temperature)
    state = start(decoder(LM, ModelDraft(LM, chain(1))), Weights(PARAMS, params), asked, 64)
    draw = Draw(noise, RoundNoise(state.key, state.length, jnp.array(True), V), state.sampling)

    def grow(drafter, params, own):
        context = Context(state.tokens, state.length, state.cache, params)
        return drafter.propose(params, own, context, draw)[0]

    drafters = ModelDraft(LM, tree), EarlyExit(LM, tree)
    owns = drafters[0].init(params, BATCH, 64)._replace(cache=state.draft.cache, feature=state.draft.feature), ()
    return texts, asked, [jax.jit(functools.partial(grow, d))(params, own) for d, own in zip(drafters, owns)]


def certain_or_not(seed: int) -> dict:
    """A table of sure tokens (probability exactly 1) and of coins: full of ties, between generations too."""
    rng = np.random.default_rng(seed)
    table = np.full((V + 1, V, V), -1e4, np.float32)
    for row in table.reshape(-1, V):
        row[rng.choice(V, rng.integers(1, 3), replace=False)] = 0.0
    return {"table": jnp.asarray(table)}


@pytest.mark.parametrize(
    ("tree", "kind"),
    with_slow(
        [
            (dynamic(4, 3, 12), "random"),
            (dynamic(4, 3, 12), "ties"),
            (dynamic(1, 4, 5), "ties"),
            (dynamic(5, 1, 4), "random"),
            (dynamic(2, 5, 19), "perturbed"),
        ],
        (dynamic(1, 4, 5), dynamic(5, 1, 4), (dynamic(4, 3, 12), "random")),
    ),
)
def test_it_equals_eagle2(tree, kind):
    """Model and early-exit drafters, 64 rows each: parents and tokens. The whole of a pool, chains and one level too.

    With the target's noise a token's share is the softmax of the perturbed scores.
    """
    params = certain_or_not(1) if kind == "ties" else PARAMS
    noise, temperature = (Noise.SHARED, 0.7) if kind == "perturbed" else (Noise.NONE, 1.0)
    prompts, asked, found = proposals(tree, params, noise, temperature)
    table = np.asarray(params["table"])
    depths = jnp.broadcast_to(3 + jnp.arange(tree.depth), (BATCH, tree.depth))
    extra = np.asarray(draw_gumbel(asked.key, depths, V)) if kind == "perturbed" else np.zeros((BATCH, tree.depth, V))
    closed = 0
    for row, prompt in enumerate(prompts):

        def log_share(text, row=row, prompt=prompt):
            before = [*prompt, *text]
            return log_softmax(table[before[-2], before[-1]] / np.float32(temperature) + extra[row, len(text)])

        parents, nodes = eagle2(log_share, tree.beam, tree.depth, tree.nodes)
        for proposal in found:
            assert proposal.tree.parents[row].tolist() == parents
            assert proposal.tokens[row, 1:].tolist() == [text[-1] for text in nodes[1:]]
            closed += len(set(parents)) > 2
    assert closed or tree.depth == 1


def test_every_tree_is_one():
    """Level order, ancestors closed, ranks in order, widths and depths as the shape says; also of broken drafts."""
    tree = dynamic(4, 4, 14)
    broken = {"table": jnp.where(jnp.arange(V) % 3 == 0, jnp.nan, PARAMS["table"])}
    nothing = {"table": jnp.full_like(PARAMS["table"], -jnp.inf)}
    proposal = None
    for params in (PARAMS, certain_or_not(2), broken, nothing):
        for proposal in proposals(tree, params, Noise.NONE, 1.0)[2]:
            parents, depths = np.asarray(proposal.tree.parents), np.asarray(proposal.tree.depths)
            assert (parents[:, 0] == -1).all()
            assert (parents[:, 1:] >= 0).all()
            assert (parents < np.arange(tree.nodes)).all()
            assert (np.diff(depths, axis=1) >= 0).all()
            assert depths.max() <= tree.depth
            assert np.asarray(proposal.tree.ranks).max() < tree.shape.width
            assert proposal.tree.children.shape[1:] == (tree.nodes, tree.shape.width)
    assert (np.asarray(not_none(proposal).tokens)[:, 1:] == -1).all(), (
        "where nothing has a probability nothing is proposed"
    )


@pytest.mark.slow
def test_it_drafts_better_than_a_fixed_tree():
    """Of equal size and depth: the tokens a round of 128 rows, greedy and sampled; the texts are the same."""
    lm, rows = TableLM(24), 128
    params = lm.init_params(jax.random.key(0))
    asked = request([[i % 24, 1] for i in range(rows)], 60, vocab=24, temperature=[0.0, 1.0] * (rows // 2))
    weights, rates, found = Weights(params, noisy(params, 1, 0.4)), [], []
    for tree in (dynamic(4, 5, 10), jaxspec.best_tree([0.5, 0.2, 0.1], 10, 5)):
        result = generate(decoder(lm, ModelDraft(lm, tree)), weights, asked, 128)
        found.append(texts(result))
        emitted = np.asarray(result.log.emitted)
        rates.append([emitted[half::2].sum() / (emitted[half::2] > 0).sum() for half in (0, 1)])
    assert found[0] == found[1]
    assert rates[0][0] > 1.02 * rates[1][0] > 2, "greedy"
    assert rates[0][1] > 1.02 * rates[1][1] > 2, "sampled; a tree by probability alone has 2.3 tokens a round here"


# Losslessness of the rules that take them.


@pytest.mark.slow
def test_the_deterministic_rule_is_lossless():
    """The law of four tokens over several rounds, from 40,000 rows, by a G-test against the exact law."""
    lm, rows, length = TableLM(3), 40_000, 4
    params = lm.init_params(jax.random.key(3), 1.0)
    asked = request([[0, 1]] * rows, length, vocab=3, temperature=1.0)
    rule = find("rule", "deterministic")()
    config = Decoder(lm, ModelDraft(lm, dynamic(2, 2, 4)), rule, chunk=4)
    result = generate(config, Weights(params, noisy(params, 1, 0.5)), asked, 64)
    assert np.asarray(result.log.accepted).sum() > rows
    got = np.asarray(result.tokens)[:, 2 : 2 + length] @ 3 ** np.arange(length)[::-1]
    law = np.ones(1)
    contexts = [[0, 1]]
    for _ in range(length):
        after = [np.exp(log_softmax(np.asarray(lm.logits(params, text)))) for text in contexts]
        law = (law[:, None] * np.stack(after)).ravel()
        contexts = [[*text, token] for text in contexts for token in range(3)]
    assert g_test(np.bincount(got, minlength=3**length), law).p > 1e-3


@pytest.mark.parametrize("name", RULES)
def test_rules_that_weigh_sampled_drafts_refuse_it(name):
    """Before anything compiles, saying which rules take it."""
    rule, drafter = find("rule", name)(), ModelDraft(LM, dynamic(2, 2, 4))
    if rule.noise is Noise.FRESH:
        with pytest.raises(InvalidConfig, match=r"dynamic tree.*'coupled' or 'deterministic'"):
            Decoder(LM, drafter, rule)
    else:
        assert Decoder(LM, drafter, rule).drafter is drafter


# The value.


def test_its_shape_is_static():
    assert dynamic(3, 4, 9).shape == TreeShape(9, 4, 3, pruned=True)
    assert dynamic(9, 2, 5).shape.width == 4
    assert dynamic(3, 4, 9) == dynamic(beam=3, depth=4, nodes=9)
    assert dynamic().nodes == 32
    for tree in (dynamic(3, 4, 31), dynamic(2, 5, 6), dynamic(1, 4, 5), dynamic(7, 1, 8)):
        assert tree.tree.depths.max() <= tree.depth
        assert np.bincount(tree.tree.parents[1:]).max() <= tree.shape.width


@pytest.mark.parametrize(
    "sizes", [(0, 2, 3), (2, 0, 3), (2, 2, 2), (2, 2, 8), (2.0, 2, 4), (True, 2, 3), (2, 1, 4), ("2", 2, 4)]
)
def test_sizes_that_do_not_go_together_are_refused(sizes):
    with pytest.raises(InvalidConfig, match="dynamic tree"):
        dynamic(*sizes)


def test_drafters_that_have_no_law_refuse_it():
    with pytest.raises(InvalidConfig, match="static tree"):
        PromptLookup(branching(2, 2))
    with pytest.raises(InvalidConfig, match="9 children"):
        ModelDraft(LM, dynamic(9, 2, 4))


def test_on_the_command_line():
    assert parse_tree("dynamic-8x5-32") == dynamic(8, 5, 32)
    for spec in ("dynamic-8x5", "dynamic-2x2-99", "dynamic-0x1-2", "dynamic-999x99-20", "dynamic"):
        with pytest.raises(UsageError, match="dynamic-BEAMxDEPTH-NODES"):
            parse_tree(spec)


@pytest.mark.slow
def test_generate_takes_it():
    """With the target's tree, by name; plain decoding at its width has the same text."""
    target = jaxspec.Model(LM, PARAMS)
    draft = jaxspec.Model(LM, noisy(PARAMS, 1, 0.3))
    options = {"key": jax.random.key(1), "sampling": Sampling(temperature=0.8), "max_new_tokens": 24}
    options |= {"tree": jaxspec.dynamic(3, 3, 9), "width_matched": True}
    one = jaxspec.generate(target, [[1, 2]], drafter="model", draft=draft, **options)
    assert one[0].tokens == jaxspec.generate(target, [[1, 2]], drafter="none", **options)[0].tokens
    assert one.stats.accepted > 5
    assert one.stats.draft_calls == 3 * one.stats.drafted_rounds
