"""Leaves out prompts that are too long for the model's context."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxspec.errors import CapacityError

NamedPrompt = tuple[str, list[int]]
"""A prompt's name and its token ids."""


def explain_excess(name: str, tokens: Sequence[int], max_new_tokens: int, context: int) -> str | None:
    """Returns why a prompt cannot be continued, in one line; None if it can."""
    need = len(tokens) + max_new_tokens
    if need <= context:
        return None
    return f"{name}: prompt and new tokens make {need} tokens, but the model's context is {context}"


def keep_fitting(
    prompts: Sequence[NamedPrompt], max_new_tokens: int, context: int, report: Callable[[str], Any] = lambda line: None
) -> list[NamedPrompt]:
    """Returns the prompts that can be continued, and reports each of the other prompts by name.

    Raises:
        CapacityError: all prompts are too long.
    """
    checked = [(prompt, explain_excess(*prompt, max_new_tokens, context)) for prompt in prompts]
    require_prompts([reason for _, reason in checked if reason], len(prompts))
    for _, reason in checked:
        if reason:
            report(f"left out: {reason}")
    return [prompt for prompt, reason in checked if reason is None]


def require_prompts(reasons: Sequence[str], prompts: int) -> None:
    """Raises CapacityError if there is a reason to leave out every prompt."""
    if len(reasons) == prompts:
        raise CapacityError(f"every prompt is too long: {reasons[0]}; shorten the prompts or lower max_new_tokens")
