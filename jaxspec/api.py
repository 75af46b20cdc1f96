"""What a user calls: `load`, `generate` and its streaming twin `stream`."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec.checkpoints.load import load as load
from jaxspec.core import checks
from jaxspec.core.protocols import Drafter, Rule, Schedule
from jaxspec.core.sampling import Sampling
from jaxspec.core.tree import Dynamic, Topology
from jaxspec.decode.loop import FOREVER
from jaxspec.decode.notice import Notice
from jaxspec.decode.session import Session
from jaxspec.errors import InvalidConfig, shown
from jaxspec.generation.drafting import DRAFTER, Drafting, as_drafting
from jaxspec.generation.inputs import Prompt
from jaxspec.generation.job import extend, make_job, say_rounded
from jaxspec.generation.output import Generation, Output
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
def generate(
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
    heads: DraftHeads | str | os.PathLike | None = None,
    drafter_options: Mapping[str, Any] = MappingProxyType({}),
    schedule: str | Schedule | None = None,
    drafting: Drafting | str | os.PathLike | None = None,
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
    rounds: int | None = None,
    verbose: bool = True,
) -> Output:
    """Continues prompts speculatively. With the default rule the text is that of plain decoding.

    Args:
        target: the model that decides; see `load`.
        prompts: text, token ids or chat messages, or any number of them; lengths may differ.
        key: a JAX random key; needed unless every temperature is 0. The same key gives the same text with any drafter,
            tree and batch.
        drafter: a registered name, or a drafter object, which brings its own tree.
        rule: a registered name, or a rule object.
        sampling: settings, for all rows or per row.
        max_new_tokens: emitted per row, at most; exactly, unless a stop is met.
        draft: the draft model of the drafter "model"; None: that of the target's preset, if it has one.
        draft_params: parameters of a drafter object.
        tree: the draft's topology, or `jaxspec.dynamic()` for one that is chosen every round; a number is a chain of
            that length. None: the drafter's default.
        heads: the heads of the drafter "medusa", or where they are, see `load_heads`; None: those that come with the
            target's preset, if it has some.
        drafter_options: options of the drafter's own, by name, such as {"exit_layers": 10} of "early-exit".
        schedule: how deep each round may draft: a registered name, or a schedule object. None: all of the tree in
            every round; where it is copied from the text, as by prompt lookup, only while that pays.
        drafting: a `Drafting`, or the file that `jaxspec tune` wrote, instead of `drafter`, `drafter_options`, `tree`
            and `schedule`.
        samples: rows per prompt, each with its own noise.
        chat: whether text prompts are messages of a user, to be wrapped into the model's chat template; None: where it
            has one. False continues raw text. Token ids and messages stay as they are.
        stop: strings that end a text; the text is cut before, the token that completes one is kept.
        stop_ids: tokens that end a text, besides the model's own.
        ignore_eos: do not end at the model's own stop tokens.
        logprobs: give the log-probability of every emitted token, under the raw logits and under the law that is
            sampled; a number gives as many of the likeliest tokens of every place, too. See `Generation`.
        on_token: called with (row, token, new text) for every token; False ends the row, the token is kept.
        width_matched: let every target call have the tree's width, also where there is no draft; the text is then bit
            for bit that of `drafter="none"` with the same tree and `width_matched=True`.
        capacity: cache slots, rounded up to whole blocks of 256; None for as many as needed. Give more to continue the
            session later.
        session: of an earlier `Output` with the same settings: the prompts are appended to its rows, each text as a
            message of its own where there is a chat template.
        mesh: devices to decode on, see `jaxspec.make_mesh`: rows are spread over its axis "data", the target's matrices
            over "model".
        batch: rows decoded at once, at most; a row that has ended gives its place to the next. None: all, in a number
            of places that is rounded up so that like numbers of rows share a compilation. A batch holds rows whose
            caches are of one size, and a text depends neither on it nor on its neighbours.
        out: a file of JSON lines that every text is written to as it ends, see
            `jaxspec.generation.results_file.Journal`. The same call resumes the job: texts that the file holds are not
            decoded again.
        progress: called with (texts ended, texts).
        rounds: rounds between two looks at the device; None: as many as there are, fewer where each token is looked at.
        verbose: say on standard error when compiling begins and ends, and that a capacity is rounded.

    Returns:
        An `Output`: a sequence of `Generation`s with timing, statistics and a session.

    Raises:
        JaxspecError: bad input, before anything compiles.
    """
    if rounds is None:
        rounds = STEP if stop or on_token else FOREVER
    running = stream(
        target, prompts, key=key, drafter=drafter, rule=rule, sampling=sampling, max_new_tokens=max_new_tokens,
        draft=draft, draft_params=draft_params, tree=tree, heads=heads, drafter_options=drafter_options,
        schedule=schedule, drafting=drafting, samples=samples, chat=chat, stop=stop, stop_ids=stop_ids,
        ignore_eos=ignore_eos, logprobs=logprobs, on_token=on_token, width_matched=width_matched, capacity=capacity,
        session=session, mesh=mesh, batch=batch, out=out, progress=progress, rounds=rounds, verbose=verbose,
    )  # fmt: skip
    for _ in running:
        pass
    return running.output


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
    heads: DraftHeads | str | os.PathLike | None = None,
    drafter_options: Mapping[str, Any] = MappingProxyType({}),
    schedule: str | Schedule | None = None,
    drafting: Drafting | str | os.PathLike | None = None,
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
    """Begins to continue prompts as `generate` does: iterate over `Chunk`s, then read `.output`.

    Args:
        target: the model that decides; see `load`.
        prompts: text, token ids or chat messages, or any number of them; lengths may differ.
        key: a JAX random key; needed unless every temperature is 0. The same key gives the same text with any drafter,
            tree and batch.
        drafter: a registered name, or a drafter object, which brings its own tree.
        rule: a registered name, or a rule object.
        sampling: settings, for all rows or per row.
        max_new_tokens: emitted per row, at most; exactly, unless a stop is met.
        draft: the draft model of the drafter "model"; None: that of the target's preset, if it has one.
        draft_params: parameters of a drafter object.
        tree: the draft's topology, or `jaxspec.dynamic()` for one that is chosen every round; a number is a chain of
            that length. None: the drafter's default.
        heads: the heads of the drafter "medusa", or where they are, see `load_heads`; None: those that come with the
            target's preset, if it has some.
        drafter_options: options of the drafter's own, by name, such as {"exit_layers": 10} of "early-exit".
        schedule: how deep each round may draft: a registered name, or a schedule object. None: all of the tree in
            every round; where it is copied from the text, as by prompt lookup, only while that pays.
        drafting: a `Drafting`, or the file that `jaxspec tune` wrote, instead of `drafter`, `drafter_options`, `tree`
            and `schedule`.
        samples: rows per prompt, each with its own noise.
        chat: whether text prompts are messages of a user, to be wrapped into the model's chat template; None: where it
            has one. False continues raw text. Token ids and messages stay as they are.
        stop: strings that end a text; the text is cut before, the token that completes one is kept.
        stop_ids: tokens that end a text, besides the model's own.
        ignore_eos: do not end at the model's own stop tokens.
        logprobs: give the log-probability of every emitted token, under the raw logits and under the law that is
            sampled; a number gives as many of the likeliest tokens of every place, too. See `Generation`.
        on_token: called with (row, token, new text) for every token; False ends the row, the token is kept.
        width_matched: let every target call have the tree's width, also where there is no draft; the text is then bit
            for bit that of `drafter="none"` with the same tree and `width_matched=True`.
        capacity: cache slots, rounded up to whole blocks of 256; None for as many as needed. Give more to continue the
            session later.
        session: of an earlier `Output` with the same settings: the prompts are appended to its rows, each text as a
            message of its own where there is a chat template.
        mesh: devices to decode on, see `jaxspec.make_mesh`: rows are spread over its axis "data", the target's matrices
            over "model".
        batch: rows decoded at once, at most; a row that has ended gives its place to the next. None: all, in a number
            of places that is rounded up so that like numbers of rows share a compilation. A batch holds rows whose
            caches are of one size, and a text depends neither on it nor on its neighbours.
        out: a file of JSON lines that every text is written to as it ends, see
            `jaxspec.generation.results_file.Journal`. The same call resumes the job: texts that the file holds are not
            decoded again.
        progress: called with (texts ended, texts).
        rounds: rounds between two looks at the device.
        verbose: say on standard error when compiling begins and ends, and that a capacity is rounded.

    Returns:
        A `Stream`, which decodes as it is iterated over.

    Raises:
        JaxspecError: bad input, before anything compiles.
    """
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
    keywords = Drafting(drafter, rule, tree, schedule, draft, heads, drafter_options, draft_params)
    job = make_job(
        target, prompts, as_drafting(drafting, keywords), key=key, sampling=sampling, max_new_tokens=max_new_tokens,
        samples=samples, chat=chat, stop_ids=stop_ids, ignore_eos=ignore_eos, logprobs=logprobs,
        width_matched=width_matched, mesh=mesh,
    )  # fmt: skip
    if stops.strings:
        target.decode([])  # a stop string needs a tokenizer
    journal = None if out is None else Journal(out, job, stops.strings)
    done = {} if journal is None else journal.done
    ended = len(done)

    def on_end(row: int, text: Generation) -> None:
        nonlocal ended
        ended += 1
        if journal is not None:
            journal.append(row, text)
        if progress is not None:
            progress(ended, job.rows)

    if session is None:
        batches = job.batches(batch, capacity, [row for row in range(job.rows) if row not in done])
        say_rounded(notice, capacity, batches)
    else:
        batches = [extend(session, job)]
    return Stream(
        job, batches, stops, rounds=rounds, on_token=on_token, on_end=on_end, session=session, done=done, notice=notice
    )
