"""Tests statistics: a worked example, cuts, sums, and real runs recounted from their tokens."""

import jax
import numpy as np
import pytest

from helpers.toys import RAGGED, decoder, generate, request, texts
from jaxspec.core.topology import chain
from jaxspec.decode.state import RoundLog, Weights
from jaxspec.decode.stats import Stats, mark_drafted
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.errors import InvalidConfig
from jaxspec.testing import ScriptedDrafter, TableLM

pytestmark = pytest.mark.quick


def logged(counts) -> RoundLog:
    """The log of one row, of these counts by round."""
    return RoundLog(np.asarray(counts))


# Emitted, accepted, drafted, children tested at depth 1, 2, 3. A chain of three; round 2 had no draft,
# round 4 was cut by the budget inside its path, the rest of the buffer was never reached.
LOG = logged(
    [
        [3, 2, 3, 1, 1, 1],
        [1, 0, 0, 0, 0, 0],
        [1, 0, 3, 1, 0, 0],
        [4, 3, 3, 1, 1, 1],
        [2, 2, 3, 1, 1, 0],
        [0, 0, 0, 0, 0, 0],
    ]
)


def test_a_worked_example():
    stats = Stats.from_log(LOG, calls=3)
    assert stats == Stats(
        rounds=5,
        drafted=12,
        tested=9,
        accepted=7,
        committed=11,
        draft_calls=12,
        drafted_rounds=4,
        tested_at=(4, 3, 2),
        accepted_at=(3, 3, 1),
    )
    assert stats.target_calls == 5
    assert stats.tokens_per_round == 11 / 5
    assert stats.acceptance_rate == 7 / 9
    assert stats.acceptance_by_position == (3 / 4, 3 / 4, 1 / 4)
    assert stats.conditional_acceptance == (3 / 4, 1.0, 1 / 2)


def test_a_cut_leaves_what_was_emitted():
    """Four tokens of five rounds: the first whole, the second whole; of the third nothing was kept."""
    cut = Stats.from_log(LOG, calls=3, committed=4)
    assert cut == Stats.from_log(LOG.part(slice(2)), calls=3)
    inside = Stats.from_log(LOG, calls=3, committed=7)
    last = [2, 2, 3, 1, 1, 0]  # two of the fourth round's four: both were drafted
    assert inside == Stats.from_log(logged([*LOG.counts[:3], last]), calls=3)
    assert Stats.from_log(LOG, calls=3, committed=11) == Stats.from_log(LOG, calls=3)
    assert Stats.from_log(LOG, calls=3, committed=0) == Stats(tested_at=(0,) * 3, accepted_at=(0,) * 3)


def test_which_tokens_were_drafted():
    rounds = ("DDt", "t", "t", "DDDt", "DD")
    assert mark_drafted(LOG).tolist() == [kind == "D" for kind in "".join(rounds)]
    assert mark_drafted(LOG.part(slice(5, None))).tolist() == mark_drafted(LOG.part(slice(0))).tolist() == []


def test_rows_add_up():
    one, other = Stats.from_log(LOG, 3), Stats.from_log(LOG.part(np.s_[:2, :4]), 1)
    both = Stats.total([one, other])
    assert both == one + other == other + one
    assert both.tested_at == (5, 3, 2)
    assert both.accepted_at == (4, 3, 1)
    assert (both.committed, both.rounds, both.draft_calls) == (15, 7, 13)
    assert Stats.total([]) == Stats()


def test_predicted_speedup():
    """Tokens over target calls and draft calls at their cost."""
    stats = Stats.from_log(LOG, calls=3)
    assert stats.predicted_speedup(0.0) == 11 / 5
    assert stats.predicted_speedup() == 11 / (5 + 12 * 0.125)
    assert stats.predicted_speedup(1.0) == 11 / 17
    assert Stats().predicted_speedup() == 1.0
    for wrong in (float("nan"), float("inf"), -0.1):
        with pytest.raises(InvalidConfig, match="cost_ratio"):
            stats.predicted_speedup(wrong)


