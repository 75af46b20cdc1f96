"""Compilation ahead of the first call: `precompile`."""

from collections.abc import Iterable

from jaxspec.core import checks
from jaxspec.core.mesh import count_groups
from jaxspec.decode.notice import Notice
from jaxspec.decode.session import Session
from jaxspec.generation.inputs import Prompt
from jaxspec.generation.job import Job, RowBatch, make_job, report_rounding
from jaxspec.generation.options import CompileOptions, accepts
from jaxspec.models.model import Model


@accepts(CompileOptions)
def precompile(target: Model, prompts: Prompt | Iterable[Prompt], options: CompileOptions) -> float:
    """Compiles the programs that `generate` needs for these arguments, without generating text.

    A later call with the same arguments and caches of the same sizes starts immediately, even in another process:
    programs that take at least a second to compile are kept in the cache directory, unless JAX's compilation cache is
    configured otherwise. Only the number of prompts and their approximate lengths matter, and not their content.

    Returns:
        The seconds spent compiling.

    Raises:
        JaxspecError: an argument is invalid; raised before anything compiles.
    """
    return compile_programs(target, prompts, options)


def compile_programs(target: Model, prompts: Prompt | Iterable[Prompt], options: CompileOptions) -> float:
    """Compiles the programs that these options need; see `precompile`."""
    notice = Notice(checks.flag("verbose", options.verbose))
    job = make_job(target, prompts, options)
    batches = job.batches(options.batch, options.capacity, range(job.rows))
    report_rounding(notice, options.capacity, batches)
    return sum(_compile(job, batch, notice) for batch in batches)


def _compile(job: Job, batch: RowBatch, notice: Notice) -> float:
    """Calls each program of a batch once, with zero rounds, and returns the seconds of compilation."""
    request = job.request(batch.initial_rows, batch.capacity)
    session = Session(job.decoder, job.weights, request, batch.capacity, job.mesh, notice=notice)
    session.run(0)
    if batch.queue:
        count = count_groups(job.mesh)
        session.replace([-1] * count, job.request([None] * count, batch.capacity))
    return session.timing.compile_s
