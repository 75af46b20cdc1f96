"""Sizes of caches and batches. This module does not import JAX, so memory can be computed before anything is loaded."""

MAX_INT32 = 2**31 - 1
"""The largest count: positions and sizes are int32 on the device."""

MAX_SEED = 2**64 - 1
"""The largest seed."""

MAX_WATERMARK_CONTEXT = 16
"""The largest number of tokens before a token that decide its noise in a watermark."""

MAX_SAMPLES = 1 << 20
"""The largest number of samples of a prompt."""

BLOCK_SLOTS = 256
"""The number of cache slots that attention reads at once. Capacities are multiples of it, so that the bits of a result
do not depend on the capacity."""

MAX_NODES = 1024
"""The largest number of drafted nodes of a tree. The tables of a tree grow with the square of this number. Published
trees have up to 768 nodes."""

PROMPT_CHUNK = 64
"""The default number of prompt tokens read at once."""

MAX_LOGPROBS = 1024
"""The largest number of alternatives recorded per token. They take as much memory as the cache of a small model."""


def required_slots(length: int, window: int) -> int:
    """Returns the number of slots that a text of `length` tokens needs, with room for a window after it."""
    return round_to_blocks(length + window)


def round_to_blocks(slots: int) -> int:
    """Rounds a number of slots up to whole blocks, because a cache consists of whole blocks."""
    return -(-slots // BLOCK_SLOTS) * BLOCK_SLOTS


def round_to_bucket(slots: int) -> int:
    """Rounds a number of slots up to a power of two from 512, so that texts of similar length share a compilation."""
    return max(512, 1 << (slots - 1).bit_length())


def round_rows(count: int) -> int:
    """Rounds a number of rows up to a bucket, so that similar numbers share a compilation.

    Buckets are powers of two, and one and a half times powers of two: 1, 2, 3, 4, 6, 8, 12, 16, 24, ... Less than a
    third of the rows are padding. An additional row costs little, because the weights are read once for all rows, while
    a compilation takes seconds. With powers of two alone, up to half of the rows would be padding. With finer steps,
    nearly every small number of rows would be compiled separately.
    """
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def round_top_logprobs(count: int, vocab: int) -> int:
    """Rounds a number of alternatives up to a power of two from 8, at most V, so that requests share programs."""
    return min(vocab, max(8, 1 << (count - 1).bit_length()))
