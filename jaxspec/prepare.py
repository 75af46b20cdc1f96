"""From what a user hands in to a `Request`: every check happens here, before anything compiles."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core import sizes
from jaxspec.core.protocols import Drafter, Rule, Schedule, Setting
from jaxspec.core.sampling import GREEDY, Sampling
from jaxspec.core.schedule import Constant
from jaxspec.core.tree import Dynamic, Topology, chain
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Request, Weights
from jaxspec.errors import CapacityError, EmptyPrompt, InvalidConfig, TokenOutOfRange
from jaxspec.models.model import Model
from jaxspec.registry import find
from jaxspec.schedules.adaptive import Adaptive
from jaxspec.text.tokenizer import refuse_difference

NODE_COST, INT8_ON_CPU = 0.1, 0.55
"""What reading a drafted token is taken to cost, in plain rounds, where nothing was measured."""
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or the messages of a chat."""


def make_decoder(
    target: Model,
    drafter: Any,
    rule: Any,
    setting: Setting,
    draft_params: Any = None,
    schedule: Any = None,
    **options: Any,
) -> tuple[Decoder, Weights]:
    """The decoder of members given by name or as objects (a drafter object brings its own tree).

    Without a schedule every round drafts all of the tree; where it is copied, not drawn, only while that pays.
    """
    given = {f.name for f in dataclasses.fields(setting) if getattr(setting, f.name) is not None} - {"target"}
    if isinstance(drafter, str):
        member = find("drafter", drafter)
        if unused := given - member.takes:
            raise InvalidConfig(f"the drafter {drafter!r} makes no use of {', '.join(sorted(unused))}")
        if setting.draft is not None and setting.draft.tokenizer is not None and target.tokenizer is not None:
            refuse_difference(target.tokenizer, setting.draft.tokenizer)
        drafter, draft_params = member.build(setting)
    elif isinstance(drafter, type) or not isinstance(drafter, Drafter):
        raise InvalidConfig(f"drafter must be a registered name or a drafter object, got {drafter!r:.80}")
    elif given:
        raise InvalidConfig(f"{', '.join(sorted(given))} build a drafter by name; a drafter object has its own")
    if isinstance(rule, str):
        rule = find("rule", rule)()
    elif isinstance(rule, type) or not isinstance(rule, Rule):
        raise InvalidConfig(f"rule must be a registered name or a rule object, got {rule!r:.80}")
    if schedule is None:
        copies = drafter.shape.depth > 0 and not getattr(drafter, "draws", True)
        schedule = while_it_pays(drafter.shape.nodes, node_cost(target)) if copies else Constant()
    elif isinstance(schedule, str):
        schedule = find("schedule", schedule)()
    elif isinstance(schedule, type) or not isinstance(schedule, Schedule):
        raise InvalidConfig(f"schedule must be a registered name or a schedule object, got {schedule!r:.80}")
    return Decoder(target.lm, drafter, rule, schedule, **options), Weights(target.params, draft_params)


def node_cost(target: Model) -> float:
    """See `NODE_COST`. A CPU reads weights of one byte anew for each of a few tokens."""
    bytes_ = any(getattr(leaf, "dtype", None) == np.int8 for leaf in jax.tree.leaves(target.params))
    return INT8_ON_CPU if bytes_ and jax.default_backend() == "cpu" else NODE_COST


def while_it_pays(nodes: int, each: float = NODE_COST) -> Adaptive:
    """The schedule of copied drafts, in windows of `nodes` tokens that cost `each` plain rounds.

    A round reads one token or a whole window, and deep drafts are hoped for, as what is copied is mostly right. Two
    whole windows may fail before any is right.
    """
    more = each * (nodes - 1)
    return Adaptive(costs=(1.0, 1 + more, 1 + more), hope=0.9, credit=max(Adaptive.credit, 2 * more), widths=())


def as_topology(tree: Topology | Dynamic | int | None) -> Topology | Dynamic | None:
    """A draft length stands for a chain."""
    return tree if tree is None or isinstance(tree, (Topology, Dynamic)) else chain(tree)


