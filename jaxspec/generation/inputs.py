"""Checks and converts user input before anything compiles: prompts, keys, sampling, stop tokens. Makes a `Request`."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core import sizes
from jaxspec.core.bias import LogitBias
from jaxspec.core.checks import flag, index
from jaxspec.core.noise import as_key
from jaxspec.core.processor import add_processor
from jaxspec.core.sampling import MIN_TEMPERATURE, Sampling
from jaxspec.decode.state import Request
from jaxspec.errors import CheckpointError, EmptyPrompt, InvalidConfig, TokenOutOfRange, in_source, shown
from jaxspec.generation.turns import RowRecord, Turn, continue_turn
from jaxspec.grammar.compilation import compile_grammar
from jaxspec.models.model import Model
from jaxspec.processors.grammar import Grammar
from jaxspec.text.messages import check_messages, check_tools, check_variables

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Text, token ids, chat messages, or a dict `{"messages": [...], "tools": [...]}` with tools of its own."""


def check_model(name: str, model: Any) -> None:
    """Raises InvalidConfig unless the argument `name` is a `Model`."""
    if not isinstance(model, Model):
        raise InvalidConfig(f"{name} must be a Model, as from jaxspec.load; got {shown(model)}")


def as_prompts(prompts: Any) -> list[Any]:
    """Converts one prompt, or any iterable of prompts, to a list of prompts.

    Raises:
        InvalidConfig: `prompts` is neither a prompt nor an iterable of prompts.
        EmptyPrompt: there is no prompt.
    """
    if isinstance(prompts, Mapping) and "messages" in prompts:
        return [prompts]
    if isinstance(prompts, (bytes, bytearray, Mapping)) or not isinstance(prompts, (Iterable, np.ndarray, jax.Array)):
        raise InvalidConfig(f"prompts must be text, token ids, chat messages, or a list of them, got {shown(prompts)}")
    if isinstance(prompts, (str, np.ndarray, jax.Array)) or (
        isinstance(prompts, Sequence)
        and prompts
        and isinstance(prompts[0], (int, np.integer, Mapping))
        and not _has_messages(prompts[0])
    ):
        prompts = [prompts]
    prompts = list(prompts)
    if not prompts:
        raise EmptyPrompt(f"expected at least one prompt, got {prompts!r}")
    return prompts


