"""Compiles before the first call: `precompile`."""

import os
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec.core import checks
from jaxspec.core.mesh import groups
from jaxspec.core.protocols import Drafter, Rule, Schedule
from jaxspec.core.sampling import Sampling
from jaxspec.core.tree import Dynamic, Topology
from jaxspec.decode.notice import Notice
from jaxspec.decode.session import Session
from jaxspec.generation.drafting import DRAFTER, Drafting, as_drafting
from jaxspec.generation.inputs import Prompt
from jaxspec.generation.job import Batch, Job, make_job, say_rounded
from jaxspec.heads.network import DraftHeads
from jaxspec.models.model import Model


@checks.named()
def precompile(
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
    width_matched: bool = False,
    capacity: int | None = None,
    mesh: Mesh | None = None,
    batch: int | None = None,
    verbose: bool = True,
) -> float:
    """Compiles what `generate` with these arguments would; the prompts are read, and nothing is written.

    A later call with the same arguments and caches of the same sizes begins at once, one of another process, too: what
    takes a second or more to compile is kept in the cache directory, unless JAX is told otherwise. What prompts say
    does not matter, but how many there are and, roughly, how long they are.

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
        stop: changes nothing that is compiled.
        stop_ids: tokens that end a text, besides the model's own.
        ignore_eos: do not end at the model's own stop tokens.
        logprobs: give the log-probability of every emitted token, under the raw logits and under the law that is
            sampled; a number gives as many of the likeliest tokens of every place, too. See `Generation`.
        width_matched: let every target call have the tree's width, also where there is no draft; the text is then bit
            for bit that of `drafter="none"` with the same tree and `width_matched=True`.
        capacity: cache slots, rounded up to whole blocks of 256; None for as many as needed. Give more to continue the
            session later.
        mesh: devices to decode on, see `jaxspec.make_mesh`: rows are spread over its axis "data", the target's matrices
            over "model".
        batch: rows decoded at once, at most; a row that has ended gives its place to the next. None: all, in a number
            of places that is rounded up so that like numbers of rows share a compilation. A batch holds rows whose
            caches are of one size, and a text depends neither on it nor on its neighbours.
        verbose: say on standard error when compiling begins and ends, and that a capacity is rounded.

    Returns:
        Seconds of compilation.

    Raises:
        JaxspecError: bad input, before anything compiles.
    """
    notice = Notice(checks.flag("verbose", verbose))
    keywords = Drafting(drafter, rule, tree, schedule, draft, heads, drafter_options, draft_params)
    job = make_job(
        target, prompts, as_drafting(drafting, keywords), key=key, sampling=sampling, max_new_tokens=max_new_tokens,
        samples=samples, chat=chat, stop_ids=stop_ids, ignore_eos=ignore_eos, logprobs=logprobs,
        width_matched=width_matched, mesh=mesh,
    )  # fmt: skip
    batches = job.batches(batch, capacity, range(job.rows))
    say_rounded(notice, capacity, batches)
    return sum(_compile(job, one, notice) for one in batches)


def _compile(job: Job, batch: Batch, notice: Notice) -> float:
    """Calls everything that decodes a batch once, for no rounds, and returns the seconds that compiling took."""
    request = job.request(batch.first, batch.capacity)
    session = Session(job.decoder, job.weights, request, batch.capacity, job.mesh, notice=notice)
    session.run(0)
    if batch.waiting:
        nobody = groups(job.mesh)
        session.replace([-1] * nobody, job.request([None] * nobody, batch.capacity))
    return session.timing.compile_s
