"""Which prompts leave room for an answer."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxspec.errors import CapacityError

Named = tuple[str, list[int]]
"""A prompt's name and its token ids."""


def too_long(name: str, tokens: Sequence[int], max_new_tokens: int, context: int) -> str | None:
    """Why a prompt cannot be continued, in one line; None if it can."""
    need = len(tokens) + max_new_tokens
    if need <= context:
        return None
    return f"{name}: prompt and new tokens make {need} tokens, the model's context is {context}"


def fitting(
    prompts: Sequence[Named], max_new_tokens: int, context: int, report: Callable[[str], Any] = lambda line: None
) -> list[Named]:
    """The prompts that can be continued; each of the others is reported by name.

    Raises:
        CapacityError: there is none.
    """
    found = [(prompt, too_long(*prompt, max_new_tokens, context)) for prompt in prompts]
    need_one([reason for _, reason in found if reason], len(prompts))
    for _, reason in found:
        if reason:
            report(f"left out: {reason}")
    return [prompt for prompt, reason in found if reason is None]


def need_one(reasons: Sequence[str], prompts: int) -> None:
    """Raises CapacityError if there are as many reasons as prompts."""
    if len(reasons) == prompts:
        raise CapacityError(f"no prompt leaves room: {reasons[0]}; shorten the prompts or lower max_new_tokens")
