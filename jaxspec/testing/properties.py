"""What every rule and every drafter must keep, as functions that raise `AssertionError` where one does not.

`check_rule(MyRule())` runs them all on a rule; the shipped ones pass through the same.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.analysis.enumeration import bias, ends, random_laws
from jaxspec.core.draw import Draw, Noise
from jaxspec.core.networks import LanguageModel
from jaxspec.core.protocols import CoupledRule, Drafter, Rule, WeighingRule
from jaxspec.core.records import Context, Ends, Params, Proposal
from jaxspec.core.sampling import Sampling
from jaxspec.core.tree import Topology, build, chain, from_paths
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Request, Weights
from jaxspec.errors import InvalidConfig

CHAIN = chain(4)
RAGGED = from_paths([(0, 0, 0), (0, 1), (1, 0), (2,)])
VOCAB = 6
CASES = 256


class Cases(NamedTuple):
    """M random proposals to one tree, and what the target says of them."""

    law: np.ndarray  # [M, N, V], the target's log-law
    proposal: Any  # a `Proposal` in numpy, every leaf with the axis M


def check_rule(rule: Rule, seed: int = 0) -> None:
    """Every property below, on chains and where the rule takes them on trees, with laws and with point masses."""
    for topology in (CHAIN, RAGGED):
        try:
            rule.check(topology.shape)
        except InvalidConfig:
            continue
        for sampled in (True, False):
            cases = random_cases(topology, seed, sampled)
            try:
                outcome(rule, cases)
            except InvalidConfig:  # it needs the draft's law
                assert not sampled
                continue
            ends_are_probabilities(rule, cases)
            ends_where_something_was_proposed(rule, cases)
            emits_nothing_impossible(rule, cases)
            rows_not_walked_are_not_read(rule, cases)
            greedy_rows_are_greedy(rule, cases)
            padding_may_stand_anywhere(rule, cases, topology)
    if rule.noise is not Noise.SHARED:
        is_lossless_if_it_says_so(cast(WeighingRule, rule), seed)


def random_cases(topology: Topology, seed: int = 0, sampled: bool = True, cases: int = CASES) -> Cases:
    """Sparse random laws; siblings distinct, of probability above 0 under the draft, a quarter of them missing.

    Below a missing node tokens stand all the same: a drafter that draws whole levels leaves them there.
    """
    rng, nodes, tree = np.random.default_rng(seed), topology.shape.nodes, topology.tree
    shape = (cases, nodes, VOCAB)
    weights = rng.dirichlet(np.full(VOCAB, 0.7), (2, *shape[:2])) + 1e-6
    # Some tokens are impossible, but not the target's first, nor so many of the draft's that children are missing.
    some = np.stack([rng.random(shape) < 0.8, rng.permuted(np.tile(np.arange(VOCAB) < 4, (*shape[:2], 1)), axis=-1)])
    some[0, ..., 0] = True
    with np.errstate(divide="ignore"):
        law, draft = np.log(weights * some)
    law, draft = (a - np.logaddexp.reduce(a, axis=-1, keepdims=True) for a in (law, draft))
    ranked = np.argsort(-(draft + rng.gumbel(size=shape)), axis=-1)
    tokens = ranked[:, np.maximum(topology.parents, 0), tree.ranks]
    tokens = np.where(rng.random(tokens.shape) < 0.25, -1, tokens)
    tokens[:, 0] = 0
    trees: Any = jax.tree.map(lambda a: np.broadcast_to(a, (cases, *a.shape)), tree)
    return Cases(_array(law), Proposal(_array(tokens, np.int32), trees, _array(draft) if sampled else None))


def outcome(rule: Rule, cases: Cases, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Where each walk ends, `[M, N]`, and the law of the token after every end, `[M, N, V]`.

    Those of a coupled rule are certain: one draw of its noise for every case, by depth.
    """
    law, proposal = jnp.asarray(cases.law), jax.tree.map(jnp.asarray, cases.proposal)
    if rule.noise is not Noise.SHARED:
        return jax.device_get(ends(cast(WeighingRule, rule), law, proposal))
    certain: Any = _Certain(cast(CoupledRule, rule), seed)
    return jax.device_get(ends(certain, law, proposal))


class _Certain(NamedTuple):
    """A coupled rule under noise that is a function of the case's depth alone."""

    rule: CoupledRule
    seed: int

    def __call__(self, law: jax.Array, proposal: Proposal) -> Ends:
        noise = jax.random.gumbel(jax.random.key(self.seed), (proposal.tree.paths.shape[1], law.shape[1]))
        row = jax.tree.map(lambda a: a[0], Sampling(temperature=1.0).rows(1, law.shape[1]))
        node, token = self.rule(law, noise, row, proposal)
        point = jnp.where(jnp.arange(law.shape[1]) == token, 0.0, -jnp.inf)
        return Ends(jax.nn.one_hot(node, law.shape[0]), lambda _: point)


