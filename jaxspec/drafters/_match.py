"""Where the end of a row's text occurred before, in the text itself or in earlier texts of the same prompt."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.core.records import Context

MATCH_ACCURACY = (0.0, 0.2, 0.53, 0.69, 0.72, 0.82, 0.83, 0.87, *[0.92] * 8, 0.96)
"""How often the next token is the one that followed a match of 0, 1, 2, ... tokens (`scripts/measure/replay.py`)."""


def with_history(context: Context) -> Context:
    """Returns the context with the earlier texts of the same prompt in front of each row's text, if there are any."""
    if context.history is None:
        return context
    tokens = jnp.concatenate([context.history, context.tokens], 1)
    return context._replace(tokens=tokens, length=context.length + context.history.shape[1], history=None)


def count_matches(tokens: Int[Array, "S"], length: Int[Array, ""], most: int) -> Int[Array, "S"]:
    """Returns, for each position of a text, how many tokens before it equal the tokens at the end of the text.

    Args:
        tokens: the text, and padding after it.
        length: the length of the text.
        most: the largest number of tokens that are compared.
    """
    positions = jnp.arange(tokens.size)
    padded = jnp.concatenate([jnp.full((most,), -3, tokens.dtype), tokens])  # -1 ends an earlier answer
    match = jnp.zeros_like(positions)
    equal = (positions > 0) & (positions < length)
    for back in range(1, most + 1):
        before = padded[most - back : most - back + tokens.size]
        ending = jnp.where(length >= back, tokens[jnp.maximum(length - back, 0)], -2)
        equal = equal & (before == ending)
        match = match + equal
    return match


def find_positions(
    tokens: Int[Array, "S"], length: Int[Array, ""], count: int, least: int, most: int
) -> tuple[Int[Array, " J"], Int[Array, " J"]]:
    """Returns the positions after the longest matches, each with a different token, and the lengths of the matches.

    Among matches of equal length, the latest position is taken.

    Args:
        tokens: the text, and padding after it; a position that holds -1 does not match.
        length: the length of the text.
        count: J, the number of positions.
        least: the least number of matching tokens; positions with fewer, and missing positions, have a match of 0.
        most: the largest number of tokens that are compared.
    """
    match, candidates = count_matches(tokens, length, most), []
    match = jnp.where((match >= least) & (tokens >= 0), match, 0)
    for _ in range(count):
        position = jnp.argmax(match * tokens.size + jnp.arange(tokens.size) * (match > 0))
        candidates.append((position, match[position]))
        match = jnp.where(tokens == tokens[position], 0, match)
    positions, matches = zip(*candidates)
    return jnp.stack(positions), jnp.stack(matches)
