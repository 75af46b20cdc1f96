"""What a user calls: `load`, `generate`, and its streaming twin `stream`."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec.checkpoints.load import load as load
from jaxspec.core import checks
from jaxspec.core.mesh import fetch, groups
from jaxspec.core.protocols import Drafter, Rule, Schedule
from jaxspec.core.sampling import Sampling
from jaxspec.core.sizes import BLOCK
from jaxspec.core.tree import Dynamic, Topology
from jaxspec.decode.loop import FOREVER
from jaxspec.decode.notice import Notice
from jaxspec.decode.session import Session
from jaxspec.errors import CapacityError, InvalidConfig, shown
from jaxspec.generation.build import Prompt
from jaxspec.generation.drafting import Tuned
from jaxspec.generation.output import Generation, Output
from jaxspec.generation.plan import DRAFTER, Batch, Plan
from jaxspec.generation.plan import plan as plan_of
from jaxspec.generation.results_file import Journal
from jaxspec.generation.stream import Stream
from jaxspec.heads.files import load_heads as load_heads
from jaxspec.heads.network import DraftHeads
from jaxspec.models.model import Model
from jaxspec.storage.reading import check_path
from jaxspec.text.stops import StopStrings

STEP = 4
"""Rounds between two looks at the device while streaming."""


@checks.named()
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
    chat: bool | None = None,
    stop: Sequence[str] | str = (),
    stop_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    logprobs: bool | int = False,
    on_token: Callable[[int, int, str], Any] | None = None,
    width_matched: bool = False,
    capacity: int | None = None,
    session: Session | None = None,
    mesh: Mesh | None = None,
    batch: int | None = None,
    out: str | os.PathLike | None = None,
    progress: Callable[[int, int], Any] | None = None,
    rounds: int = STEP,
    verbose: bool = True,
) -> Stream:
    """The streaming twin of `generate`: iterate over `Chunk`s, then read `.output`.

    Args (beyond those of `generate`):
        draft: the draft model of the drafter "model"; None: that of the target's preset, if it has one.
        draft_params: parameters of a drafter given as an object.
        tree: the draft's topology, or `jaxspec.dynamic()` for one that is chosen every round; a number is a chain of
            that length. None: the drafter's default.
        exit_layers: layers of the drafter "early-exit".
        heads: the heads of the drafter "medusa", or where they are, see `load_heads`; None: those that come with the
            target's preset, if it has some.
        schedule: how deep each round may draft: a registered name, or a schedule object. None: all of the tree in
            every round; where it is copied from the text, as by prompt lookup, only while that pays.
        tuned: what `jaxspec tune` wrote, instead of `drafter`, `tree`, `exit_layers` and `schedule`.
        samples: rows per prompt, each with its own noise.
        chat: whether text prompts are messages of a user, to be wrapped into the model's chat template; None: where it
            has one. False continues raw text. Token ids and messages stay as they are.
        stop: strings that end a text; the text is cut before, the token that completes one is kept.
        stop_ids: tokens that end a text, besides the model's own.
        ignore_eos: do not end at the model's own stop tokens.
        logprobs: give the log-probability of every emitted token, under the raw logits and under the law that is
            sampled; a number gives as many of the likeliest tokens of every place, too. See `Generation`.
        on_token: called with (row, token, new text) for every token; False ends the row, the token is kept.
        width_matched: let every target call have the tree's width, also where there is no draft; the text is
            then bit for bit that of `drafter="none"` with the same tree and `width_matched=True`.
        capacity: cache slots, rounded up to whole blocks of 256; None for as many as needed. Give more to continue the
            session later.
        session: of an earlier `Output` with the same settings: the prompts are appended to its rows, each text as a
            message of its own where there is a chat template.
        mesh: devices to decode on, see `jaxspec.make_mesh`: rows are spread over its axis "data", the target's matrices
            over "model".
        batch: rows decoded at once, at most; a row that has ended gives its place to the next. None: all, in a number
            of places that is rounded up so that like numbers of rows share a compilation. A batch holds rows
            whose caches are of one size, and a text depends neither on it nor on its neighbours.
        out: a file of JSON lines that every text is written to as it ends, see
            `jaxspec.generation.results_file.Journal`. The same call resumes the job: texts that the file holds are not
            decoded again.
        progress: called with (texts ended, texts).
        rounds: rounds between two looks at the device.
        verbose: say on standard error when compiling begins and ends, and that a capacity is rounded.
    """
    given = locals()
    checks.called("on_token", on_token)
    checks.called("progress", progress)
    notice = Notice(checks.flag("verbose", verbose))
    if session is not None and not isinstance(session, Session):
        raise InvalidConfig(f"session must be the session of an earlier output, got {shown(session)}")
    if session is not None and not (batch is None and out is None):
        raise InvalidConfig("a session is one batch, and knows no file; give it without batch= and out=")
    rounds = checks.whole("rounds", rounds)
    stops = StopStrings(stop)
    if stops.strings or on_token:
        rounds = min(rounds, STEP)
    if out is not None:
        check_path(out, "out")
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
        _say_rounded(notice, capacity, batches)
    else:
        batches = [_extend(session, plan)]
    return Stream(
        plan, batches, stops, rounds=rounds, on_token=on_token, on_end=on_end, session=session, done=done,
        notice=notice,
    )  # fmt: skip


@checks.named(like=stream)
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


@checks.named(like=stream)
def precompile(target: Model, prompts: Prompt | Iterable[Prompt], **options: Any) -> float:
    """Compiles what `generate` with these arguments would; the prompts are read, and nothing is written.

    A later call with the same options and caches of the same sizes begins at once, one of another process, too: what
    takes a second or more to compile is kept in the cache directory, unless JAX is told otherwise.

    Args:
        target: the model.
        prompts: how many there are and how long they are matters, roughly; what they say does not.
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
    notice = Notice(checks.flag("verbose", given.arguments["verbose"]))
    plan = _plan(given.arguments)
    capacity = given.arguments["capacity"]
    batches = plan.batches(given.arguments["batch"], capacity, range(plan.rows))
    _say_rounded(notice, capacity, batches)
    return sum(_compiled(plan, batch, notice) for batch in batches)