def ends_are_probabilities(rule: Rule, cases: Cases) -> None:
    """Chances of ends are finite, at least 0, and sum to 1; so are the laws after every end that may happen."""
    chances, after = outcome(rule, cases)
    _say(np.isfinite(chances).all(), rule, "has chances that are not finite")
    _say((chances >= 0).all(), rule, "has chances below 0")
    _say(np.abs(chances.sum(-1) - 1).max() < 1e-5, rule, "has chances that do not sum to 1")
    laws = after[chances > 0]
    _say(np.isfinite(laws).all() and np.abs(laws.sum(-1) - 1).max() < 1e-5, rule, "has no law after some end")


def ends_where_something_was_proposed(rule: Rule, cases: Cases) -> None:
    """Never at a node without a token, nor anywhere below one."""
    chances, _ = outcome(rule, cases)
    _say(not chances[~_reachable(cases)].any(), rule, "ends at a node where nothing is proposed, or below one")


def emits_nothing_impossible(rule: Rule, cases: Cases) -> None:
    """No token of probability 0 under the target, neither on the path nor after it."""
    chances, after = outcome(rule, cases)
    tree, tokens = cases.proposal.tree, np.asarray(cases.proposal.tokens)
    above = np.take_along_axis(cases.law, np.maximum(tree.parents, 0)[..., None], 1)
    possible = np.take_along_axis(above, np.maximum(tokens, 0)[..., None], 2)[..., 0] > -np.inf
    possible[:, 0] = True
    path = (possible[:, None, :] | ~tree.ancestors).all(-1)
    _say(not chances[~path].any(), rule, "keeps a token whose probability is 0")
    emitted = (chances[..., None] > 0) & (after > 0)
    _say(not emitted[cases.law == -np.inf].any(), rule, "emits a token whose probability is 0")


def rows_not_walked_are_not_read(rule: Rule, cases: Cases) -> None:
    """Nothing changes with the target's laws at unproposed nodes, nor with NaN for a draft law without children."""
    live, proposal = _reachable(cases), cases.proposal
    law = np.where(live[..., None], cases.law, np.roll(cases.law, 1, axis=0))
    below = (proposal.tree.parents[:, None, :] == np.arange(live.shape[1])[:, None]) & (proposal.tokens >= 0)[:, None]
    if proposal.law is not None:
        proposal = proposal._replace(law=np.where(below.any(-1)[..., None], proposal.law, np.float32(np.nan)))
    _same(outcome(rule, cases), outcome(rule, Cases(law, proposal)), rule, "reads rows that are not walked")


def greedy_rows_are_greedy(rule: Rule, cases: Cases) -> None:
    """Where the target's laws are points, the text is that of the points, whatever was proposed."""
    point = cases.law.argmax(-1)
    law = np.where(np.arange(VOCAB) == point[..., None], 0.0, -np.inf).astype(cases.law.dtype)
    chances, after = outcome(rule, Cases(law, cases.proposal))
    tree = cases.proposal.tree
    right = np.asarray(cases.proposal.tokens) == np.take_along_axis(point, np.maximum(tree.parents, 0), 1)
    right[:, 0] = True
    path = (right[:, None, :] | ~tree.ancestors).all(-1)
    deepest = np.where(path, tree.depths, -1).argmax(-1)
    rows = np.arange(len(deepest))
    _say(np.allclose(chances[rows, deepest], 1, atol=1e-6), rule, "does not keep all of a greedy path")
    _say(np.allclose(after[rows, deepest, point[rows, deepest]], 1, atol=1e-6), rule, "is not greedy after a path")


def padding_may_stand_anywhere(rule: Rule, cases: Cases, topology: Topology) -> None:
    """Siblings that are missing may as well stand last, with all that is below them."""
    tokens = np.asarray(cases.proposal.tokens)
    live, parents = _reachable(cases), np.asarray(topology.parents)
    order = np.zeros_like(tokens)  # by new id, the old one
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
    chances, after = outcome(rule, cases)
    before = np.take_along_axis(chances, order, 1), np.take_along_axis(after, order[..., None], 1)
    other = Cases(law, Proposal(_array(tokens, np.int32), jax.device_get(trees), draft))
    _same(before, outcome(rule, other), rule, "depends on where padding stands")


