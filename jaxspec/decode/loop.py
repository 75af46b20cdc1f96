"""The decoder: one `lax.while_loop` from prompt to last token, in pure functions of arrays.

In a round the drafter proposes a tree of tokens, the target scores all of them in one call, the rule accepts a path
from the root, and that path and the target's next token are committed. Plain autoregressive decoding uses the tree of
one node.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array

from jaxspec.core import sizes
from jaxspec.core.checks import check_member, flag_or_whole, whole
from jaxspec.core.drafter import Drafter, require_drafter
from jaxspec.core.draw import Draw, Noise
from jaxspec.core.networks import CompiledTarget, LanguageModel, with_taps
from jaxspec.core.noise import RoundNoise
from jaxspec.core.processor import Shared, map_rows
from jaxspec.core.records import Cache, Context, Proposal, Status, Window
from jaxspec.core.rule import Rule
from jaxspec.core.sampling import PreparedSampling
from jaxspec.core.schedule import Constant, Schedule, check_widths
from jaxspec.core.tree import TreeShape
from jaxspec.decode import lifecycle, logprobs
from jaxspec.decode.commit import Outcome, commit, cut
from jaxspec.decode.forcing import draft_forced
from jaxspec.decode.prefill import prefill
from jaxspec.decode.state import Request, Result, State, Weights
from jaxspec.decode.target_call import MAX_PATH, read, score, widen
from jaxspec.decode.verify import (
    Processing,
    accepted_path,
    apply_rule,
    complete_proposal,
    select_likeliest,
    take_first_nodes,
)
from jaxspec.errors import InvalidConfig, shown

NO_LIMIT = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A target, a drafter, a rule and a schedule. Static and hashable: equal decoders compile once.

    Attributes:
        target: the model whose text is decoded.
        drafter: proposes trees of tokens.
        rule: decides how much of a tree is accepted.
        schedule: decides how deep each row drafts, and how many nodes.
        chunk: the number of prompt tokens read per call of the target.
        widths: widths of target calls to compile, in tokens, besides the number of nodes of the tree and the widths of
            the schedule. A round runs at the smallest width that holds every drafted node of every row; by default a
            round without drafts runs at width 1.
        width_matched: whether every target call has as many tokens as the tree has nodes, whatever was drafted; or a
            number of tokens, from 2, that every target call then has, with any tree that fits. On a CPU the bits of the
            text then do not depend on the drafter; on GPUs and TPUs this has not been shown.
        top_logprobs: the number of most likely tokens recorded with each emitted token, in rows that ask for
            log-probabilities; see `Request`.

    Raises:
        InvalidConfig: an attribute has another type or is out of range, the rule does not support the drafter's trees,
            or the target does not give the features that the drafter reads.
    """

    target: LanguageModel
    drafter: Drafter
    rule: Rule
    schedule: Schedule = Constant()
    chunk: int = sizes.PROMPT_CHUNK
    widths: tuple[int, ...] = (1,)
    width_matched: bool | int = False
    top_logprobs: int = 0

    def __post_init__(self):
        object.__setattr__(self, "chunk", whole("chunk", self.chunk))
        object.__setattr__(self, "top_logprobs", whole("top_logprobs", self.top_logprobs, 0))
        widest = sizes.MAX_NODES + 1
        object.__setattr__(self, "width_matched", flag_or_whole("width_matched", self.width_matched, 2, widest))
        check_widths(self.widths)
        if not isinstance(self.target, LanguageModel) or isinstance(self.target, type):
            raise InvalidConfig(f"target must be a LanguageModel, such as model.lm; got {shown(self.target)}")
        require_drafter(self.drafter)
        check_member("rule", self.rule, Rule)
        check_member("schedule", self.schedule, Schedule)
        self.rule.check(self.drafter.shape)
        if self.canonical_width is not None:
            _check_fits(self.drafter.shape, self.canonical_width)
        limit = self.target.max_exact_depth if isinstance(self.target, CompiledTarget) else None
        if limit is not None and self.drafter.shape.depth > limit:
            raise InvalidConfig(
                f"the draft tree is {self.drafter.shape.depth} deep, and a target with exact=True allows a depth of "
                f"{limit}; use a shallower tree"
            )
        _ = self.network  # refuses a target without the features that the drafter reads

    @functools.cached_property
    def network(self) -> LanguageModel:
        """The target, with the features that the drafter reads."""
        return with_taps(self.target, self.drafter.needs.taps)

    @functools.cached_property
    def call_widths(self) -> tuple[int, ...]:
        """The widths of target calls, in ascending order; the last is the number of nodes of the tree."""
        nodes = self.drafter.shape.nodes
        narrower = () if self.width_matched else {*self.widths, *self.schedule.widths}
        return (*sorted(width for width in narrower if width < nodes), nodes)

    @property
    def canonical_width(self) -> int | None:
        """The number of tokens of every target call, if `width_matched` is a number; else None."""
        return None if isinstance(self.width_matched, bool) else self.width_matched

    def slots(self, length: int) -> int:
        """Returns the cache capacity for a text of `length` tokens, with room for one more window after it."""
        return sizes.required_slots(length, max(self.drafter.shape.nodes, self.drafter.shape.depth + 1, self.chunk))

    def init(self, weights: Weights, request: Request, capacity: int) -> State:
        """Returns the state of a batch of prompts before any of them is read; `slots` computes `capacity`."""
        members = self.target, self.drafter, self.schedule
        return lifecycle.init(*members, weights, request, capacity, self.top_logprobs)

    def prefill(self, weights: Weights, state: State) -> State:
        """Reads all text that target and drafter have not read yet; the target stops before the root."""
        return prefill(self.network, self.drafter, self.chunk, weights, state)

    def step(self, weights: Weights, state: State, max_depth: Array | int | None = None) -> State:
        """Runs one round: every running row drafts to `max_depth` at most, and commits 1 to D + 1 tokens."""
        return self._run_round(weights, state, max_depth, PreparedSampling.of(state.sampling))

    def _run_round(
        self, weights: Weights, state: State, max_depth: Array | int | None, sampling: PreparedSampling
    ) -> State:
        """Computes `step`, with the settings of the state's rows."""
        given, state, shape = state.sampling, state._replace(sampling=sampling), self.drafter.shape
        deepest = shape.depth if max_depth is None else jnp.minimum(max_depth, shape.depth)
        running = state.status == Status.RUNNING
        limit = jnp.where(running, jnp.clip(self.schedule.limit(state.schedule), 0, deepest), 0)

        noise = RoundNoise(state.key, state.length, sampling.any_sampled, self.target.vocab)
        if self.rule.noise is Noise.SHARED and self.drafter.draws:
            noise = noise.share(shape.depth + 1, jnp.max(limit) + 1)
        count = functools.partial(self.schedule.count_nodes, state.schedule)
        draw = Draw(self.rule.noise, noise, sampling, limit, self.schedule.stop_after, count, state.processed)
        context = Context(state.tokens, state.length, state.cache, weights.target, state.history)
        proposal, draft = self.drafter.propose(weights.draft, state.draft, context, draw)
        proposal = complete_proposal(proposal, state.tokens, state.length, limit, self.target.vocab)
        allowed_depth = jnp.where(running, deepest, 0)
        proposal = draft_forced(state.sampling.processors, state.processed, proposal, allowed_depth)

        drafted = proposal.tokens.at[:, 0].set(-1) >= 0
        needed = jnp.max(jnp.where(drafted, jnp.arange(shape.nodes), 0)) + 1

        def verify(width: int, cache: Cache) -> Outcome:
            return self._verify(
                weights, state._replace(cache=cache), take_first_nodes(proposal, width), shape.depth, noise
            )

        widths = self.call_widths
        calls = [functools.partial(verify, width) for width in widths]
        outcome = _call(calls, (jnp.asarray(widths) < needed).sum(), state.cache)
        members, together = (self.drafter, self.schedule), self.rule.noise is Noise.SHARED
        done = commit(*members, weights, state._replace(draft=draft), proposal, outcome, drafted, together)
        return done._replace(sampling=given)

    def run(
        self,
        weights: Weights,
        state: State,
        max_rounds: Array | int = NO_LIMIT,
        least: Array | int = 1,
        max_depth: Array | int | None = None,
    ) -> State:
        """Runs rounds while at least `least` rows are running.

        Every round commits a token of each running row or ends the row, so the number of rounds is at most the largest
        number of tokens that a row has left.

        Args:
            weights: parameters of target and drafter.
            state: the state after prefill.
            max_rounds: the largest number of rounds that are run; may be traced.
            least: the loop ends when fewer rows than this are running; an array counts as its maximum. May be traced.
            max_depth: the greatest depth of a draft; may be traced. None for the depth of the tree.
        """
        least = jnp.maximum(jnp.max(least), 1)
        max_rounds = jnp.minimum(max_rounds, jnp.max(state.limit - state.length))
        sampling = PreparedSampling.of(state.sampling)

        def unfinished(carry: tuple[State, Array]) -> Array:
            state, rounds = carry
            return ((state.status == Status.RUNNING).sum() >= least) & (rounds < max_rounds)

        def run_round(carry: tuple[State, Array]) -> tuple[State, Array]:
            state, rounds = carry
            return self._run_round(weights, state, max_depth, sampling), rounds + 1

        # The counter bounds the loop by integers, whatever the logits are.
        return lax.while_loop(unfinished, run_round, (state, jnp.int32(0)))[0]

    def generate(self, weights: Weights, request: Request, capacity: int) -> Result:
        """Decodes one prompt or a batch to the last token; under `jax.vmap` it still runs one batched program."""
        if request.tokens.ndim == 1:
            batched = jax.tree.map(lambda a: a[None], request)
            return jax.tree.map(lambda a: a[0], _batched(self, capacity)(weights, batched))
        return _batched(self, capacity)(weights, request)

    def _verify(self, weights: Weights, state: State, proposal: Proposal, depth: int, noise: RoundNoise) -> Outcome:
        """Calls the target on the proposal's nodes, applies the rule, and commits the accepted path to the cache.

        Paths are padded to `depth` + 1 nodes.
        """
        tree = proposal.tree
        positions = state.cache.length[:, None] + tree.depths
        paths = tree.paths if self.width_matched else None
        window = Window(jnp.maximum(proposal.tokens, 0), positions, tree.ancestors, paths)
        if self.canonical_width is not None:
            window = widen(window, self.canonical_width)
        features, entries = read(self.network, weights.target, window, state.cache)
        logits = score(self.network, weights.target, features)[:, : proposal.tokens.shape[1]]
        processing = Processing.of(state.sampling, state.processed, proposal)
        verdict, finite = apply_rule(self.rule, noise, processing, logits, proposal)
        path, tokens = accepted_path(proposal, verdict)
        nodes, rest = path, ((0, 0), (0, depth + 1 - path.shape[1]))
        path, tokens = jnp.pad(path, rest, constant_values=-1), jnp.pad(tokens, rest, mode="edge")
        at = jnp.maximum(path, 0)
        count, status = cut(state, path, tokens, finite(at, tokens))
        cache = self.network.commit(state.cache, entries, nodes, count, tokens[:, -1])

        recorded = None
        if state.recorded is not None:
            asking = state.recorded & (state.status == Status.RUNNING)
            longest = jnp.where(asking, (path >= 0).sum(-1), 0).max()
            settings = processing, self.top_logprobs, self.rule.lossless
            recorded = logprobs.compute_logprobs(path, tokens, longest, logits, *settings)
        seen = None
        if observed := self.drafter.needs.observed:
            seen = select_likeliest(proposal.tokens, logits, observed, self.drafter.shape.nodes)
        return Outcome(
            path,
            tokens,
            count,
            status,
            cache,
            jnp.take_along_axis(features, at[:, :, None], 1),
            recorded,
            seen,
        )


