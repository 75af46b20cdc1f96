"""The decoder: one `lax.while_loop` from prompt to last token, in pure functions of arrays.

A round: the drafter proposes a tree, the target reads it in one call, the rule keeps a path, and path and
target's token are committed. Plain autoregression is the tree of one node.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Int

from jaxspec.core import cache as caches
from jaxspec.core import noise, sizes
from jaxspec.core.draw import Draw, Noise
from jaxspec.core.laws import scores
from jaxspec.core.networks import LanguageModel
from jaxspec.core.protocols import Drafter, Rule, Schedule
from jaxspec.core.records import Context, Proposal, Status, Window
from jaxspec.core.sampling import GREEDY
from jaxspec.core.schedule import Constant
from jaxspec.decode import logprobs
from jaxspec.decode.commit import Outcome, commit
from jaxspec.decode.prefill import prefill
from jaxspec.decode.proposal import first_nodes, kept, rooted
from jaxspec.decode.state import Request, Result, State, Weights
from jaxspec.decode.verdict import judge
from jaxspec.errors import InvalidConfig

FOREVER = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Target, drafter and rule, put together; static and hashable, so that equal ones compile once.

    Attributes:
        target: scores the text.
        drafter: proposes trees.
        rule: decides what of them is kept.
        schedule: decides how deep they may be.
        chunk: tokens of a prompt read at once.
        widths: of the target calls, besides that of the whole tree and those of the schedule. A round runs at the
            smallest that holds every node some row has a draft at; by default one without a draft runs at width one.
            With none every call has the tree's width: the width-matched reference, whose bits do not depend on the
            drafts.
        top_logprobs: the likeliest tokens, and their log-probabilities, that are recorded beside every emitted token of
            a row that asks for log-probabilities; see `Request`.
    """

    target: LanguageModel
    drafter: Drafter
    rule: Rule
    schedule: Schedule = Constant()
    chunk: int = sizes.CHUNK
    widths: tuple[int, ...] = (1,)
    top_logprobs: int = 0

    def __post_init__(self):
        shape = self.drafter.shape
        if shape.pruned and self.rule.noise is Noise.FRESH:
            raise InvalidConfig(
                f"{type(self.rule).__name__} weighs the law its drafts were sampled from, and a dynamic tree keeps "
                "only the likeliest, which are no sample; use a rule whose drafter draws with the target's noise or "
                "with none ('coupled', 'deterministic'), or a fixed tree"
            )
        self.rule.check(shape)

    def slots(self, length: int) -> int:
        """The cache capacity that a text of `length` tokens needs: the last window still fits behind it."""
        return sizes.slots(length, max(self.drafter.shape.nodes, self.drafter.shape.depth + 1, self.chunk))

    def init(self, weights: Weights, request: Request, capacity: int) -> State:
        """The state of a batch of prompts, before anything was read. `capacity`: see `slots`."""
        batch, size = request.tokens.shape
        cache = self.target.init_cache(batch, capacity)
        slots = cache.kv.keys.shape[3]
        tokens = jnp.zeros((batch, slots), jnp.int32).at[:, :size].set(request.tokens)
        zeros = jnp.zeros((batch,), jnp.int32)
        return State(
            tokens=tokens,
            length=request.count,
            start=request.count,
            limit=request.count + request.new_tokens,
            status=jnp.where(request.new_tokens > 0, Status.RUNNING, Status.LENGTH).astype(jnp.int32),
            key=request.key,
            stop_ids=request.stop_ids,
            sampling=request.sampling,
            cache=cache,
            absorbed=zeros,
            draft=self.drafter.init(weights.draft, batch, slots),
            schedule=self.schedule.init(batch, self.drafter.shape),
            log=jnp.zeros((batch, slots, 3 + self.drafter.shape.depth), jnp.int32),
            round=zeros,
            recorded=request.logprobs,
            logprobs=None if request.logprobs is None else logprobs.empty(batch, slots, self.top_logprobs),
        )

    def extend(self, state: State, request: Request) -> State:
        """The state with more text appended (the next turn of a chat; nothing is fine too) and a new budget.

        Only the new tokens will be read. `request.key` is not used: a row keeps its key, its noise is a
        function of the position.
        """
        if state.recorded is None and request.logprobs is not None:
            raise InvalidConfig("the state records no log-probabilities: its first request had logprobs None")
        rows = jnp.arange(state.length.shape[0])[:, None]
        places = state.length[:, None] + jnp.arange(request.tokens.shape[1])  # padding may stand past the end
        tokens = state.tokens.at[rows, places].set(request.tokens, mode="drop")
        length = state.length + request.count
        return state._replace(
            tokens=tokens,
            length=length,
            start=length,
            limit=length + request.new_tokens,
            status=jnp.where(request.new_tokens > 0, Status.RUNNING, Status.LENGTH).astype(jnp.int32),
            stop_ids=request.stop_ids,
            sampling=request.sampling,
            log=jnp.zeros_like(state.log),
            round=jnp.zeros_like(state.round),
            recorded=state.recorded if request.logprobs is None else request.logprobs,
        )

    def row_axes(self, weights: Weights, request: Request, capacity: int) -> State:
        """The axis along which each leaf of a state of such requests has its rows; -1: it has none. Shapes will do."""

        def of(batch: int) -> State:
            rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((batch, *a.shape[1:]), a.dtype), request)
            return jax.eval_shape(lambda weights, rows: self.init(weights, rows, capacity), weights, rows)

        def axis(one: jax.ShapeDtypeStruct, two: jax.ShapeDtypeStruct) -> int:
            return next((i for i, (m, n) in enumerate(zip(one.shape, two.shape)) if m != n), -1)

        return jax.tree.map(axis, of(1), of(2))

    def replace(self, weights: Weights, state: State, fresh: State, place: Int[Array, "1"]) -> State:
        """The state with the row at `place` taken by the only row of `fresh`, of the same capacity; -1: by none."""
        settings = fresh.sampling, fresh.recorded
        like = Request(fresh.tokens, fresh.length, fresh.limit, fresh.key, fresh.stop_ids, *settings)
        at = jnp.maximum(place[0], 0)

        def put(old: Array, new: Array, axis: int) -> Array:
            if axis < 0:
                return old
            new = jnp.where(place[0] < 0, lax.dynamic_slice_in_dim(old, at, 1, axis), new)
            return lax.dynamic_update_slice_in_dim(old, new, at, axis)

        return jax.tree.map(put, state, fresh, self.row_axes(weights, like, state.tokens.shape[1]))

    def truncate(self, weights: Weights, state: State, length: Int[Array, "B"]) -> State:
        """The state with its text cut. What drafters took in cannot be taken back: all is read again."""
        batch, slots = state.tokens.shape
        return state._replace(
            length=length,
            cache=state.cache._replace(length=jnp.zeros_like(length)),
            absorbed=jnp.zeros_like(length),
            draft=self.drafter.init(weights.draft, batch, slots),
        )

    def prefill(self, weights: Weights, state: State) -> State:
        """Reads all text that was not read yet, in chunks: the target up to the root, the drafter with it."""
        return prefill(self.target, self.drafter, self.chunk, weights, state)

    def step(self, weights: Weights, state: State) -> State:
        """One round: every running row emits 1 to D + 1 tokens."""
        shape = self.drafter.shape
        wanted = jnp.any(state.sampling.temperature >= GREEDY)
        running = state.status == Status.RUNNING
        limit = jnp.where(running, jnp.clip(self.schedule.limit(state.schedule), 0, shape.depth), 0)

        shared = None
        if self.rule.noise is Noise.SHARED and self.drafter.draws:
            # Once for drafter and rule, as deep as some row may draft.
            depths = jnp.where(wanted, jnp.max(limit) + 1, 0)
            shared = noise.ahead(state.key, state.length, shape.depth + 1, depths, self.target.vocab)
        draw = Draw(
            self.rule.noise,
            state.key,
            state.length,
            state.sampling,
            wanted,
            self.target.vocab,
            limit,
            self.schedule.doubts,
            shared,
        )
        context = Context(state.tokens, state.length, state.cache, weights.target)
        proposal, draft = self.drafter.propose(weights.draft, state.draft, context, draw)
        proposal = rooted(proposal, state.tokens, state.length, limit, self.target.vocab)

        drafted = proposal.tokens.at[:, 0].set(-1) >= 0
        needed = jnp.max(jnp.where(drafted, jnp.arange(shape.nodes), 0)) + 1
        wished = {*self.widths, *self.schedule.widths} if self.widths else set()
        widths = (*sorted(width for width in wished if width < shape.nodes), shape.nodes)

        def verify(width: int) -> Outcome:
            return self._verify(weights, state, first_nodes(proposal, width), shape.depth, wanted, shared)

        calls = [functools.partial(verify, width) for width in widths]
        outcome = lax.switch(jnp.searchsorted(jnp.asarray(widths), needed), calls) if len(calls) > 1 else calls[0]()
        return commit(self.drafter, self.schedule, weights, state._replace(draft=draft), proposal, outcome, drafted)

    def run(self, weights: Weights, state: State, max_rounds: Array | int = FOREVER, least: Array | int = 1) -> State:
        """Rounds while at least `least` rows are running, `max_rounds` at most; both may be traced."""
        least = jnp.maximum(jnp.max(least), 1)

        def going(carry: tuple[State, Array]) -> Array:
            state, played = carry
            return ((state.status == Status.RUNNING).sum() >= least) & (played < max_rounds)

        def play(carry: tuple[State, Array]) -> tuple[State, Array]:
            state, played = carry
            return self.step(weights, state), played + 1

        return lax.while_loop(going, play, (state, jnp.int32(0)))[0]

    def generate(self, weights: Weights, request: Request, capacity: int) -> Result:
        """Prompt to last token, for one prompt or a batch; `jax.vmap` of it runs one batched program."""
        if request.tokens.ndim == 1:
            batched = jax.tree.map(lambda a: a[None], request)
            return jax.tree.map(lambda a: a[0], _batched(self, capacity)(weights, batched))
        return _batched(self, capacity)(weights, request)

    def _verify(
        self, weights: Weights, state: State, proposal: Proposal, depth: int, wanted: Array, shared: Array | None
    ) -> Outcome:
        """One target call on the proposal's nodes, and the rule's walk; padded to a path of `depth`."""
        tree = proposal.tree
        positions = state.cache.length[:, None] + tree.depths
        paths = None if self.widths else tree.paths
        window = Window(jnp.maximum(proposal.tokens, 0), positions, tree.ancestors, paths)
        features, entries = self.target.apply(weights.target, window, state.cache)
        logits = self.target.head(weights.target, features)
        tempered = scores(logits, state.sampling)
        finite = jnp.isfinite(tempered.max(-1))
        rows = state.key, state.length, state.sampling
        verdict = judge(self.rule, *rows, tempered, finite, proposal, wanted, shared)
        path, tokens = kept(proposal, verdict, depth)
        at = jnp.maximum(path, 0)

        recorded = None
        if state.recorded is not None:
            asking = state.recorded & (state.status == Status.RUNNING)
            count = jnp.where(asking, (path >= 0).sum(-1), 0).max()
            settings = state.sampling, self.top_logprobs, self.rule.lossless
            recorded = logprobs.along(path, tokens, count, logits, tempered, *settings)
        return Outcome(
            path,
            tokens,
            jnp.take_along_axis(finite, at, 1),
            caches.take(entries, path),
            jnp.take_along_axis(features, at[:, :, None], 1),
            recorded,
        )