def is_lossless_if_it_says_so(rule: WeighingRule, seed: int = 0, laws: int = 5) -> None:
    """By enumeration: the bias of a round is below 1e-12 for every pair of laws, or above 1e-3 for some."""
    topology = from_paths([(0, 0), (1,)])
    try:
        rule.check(topology.shape)
    except InvalidConfig:
        topology = chain(3)
    found = [bias(rule, topology, random_laws(seed + i, 3), random_laws(seed + 100 + i, 3)) for i in range(laws)]
    if rule.lossless:
        _say(max(found) < 1e-12, rule, f"is not lossless: a round is off by {max(found):.1e}")
    else:
        _say(max(found) > 1e-3, rule, "says that it is lossy, and seems lossless")


def check_drafter(
    drafter: Drafter, params: Params, target: LanguageModel, target_params: Params, prompts: Sequence[Sequence[int]]
) -> Proposal:
    """What a drafter proposes after these prompts is a tree of its shape; its laws are laws, of its tokens.

    Returns:
        The proposals `[B, N]`, drawn with fresh noise.
    """
    batch, vocab, longest = len(prompts), target.vocab, max(map(len, prompts))
    decoder = Decoder(target, drafter, _Fresh(), chunk=4)
    tokens = np.zeros((batch, longest), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt
    count = jnp.asarray([len(prompt) for prompt in prompts])
    keys = jax.random.split(jax.random.key(0), batch)
    stops, rows = jnp.full((batch, 1), -1), Sampling(temperature=1.0).rows(batch, vocab)
    request = Request(jnp.asarray(tokens), count, jnp.full((batch,), 8), keys, stops, rows)
    weights = Weights(target_params, params)

    @jax.jit
    def propose(weights: Weights, request: Request) -> Proposal:
        state = decoder.prefill(weights, decoder.init(weights, request, decoder.slots(longest + 8)))
        draw = Draw(Noise.FRESH, state.key, state.length, state.sampling, jnp.array(True), vocab)
        context = Context(state.tokens, state.length, state.cache, weights.target)
        return drafter.propose(weights.draft, state.draft, context, draw)[0]

    proposal: Any = jax.device_get(propose(weights, request))
    shape, tree, tokens = drafter.shape, proposal.tree, np.array(proposal.tokens)
    sizes = (shape.nodes, shape.width), (shape.nodes, shape.depth + 1)
    _say((tree.children.shape[-2:], tree.paths.shape[-2:]) == sizes, drafter, "has another tree than its shape says")
    _say(tokens.shape == (batch, shape.nodes), drafter, "has another number of nodes than its shape says")
    parents = np.broadcast_to(tree.parents, tokens.shape)
    expected = jax.device_get(jax.vmap(lambda p: build(p, shape))(parents))
    same = [np.array_equal(np.broadcast_to(a, b.shape), b) for a, b in zip(tree, expected)]
    _say(all(same), drafter, "has a tree whose tables are not those of its parents")
    tokens[:, 0] = -1
    _say(((tokens >= -1) & (tokens < vocab)).all(), drafter, "proposes tokens that do not exist")
    siblings = (parents[:, :, None] == parents[:, None, :]) & ~np.eye(shape.nodes, dtype=bool)
    twice = siblings & (tokens[:, :, None] == tokens[:, None, :]) & (tokens >= 0)[:, :, None]
    _say(not twice.any(), drafter, "proposes a token twice below one node")
    if proposal.law is not None:
        proposed = (tokens >= 0) & np.take_along_axis((tokens >= 0) | (parents < 0), np.maximum(parents, 0), 1)
        above = np.take_along_axis(proposal.law, np.maximum(parents, 0)[..., None], 1)
        own = np.take_along_axis(above, np.maximum(tokens, 0)[..., None], 2)[..., 0]
        _say((own[proposed] > -np.inf).all(), drafter, "proposes a token that its law excludes")
        _say(np.allclose(np.exp(above[proposed]).sum(-1), 1, atol=1e-5), drafter, "has a law that is none")
    return proposal


class _Fresh:
    """Takes every tree; for a decoder that is only to read prompts."""

    noise, lossless = Noise.FRESH, True

    def check(self, shape: Any) -> None:
        pass


def _reachable(cases: Cases) -> np.ndarray:
    """[M, N]: every node from the root to this one is proposed."""
    there = np.asarray(cases.proposal.tokens) >= 0
    there[:, 0] = True
    return np.all(there[:, None, :] | ~cases.proposal.tree.ancestors, axis=-1)


def _same(one: tuple, other: tuple, member: object, fault: str) -> None:
    live = one[0] > 0
    alike = np.allclose(one[0], other[0], atol=1e-6) and np.allclose(one[1][live], other[1][live], atol=1e-5)
    _say(alike, member, fault)


def _say(holds: Any, member: object, fault: str) -> None:
    if not holds:
        raise AssertionError(f"{type(member).__name__} {fault}")


def _array(values: Any, dtype: Any = np.float32) -> Any:
    return np.asarray(values, dtype)