def encode_prompts(
    target: Model,
    prompts: Any,
    chat: bool | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_variables: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """Returns the token ids of every prompt; see `read_turns`."""
    return [turn.ids for turn in read_turns(target, prompts, chat, tools, template_variables)]


def read_turns(
    target: Model,
    prompts: Any,
    chat: bool | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_variables: Mapping[str, Any] | None = None,
    records: Sequence[RowRecord] | None = None,
) -> list[Turn]:
    """Encodes every prompt.

    Args:
        target: the model, with its tokenizer and chat template.
        prompts: one prompt, or any iterable of prompts.
        chat: whether to wrap text in the chat template, as a message of the user; None to wrap it if there is a
            template.
        tools: JSON schemas of the tools, for prompts without their own tools.
        template_variables: further variables of the chat template.
        records: the records of a session's rows, the same number for each prompt; None outside a session.

    Returns:
        A turn for each prompt, or in a session for each row.

    Raises:
        EmptyPrompt: a prompt has no token.
        TokenOutOfRange: a token id is not in the vocabulary.
        InvalidConfig: a prompt is of the wrong type, or there are tools or template variables, but no prompt is
            rendered by a chat template. All messages name the prompt.
    """
    chat = target.chat_template is not None if chat is None else flag("chat", chat)
    prompts, tools = as_prompts(prompts), check_tools(tools)
    call_variables = check_variables(template_variables)
    conversations = [_messages(prompt, chat, f"prompt {i}") for i, prompt in enumerate(prompts)]
    if (tools or call_variables) and all(conversation is None for conversation in conversations):
        name = "tools" if tools else "template_variables"
        raise InvalidConfig(
            f"{name} are for the chat template, but no prompt is a chat; pass messages, or text with chat=True"
        )
    turns: list[Turn] = []
    for i in range(len(prompts) if records is None else len(records)):
        record = None if records is None else records[i]
        index = i if records is None else i * len(prompts) // len(records)
        where, conversation = f"prompt {index}", conversations[index]
        if conversation is None:
            prefix = [] if record is None else record.tokens
            turns.append(Turn(_encode(target, prompts[index], where, not prefix), prefix=prefix))
            continue
        (messages, prompt_tools), variables = conversation, call_variables
        prompt_tools = tools if prompt_tools is None else prompt_tools
        if record is not None:
            messages = record.join(messages, where)
            prompt_tools = record.turn.tools if prompt_tools is None else prompt_tools
            variables = record.turn.variables if template_variables is None else call_variables
        turns.append(Turn([], tuple(messages), tools=prompt_tools, variables=variables))
    turns = _render_turns(target, turns)
    for i, turn in enumerate(turns):
        _check_ids(target, turn.ids, f"prompt {i if records is None else i * len(prompts) // len(records)}")
    return turns if records is None else [continue_turn(target, *pair) for pair in zip(records, turns, strict=True)]


def _render_turns(target: Model, turns: list[Turn]) -> list[Turn]:
    """Renders and encodes the conversations among the turns.

    Adjacent conversations with the same tools and variables are rendered together.
    """
    rendered, first = list(turns), 0
    for (chats, tools, variables), group in itertools.groupby(
        turns, lambda turn: (bool(turn.messages), turn.tools, turn.variables)
    ):
        part = list(group)
        if chats:
            texts = _render(target, [turn.messages or () for turn in part], tools, variables, first, len(turns))
            assert target.tokenizer is not None
            with in_source(target.name):
                ids = target.tokenizer.encode_all(texts)
            for i, (turn, text, tokens) in enumerate(zip(part, texts, ids), start=first):
                rendered[i] = dataclasses.replace(turn, text=text, ids=tokens)
        first += len(part)
    return rendered


def _render(
    target: Model, chats: list[Sequence[Mapping[str, Any]]], tools: Any, variables: Any, first: int, rows: int
) -> list[str]:
    """Renders conversations; if one of several is refused, the error names it."""
    try:
        return target.render_chats(chats, tools, variables)
    except (InvalidConfig, CheckpointError):
        for i, chat in enumerate(chats, start=first):
            try:
                target.render_chat(chat, tools, variables)
            except (InvalidConfig, CheckpointError) as error:
                raise error if rows == 1 else type(error)(f"prompt {i}: {error}") from None
        raise


def _has_messages(prompt: Any) -> bool:
    return isinstance(prompt, Mapping) and "messages" in prompt


def _messages(prompt: Any, chat: bool, where: str) -> tuple[list[Mapping[str, Any]], Any] | None:
    """Returns the messages of a prompt, and its own tools if it has any; None for raw text and token ids.

    Raises:
        EmptyPrompt: the prompt is an empty text.
        InvalidConfig: the prompt is a dict with keys other than "messages" and "tools".
    """
    if isinstance(prompt, str):
        if not prompt:
            raise EmptyPrompt(f"{where} is empty; pass at least one token")
        return ([{"role": "user", "content": prompt}], None) if chat else None
    if isinstance(prompt, Mapping):
        if not {"messages"} <= prompt.keys() <= {"messages", "tools"}:
            raise InvalidConfig(f'{where} must be a dict with "messages" and optionally "tools", got {shown(prompt)}')
        check_messages(prompt["messages"])
        return list(prompt["messages"]), check_tools(prompt.get("tools"))
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        return list(prompt), None
    return None


def _encode(target: Model, prompt: Any, where: str, begins: bool) -> list[int]:
    """Returns the ids of a prompt that is raw text, which may continue a session's text, or token ids of any type."""
    if isinstance(prompt, str):
        return target.encode(prompt, begins)
    try:
        array = np.asarray(prompt)
    except Exception:  # ragged lists, deleted arrays
        array = np.asarray(None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidConfig(f"{where} must be text, chat messages or a list of token ids, got {shown(prompt)}")
    return array.astype(np.int64).tolist()


def _check_ids(target: Model, ids: list[int], where: str) -> None:
    """Checks the ids of a prompt.

    Raises:
        EmptyPrompt: there are no ids.
        TokenOutOfRange: an id is not in the vocabulary.
    """
    if not ids:
        raise EmptyPrompt(f"{where} has no tokens; pass at least one")
    vocab = target.lm.vocab
    for i, token in enumerate(ids):
        if not 0 <= token < vocab:
            raise TokenOutOfRange(f"{where} has token {token} at index {i}; ids go from 0 to {vocab - 1}")


def row_keys(key: Any, prompts: int, samples: int, sampling: Sampling) -> jax.Array:
    """Returns one typed key per row: the key folded with the index of the prompt and of the sample.

    A row's key depends on nothing else, so that its text does not depend on the other rows. `key` may also be an array
    with one key per row.

    Raises:
        InvalidConfig: `key` is not a random key or has the wrong shape, or `key` is None and a row is not greedy.
    """
    if key is None:
        if np.any(np.asarray(sampling.temperature) >= MIN_TEMPERATURE):
            raise InvalidConfig("sampling needs a key: pass key=jax.random.key(seed)")
        key = jax.random.key(0)  # unused: greedy decoding draws nothing
    key = as_key(key, prompts * samples)
    if key.shape:
        return key
    of_prompt = [jax.random.fold_in(key, i) for i in range(prompts)]
    data = [np.asarray(jax.random.key_data(jax.random.fold_in(k, s))) for k in of_prompt for s in range(samples)]
    return jax.random.wrap_key_data(jnp.asarray(np.stack(data)), impl=jax.random.key_impl(key))


def mask_padding(target: Model, sampling: Sampling, batch: int) -> Sampling:
    """Returns the settings of each row; the ids that pad the vocabulary and have no text are forbidden first."""
    vocab = target.lm.vocab
    known = vocab if target.tokenizer is None else min(target.tokenizer.vocab_size, vocab)
    rows = sampling.rows(batch, vocab)
    if known == vocab:
        return rows
    padding = jnp.broadcast_to(jnp.where(jnp.arange(vocab) < known, 0.0, -jnp.inf), (batch, vocab))
    return dataclasses.replace(rows, processors=(LogitBias(padding), *rows.processors))


def with_defaults(target: Model, sampling: Sampling) -> Sampling:
    """Returns the settings with the processors of the target, after biases and before all other processors.

    A processor of the settings replaces one of the target that has the same class.
    """
    given = sampling.processors
    defaults = [one for one in target.processors if type(one) not in map(type, given)]
    biases = [one for one in given if isinstance(one, LogitBias)]
    others = [one for one in given if not isinstance(one, LogitBias)]
    return dataclasses.replace(sampling, processors=(*biases, *defaults, *others)) if defaults else sampling


def with_grammar(
    target: Model, sampling: Any, grammar: Any, after: Any, stops: jax.Array, samples: int, rows: int
) -> Sampling:
    """Adds the grammar of a call to the processors of the sampling settings.

    Args:
        target: the target model.
        sampling: the sampling settings.
        grammar: the option `grammar` of `generate`.
        after: the option `grammar_after`.
        stops: the stop tokens of every row, padded with -1.
        samples: rows per prompt.
        rows: the number of rows.

    Raises:
        InvalidConfig: the grammar is invalid, or there is no stop token to end a text with.
    """
    if not isinstance(sampling, Sampling):
        raise InvalidConfig(f"sampling must be a jaxspec.Sampling, got {shown(sampling)}")
    if grammar is None:
        if after is not None:
            raise InvalidConfig("grammar_after= needs a grammar; pass grammar=... with it")
        return sampling
    if not (np.asarray(stops) >= 0).any():
        raise InvalidConfig("a grammar needs a stop token, which ends its texts; pass stop_ids=... or ignore_eos=False")
    listed = list(grammar) if isinstance(grammar, (list, tuple)) else [grammar]
    if isinstance(grammar, (list, tuple)) and len(listed) * samples != rows:
        raise InvalidConfig(f"grammar must have one entry for each of the {rows // samples} prompts, got {len(listed)}")
    automata = [None if one is None else compile_grammar(target, one, after=after) for one in listed]
    of_rows = automata[0] if len(listed) == 1 else [one for one in automata for _ in range(samples)]
    return dataclasses.replace(sampling, processors=add_processor(sampling.processors, Grammar(of_rows)))


def check_sampling(sampling: Any, rows: int, vocab: int) -> None:
    """Checks the settings of all rows, without allocating a bias over the vocabulary for each row.

    Raises:
        InvalidConfig, TokenOutOfRange: see `Sampling.check`.
    """
    if not isinstance(sampling, Sampling):
        raise InvalidConfig(f"sampling must be a jaxspec.Sampling, got {shown(sampling)}")
    sampling.check(rows, vocab)


def check_logprobs(value: Any) -> int | None:
    """Returns how many alternatives `logprobs` requests for each token; 0 for True, and None for False.

    Raises:
        InvalidConfig: `logprobs` is neither a bool nor a valid number of alternatives.
    """
    if isinstance(value, (bool, np.bool_)):
        return 0 if value else None
    number = index(value)
    if number is None or not 0 <= number <= sizes.MAX_LOGPROBS:
        raise InvalidConfig(
            f"logprobs must be True, False, or the number of alternatives for each token, 0 to {sizes.MAX_LOGPROBS}; "
            f"got {shown(value)}"
        )
    return number


def stop_array(target: Model, stop_ids: Iterable[int], ignore_eos: bool, batch: int) -> jax.Array:
    """Returns the stop ids of each row, `[batch, M]`, padded with -1.

    M is a multiple of 8, so that one more stop id does not recompile.

    Raises:
        InvalidConfig: `stop_ids` is not a list.
        TokenOutOfRange: an id is not in the vocabulary.
    """
    vocab = target.lm.vocab
    try:  # not all of a list that is longer than any list of ids
        listed = None if isinstance(stop_ids, (str, bytes, Mapping)) else list(itertools.islice(stop_ids, vocab + 1))
    except TypeError:
        listed = None
    if listed is None:
        raise InvalidConfig(f"stop_ids must be a list of token ids, got {shown(stop_ids)}")
    model_ids = () if flag("ignore_eos", ignore_eos) else target.stop_ids
    unique: dict[int, None] = {}
    for token in (*model_ids, *listed):
        number = index(token)
        if number is None or not 0 <= number < vocab:
            raise TokenOutOfRange(f"stop id {shown(token)} is not in the vocabulary; ids go from 0 to {vocab - 1}")
        unique[number] = None
    if len(listed) > vocab:
        raise InvalidConfig(
            f"stop_ids has more than {vocab} ids, which is the size of the vocabulary; pass each id once"
        )
    ids = list(unique)
    row = np.full(-(-max(len(ids), 1) // 8) * 8, -1, np.int32)
    row[: len(ids)] = ids
    return jnp.broadcast_to(jnp.asarray(row), (batch, row.size))


def pad_prompts(prompts: Sequence[Sequence[int]], size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the prompts padded or cut to `[rows, size]`, and their lengths `[rows]`."""
    tokens = np.zeros((len(prompts), size), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt[:size]
    return jnp.asarray(tokens), jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)


def make_request(
    prompts: list[list[int]],
    keys: jax.Array,
    sampling: Sampling,
    max_new_tokens: int | Sequence[int],
    stops: jax.Array,
    size: int,
    logprobs: bool = False,
) -> Request:
    """Makes a request; `sampling` has a value per row, and prompts are padded to `size`.

    The program is the same with and without log-probabilities.
    """
    tokens, count = pad_prompts(prompts, size)
    budget = np.broadcast_to(np.asarray(max_new_tokens, np.int32), count.shape)
    recorded = np.full(count.shape, logprobs)
    return Request(tokens, count, jnp.asarray(budget), keys, stops, sampling, jnp.asarray(recorded))