@functools.lru_cache(maxsize=64)
def _batched(decoder: Decoder, capacity: int):
    """`generate` of a batch, under a vmap rule that leads back to itself.

    A vmapped `while_loop` would select over the whole carry, caches included, every round. The rule calls the
    decorated function, so that any nesting of vmaps ends in the one batched program.
    """

    @custom_vmap
    def generate(weights: Weights, request: Request) -> Result:
        state = decoder.init(weights, request, capacity)
        state = decoder.run(weights, decoder.prefill(weights, state))
        return Result(state.tokens, state.length, state.start, state.status, state.log, state.logprobs)

    @generate.def_vmap
    def rule(size, batched, weights, request):
        if any(jax.tree.leaves(batched[0])):  # one set of parameters per example: no shared program

            def one(index):
                pick = jax.tree.map(
                    lambda leaf, mapped: leaf[index] if mapped else leaf, (weights, request), tuple(batched)
                )
                return generate(*pick)

            out = lax.map(one, jnp.arange(size))
        else:
            full = jax.tree.map(
                lambda leaf, mapped: leaf if mapped else jnp.broadcast_to(leaf[None], (size, *leaf.shape)),
                request,
                batched[1],
            )
            flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), full)
            out = generate(weights, flat)
            out = jax.tree.map(lambda leaf: leaf.reshape(size, -1, *leaf.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return generate
