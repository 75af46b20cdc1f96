"""How many cache slots a text takes. Without JAX, so that memory can be told before anything is loaded."""

BLOCK = 256
"""Slots an attention step reads at once; capacities are multiples of it, so bits do not depend on them."""

MAX_NODES = 1024
"""Nodes of a tree, at most: its tables grow with their square. Published trees have up to 768."""

CHUNK = 64
"""Tokens of a prompt read at once, unless a decoder says otherwise."""

MOST_LOGPROBS = 1024
"""Most of a token's likeliest alternatives that are recorded: their memory is that of a cache of a small model."""


def slots(length: int, window: int) -> int:
    """Slots that a text of `length` tokens needs: a window still fits behind it."""
    return whole_blocks(length + window)


def whole_blocks(slots: int) -> int:
    """As many slots, or more to a whole block: what a cache has."""
    return -(-slots // BLOCK) * BLOCK


def round_to_bucket(slots: int) -> int:
    """At least so many slots, a power of two, so that texts of like lengths share a compilation."""
    return max(512, 1 << (slots - 1).bit_length())


def rows(count: int) -> int:
    """At least so many rows: a power of two, or one and a half times one, so that like counts share a compilation.

    1, 2, 3, 4, 6, 8, 12, 16, 24, ...: less than a third of the rows stand still. Decoding few rows reads the weights
    once for all of them, so a row more costs little, and a compilation costs seconds. Powers of two alone would waste
    up to half, finer steps would compile nearly every count anew where counts are small.
    """
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def top_logprobs(count: int, vocab: int) -> int:
    """At least so many alternatives of a token, a power of two from 8, so that like counts share a compilation."""
    return min(vocab, max(8, 1 << (count - 1).bit_length()))