def _say_rounded(notice: Notice, capacity: int | None, batches: list[Batch]) -> None:
    """Says that caches get more slots than were asked for, where they do."""
    if capacity is not None and batches and batches[0].capacity != capacity:
        notice.say(f"capacity {capacity} is rounded up to {batches[0].capacity} slots, whole blocks of {BLOCK}")


def _compiled(plan: Plan, batch: Batch, notice: Notice) -> float:
    """Calls everything that decodes a batch once, for no rounds; the seconds that compiling took."""
    request = plan.request(batch.first, batch.capacity)
    session = Session(plan.decoder, plan.weights, request, batch.capacity, plan.mesh, notice=notice)
    session.run(0)
    if batch.waiting:
        nobody = groups(plan.mesh)
        session.replace([-1] * nobody, plan.request([None] * nobody, batch.capacity))
    return session.timing.compile_s


def _plan(given: Mapping[str, Any]) -> Plan:
    """Of the arguments of `stream`, those that a plan is made of."""
    return plan_of(**{name: given[name] for name in inspect.signature(plan_of).parameters})


def _extend(session: Session, plan: Plan) -> Batch:
    """Appends the prompts to the rows of a session."""
    if session.decoder != plan.decoder or session.rows != plan.rows or session.mesh != plan.mesh:
        raise InvalidConfig("a session goes on with the settings and the number of rows it began with")
    longest = int(fetch(session.state.length).max()) + max(map(len, plan.ids)) + plan.max_new_tokens
    if plan.decoder.slots(longest) > session.capacity or longest > plan.decoder.target.context:
        raise CapacityError(
            f"the session has room for {session.capacity} slots, this turn needs {plan.decoder.slots(longest)}; "
            "begin with a larger capacity=..."
        )
    batch = Batch(list(range(plan.rows)), len(session.state.length), session.capacity)
    session.extend(plan.request(batch.first, session.capacity))
    return batch