def need_model(name: str, model: Any) -> None:
    if not isinstance(model, Model):
        raise InvalidConfig(f"{name} must be a Model, as jaxspec.load returns it; got {model!r:.80}")


def encode_prompts(target: Model, prompts: Any, chat: bool) -> list[list[int]]:
    """The token ids of every prompt.

    Raises:
        EmptyPrompt, TokenOutOfRange, InvalidConfig: naming the prompt.
    """
    if isinstance(prompts, (str, np.ndarray, jax.Array)) or (
        isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], (int, np.integer, Mapping))
    ):
        prompts = [prompts]
    elif isinstance(prompts, Iterable) and not isinstance(prompts, Mapping):
        prompts = list(prompts)
    if not isinstance(prompts, Sequence) or not len(prompts):
        raise EmptyPrompt(f"expected one prompt or more, got {prompts!r}")
    return [_encode(target, prompt, chat, f"prompt {i}") for i, prompt in enumerate(prompts)]


def _encode(target: Model, prompt: Any, chat: bool, where: str) -> list[int]:
    if isinstance(prompt, str):
        if not prompt:
            raise EmptyPrompt(f"{where} is empty; give at least one token to continue")
        ids = target.encode_chat([{"role": "user", "content": prompt}]) if chat else target.encode(prompt)
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        ids = target.encode_chat(prompt)
    else:
        try:
            array = np.asarray(prompt)
        except ValueError:  # ragged
            array = np.asarray(None)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            shown = " ".join(f"{prompt!r}"[:80].split())
            raise InvalidConfig(f"{where} must be text, chat messages or a list of token ids, got {shown}")
        ids = array.astype(np.int64).tolist()
    if not ids:
        raise EmptyPrompt(f"{where} has no token; give at least one to continue")
    vocab = target.lm.vocab
    for place, token in enumerate(ids):
        if not 0 <= token < vocab:
            raise TokenOutOfRange(f"{where} has token {token} at place {place}; ids go from 0 to {vocab - 1}")
    return ids


def row_keys(key: Any, prompts: int, samples: int, sampling: Sampling) -> jax.Array:
    """One typed key per row: the given key folded with the prompt's index and the sample's.

    A row's key depends on nothing else, so its text does not depend on its neighbours. A key per row may be
    given instead.
    """
    if key is None:
        if np.any(np.asarray(sampling.temperature) >= GREEDY):
            raise InvalidConfig("sampling needs a key: give key=jax.random.key(seed)")
        key = jax.random.key(0)  # not read: greedy decoding draws nothing
    if not isinstance(key, (jax.Array, np.ndarray)):
        raise InvalidConfig(f"key must be a JAX random key such as jax.random.key(0), got {key!r}")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.dtype != np.uint32 or key.shape[-1:] != (2,):
            raise InvalidConfig(f"key must be a JAX random key such as jax.random.key(0), got {key.dtype}{key.shape}")
        key = jax.random.wrap_key_data(jnp.asarray(key))
    key = jnp.asarray(key)
    rows = prompts * samples
    if key.shape == (rows,):
        return key
    if key.shape != ():
        raise InvalidConfig(f"key must be one key, or one for each of the {rows} rows; got shape {key.shape}")
    of_prompt = [jax.random.fold_in(key, i) for i in range(prompts)]
    data = [np.asarray(jax.random.key_data(jax.random.fold_in(k, s))) for k in of_prompt for s in range(samples)]
    return jax.random.wrap_key_data(jnp.asarray(np.stack(data)), impl=jax.random.key_impl(key))


def with_padding_masked(target: Model, sampling: Sampling, batch: int) -> Sampling:
    """The settings as rows, with the tokens that the tokenizer does not know banned.

    Checkpoints pad the vocabulary; a padded id has no text.
    """
    vocab = target.lm.vocab
    known = vocab if target.tokenizer is None else min(target.tokenizer.vocab_size, vocab)
    rows = sampling.rows(batch, vocab)
    if known == vocab:
        return rows
    padding = jnp.where(jnp.arange(vocab) < known, 0.0, -jnp.inf)
    bias = padding if rows.logit_bias is None else rows.logit_bias + padding
    return Sampling(rows.temperature, rows.top_k, rows.top_p, rows.min_p, jnp.broadcast_to(bias, (batch, vocab)))