def _check_fits(shape: TreeShape, width: int) -> None:
    """Refuses trees that do not fit into target calls of `width` tokens.

    Raises:
        InvalidConfig: the tree has more nodes than tokens, or a longer path than such calls have.
    """
    if shape.nodes > width:
        raise InvalidConfig(
            f"the draft tree has {shape.nodes} nodes, and width_matched={width} allows {width} tokens in a call of the "
            "target; use a smaller tree or a larger number"
        )
    if shape.depth >= MAX_PATH:
        raise InvalidConfig(
            f"the draft tree is {shape.depth} deep, and width_matched={width} allows a depth of {MAX_PATH - 1}; use a "
            "shallower tree"
        )


def _call(calls: Sequence[Callable[[Cache], Outcome]], chosen: Array, cache: Cache) -> Outcome:
    """Returns the outcome of the chosen call. Each call is in a `while_loop` that runs at most once.

    A loop writes to the cache in place, and writes only the entries of its own width. A branch of a conditional would
    copy the cache, and XLA:GPU would also copy each layer of the cache before reading it.
    """
    if len(calls) == 1:
        return calls[0](cache)
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(calls[0], cache))
    carry = chosen, empty._replace(cache=cache)
    for number, call in enumerate(calls):
        with jax.named_scope("alternatives"):  # a name in compiled programs; only the chosen loop runs
            carry = lax.while_loop(
                lambda carry, number=number: carry[0] == number,
                lambda carry, call=call: (jnp.full_like(chosen, -1), call(carry[1].cache)),
                carry,
            )
    return carry[1]


