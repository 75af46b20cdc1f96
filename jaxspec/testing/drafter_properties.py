"""The properties of every correct drafter, as a function that raises `AssertionError`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core.drafter import Drafter
from jaxspec.core.draw import Draw, Noise
from jaxspec.core.networks import LanguageModel
from jaxspec.core.noise import RoundNoise
from jaxspec.core.records import Context, Params, Proposal
from jaxspec.core.sampling import Sampling
from jaxspec.core.tree import build
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Request, Weights
from jaxspec.rules.rejection import Rejection
from jaxspec.testing.properties import require


def check_drafter(
    drafter: Drafter, params: Params, target: LanguageModel, target_params: Params, prompts: Sequence[Sequence[int]]
) -> Proposal:
    """Checks a drafter's proposals after some prompts, drawn with fresh noise.

    The tree must have the declared shape and consistent tables, tokens must be valid and siblings distinct, and the
    draft's laws must sum to 1 and allow the proposed tokens.

    Args:
        drafter: the drafter.
        params: the parameters of the drafter.
        target: the target, with `target_params`.
        target_params: the target's parameters.
        prompts: token ids of each row.

    Returns:
        The proposals, `[B, N]`, as NumPy arrays.

    Raises:
        AssertionError: a property does not hold; the message names it.
    """
    batch, vocab, longest = len(prompts), target.vocab, max(map(len, prompts))
    decoder = Decoder(target, drafter, Rejection(), chunk=4)
    tokens = np.zeros((batch, longest), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt
    count = jnp.asarray([len(prompt) for prompt in prompts])
    keys = jax.random.split(jax.random.key(0), batch)
    stops, rows = jnp.full((batch, 1), -1), Sampling(temperature=1.0).rows(batch, vocab)
    request = Request(jnp.asarray(tokens), count, jnp.full((batch,), 8), keys, stops, rows)
    weights = Weights(target_params, params)

    @jax.jit
    def propose(weights: Weights, request: Request) -> Proposal:
        state = decoder.prefill(weights, decoder.init(weights, request, decoder.slots(longest + 8)))
        draw = Draw(Noise.FRESH, RoundNoise(state.key, state.length, jnp.array(True), vocab), state.sampling)
        context = Context(state.tokens, state.length, state.cache, weights.target, state.history)
        return drafter.propose(weights.draft, state.draft, context, draw)[0]

    proposal: Any = jax.device_get(propose(weights, request))
    shape, tree, tokens = drafter.shape, proposal.tree, np.array(proposal.tokens)
    sizes = (shape.nodes, shape.width), (shape.nodes, shape.depth + 1)
    require(
        (tree.children.shape[-2:], tree.paths.shape[-2:]) == sizes,
        drafter,
        "proposes a tree that differs from its shape",
    )
    require(tokens.shape == (batch, shape.nodes), drafter, "proposes a number of nodes that differs from its shape")
    parents = np.broadcast_to(tree.parents, tokens.shape)
    expected = jax.device_get(jax.vmap(lambda p: build(p, shape))(parents))
    same = [np.array_equal(np.broadcast_to(a, b.shape), b) for a, b in zip(tree, expected)]
    require(all(same), drafter, "proposes a tree whose tables do not follow from its parents")
    tokens[:, 0] = -1
    require(((tokens >= -1) & (tokens < vocab)).all(), drafter, "proposes tokens outside the vocabulary")
    siblings = (parents[:, :, None] == parents[:, None, :]) & ~np.eye(shape.nodes, dtype=bool)
    twice = siblings & (tokens[:, :, None] == tokens[:, None, :]) & (tokens >= 0)[:, :, None]
    require(not twice.any(), drafter, "proposes a token twice among siblings")
    if proposal.law is not None:
        proposed = (tokens >= 0) & np.take_along_axis((tokens >= 0) | (parents < 0), np.maximum(parents, 0), 1)
        above = np.take_along_axis(proposal.law, np.maximum(parents, 0)[..., None], 1)
        log_probs = np.take_along_axis(above, np.maximum(tokens, 0)[..., None], 2)[..., 0]
        require((log_probs[proposed] > -np.inf).all(), drafter, "proposes a token that its law excludes")
        require(np.allclose(np.exp(above[proposed]).sum(-1), 1, atol=1e-5), drafter, "has a law that does not sum to 1")
    return proposal
