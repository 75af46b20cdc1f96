"""Compares texts, and certifies differences that rounding explains."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.records import PLAIN_METHOD, BenchPrompt, Difference, Method
from jaxspec.bench.setup import BenchSetup
from jaxspec.bench.worker import Worker
from jaxspec.generation import inputs
from jaxspec.generation.drafting import Drafting
from jaxspec.models.model import Model
from jaxspec.testing import TIE_GAP, tie_gap


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Returns the first index at which two texts differ or one has ended; None if they are equal."""
    for place, (a, b) in enumerate(zip(one, other)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def in_float32(model: Model) -> bool:
    """Returns True if no parameter has a lower precision than float32."""
    leaves = jax.tree.leaves(model.params)
    return all(a.dtype.itemsize >= 4 for a in leaves if jnp.issubdtype(a.dtype, jnp.floating))


def certify(
    setup: BenchSetup, method: Method | Worker, prompt: BenchPrompt, plain: list[int], difference: Difference
) -> Difference:
    """Completes a difference with its gap and, where rounding explains it, its certificate; see `Difference`.

    Args:
        setup: the setup that decoded both texts.
        method: the method whose text differs.
        prompt: the prompt of both texts.
        plain: the tokens of plain decoding.
        difference: the first difference between the texts.
    """
    one, other = difference.plain, difference.other
    foreign = isinstance(method, Worker)
    if one is None or other is None:
        return dataclasses.replace(difference, certificate="peer" if foreign else None)
    target = setup.target
    sampling = inputs.mask_padding(target, setup.common["sampling"], 1)
    text = prompt.tokens + plain[: difference.place]
    with np.errstate(invalid="ignore"):  # -inf - -inf if neither token can be drawn
        gap = tie_gap(target.lm, target.params, text, (one, other), prompt.key, sampling, len(prompt.tokens))
    if foreign:
        certificate = "peer"
    elif in_float32(target):
        certificate = "tie" if gap < TIE_GAP else None
    else:
        certificate = "width" if _equal_at_one_width(setup, method, prompt) else None
    return dataclasses.replace(difference, gap=gap if np.isfinite(gap) else None, certificate=certificate)


def _equal_at_one_width(setup: BenchSetup, method: Method, prompt: BenchPrompt) -> bool:
    """Returns True if the texts are equal when every target call has the width of the method's tree."""
    tree = setup.decoder(method)[0].drafter.needs.tree
    if tree is None:
        return False
    plain = Method(PLAIN_METHOD, Drafting(PLAIN_METHOD, tree=tree))
    one, other = (setup.decode(each, prompt, width_matched=True).text for each in (plain, method))
    return one.tokens == other.tokens
