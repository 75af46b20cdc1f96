"""The properties of every correct rule, as functions that raise `AssertionError`.

`check_rule(MyRule())` runs all of them. The rules of jaxspec pass the same checks.
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.analysis.enumeration import bias, random_laws, stop_laws
from jaxspec.core.checks import check_member
from jaxspec.core.draw import Noise
from jaxspec.core.records import Proposal, StopLaw
from jaxspec.core.rule import CoupledRule, Rule, WeighingRule
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import Topology, chain, dynamic, from_paths
from jaxspec.core.tree import build
from jaxspec.errors import InvalidConfig

CHAIN = chain(4)
RAGGED = from_paths([(0, 0, 0), (0, 1), (1, 0), (2,)])
VOCAB_SIZE = 6
CASES = 256


class Cases(NamedTuple):
    """M random proposals on one tree, with the target's laws."""

    law: np.ndarray  # [M, N, V], the target's log-law
    proposal: Any  # a `Proposal` of NumPy arrays, each with a leading axis M


def check_rule(rule: Rule, seed: int = 0) -> None:
    """Checks every property of a rule, on a chain and a tree, for drafts with laws and for point masses.

    Trees that the rule refuses, and point masses if it needs the draft's law, are skipped. The acceptance rate is not
    checked, so a lossless rule that accepts less than it could passes all checks.

    Args:
        rule: the rule, a frozen dataclass.
        seed: the seed of the random proposals and laws.

    Raises:
        AssertionError: a property does not hold; the message names it.
    """
    check_member("rule", rule, Rule)
    if rule.noise is Noise.FRESH:
        check_refuses_dynamic_trees(rule)
    for topology in (CHAIN, RAGGED):
        try:
            rule.check(topology.shape)
        except InvalidConfig:
            continue
        for sampled in (True, False):
            cases = random_cases(topology, seed, sampled)
            try:
                rule_outcomes(rule, cases)
            except InvalidConfig:  # the rule needs the draft's law
                assert not sampled
                continue
            check_probabilities(rule, cases)
            check_stops_at_proposed_nodes(rule, cases)
            check_emits_possible_tokens(rule, cases)
            check_unreached_nodes_are_ignored(rule, cases)
            check_greedy_rows(rule, cases)
            check_padding_order_is_ignored(rule, cases, topology)
    if rule.noise is not Noise.SHARED:
        check_losslessness(cast(WeighingRule, rule), seed)


def check_refuses_dynamic_trees(rule: Rule) -> None:
    """Checks that a rule that weighs sampled drafts refuses trees that keep only the most likely drafts."""
    try:
        rule.check(dynamic(1, 3, 4).shape)
    except InvalidConfig:
        return
    require(False, rule, "takes dynamic trees, whose tokens are not a sample of the draft's law; see `refuse_pruned`")


def random_cases(topology: Topology, seed: int = 0, sampled: bool = True, cases: int = CASES) -> Cases:
    """Returns random proposals with sparse random laws.

    Siblings are distinct and have a positive probability under the draft. A quarter of the tokens are missing (-1);
    nodes below a missing token keep their tokens, as in a drafter that draws whole levels.

    Args:
        topology: the tree of all proposals.
        seed: the seed of the random numbers.
        sampled: whether to include the draft's laws; otherwise the drafted tokens are point masses.
        cases: the number of proposals, M.
    """
    rng, nodes, tree = np.random.default_rng(seed), topology.shape.nodes, topology.tree
    shape = (cases, nodes, VOCAB_SIZE)
    weights = rng.dirichlet(np.full(VOCAB_SIZE, 0.7), (2, *shape[:2])) + 1e-6
    # Some tokens are impossible: never the target's first, and four remain to the draft, enough for all children.
    possible = np.stack(
        [rng.random(shape) < 0.8, rng.permuted(np.tile(np.arange(VOCAB_SIZE) < 4, (*shape[:2], 1)), axis=-1)]
    )
    possible[0, ..., 0] = True
    with np.errstate(divide="ignore"):
        law, draft = np.log(weights * possible)
    law, draft = (a - np.logaddexp.reduce(a, axis=-1, keepdims=True) for a in (law, draft))
    ranked = np.argsort(-(draft + rng.gumbel(size=shape)), axis=-1)
    tokens = ranked[:, np.maximum(topology.parents, 0), tree.ranks]
    tokens = np.where(rng.random(tokens.shape) < 0.25, -1, tokens)
    tokens[:, 0] = 0
    trees: Any = jax.tree.map(lambda a: np.broadcast_to(a, (cases, *a.shape)), tree)
    return Cases(_array(law), Proposal(_array(tokens, np.int32), trees, _array(draft) if sampled else None))


