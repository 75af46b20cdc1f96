"""Compilation ahead of the first call: `precompile`."""

import os
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec.core import checks
from jaxspec.core.drafter import Drafter
from jaxspec.core.mesh import groups
from jaxspec.core.rule import Rule
from jaxspec.core.sampling import Sampling
from jaxspec.core.schedule import Schedule
from jaxspec.core.topology import Dynamic, Topology
from jaxspec.decode.notice import Notice
from jaxspec.decode.session import Session
from jaxspec.generation.drafting import DRAFTER, Drafting, resolve_drafting
from jaxspec.generation.inputs import Prompt
from jaxspec.generation.job import Job, RowBatch, make_job, report_rounding
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
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_variables: Mapping[str, Any] | None = None,
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
    """Compiles the programs that `generate` needs for these arguments, without generating text.

    A later call with the same arguments and caches of the same sizes starts immediately, in another process, too:
    programs that take at least a second to compile are kept in the cache directory, unless JAX's compilation cache is
    configured otherwise. Only the number of prompts and their approximate lengths matter, and not their content.

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
        stop: stop strings, which do not affect compilation.
        stop_ids: ids of stop tokens, in addition to the model's own.
        ignore_eos: whether to ignore the model's own stop tokens.
        logprobs: whether to return the log-probability of every emitted token, under the raw logits and under the law
            that is sampled from; a number also returns that many of the most likely tokens. See `Generation`.
        width_matched: whether every target call has the width of the tree, even without a draft. The text is then
            bit-identical to that of `drafter="none"` with the same tree and `width_matched=True`.
        capacity: cache slots of each row, rounded up to whole blocks of 256; None for as many as needed. Set it larger
            to continue the session later.
        mesh: devices to decode on, see `jaxspec.make_mesh`: rows are sharded over its axis "data", the target's
            matrices over "model".
        batch: maximum number of rows decoded at once (continuous batching): a finished row is replaced by the next one.
            None for all rows, in a batch that is rounded up so that similar numbers of rows share a compilation. The
            rows of a batch have caches of one size. Batching does not change a row's text.
        verbose: whether to print notices to standard error: when compilation begins and ends, and when a capacity is
            rounded up.

    Returns:
        The seconds spent compiling.

    Raises:
        JaxspecError: an argument is invalid; raised before anything compiles.
    """
    notice = Notice(checks.flag("verbose", verbose))
    keywords = Drafting(drafter, rule, tree, schedule, draft, heads, drafter_options, draft_params)
    job = make_job(
        target, prompts, resolve_drafting(drafting, keywords), key=key, sampling=sampling,
        max_new_tokens=max_new_tokens, samples=samples, chat=chat, tools=tools,
        template_variables=template_variables, stop_ids=stop_ids, ignore_eos=ignore_eos,
        logprobs=logprobs, width_matched=width_matched, mesh=mesh,
    )  # fmt: skip
    batches = job.batches(batch, capacity, range(job.rows))
    report_rounding(notice, capacity, batches)
    return sum(_compile(job, one, notice) for one in batches)


def _compile(job: Job, batch: RowBatch, notice: Notice) -> float:
    """Calls each program of a batch once, with zero rounds, and returns the seconds of compilation."""
    request = job.request(batch.initial_rows, batch.capacity)
    session = Session(job.decoder, job.weights, request, batch.capacity, job.mesh, notice=notice)
    session.run(0)
    if batch.queue:
        count = groups(job.mesh)
        session.replace([-1] * count, job.request([None] * count, batch.capacity))
    return session.timing.compile_s
