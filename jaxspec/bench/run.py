"""Measures plain decoding and every method alternately, in one process, after all of them are compiled.

All methods continue the same token ids with the same key in caches of the same size. Their order rotates with every
prompt and every repeat, so that no method always runs first.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxspec.bench.equality import certify, first_difference
from jaxspec.bench.records import PLAIN_METHOD, BenchPrompt, Difference, Method, Row, Run
from jaxspec.bench.setup import BenchSetup, Decoded, time_draft_call
from jaxspec.bench.tasks import Task, TaskTurn
from jaxspec.bench.worker import Worker
from jaxspec.core.checks import whole
from jaxspec.core.noise import seed_key
from jaxspec.core.rule import Rule
from jaxspec.core.sampling import Sampling
from jaxspec.errors import InvalidConfig, JaxspecError
from jaxspec.generation import inputs, memory
from jaxspec.generation.drafting import Drafting
from jaxspec.heads.network import DraftHeads
from jaxspec.models.model import Model
from jaxspec.registry import DRAFTERS
from jaxspec.tuning.prompt_lengths import explain_excess, require_prompts


def find_buildable(target: Model, draft: Model | None, heads: Mapping[str, DraftHeads] = {}) -> list[Method]:
    """Returns every registered drafter that these models support, with its default tree.

    `heads` maps the name of a drafter to its heads.
    """
    methods = []
    for name in DRAFTERS:
        try:
            drafting = Drafting(name, draft=draft, heads=heads.get(name)).without_unused()
            drafting.build_drafter(target)
        except JaxspecError:
            continue
        methods.append(Method(name, drafting))
    return [method for method in methods if method.label != PLAIN_METHOD]


def measure_methods(
    target: Model,
    methods: Sequence[Method],
    tasks: Sequence[Task],
    *,
    rule: str | Rule = "coupled",
    sampling: Sampling = Sampling(),
    seed: int = 0,
    max_new_tokens: int = 128,
    repeats: int = 3,
    turns: int = 1,
    chat: bool | None = None,
    ignore_eos: bool = False,
    peers: Sequence[Worker] = (),
    report: Callable[[str], Any] | None = None,
    progress: Callable[[int, int], Any] | None = None,
) -> Run:
    """Measures the methods and plain decoding, and compares every text with the text of plain decoding.

    Args:
        target: the target model.
        methods: the methods to compare with plain decoding, which is always measured.
        tasks: the prompts.
        rule: the rule of all methods except plain decoding.
        sampling: sampling settings, as numbers.
        seed: prompt `i` has the key `fold_in(key(seed), i)`.
        max_new_tokens: the largest number of tokens that are emitted per prompt.
        repeats: the number of times that every prompt is decoded.
        turns: the largest number of turns of a conversation. Plain decoding gives the assistant's earlier answers.
        chat: whether to use the target's chat template; None to use it if there is one.
        ignore_eos: whether to continue past the model's own stop tokens.
        peers: other systems, which decode the same prompts greedily.
        report: called with a line of text per step, before the first call of `progress`.
        progress: called with (texts decoded, all texts).

    Raises:
        CapacityError: every prompt is too long for the target's context. If only some prompts are too long, they are
            left out.
        JaxspecError: another argument is invalid; raised before anything compiles.
        ArithmeticError: the target's logits were not finite.
    """
    report = report or (lambda line: None)
    methods = [_choose_drafter(target, method, rule, sampling, report) for method in methods]
    labels = [PLAIN_METHOD, *(method.label for method in (*methods, *peers))]
    _check(labels, tasks, sampling if peers else None)
    whole("repeats", repeats)
    whole("turns", turns)
    whole("max_new_tokens", max_new_tokens)
    plain = Method(PLAIN_METHOD, Drafting(PLAIN_METHOD))
    own, everyone = [plain, *methods], [plain, *methods, *peers]
    chat = target.chat_template is not None if chat is None else chat
    common = {"sampling": sampling, "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos}
    setup = BenchSetup(target, rule, common)
    decoders = {method.label: setup.decoder(method) for method in own}

    if turns > 1:
        report("decoding the answers before later turns")
    left_out: list[str] = []
    prompts = list(_prompts(setup, tasks, turns, chat, seed_key(seed), left_out))
    require_prompts(left_out, len(prompts) + len(left_out))
    for reason in left_out:
        report(f"left out: {reason}")
    longest = max(len(prompt.tokens) for prompt in prompts) + max_new_tokens
    setup.capacity = max(memory.fit_capacity(*pair, longest, 1, None) for pair in decoders.values())

    def decode(method: Method | Worker, prompt: BenchPrompt) -> Decoded:
        if isinstance(method, Worker):
            return method.decode(prompt, max_new_tokens, ignore_eos)
        return setup.decode(method, prompt)

    compile_s = {}
    for method in everyone:
        report(f"compiling and warming up {method.label}")
        compile_s[method.label] = decode(method, prompts[0]).timing.compile_s

    outputs: dict[tuple[int, str], list[Decoded]] = {}
    done, total = itertools.count(1), repeats * len(prompts) * len(everyone)
    for repeat in range(repeats):
        for i, prompt in enumerate(prompts):
            for method in rotate_methods(everyone, repeat + i):
                outputs.setdefault((i, method.label), []).append(decode(method, prompt))
                if progress:
                    progress(next(done), total)

    rows = [
        _row(setup, method, prompt, outputs[i, method.label], outputs[i, PLAIN_METHOD][0])
        for i, prompt in enumerate(prompts)
        for method in everyone
    ]
    plain_s = (s / row.stats.rounds for row in rows if row.method == PLAIN_METHOD for s in row.decode_s)
    call_s = {PLAIN_METHOD: statistics.median(plain_s)}
    for label, pair in decoders.items():
        if (seconds := time_draft_call(setup, *pair, prompts, repeats)) is not None:
            call_s[label] = seconds
    used = decoders[own[-1].label][0].rule
    name = rule if isinstance(rule, str) else type(rule).__name__
    versions = {worker.label: worker.versions for worker in peers}
    return Run(
        sampling, name, used.lossless, tuple(labels), tuple(rows), setup.capacity, compile_s, call_s, versions,
        tuple(left_out),
    )  # fmt: skip


def _check(labels: Sequence[str], tasks: Sequence[Task], beside_peers: Sampling | None) -> None:
    """Refuses duplicate methods and tasks, tasks without questions, and other systems with a temperature above 0."""
    if len(set(labels)) < len(labels):
        raise InvalidConfig(
            f"the labels of methods must be distinct, and not {PLAIN_METHOD!r} (plain decoding); got {labels[1:]}"
        )
    if not tasks or not all(task.questions for task in tasks):
        raise InvalidConfig("expected at least one task, each with at least one question")
    if len({task.name for task in tasks}) < len(tasks):
        raise InvalidConfig(f"the names of tasks must be distinct, got {[task.name for task in tasks]}")
    if beside_peers is not None and beside_peers.temperature != 0:
        raise InvalidConfig(f"other systems are only measured at temperature 0, got {beside_peers.temperature}")


def _choose_drafter(
    target: Model, method: Method, rule: str | Rule, sampling: Sampling, report: Callable[[str], Any]
) -> Method:
    """Returns the method with the drafter that "auto" stands for."""
    drafting = dataclasses.replace(method.drafting, rule=rule).resolve(target, sampling, report=report)
    return dataclasses.replace(method, drafting=drafting)


def rotate_methods(methods: Sequence[Method | Worker], by: int) -> list[Method | Worker]:
    """Returns the methods, rotated to the left by `by`."""
    by %= len(methods)
    return [*methods[by:], *methods[:by]]


def _prompts(
    setup: BenchSetup, tasks: Sequence[Task], turns: int, chat: bool, key: jax.Array, left_out: list[str]
) -> Iterator[BenchPrompt]:
    """Yields every turn as a prompt, and decodes the answers before later turns without a draft.

    A conversation ends before a turn that is too long; the reason is appended to `left_out`.
    """
    first, count, context = 0, setup.common["max_new_tokens"], setup.target.lm.context
    for task in tasks:
        for question in task.questions:
            said: list[TaskTurn] = []
            asked = question.turns[:turns]
            for turn, text in enumerate(asked, start=1):
                said.append(text)
                ids = _encode(setup.target, said, chat, question.tools)
                name = f"{task.name}, prompt {question.id}" + (f", turn {turn}" if turns > 1 else "")
                if reason := explain_excess(name, ids, count, context):
                    left_out.append(reason)
                    break
                own = jax.random.fold_in(key, first + turn - 1)
                prompt = BenchPrompt(task.name, question.category, question.id, turn, ids, own)
                yield prompt
                if turn < len(asked):
                    answer = setup.decode(Method(PLAIN_METHOD, Drafting(PLAIN_METHOD)), prompt).text
                    said.append(tuple(answer.tokens) if answer.text is None else answer.text)
            first += len(asked)


def _encode(target: Model, said: list[TaskTurn], chat: bool, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
    """Returns the token ids of a conversation, by the chat template or from its concatenated parts."""
    if chat or any(_are_messages(part) for part in said):
        messages: list[Any] = []
        for i, part in enumerate(said):
            role = ("user", "assistant")[i % 2]
            messages += part if _are_messages(part) else [{"role": role, "content": part}]
        prompt: Any = {"messages": messages, "tools": list(tools)}
    elif target.tokenizer is None:
        prompt = [token for part in said for token in part]
    else:
        prompt = "\n\n".join(map(str, said))
    return inputs.encode_prompts(target, [prompt], chat)[0]


def _are_messages(turn: TaskTurn) -> bool:
    return not isinstance(turn, str) and isinstance(turn[0], Mapping)


def _row(
    setup: BenchSetup, method: Method | Worker, prompt: BenchPrompt, outputs: list[Decoded], plain: Decoded
) -> Row:
    """Returns the row of one method's outputs on one prompt, compared with plain decoding."""
    reference, first, difference = plain.text.tokens, outputs[0].text, None
    for repeat, output in enumerate(outputs):
        tokens = output.text.tokens
        place = first_difference(reference, tokens)
        if place is not None:
            one, other = (text[place] if place < len(text) else None for text in (reference, tokens))
            difference = certify(setup, method, prompt, reference, Difference(repeat, place, one, other))
            break
    return Row(
        task=prompt.task,
        category=prompt.category,
        id=prompt.id,
        turn=prompt.turn,
        method=method.label,
        prompt_tokens=len(prompt.tokens),
        tokens=first.tokens,
        text=first.text,
        finish_reason=first.finish_reason or "",
        prefill_s=[output.timing.prefill_s for output in outputs],
        decode_s=[output.timing.decode_s for output in outputs],
        stats=first.stats,
        difference=difference,
    )