def rule_outcomes(rule: Rule, cases: Cases, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns the probability that each node stops the walk, `[M, N]`, and the law of the next token, `[M, N, V]`.

    For a coupled rule, both results are point masses, given one draw of the noise for all cases.
    """
    law, proposal = jnp.asarray(cases.law), jax.tree.map(jnp.asarray, cases.proposal)
    if rule.noise is not Noise.SHARED:
        return jax.device_get(stop_laws(cast(WeighingRule, rule), law, proposal))
    fixed: Any = _FixedNoise(cast(CoupledRule, rule), seed)
    return jax.device_get(stop_laws(fixed, law, proposal))


class _FixedNoise(NamedTuple):
    """A coupled rule under fixed noise, in the form of a rule that compares laws."""

    rule: CoupledRule
    seed: int

    def __call__(self, law: jax.Array, proposal: Proposal) -> StopLaw:
        noise = jax.random.gumbel(jax.random.key(self.seed), (proposal.tree.paths.shape[1], law.shape[1]))
        rows = Sampling(temperature=1.0).rows(1, law.shape[1])
        batched = jax.tree.map(lambda a: a[None], proposal)
        node, token = self.rule(lambda nodes: law[nodes], lambda depths: noise[depths], rows, batched)
        point = jnp.where(jnp.arange(law.shape[1]) == token, 0.0, -jnp.inf)
        return StopLaw(jax.nn.one_hot(node[0], law.shape[0]), lambda _: point)


def check_probabilities(rule: Rule, cases: Cases) -> None:
    """Checks that stop probabilities, and the next token's law at every possible stop, are finite and sum to 1."""
    chances, after = rule_outcomes(rule, cases)
    require(np.isfinite(chances).all(), rule, "has stop probabilities that are not finite")
    require((chances >= 0).all(), rule, "has negative stop probabilities")
    require(np.abs(chances.sum(-1) - 1).max() < 1e-5, rule, "has stop probabilities that do not sum to 1")
    laws = after[chances > 0]
    require(
        np.isfinite(laws).all() and np.abs(laws.sum(-1) - 1).max() < 1e-5,
        rule,
        "returns a law of the next token that does not sum to 1 at a possible stop",
    )


def check_stops_at_proposed_nodes(rule: Rule, cases: Cases) -> None:
    """Checks that no walk stops at, or below, a node without a proposed token."""
    chances, _ = rule_outcomes(rule, cases)
    require(not chances[~_reachable(cases)].any(), rule, "stops at, or below, a node where nothing is proposed")


def check_emits_possible_tokens(rule: Rule, cases: Cases) -> None:
    """Checks that no emitted token has probability 0 under the target, on the path or after it."""
    chances, after = rule_outcomes(rule, cases)
    tree, tokens = cases.proposal.tree, np.asarray(cases.proposal.tokens)
    above = np.take_along_axis(cases.law, np.maximum(tree.parents, 0)[..., None], 1)
    possible = np.take_along_axis(above, np.maximum(tokens, 0)[..., None], 2)[..., 0] > -np.inf
    possible[:, 0] = True
    path = (possible[:, None, :] | ~tree.ancestors).all(-1)
    require(not chances[~path].any(), rule, "accepts a token whose probability is 0")
    emitted = (chances[..., None] > 0) & (after > 0)
    require(not emitted[cases.law == -np.inf].any(), rule, "emits a token whose probability is 0")


def check_unreached_nodes_are_ignored(rule: Rule, cases: Cases) -> None:
    """Checks that the target's laws at unreachable nodes, and draft laws without children, do not matter."""
    live, proposal = _reachable(cases), cases.proposal
    law = np.where(live[..., None], cases.law, np.roll(cases.law, 1, axis=0))
    below = (proposal.tree.parents[:, None, :] == np.arange(live.shape[1])[:, None]) & (proposal.tokens >= 0)[:, None]
    if proposal.law is not None:
        proposal = proposal._replace(law=np.where(below.any(-1)[..., None], proposal.law, np.float32(np.nan)))
    _require_same(
        rule_outcomes(rule, cases),
        rule_outcomes(rule, Cases(law, proposal)),
        rule,
        "reads laws of nodes that cannot be reached",
    )


def check_greedy_rows(rule: Rule, cases: Cases) -> None:
    """Checks that the text of a greedy target, whose laws are point masses, does not depend on the proposal.

    A rule may accept less of the greedy path than was proposed: the token after the accepted part is then the proposed
    token.
    """
    point = cases.law.argmax(-1)
    law = np.where(np.arange(VOCAB_SIZE) == point[..., None], 0.0, -np.inf).astype(cases.law.dtype)
    chances, after = rule_outcomes(rule, Cases(law, cases.proposal))
    tree = cases.proposal.tree
    right = np.asarray(cases.proposal.tokens) == np.take_along_axis(point, np.maximum(tree.parents, 0), 1)
    right[:, 0] = True
    path = (right[:, None, :] | ~tree.ancestors).all(-1)
    require(np.all(chances[~path] < 1e-6), rule, "accepts a token of a greedy row that is not the greedy one")
    greedy = np.take_along_axis(after, point[..., None], -1)[..., 0]
    require(np.allclose(greedy[chances > 1e-6], 1, atol=1e-6), rule, "is not greedy after a path")


def check_padding_order_is_ignored(rule: Rule, cases: Cases, topology: Topology) -> None:
    """Checks that moving missing siblings, and all nodes below them, to the end changes nothing."""
    tokens = np.asarray(cases.proposal.tokens)
    live, parents = _reachable(cases), np.asarray(topology.parents)
    order = np.zeros_like(tokens)  # the old id of each new node
    moved = np.zeros_like(tokens)
    for m, alive in enumerate(live):
        new: dict[Any, int] = {-1: -1, 0: 0}
        for level in topology.levels[1:]:
            for node in sorted(level, key=lambda n: (new[parents[n]], not alive[n], n)):
                order[m, len(new) - 1] = node
                new[node] = len(new) - 1
        moved[m] = [new[parents[node]] for node in order[m]]
    trees = jax.vmap(lambda p: build(p, topology.shape))(moved)
    law, tokens = np.take_along_axis(cases.law, order[..., None], 1), np.take_along_axis(tokens, order, 1)
    draft: Any = cases.proposal.law
    draft = None if draft is None else np.take_along_axis(draft, order[..., None], 1)
    chances, after = rule_outcomes(rule, cases)
    before = np.take_along_axis(chances, order, 1), np.take_along_axis(after, order[..., None], 1)
    other = Cases(law, Proposal(_array(tokens, np.int32), jax.device_get(trees), draft))
    _require_same(before, rule_outcomes(rule, other), rule, "depends on the order of padding")


def check_losslessness(rule: WeighingRule, seed: int = 0, laws: int = 5) -> None:
    """Checks `rule.lossless` by enumeration: the bias of a round is below 1e-12, or above 1e-3 for some laws."""
    topology = from_paths([(0, 0), (1,)])
    try:
        rule.check(topology.shape)
    except InvalidConfig:
        topology = chain(3)
    biases = [bias(rule, topology, random_laws(seed + i, 3), random_laws(seed + 100 + i, 3)) for i in range(laws)]
    if rule.lossless:
        require(max(biases) < 1e-12, rule, f"is not lossless: a round has a bias of {max(biases):.1e}")
    else:
        require(max(biases) > 1e-3, rule, "has lossless = False, but seems to be lossless")


def _reachable(cases: Cases) -> np.ndarray:
    """Returns whether every node from the root to each node is proposed, `[M, N]`."""
    proposed = np.asarray(cases.proposal.tokens) >= 0
    proposed[:, 0] = True
    return np.all(proposed[:, None, :] | ~cases.proposal.tree.ancestors, axis=-1)


def _require_same(first: tuple, other: tuple, member: object, fault: str) -> None:
    live = first[0] > 0
    alike = np.allclose(first[0], other[0], atol=1e-6) and np.allclose(first[1][live], other[1][live], atol=1e-5)
    require(alike, member, fault)


def require(holds: Any, member: object, fault: str) -> None:
    """Raises AssertionError with the member's class and its fault, unless `holds` is true."""
    if not holds:
        raise AssertionError(f"{type(member).__name__} {fault}")


def _array(values: Any, dtype: Any = np.float32) -> Any:
    return np.asarray(values, dtype)
