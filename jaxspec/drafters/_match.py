"""Where the end of a row's text occurred before."""

import jax.numpy as jnp
from jaxtyping import Array, Int

TRUST = (0.0, 0.2, 0.53, 0.69, 0.72, 0.82, 0.83, 0.87, *[0.92] * 8, 0.96)
"""How often the next token is what followed a match of 0, 1, 2, ... tokens (`scripts/measure/replay.py`)."""


def count_matches(tokens: Int[Array, "S"], length: Int[Array, ""], most: int) -> Int[Array, "S"]:
    """Returns, for each place of a text, how many tokens before it equal those at the end of the text.

    Args:
        tokens: the text, and padding after it.
        length: its length.
        most: the number of tokens that are compared.
    """
    places = jnp.arange(tokens.size)
    padded = jnp.concatenate([jnp.full((most,), -3, tokens.dtype), tokens])  # -1 ends an earlier answer
    match = jnp.zeros_like(places)
    equal = (places > 0) & (places < length)
    for back in range(1, most + 1):
        before = padded[most - back : most - back + tokens.size]
        ending = jnp.where(length >= back, tokens[jnp.maximum(length - back, 0)], -2)
        equal = equal & (before == ending)
        match = match + equal
    return match


def find_places(
    tokens: Int[Array, "S"], length: Int[Array, ""], count: int, least: int, most: int
) -> tuple[Int[Array, " J"], Int[Array, " J"]]:
    """Returns the places of the longest matches, the latest of equal ones, each with another token, and the matches.

    Args:
        tokens: the text, and padding after it; -1 is never a place.
        length: its length.
        count: J.
        least: least number of matching tokens; a place with fewer, or none, has a match of 0.
        most: the number of tokens that are compared.
    """
    match, found = count_matches(tokens, length, most), []
    match = jnp.where((match >= least) & (tokens >= 0), match, 0)
    for _ in range(count):
        place = jnp.argmax(match * tokens.size + jnp.arange(tokens.size) * (match > 0))
        found.append((place, match[place]))
        match = jnp.where(tokens == tokens[place], 0, match)
    places, matches = zip(*found)
    return jnp.stack(places), jnp.stack(matches)
