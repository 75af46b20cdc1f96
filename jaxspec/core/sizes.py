"""How many cache slots a text takes. Without JAX, so that memory can be told before anything is loaded."""

BLOCK = 256
"""Slots an attention step reads at once; capacities are multiples of it, so bits do not depend on them."""

CHUNK = 64
"""Tokens of a prompt read at once, unless a decoder says otherwise."""


def slots(length: int, window: int) -> int:
    """Slots that a text of `length` tokens needs: a window still fits behind it."""
    return -(-(length + window) // BLOCK) * BLOCK


def shared(slots: int) -> int:
    """At least so many slots, a power of two, so that texts of like lengths share a compilation."""
    return max(512, 1 << (slots - 1).bit_length())
