"""What a user calls: `load`, `generate`, and its streaming twin `stream`."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec import prepare
from jaxspec.core.protocols import Drafter, Rule, Schedule, Setting
from jaxspec.core.sampling import Sampling
from jaxspec.core.tree import Dynamic, Topology
from jaxspec.decode.loop import FOREVER
from jaxspec.decode.session import Session
from jaxspec.errors import CapacityError, InvalidConfig
from jaxspec.models.head_files import load_heads as load_heads
from jaxspec.models.heads import DraftHeads
from jaxspec.models.model import Model
from jaxspec.models.model import load as load
from jaxspec.output import Output
from jaxspec.prepare import Prompt
from jaxspec.streaming import Stream
from jaxspec.text.stops import StopStrings
from jaxspec.tuned import Tuned, as_tuned

DRAFTER = "prompt-lookup"
STEP = 4
"""Rounds between two looks at the device while streaming."""


def generate(
    target: Model,
    prompts: Prompt | Sequence[Prompt],
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
        prompts: text, token ids or chat messages, or a list of them; lengths may differ.
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
    prompts: Prompt | Sequence[Prompt],
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
    schedule: str | Schedule = "constant",
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
        schedule: how deep each round may draft: a registered name, or a schedule object.
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
        rounds: rounds between two looks at the device.
    """
    prepare.check_counts(max_new_tokens=max_new_tokens, samples=samples)
    prepare.need_model("target", target)
    if draft is not None:
        prepare.need_model("draft", draft)
    if not isinstance(sampling, Sampling):
        raise InvalidConfig(f"sampling must be a jaxspec.Sampling, got {sampling!r:.80}")
    if on_token is not None and not callable(on_token):
        raise InvalidConfig(f"on_token must be callable, got {on_token!r:.80}")
    if session is not None and not isinstance(session, Session):
        raise InvalidConfig(f"session must be the session of an earlier output, got {session!r:.80}")
    stops = StopStrings(stop)
    ids = prepare.encode_prompts(target, prompts, chat)
    if stops.strings or on_token:
        rounds = min(rounds, STEP)
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise InvalidConfig(f"rounds must be a whole number from 1, got {rounds!r}")
    if stops.strings:
        target.decode([])  # a stop string needs a tokenizer
    batch = len(ids) * samples
    settings = prepare.with_padding_masked(target, sampling, batch)
    keys = prepare.row_keys(key, len(ids), samples, sampling)
    stopping = prepare.stop_array(target, stop_ids, ignore_eos, batch)
    if tuned is not None:
        more = any(given is not None for given in (tree, exit_layers, draft_params))
        if drafter != DRAFTER or schedule != "constant" or more:
            raise InvalidConfig("tuned= says how to draft; give it without drafter, tree, exit_layers or schedule")
        told = as_tuned(tuned)
        drafter, tree, exit_layers, schedule = told.drafter, told.tree, told.exit_layers, told.schedule
    heads = load_heads(heads, target=target) if isinstance(heads, (str, os.PathLike)) else heads
    setting = Setting(target, draft, prepare.as_topology(tree), exit_layers, heads)
    widths = () if width_matched else (1,)
    decoder, weights = prepare.make_decoder(
        target, drafter, rule, setting, draft_params, schedule, widths=widths, logprobs=logprobs
    )
    longest = max(map(len, ids)) + max_new_tokens
    request = (ids, keys, settings, max_new_tokens, samples, stopping)
    if session is None:
        slots = prepare.fit_capacity(decoder, weights, longest, batch, capacity)
        session = Session(decoder, weights, prepare.make_request(*request, slots), slots)
    else:
        if session.decoder != decoder or len(session.state.length) != batch:
            raise InvalidConfig("a session goes on with the settings and the number of rows it began with")
        longest += int(np.asarray(session.state.length).max())
        if decoder.slots(longest) > session.capacity or longest > decoder.target.context:
            raise CapacityError(
                f"the session has room for {session.capacity} slots, this turn needs {decoder.slots(longest)}; "
                "begin with a larger capacity=..."
            )
        size = -(-max(map(len, ids)) // 64) * 64
        session.extend(prepare.make_request(*request, size))
    return Stream(target, session, ids, samples, stops, on_token, rounds)