def test_as_dict_holds_counts_and_rates():
    stats = Stats.from_log(LOG, calls=3)
    told = stats.as_dict()
    for name in ("rounds", "drafted", "tested", "accepted", "committed", "tested_at", "accepted_at"):
        assert told[name] == getattr(stats, name)
    for name in ("target_calls", "tokens_per_round", "acceptance_rate", "conditional_acceptance"):
        assert told[name] == getattr(stats, name)
    assert told["predicted_speedup"] == stats.predicted_speedup()
    assert Stats().as_dict()["acceptance_rate"] == 0.0


V = 8


@pytest.mark.parametrize("tree", [chain(4), RAGGED], ids=["chain", "ragged"])
def test_a_run_counted_again_from_its_tokens(tree):
    """The text tells what every round did: the walk down a known script, with cuts at stop and budget."""
    lm = TableLM(V)
    params = lm.init_params(jax.random.key(0), 3.0)
    rng = np.random.default_rng(0)
    script = rng.integers(-1, V, (V, tree.shape.nodes)).astype(np.int32)
    prompts = [rng.integers(0, V, n).tolist() for n in (1, 4, 9, 2, 3, 5)]
    asked = request(
        prompts,
        [30, 7, 0, 1, 30, 13],
        vocab=V,
        temperature=[0, 0.7, 1, 1, 0.5, 0.3],
        stops=[[], [], [], [], [2]],
    )
    config = decoder(lm, ScriptedDrafter(tree))
    result = generate(config, Weights(params, script), asked, 128)
    for row, (text, prompt) in enumerate(zip(texts(result), prompts)):
        at, log, depths = len(prompt), [], tree.shape.depth
        while at < len(text):
            tokens, node, depth = script[text[at - 1]], 0, 0
            tested = [0] * depths
            while True:
                children = [c for c, p in enumerate(tree.parents) if p == node and tokens[c] >= 0]
                if depth < depths:
                    tested[depth] = len(children)
                right = [c for c in children if at + depth < len(text) and tokens[c] == text[at + depth]]
                if not right or at + depth == len(text) - 1:
                    depth += bool(right)
                    break
                node, depth = deepest(right, tree, tokens, text[at:]), depth + 1
            emitted = min(depth + 1, len(text) - at)
            log.append([emitted, min(depth, emitted), int((tokens[1:] >= 0).sum()), *tested])
            at += emitted
        stats = Stats.from_log(result.log.part(row), 0)
        assert stats == Stats.from_log(logged(np.reshape(np.asarray(log, int), (-1, 3 + depths))), 0)
        assert stats.committed == len(text) - len(prompt)


def deepest(nodes, tree, tokens, text) -> int:
    """Of siblings with the same token, the one that the text follows furthest."""

    def reach(node, text):
        below = [c for c, p in enumerate(tree.parents) if p == node and text and tokens[c] == text[0]]
        return 1 + max((reach(c, text[1:]) for c in below), default=0)

    depth = tree.tree.depths[nodes[0]]
    return max(nodes, key=lambda n: reach(n, text[depth:]))


@pytest.mark.slow
def test_rounds_without_a_draft_draft_nothing():
    """Plain decoding and a lookup that finds nothing: a token a round, no drafted token, no rate."""
    lm = TableLM(V)
    params = lm.init_params(jax.random.key(1))
    asked = request([[1, 2, 3]], 12, vocab=V, temperature=1.0)
    for drafter in (NoDraft(), NoDraft(chain(3)), PromptLookup(chain(3), min_match=8)):
        result = generate(decoder(lm, drafter), Weights(params), asked, 128)
        stats = Stats.from_log(result.log.part(0), drafter.calls)
        assert (stats.rounds, stats.committed, stats.drafted, stats.tested, stats.accepted) == (
            12,
            12,
            0,
            0,
            0,
        )
        assert stats.predicted_speedup(10.0) == 1.0
