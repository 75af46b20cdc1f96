"""The memory of caches: chooses a capacity and checks that it fits on the machine."""

import functools
import math
import os

import jax

from jaxspec.amounts import plural, size
from jaxspec.core import sizes
from jaxspec.core.checks import index
from jaxspec.core.networks import LanguageModel
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Weights
from jaxspec.errors import CapacityError, InvalidConfig, shown
from jaxspec.models.transformer import TransformerLM


def fit_capacity(decoder: Decoder, weights: Weights, longest: int, batch: int, capacity: int | None) -> int:
    """Returns the cache slots of each row for texts of up to `longest` tokens.

    Args:
        decoder: the decoder.
        weights: the parameters of the target and the drafter.
        longest: length of the longest text, prompt included, in tokens.
        batch: number of rows.
        capacity: requested slots, rounded up to whole blocks; None to choose, in powers of two so that similar lengths
            share a compilation.

    Raises:
        InvalidConfig: the capacity is not a whole number.
        CapacityError: the text exceeds the model's context or the requested capacity, or the caches exceed the memory.
    """
    if capacity is not None and (index(capacity) is None or int(capacity) > sizes.MAX_INT32):
        raise InvalidConfig(f"capacity must be a whole number of slots up to {sizes.MAX_INT32}, got {shown(capacity)}")
    context = decoder.target.context
    if longest > context:
        raise CapacityError(
            f"prompt and new tokens are {longest} tokens, but the model's context is {context}; shorten the prompt or "
            f"lower max_new_tokens{_longer(decoder.target, longest)} (the cache would take "
            f"{_memory(decoder, weights, batch, longest)})"
        )
    need = decoder.slots(longest)
    if capacity is not None and capacity < need:
        raise CapacityError(
            f"capacity {capacity} is too small: {longest} tokens and a window of {decoder.drafter.shape.nodes} "
            f"need {need} slots, a cache of {_memory(decoder, weights, batch, need)} for {plural(batch, 'row')}"
        )
    slots = sizes.round_to_bucket(need) if capacity is None else sizes.round_to_blocks(int(capacity))
    if cache_bytes(decoder, weights, batch, slots) > machine_bytes():
        raise CapacityError(
            f"a cache for {plural(batch, 'row')} of {slots} slots takes {_memory(decoder, weights, batch, slots)}, "
            f"but the machine has {size(machine_bytes())}; lower max_new_tokens, samples or capacity, or pass batch="
        )
    return slots


def cache_bytes(decoder: Decoder, weights: Weights, batch: int, slots: int) -> int:
    """Returns the memory of the target's cache and the drafter's state, in bytes.

    For a target with recurrent layers, the cache includes their states. What a window leaves behind in these layers is
    large as well, and counts.
    """
    cache = jax.eval_shape(lambda: decoder.target.init_cache(batch, slots))
    draft = jax.eval_shape(lambda: decoder.drafter.init(weights.draft, batch, slots))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((cache, draft)))
    return held + int(batch) * decoder.drafter.shape.nodes * state_entry_bytes(decoder.target)


def state_entry_bytes(target: LanguageModel) -> int:
    """Returns the bytes that a token of a window leaves behind in all recurrent layers of a target."""
    if not isinstance(target, TransformerLM) or (delta := target.config.delta) is None:
        return 0
    return 4 * delta.entry_numbers * sum(map(target.config.is_recurrent, range(target.depth)))


@functools.cache
def machine_bytes() -> float:
    """Returns the memory of all devices together, in bytes; infinity if it is not known."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit", math.inf) * jax.device_count()
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return math.inf


def _memory(decoder: Decoder, weights: Weights, batch: int, slots: int) -> str:
    """Formats the memory of a cache."""
    return size(cache_bytes(decoder, weights, batch, slots))


def _longer(lm: LanguageModel, longest: int) -> str:
    """Returns how a model with scaled rotary positions can be loaded for longer texts; empty for other models."""
    rope = lm.config.rope if isinstance(lm, TransformerLM) else None
    if rope is None or rope.scale == 1 or len(set(rope.divisors)) < 2:
        return ""
    return (
        f", or, if the model has LongRoPE, load it for longer texts: load(..., context={longest}) (--context {longest})"
    )
