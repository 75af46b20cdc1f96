"""Rollouts: texts drawn inside a training program, with their log-probabilities; `rollout` and `log_probs`.

Everything is traced except the number and the lengths of the texts, and the drafting. The parameters of target and
drafter may be the values of an outer program, so one compilation serves every training step.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from jaxspec.core import checks, sizes
from jaxspec.core.laws import log_prob, scores, temper_logits, widened
from jaxspec.core.mesh import DATA, MODEL, check_mesh, count_groups, manual_axes
from jaxspec.core.networks import LanguageModel
from jaxspec.core.noise import as_key
from jaxspec.core.processor import Beginning, map_rows, process_text, read_text
from jaxspec.core.records import Params, Status, Window
from jaxspec.core.sampling import Sampling, is_abstract
from jaxspec.decode import lifecycle
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Logprobs, Request, Weights
from jaxspec.errors import InvalidConfig, TokenOutOfRange, shown
from jaxspec.generation import inputs
from jaxspec.generation.drafting import Drafting
from jaxspec.generation.history import History, Texts, check_history
from jaxspec.generation.memory import fit_capacity
from jaxspec.models.model import Model
from jaxspec.models.transformer import TransformerLM
from jaxspec.registry import AUTO_DRAFTER


class Rollout(NamedTuple):
    """Texts that a policy has drawn: R rows of at most T tokens, of which at most N are new.

    The rows of a prompt are adjacent. The prompt of row r is `tokens[r, :start[r]]`, and its new text is
    `tokens[r, start[r]:length[r]]`, including a stop token.
    """

    tokens: Int[Array, "R T"]  # prompt and new text, then zeros
    start: Int[Array, "R"]
    length: Int[Array, "R"]
    status: Int[Array, "R"]  # why the row finished: a `Status`
    rounds: Int[Array, "R"]  # calls of the target
    logprobs: Logprobs  # of the new tokens, [R, N], zeros after the last; without alternatives
    sampling: Sampling  # the settings of each row
    stop_ids: Int[Array, "R M"]  # the stop tokens of each row, padded with -1

    def as_texts(self) -> Texts:
        """Returns the texts for `History.add`."""
        return Texts(self.tokens, self.start, self.length, self.status != Status.ERROR)

    @property
    def drawn(self) -> Bool[Array, "R N"]:
        """True for new tokens, False for the padding after them."""
        return jnp.arange(self.logprobs.raw.shape[-1]) < (self.length - self.start)[:, None]

    @property
    def new_tokens(self) -> Int[Array, "R N"]:
        """The new tokens, padded with zeros."""
        return jnp.where(self.drawn, _aligned(self.tokens, self.start, self.drawn.shape[-1]), 0)


@checks.check_arguments
def rollout(
    target: Model,
    tokens: Int[Array | np.ndarray, "B P"],
    count: Int[Array | np.ndarray, "B"],
    *,
    key: Array,
    sampling: Sampling = Sampling(temperature=1.0),
    max_new_tokens: int = 128,
    samples: int = 1,
    drafting: Drafting = Drafting(),
    stop_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    width_matched: bool | int = False,
    history: History | None = None,
    mesh: Mesh | None = None,
) -> Rollout:
    """Draws texts by speculative decoding inside a program of your own; see docs/rollouts.md.

    This is a pure function of arrays, which also works under `jax.jit`, `jax.lax.scan` and `jax.lax.cond`. With the
    default rule, the texts are the same as with `drafting=Drafting("none")`, and the same as the texts of `generate`
    with the same key, up to ties. Each prompt is read once, whatever the number of its samples.

    Args:
        target: the policy: `Model(lm, params)`, or `dataclasses.replace(model, params=params)`. With a mesh, its
            parameters are laid out as by `jaxspec.shard`, or in any other way over the axis "data".
        tokens: prompts, padded on the right with any id.
        count: the number of tokens of each prompt, from 1.
        key: JAX random key, folded for each row as `generate` does; or one key for each row.
        sampling: sampling settings, for all rows or per row; may be traced.
        max_new_tokens: N, the maximum number of new tokens of each row.
        samples: rows per prompt, each with its own random numbers.
        drafting: drafter, rule, tree and schedule. Its draft model, heads or `draft_params` may be traced.
        stop_ids: ids of stop tokens, in addition to the model's own.
        ignore_eos: whether to ignore the model's own stop tokens.
        width_matched: whether every target call has the width of the tree, or that width as a number; see `generate`.
        history: earlier texts of these prompts, from which the drafters "prompt-lookup" and "recycling" copy; may be
            traced. With the default rule it changes no text.
        mesh: devices to decode on, see `make_mesh`. Every group of devices draws its own rows, and does not wait for
            the other groups.

    Raises:
        JaxspecError: an argument is invalid; raised while the program is traced.
    """
    if not isinstance(drafting, Drafting):
        raise InvalidConfig(f"drafting must be a jaxspec.Drafting, got {shown(drafting)}")
    if drafting.is_auto:
        raise InvalidConfig(
            f"the drafter {AUTO_DRAFTER!r} is measured, and a rollout is traced; choose the drafter before, as in "
            f"drafting=jaxspec.tune(target, prompts, drafter={AUTO_DRAFTER!r})"
        )
    new = checks.whole("max_new_tokens", max_new_tokens)
    samples = checks.whole("samples", samples, 1, sizes.MAX_SAMPLES)
    inputs.check_model("target", target)
    _check_mesh(target.lm, mesh)
    tokens, count = _check_prompts(tokens, count, target.lm.vocab)
    prompts = len(tokens)
    rows, parts = prompts * samples, count_groups(mesh)
    split = parts // math.gcd(prompts, parts)  # the groups that share a prompt, each of which reads it
    if samples % split:
        raise InvalidConfig(
            f"{prompts} prompts of {samples} samples cannot be shared evenly by {parts} groups of devices"
        )
    inputs.check_sampling(sampling, rows, target.lm.vocab)
    settings = inputs.mask_padding(target, sampling, rows)
    keys = _row_keys(as_key(key, rows), prompts, samples)
    stops = inputs.stop_array(target, stop_ids, ignore_eos, rows)
    decoder, weights = drafting.build(target, width_matched=width_matched)
    earlier = check_history(history, prompts, decoder.drafter)
    earlier = None if earlier is None else jnp.repeat(earlier, samples, axis=0)
    longest = tokens.shape[1] + new
    capacity = fit_capacity(decoder, weights, longest, rows, decoder.slots(longest))
    tokens, count = (jnp.repeat(a, split, axis=0) for a in (tokens, count))
    request = Request(tokens, count, jnp.full(rows, new), keys, stops, settings, jnp.ones(rows, bool), history=earlier)
    return _draw(decoder, capacity, new, samples // split, mesh, weights, request)


@checks.check_arguments
def log_probs(target: Model, rollout: Rollout, mesh: Mesh | None = None) -> Logprobs:
    """Computes the log-probabilities of a rollout's new tokens by one differentiable pass over its texts.

    With the parameters that drew the texts, the results are `rollout.logprobs`, up to rounding. With other parameters,
    a token that truncation would drop counts as kept, and all more likely tokens also count as kept. Every
    log-probability is therefore finite, as long as no bias bans a token.

    Args:
        target: the model, such as the policy after an update, or a reference.
        rollout: the texts, and the settings of the sampled law.
        mesh: as in `rollout`.

    Returns:
        Log-probabilities `[R, N]` under the raw logits and under the sampled law; zeros after the last token.
    """
    inputs.check_model("target", target)
    if not isinstance(rollout, Rollout):
        raise InvalidConfig(f"rollout must be a jaxspec.Rollout, as from jaxspec.rollout; got {shown(rollout)}")
    _check_mesh(target.lm, mesh)
    lm = target.lm

    def score(params: Params, rollout: Rollout) -> Logprobs:
        return _score(lm, params, rollout)

    return _over(mesh, score, target.params, rollout)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _draw(
    decoder: Decoder, capacity: int, new: int, samples: int, mesh: Mesh | None, weights: Weights, request: Request
) -> Rollout:
    """Draws all rows. The request has prompts `[B]`, and everything else for every row, `[B samples]`."""

    def draw(weights: Weights, request: Request) -> tuple[Any, ...]:
        first = Request(*request[:2], *map_rows(lambda leaf: leaf[::samples], tuple(request[2:])))

        def init(weights: Weights, request: Request) -> Any:
            return decoder.init(weights, request, capacity)

        axes = lifecycle.row_axes(init, weights, first)
        state = decoder.prefill(weights, init(weights, first))
        state = jax.tree.map(lambda leaf, axis: leaf if axis < 0 else jnp.repeat(leaf, samples, axis), state, axes)
        state = state._replace(key=request.key, sampling=request.sampling)
        state = decoder.run(weights, state)
        size = request.tokens.shape[1] + new
        text = jnp.where(jnp.arange(size) < state.length[:, None], state.tokens[:, :size], 0)
        within = jnp.arange(new) < (state.length - state.start)[:, None]
        logprobs = jax.tree.map(lambda leaf: _masked(_aligned(leaf, state.start, new), within), state.logprobs)
        return text, state.start, state.length, state.status, state.round, logprobs

    text, start, length, status, rounds, logprobs = _over(mesh, draw, weights, request)
    return Rollout(text, start, length, status, rounds, logprobs, request.sampling, request.stop_ids)


def _score(lm: LanguageModel, params: Params, rollout: Rollout) -> Logprobs:
    tokens, within, sampling = rollout.tokens, rollout.drawn, rollout.sampling
    rows, size = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(size), tokens.shape)
    window = Window(tokens, positions, jnp.broadcast_to(jnp.tri(size, dtype=bool), (rows, size, size)))
    features, _ = lm.apply(params, window, lm.init_cache(rows, 0))
    logits = lm.head(params, _aligned(features, rollout.start - 1, within.shape[1]))
    logits, token = widened(logits), rollout.new_tokens
    raw = jnp.take_along_axis(jax.nn.log_softmax(logits, -1), token[..., None], -1)[..., 0]
    beginning = Beginning(lm.vocab, size, rollout.stop_ids)
    states = read_text(sampling.processors, beginning, tokens, rollout.start, rollout.start)
    logits = process_text(sampling.processors, states, token, logits)
    rest = dataclasses.replace(sampling, processors=())
    score, untruncated = scores(logits, rest), temper_logits(logits, rest)
    chosen = jnp.take_along_axis(untruncated, token[..., None], -1)
    score = jnp.where(untruncated >= chosen, untruncated, score)  # top-k also keeps it
    sampled = log_prob(score, token, rest, drawn=True)
    none = jnp.zeros((*token.shape, 0))
    return Logprobs(_masked(raw, within), _masked(sampled, within), none, none.astype(jnp.int32))


def _over(mesh: Mesh | None, function: Callable, params: Any, rows: Any) -> Any:
    """Returns `function(params, rows)`; every group of devices computes its own rows."""
    if mesh is None:
        return function(params, rows)
    by_row = map_rows(lambda _: P(DATA), rows, shared=lambda _: P())
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=(P(), by_row), out_specs=P(DATA), axis_names=manual_axes(mesh), check_vma=False
    )
    return mapped(params, rows)


def _aligned(values: Array, start: Int[Array, "R"], size: int) -> Array:
    """Returns `size` entries of each row `[R, T, ...]` from its start on; entries past its end repeat the last one."""
    index = jnp.minimum(start[:, None] + jnp.arange(size), values.shape[1] - 1)
    return jnp.take_along_axis(values, index.reshape(*index.shape, *[1] * (values.ndim - 2)), axis=1)


def _masked(values: Array, within: Bool[Array, "R N"]) -> Array:
    return jnp.where(within.reshape(*within.shape, *[1] * (values.ndim - 2)), values, 0)


def _row_keys(key: Array, prompts: int, samples: int) -> Array:
    """Returns one key for each row, traced: the key that `jaxspec.generation.inputs.row_keys` returns."""
    if key.shape:
        return key

    def of(row: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(key, row // samples), row % samples)

    return jax.vmap(of)(jnp.arange(prompts * samples))


def _check_prompts(tokens: Any, count: Any, vocab: int) -> tuple[Array, Array]:
    """Returns prompts `[B, P]` and their lengths `[B]` as int32. Values that are traced are not checked.

    Raises:
        InvalidConfig: `tokens` or `count` is not an array of integers of its shape, or a length is not from 1 to P.
        TokenOutOfRange: a token is not in the vocabulary.
    """
    for name, value, rank in (("tokens", tokens, 2), ("count", count, 1)):
        kind = getattr(value, "dtype", None)
        if kind is None or not jnp.issubdtype(kind, jnp.integer) or value.ndim != rank or not value.size:
            expected = "[prompts, length]" if rank == 2 else "[prompts]"
            raise InvalidConfig(f"{name} must be an array of integers {expected}, got {shown(value)}")
    if len(tokens) != len(count):
        raise InvalidConfig(f"count must have the length of each of the {len(tokens)} prompts, got {len(count)}")
    size = tokens.shape[1]
    if not is_abstract(count):
        for row, length in enumerate(np.asarray(count).tolist()):
            if not 1 <= length <= size:
                raise InvalidConfig(f"count must be from 1 to {size}, the width of tokens, got {length} for row {row}")
        if not is_abstract(tokens):
            wrong = (np.asarray(tokens) < 0) | (np.asarray(tokens) >= vocab)
            wrong &= np.arange(size) < np.asarray(count)[:, None]
            if wrong.any():
                row, at = np.argwhere(wrong)[0].tolist()
                token = int(np.asarray(tokens)[row, at])
                raise TokenOutOfRange(f"prompt {row} has token {token} at index {at}; ids go from 0 to {vocab - 1}")
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(count, jnp.int32)


def _check_mesh(lm: LanguageModel, mesh: Mesh | None) -> None:
    """Refuses a mesh that the model is not laid out for.

    Raises:
        InvalidConfig: the mesh was not made by `make_mesh`, or the model is split over another number of devices.
    """
    if mesh is not None:
        check_mesh(mesh)
    size = 1 if mesh is None else mesh.shape[MODEL]
    if isinstance(lm, TransformerLM) and lm.execution.shards != size:
        raise InvalidConfig(
            f"the model is split over {lm.execution.shards} devices, but the axis 'model' of the mesh has {size}; call "
            "jaxspec.shard(model, mesh) once, and pass the same mesh"
        )
