"""The functions that generate text: `generate` for whole texts, and `stream` for chunks as they are emitted."""

import dataclasses
from collections.abc import Iterable

from jaxspec.core import checks
from jaxspec.decode.loop import NO_LIMIT
from jaxspec.decode.notice import Notice
from jaxspec.decode.session import Session
from jaxspec.errors import InvalidConfig, shown
from jaxspec.generation.inputs import Prompt
from jaxspec.generation.job import extend_session, make_job, report_bridge, report_rounding
from jaxspec.generation.options import GenerateOptions, accepts
from jaxspec.generation.output import Generation, Output
from jaxspec.generation.results_file import ResultsFile
from jaxspec.generation.stream import Stream
from jaxspec.models.model import Model
from jaxspec.storage.reading import check_path
from jaxspec.text.stops import StopStrings

STEP = 4
"""Default number of rounds between two reads from the device while streaming."""


@accepts(GenerateOptions)
def generate(target: Model, prompts: Prompt | Iterable[Prompt], options: GenerateOptions) -> Output:
    """Generates text by speculative decoding. With the default rule, the text is the same as with plain decoding.

    Returns:
        An `Output`: a sequence of `Generation` objects, with timing, statistics and a session.

    Raises:
        JaxspecError: an argument is invalid; raised before anything compiles.
    """
    rounds = NO_LIMIT if options.rounds is None else options.rounds
    running = start_stream(target, prompts, dataclasses.replace(options, rounds=rounds))
    for _ in running:
        pass
    return running.output


@accepts(GenerateOptions)
def stream(target: Model, prompts: Prompt | Iterable[Prompt], options: GenerateOptions) -> Stream:
    """Starts generating text as `generate` does. Iterate over the chunks of the result, then read its `.output`.

    Returns:
        A `Stream`, which decodes as it is iterated over.

    Raises:
        JaxspecError: an argument is invalid; raised before anything compiles.
    """
    return start_stream(target, prompts, options)


def start_stream(target: Model, prompts: Prompt | Iterable[Prompt], options: GenerateOptions) -> Stream:
    """Starts generating text with these options; see `stream`."""
    batch, capacity, session, out = options.batch, options.capacity, options.session, options.out
    on_token, progress = options.on_token, options.progress
    checks.check_callable("on_token", on_token)
    checks.check_callable("progress", progress)
    notice = Notice(checks.flag("verbose", options.verbose))
    if session is not None and not isinstance(session, Session):
        raise InvalidConfig(f"session must be the session of an earlier output, got {shown(session)}")
    if session is not None and not (batch is None and out is None):
        raise InvalidConfig("session= cannot be combined with batch= or out=; leave them out")
    rounds = checks.whole("rounds", STEP if options.rounds is None else options.rounds)
    stops = StopStrings(options.stop)
    if stops.strings or on_token:
        rounds = min(rounds, STEP)
    if out is not None:
        check_path(out, "out")
    job = make_job(target, prompts, options, session)
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