def check_sampling(sampling: Any, rows: int, vocab: int) -> None:
    """The values of all rows, without an array of the vocabulary for each.

    Raises:
        InvalidConfig, TokenOutOfRange: see `Sampling.rows`.
    """
    if not isinstance(sampling, Sampling):
        raise InvalidConfig(f"sampling must be a jaxspec.Sampling, got {sampling!r:.80}")
    bias = sampling.logit_bias
    if not isinstance(bias, Mapping) and np.ndim(bias) == 2:
        sampling.rows(rows, vocab)
    else:
        dataclasses.replace(sampling, logit_bias=None).rows(rows, vocab)
        Sampling(logit_bias=bias).rows(1, vocab)


def check_counts(**counts: Any) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise InvalidConfig(f"{name} must be a whole number from 1, got {value!r}")


def stop_array(target: Model, stop_ids: Sequence[int], ignore_eos: bool, batch: int) -> jax.Array:
    """`[batch, M]`, M in steps of 8 so that a stop id more does not compile anew."""
    if not isinstance(stop_ids, Sequence):
        raise InvalidConfig(f"stop_ids must be a list of token ids, got {stop_ids!r:.80}")
    ids = list(dict.fromkeys((*(() if ignore_eos else target.stop_ids), *stop_ids)))
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < target.lm.vocab:
            raise TokenOutOfRange(f"stop id {token!r} is no token; ids go from 0 to {target.lm.vocab - 1}")
    row = np.full(-(-max(len(ids), 1) // 8) * 8, -1, np.int32)
    row[: len(ids)] = ids
    return jnp.broadcast_to(jnp.asarray(row), (batch, row.size))


def fit_capacity(decoder: Decoder, weights: Weights, longest: int, batch: int, capacity: int | None) -> int:
    """Cache slots for texts of `longest` tokens, in powers of two so that lengths share a compilation.

    Raises:
        CapacityError: longer than the model's context, or than the capacity that was asked for.
    """
    if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, (int, np.integer))):
        raise InvalidConfig(f"capacity must be a whole number of slots, got {capacity!r}")
    context = decoder.target.context
    if longest > context:
        raise CapacityError(
            f"prompt and new tokens make {longest} tokens, the model's context is {context}; "
            "shorten the prompt or lower max_new_tokens "
            f"(all of it would be a cache of {_memory(decoder, weights, batch, longest)})"
        )
    need = decoder.slots(longest)
    slots = sizes.shared(need) if capacity is None else capacity
    if slots < need:
        raise CapacityError(
            f"capacity {capacity} is too small: {longest} tokens and a window of {decoder.drafter.shape.nodes} "
            f"need {need} slots, a cache of {_memory(decoder, weights, batch, need)} for {batch} rows"
        )
    return slots


def cache_bytes(decoder: Decoder, weights: Weights, batch: int, slots: int) -> int:
    """Memory of what target and drafter remember."""
    cache = jax.eval_shape(lambda: decoder.target.init_cache(batch, slots))
    draft = jax.eval_shape(lambda: decoder.drafter.init(weights.draft, batch, slots))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((cache, draft)))


def _memory(decoder: Decoder, weights: Weights, batch: int, slots: int) -> str:
    size = cache_bytes(decoder, weights, batch, slots)
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def pad_prompts(prompts: Sequence[Sequence[int]], size: int) -> tuple[jax.Array, jax.Array]:
    """`[rows, size]` and the counts."""
    tokens = np.zeros((len(prompts), size), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt
    return jnp.asarray(tokens), jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)


def make_request(
    prompts: list[list[int]],
    keys: jax.Array,
    sampling: Sampling,
    max_new_tokens: int | Sequence[int],
    stops: jax.Array,
    size: int,
) -> Request:
    """`sampling` as rows, prompts padded to `size`."""
    tokens, count = pad_prompts(prompts, size)
    return Request(
        tokens, count, jnp.broadcast_to(jnp.asarray(max_new_tokens, jnp.int32), count.shape), keys, stops, sampling
    )
