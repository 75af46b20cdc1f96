"""What a user calls: `load`, `generate`, and its streaming twin `stream`."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec.core.mesh import fetch, groups
from jaxspec.core.protocols import Drafter, Rule, Schedule
from jaxspec.core.sampling import Sampling
from jaxspec.core.tree import Dynamic, Topology
from jaxspec.decode.loop import FOREVER
from jaxspec.decode.session import Session
from jaxspec.errors import CapacityError, InvalidConfig
from jaxspec.journal import Journal
from jaxspec.models.head_files import load_heads as load_heads
from jaxspec.models.heads import DraftHeads
from jaxspec.models.model import Model
from jaxspec.models.model import load as load
from jaxspec.output import Generation, Output
from jaxspec.plan import DRAFTER, Batch, Plan
from jaxspec.plan import plan as plan_of
from jaxspec.prepare import Prompt
from jaxspec.streaming import Stream
from jaxspec.text.stops import StopStrings
from jaxspec.tuned import Tuned

STEP = 4
"""Rounds between two looks at the device while streaming."""


def generate(
    target: Model,
    prompts: Prompt | Iterable[Prompt],
    *,
    key: jax.Array | None = None,
    drafter: str | Drafter = DRAFTER,
    rule: str | Rule = "coupled",
    sampling: Sampling = Sampling(),
    max_new_tokens: int = 128,
    **options: Any,
) -> Output:
    """Continues prompts speculatively. With the default rule the text is that of plain decoding.

    Args:
        target: the model that decides; see `load`.
        prompts: text, token ids or chat messages, or any number of them; lengths may differ.
        key: a JAX random key; needed unless every temperature is 0. The same key gives the same text with
            any drafter, tree and batch.
        drafter: a registered name, or a drafter object.
        rule: a registered name, or a rule object.
        sampling: settings, for all rows or per row.
        max_new_tokens: emitted per row, at most; exactly, unless a stop is met.
        **options: see `stream`.

    Returns:
        An `Output`: a sequence of `Generation`s with timing, statistics and a session.

    Raises:
        JaxspecError: bad input, before anything compiles.
    """
    given = locals()
    if not options.get("on_token") and not options.get("stop"):
        options.setdefault("rounds", FOREVER)
    options |= {name: given[name] for name in ("key", "drafter", "rule", "sampling", "max_new_tokens")}
    running = stream(target, prompts, **options)
    for _ in running:
        pass
    return running.output


def stream(
    target: Model,
    prompts: Prompt | Iterable[Prompt],
    *,
    key: jax.Array | None = None,
    drafter: str | Drafter = DRAFTER,
    rule: str | Rule = "coupled",
    sampling: Sampling = Sampling(),
    max_new_tokens: int = 128,
    draft: Model | None = None,
    draft_params: Any = None,
    tree: Topology | Dynamic | int | None = None,
    exit_layers: int | None = None,
    heads: DraftHeads | str | os.PathLike | None = None,
    schedule: str | Schedule | None = None,
    tuned: Tuned | str | os.PathLike | None = None,
    samples: int = 1,
    chat: bool = False,
    stop: Sequence[str] | str = (),
    stop_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    logprobs: bool = False,
    on_token: Callable[[int, int, str], Any] | None = None,
    width_matched: bool = False,
    capacity: int | None = None,
    session: Session | None = None,
    mesh: Mesh | None = None,
    batch: int | None = None,
    out: str | os.PathLike | None = None,
    progress: Callable[[int, int], Any] | None = None,
    rounds: int = STEP,
) -> Stream:
    """The streaming twin of `generate`: iterate over `Chunk`s, then read `.output`.

    Args (beyond those of `generate`):
        draft: the draft model of the drafter "model".
        draft_params: parameters of a drafter given as an object.
        tree: the draft's topology, or `jaxspec.dynamic()` for one that is chosen every round; a number is a chain of
            that length. None: the drafter's default.
        exit_layers: layers of the drafter "early-exit".
        heads: the heads of the drafter "medusa", or where they are; see `load_heads`.
        schedule: how deep each round may draft: a registered name, or a schedule object. None: all of the tree in
            every round; where it is copied from the text, as by prompt lookup, only while that pays.
        tuned: what `jaxspec tune` wrote, instead of `drafter`, `tree`, `exit_layers` and `schedule`.
        samples: rows per prompt, each with its own noise.
        chat: wrap text prompts into the model's chat template, as a user's message.
        stop: strings that end a text; the text is cut before, the token that completes one is kept.
        stop_ids: tokens that end a text, besides the model's own.
        ignore_eos: do not end at the model's own stop tokens.
        logprobs: record log-probabilities.
        on_token: called with (row, token, new text) for every token; False ends the row, the token is kept.
        width_matched: let every target call have the tree's width, also where there is no draft; the text is
            then bit for bit that of `drafter="none"` with the same tree and `width_matched=True`.
        capacity: cache slots; None for as many as needed. Give more to continue the session later.
        session: of an earlier `Output` with the same settings: the prompts are appended to its rows.
        mesh: devices to decode on, see `jaxspec.make_mesh`: rows are spread over its axis "data", the target's matrices
            over "model".
        batch: rows decoded at once; a row that has ended gives its place to the next. None: all. A batch holds rows
            whose caches are of one size, and a text depends neither on it nor on its neighbours.
        out: a file that every text is written to as it ends, see `Journal`. Texts it holds are not decoded again.
        progress: called with (texts ended, texts).
        rounds: rounds between two looks at the device.
    """
    given = locals()
    for name, call in (("on_token", on_token), ("progress", progress)):
        if call is not None and not callable(call):
            raise InvalidConfig(f"{name} must be callable, got {call!r:.80}")
    if session is not None and not isinstance(session, Session):
        raise InvalidConfig(f"session must be the session of an earlier output, got {session!r:.80}")
    if session is not None and not (batch is None and out is None):
        raise InvalidConfig("a session is one batch, and knows no file; give it without batch= and out=")
    stops = StopStrings(stop)
    if stops.strings or on_token:
        rounds = min(rounds, STEP)
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise InvalidConfig(f"rounds must be a whole number from 1, got {rounds!r}")
    plan = _plan(given)
    if stops.strings:
        target.decode([])  # a stop string needs a tokenizer
    journal = None if out is None else Journal(out, plan, stops.strings)
    done = {} if journal is None else journal.done
    ended = len(done)

    def on_end(row: int, text: Generation) -> None:
        nonlocal ended
        ended += 1
        if journal is not None:
            journal.append(row, text)
        if progress is not None:
            progress(ended, plan.rows)

    if session is None:
        batches = plan.batches(batch, capacity, [row for row in range(plan.rows) if row not in done])
    else:
        _extend(session, plan)
        batches = [Batch(list(range(plan.rows)), plan.rows, session.capacity)]
    return Stream(
        plan, batches, stops, rounds=rounds, on_token=on_token, on_end=on_end, session=session, done=done
    )  # fmt: skip


def precompile(target: Model, prompts: Prompt | Iterable[Prompt], **options: Any) -> float:
    """Compiles what `generate` with these arguments would; the prompts are read, and nothing is written.

    A later call with the same options and caches of the same sizes begins at once; where JAX keeps what it compiled
    (`jax_compilation_cache_dir`), one of another process, too.

    Args:
        target: the model.
        prompts: how many there are and how long they are matters, what they say does not.
        **options: of `generate` and `stream`, but for `out` and `session`.

    Returns:
        Seconds of compilation.

    Raises:
        JaxspecError: bad input, before anything compiles.
    """
    for name in ("out", "session"):
        if options.get(name) is not None:
            raise InvalidConfig(f"precompile writes nothing and goes on with nothing; give it without {name}=")
    given = inspect.signature(stream).bind(target, prompts, **options)
    given.apply_defaults()
    plan = _plan(given.arguments)
    batches = plan.batches(given.arguments["batch"], given.arguments["capacity"], range(plan.rows))
    return sum(_compiled(plan, batch) for batch in batches)


def _compiled(plan: Plan, batch: Batch) -> float:
    """Calls everything that decodes a batch once, for no rounds; the seconds that compiling took."""
    request = plan.request(batch.first, batch.capacity)
    session = Session(plan.decoder, plan.weights, request, batch.capacity, plan.mesh)
    session.run(0)
    if batch.waiting:
        nobody = groups(plan.mesh)
        session.replace([-1] * nobody, plan.request([None] * nobody, batch.capacity))
    return session.timing.compile_s


def _plan(given: Mapping[str, Any]) -> Plan:
    """Of the arguments of `stream`, those that a plan is made of."""
    return plan_of(**{name: given[name] for name in inspect.signature(plan_of).parameters})


def _extend(session: Session, plan: Plan) -> None:
    """Appends the prompts to the rows of a session."""
    if session.decoder != plan.decoder or len(session.state.length) != plan.rows or session.mesh != plan.mesh:
        raise InvalidConfig("a session goes on with the settings and the number of rows it began with")
    longest = int(fetch(session.state.length).max()) + max(map(len, plan.ids)) + plan.max_new_tokens
    if plan.decoder.slots(longest) > session.capacity or longest > plan.decoder.target.context:
        raise CapacityError(
            f"the session has room for {session.capacity} slots, this turn needs {plan.decoder.slots(longest)}; "
            "begin with a larger capacity=..."
        )
    session.extend(plan.request(range(plan.rows), -(-max(map(len, plan.ids)) // 64) * 64))