def _is_shared(leaf: Any) -> bool:
    return isinstance(leaf, Shared)


@functools.lru_cache(maxsize=64)
def _batched(decoder: Decoder, capacity: int):
    """Returns `generate` for a batch, with a vmap rule that calls the function itself on a larger batch.

    By default a vmapped `while_loop` selects over its whole carry, caches included, in every round. With this rule any
    nesting of vmaps runs the one batched program.
    """

    @custom_vmap
    def generate(weights: Weights, request: Request) -> Result:
        state = decoder.init(weights, request, capacity)
        state = decoder.run(weights, decoder.prefill(weights, state))
        return Result(state.tokens, state.length, state.start, state.status, state.log, state.logprobs)

    @generate.def_vmap
    def rule(size, batched, weights, request):
        of_all = [leaf.value for leaf in jax.tree.leaves(batched[1], is_leaf=_is_shared) if _is_shared(leaf)]
        if any(jax.tree.leaves((batched[0], of_all))):  # these differ between examples, which cannot share a batch

            def generate_example(index):
                arguments = jax.tree.map(
                    lambda leaf, mapped: leaf[index] if mapped else leaf, (weights, request), tuple(batched)
                )
                return generate(*arguments)

            out = lax.map(generate_example, jnp.arange(size))
        else:
            full = map_rows(
                lambda leaf, mapped: leaf if mapped else jnp.broadcast_to(leaf[None], (size, *leaf.shape)),
                request,
                batched[1],
            )
            # Sizes are written out, because -1 is ambiguous for arrays of width 0, as without stop ids.
            flat = map_rows(lambda leaf: leaf.reshape(size * leaf.shape[1], *leaf.shape[2:]), full)
            out = generate(weights, flat)
            out = jax.tree.map(lambda leaf: leaf.reshape(size, len(leaf) // size, *leaf.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return generate
