"""The functions that generate text: `generate`, and `stream` for chunks as they are emitted."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec.checkpoints.load import load as load
from jaxspec.core import checks
from jaxspec.core.drafter import Drafter
from jaxspec.core.rule import Rule
from jaxspec.core.sampling import Sampling
from jaxspec.core.schedule import Schedule
from jaxspec.core.topology import Dynamic, Topology
from jaxspec.decode.loop import FOREVER
from jaxspec.decode.notice import Notice
from jaxspec.decode.session import Session
from jaxspec.errors import InvalidConfig, shown
from jaxspec.generation.drafting import DRAFTER, Drafting, resolve_drafting
from jaxspec.generation.inputs import Prompt
from jaxspec.generation.job import extend_session, make_job, report_bridge, report_rounding
from jaxspec.generation.output import Generation, Output
from jaxspec.generation.results_file import ResultsFile
from jaxspec.generation.stream import Stream
from jaxspec.heads.files import load_heads as load_heads
from jaxspec.heads.network import DraftHeads
from jaxspec.models.model import Model
from jaxspec.storage.reading import check_path
from jaxspec.text.stops import StopStrings

STEP = 4
"""Default number of rounds between two reads from the device while streaming."""


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
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_variables: Mapping[str, Any] | None = None,
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
    """Generates text by speculative decoding. With the default rule the text is that of plain decoding.

    Args:
        target: target model; see `load`.
        prompts: one prompt, or any iterable of prompts: text, token ids, or chat messages
            `[{"role": "user", "content": ...}, ...]`. Lengths may differ.
        key: JAX random key; required unless every temperature is 0. The same key gives the same text with any drafter,
            tree and batch size.
        drafter: name of a registered drafter, or a drafter object, which brings its own tree.
        rule: name of a registered rule, or a rule object.
        sampling: sampling settings, for all rows or per row.
        max_new_tokens: maximum number of new tokens of each row; a row is shorter only if it is stopped.
        draft: draft model of the drafter "model", of any vocabulary, or "pard"; None for that of the target's preset.
        draft_params: parameters of a drafter object.
        tree: topology of the draft tree, or `jaxspec.dynamic()` for one that is chosen in every round; a number is the
            length of a chain. None for the drafter's default.
        heads: draft heads of "medusa", "eagle" or "dflash", or their location, see `load_heads`; None for those of
            the target's preset, if any.
        drafter_options: options of the drafter, by name, such as {"exit_layers": 10} for "early-exit".
        schedule: name of a registered schedule, or a schedule object, which limits the depth of each round. None for
            the whole tree in every round; for drafts that are copied from the text (prompt lookup), only while
            drafting pays.
        drafting: a `Drafting`, or the path of a file that `jaxspec tune` wrote, instead of `drafter`,
            `drafter_options`, `tree` and `schedule`.
        samples: rows per prompt, each with its own random numbers.
        chat: whether to wrap text prompts in the model's chat template, as messages of the user; None: if there is a
            template. False continues raw text. Token ids and chat messages are not affected.
        tools: JSON schemas of the functions that the model may call in chats, one dict each, as the chat template takes
            them; None for no tools, or in a session for those of its last turn. A prompt
            `{"messages": [...], "tools": [...]}` has tools of its own.
        template_variables: further variables of the chat template, such as `{"enable_thinking": False}`; None for
            none, or in a session for those of its last turn.
        stop: stop strings. The text is cut before the stop string; the token that completes it is kept.
        stop_ids: ids of stop tokens, in addition to the model's own.
        ignore_eos: whether to ignore the model's own stop tokens.
        logprobs: whether to return the log-probability of every emitted token, under the raw logits and under the law
            that is sampled from; a number also returns that many of the most likely tokens. See `Generation`.
        on_token: called with (row, token, new text) for every token; returning False ends the row after this token.
        width_matched: whether every target call has the width of the tree, even without a draft. The text is then
            bit-identical to that of `drafter="none"` with the same tree and `width_matched=True`.
        capacity: cache slots of each row, rounded up to whole blocks of 256; None for as many as needed. Set it larger
            to continue the session later.
        session: session of an earlier `Output` with the same settings. The prompts are appended to its rows. Text, as a
            message of the user, and chat messages continue the conversation of a row as the chat template writes it;
            if the template changes what was read, the row is read again from there. Messages may also repeat the whole
            conversation.
        mesh: devices to decode on, see `jaxspec.make_mesh`: rows are sharded over its axis "data", the target's
            matrices over "model".
        batch: maximum number of rows decoded at once (continuous batching): a finished row is replaced by the next one.
            None for all rows, in a batch that is rounded up so that similar numbers of rows share a compilation. The
            rows of a batch have caches of one size. Batching does not change a row's text.
        out: path of a file of JSON lines to which each text is written when it is finished, see
            `jaxspec.generation.results_file.ResultsFile`. The same call resumes an interrupted job: texts in the file
            are not generated again.
        progress: called with (finished texts, total texts).
        rounds: rounds between two reads from the device; None for all at once, or 4 with stop strings or `on_token`.
        verbose: whether to print notices to standard error: when compilation begins and ends, and when a capacity is
            rounded up.

    Returns:
        An `Output`: a sequence of `Generation` objects, with timing, statistics and a session.

    Raises:
        JaxspecError: an argument is invalid; raised before anything compiles.
    """
    if rounds is None:
        rounds = STEP if stop or on_token else FOREVER
    running = stream(
        target, prompts, key=key, drafter=drafter, rule=rule, sampling=sampling, max_new_tokens=max_new_tokens,
        draft=draft, draft_params=draft_params, tree=tree, heads=heads, drafter_options=drafter_options,
        schedule=schedule, drafting=drafting, samples=samples, chat=chat, tools=tools,
        template_variables=template_variables, stop=stop, stop_ids=stop_ids,
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
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_variables: Mapping[str, Any] | None = None,
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
    """Starts generating text as `generate` does: iterate over its chunks, then read `.output`.

    Args:
        target: target model; see `load`.
        prompts: one prompt, or any iterable of prompts: text, token ids, or chat messages
            `[{"role": "user", "content": ...}, ...]`. Lengths may differ.
        key: JAX random key; required unless every temperature is 0. The same key gives the same text with any drafter,
            tree and batch size.
        drafter: name of a registered drafter, or a drafter object, which brings its own tree.
        rule: name of a registered rule, or a rule object.
        sampling: sampling settings, for all rows or per row.
        max_new_tokens: maximum number of new tokens of each row; a row is shorter only if it is stopped.
        draft: draft model of the drafter "model", of any vocabulary, or "pard"; None for that of the target's preset.
        draft_params: parameters of a drafter object.
        tree: topology of the draft tree, or `jaxspec.dynamic()` for one that is chosen in every round; a number is the
            length of a chain. None for the drafter's default.
        heads: draft heads of "medusa", "eagle" or "dflash", or their location, see `load_heads`; None for those of
            the target's preset, if any.
        drafter_options: options of the drafter, by name, such as {"exit_layers": 10} for "early-exit".
        schedule: name of a registered schedule, or a schedule object, which limits the depth of each round. None for
            the whole tree in every round; for drafts that are copied from the text (prompt lookup), only while
            drafting pays.
        drafting: a `Drafting`, or the path of a file that `jaxspec tune` wrote, instead of `drafter`,
            `drafter_options`, `tree` and `schedule`.
        samples: rows per prompt, each with its own random numbers.
        chat: whether to wrap text prompts in the model's chat template, as messages of the user; None: if there is a
            template. False continues raw text. Token ids and chat messages are not affected.
        tools: JSON schemas of the functions that the model may call in chats, one dict each, as the chat template takes
            them; None for no tools, or in a session for those of its last turn. A prompt
            `{"messages": [...], "tools": [...]}` has tools of its own.
        template_variables: further variables of the chat template, such as `{"enable_thinking": False}`; None for
            none, or in a session for those of its last turn.
        stop: stop strings. The text is cut before the stop string; the token that completes it is kept.
        stop_ids: ids of stop tokens, in addition to the model's own.
        ignore_eos: whether to ignore the model's own stop tokens.
        logprobs: whether to return the log-probability of every emitted token, under the raw logits and under the law
            that is sampled from; a number also returns that many of the most likely tokens. See `Generation`.
        on_token: called with (row, token, new text) for every token; returning False ends the row after this token.
        width_matched: whether every target call has the width of the tree, even without a draft. The text is then
            bit-identical to that of `drafter="none"` with the same tree and `width_matched=True`.
        capacity: cache slots of each row, rounded up to whole blocks of 256; None for as many as needed. Set it larger
            to continue the session later.
        session: session of an earlier `Output` with the same settings. The prompts are appended to its rows. Text, as a
            message of the user, and chat messages continue the conversation of a row as the chat template writes it;
            if the template changes what was read, the row is read again from there. Messages may also repeat the whole
            conversation.
        mesh: devices to decode on, see `jaxspec.make_mesh`: rows are sharded over its axis "data", the target's
            matrices over "model".
        batch: maximum number of rows decoded at once (continuous batching): a finished row is replaced by the next one.
            None for all rows, in a batch that is rounded up so that similar numbers of rows share a compilation. The
            rows of a batch have caches of one size. Batching does not change a row's text.
        out: path of a file of JSON lines to which each text is written when it is finished, see
            `jaxspec.generation.results_file.ResultsFile`. The same call resumes an interrupted job: texts in the file
            are not generated again.
        progress: called with (finished texts, total texts).
        rounds: rounds between two reads from the device; at most 4 with stop strings or `on_token`.
        verbose: whether to print notices to standard error: when compilation begins and ends, and when a capacity is
            rounded up.

    Returns:
        A `Stream`, which decodes as it is iterated over.

    Raises:
        JaxspecError: an argument is invalid; raised before anything compiles.
    """
    checks.called("on_token", on_token)
    checks.called("progress", progress)
    notice = Notice(checks.flag("verbose", verbose))
    if session is not None and not isinstance(session, Session):
        raise InvalidConfig(f"session must be the session of an earlier output, got {shown(session)}")
    if session is not None and not (batch is None and out is None):
        raise InvalidConfig("session= cannot be combined with batch= or out=; leave them out")
    rounds = checks.whole("rounds", rounds)
    stops = StopStrings(stop)
    if stops.strings or on_token:
        rounds = min(rounds, STEP)
    if out is not None:
        check_path(out, "out")
    keywords = Drafting(drafter, rule, tree, schedule, draft, heads, drafter_options, draft_params)
    job = make_job(
        target, prompts, resolve_drafting(drafting, keywords), key=key, sampling=sampling,
        max_new_tokens=max_new_tokens, samples=samples, chat=chat, tools=tools,
        template_variables=template_variables, stop_ids=stop_ids, ignore_eos=ignore_eos,
        logprobs=logprobs, width_matched=width_matched, mesh=mesh, session=session,
    )  # fmt: skip
    report_bridge(notice, job)
    if stops.strings:
        target.decode([])  # stop strings need a tokenizer
    results = None if out is None else ResultsFile(out, job, stops.strings)
    done = {} if results is None else results.done
    finished = len(done)

    def on_end(row: int, text: Generation) -> None:
        nonlocal finished
        finished += 1
        if results is not None:
            results.append(row, text)
        if progress is not None:
            progress(finished, job.rows)

    if session is None:
        batches = job.batches(batch, capacity, [row for row in range(job.rows) if row not in done])
        report_rounding(notice, capacity, batches)
    else:
        batches = [extend_session(session, job, notice)]
    return Stream(
        job, batches, stops, rounds=rounds, on_token=on_token, on_end=on_end, session=session, done=done, notice=notice
    )
