"""The drafter "pard": a draft model that guesses several tokens in one call, on any tree (PARD, arXiv:2504.18583).

The model was trained to continue a text in which mask tokens stand for the last tokens. In each round, one call reads
the text that the model has not read yet, and D - 1 masks after it. The last D rows of this call are the distributions
of the next D tokens. No row reads a drafted token, so all nodes of a level have the same children, as in Medusa's
Cartesian trees. Only the text's keys and values are kept.

PARD-2 (2026, arXiv:2605.08632) adds to the embedding of every token a projection of the target's states at the token
before it. Masks get the projection of the last token of the text, as in AMD's code (`pard2_infer.py`).
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.checkpoints.pard2 import is_pard2, parse_pard2, read_projection
from jaxspec.core.checks import whole
from jaxspec.core.drafter import DrafterInputs, Needs
from jaxspec.core.draw import Draw
from jaxspec.core.networks import LanguageModel, TappedTarget, empty_feature
from jaxspec.core.records import Advance, Cache, Context, Params, Proposal, Window
from jaxspec.core.topology import Dynamic, Topology, chain
from jaxspec.drafters._grow import grow
from jaxspec.drafters._level import Level
from jaxspec.drafters._tapped import dtype_of
from jaxspec.drafters._tree import TreeDrafter
from jaxspec.drafters._window import check_tree
from jaxspec.errors import InvalidConfig, MissingDraft, VocabMismatch
from jaxspec.models.layers import matmul
from jaxspec.models.model import Model
from jaxspec.models.transformer import TransformerLM
from jaxspec.text.tokenizer import same_vocab


class PardState(NamedTuple):
    """What the draft model has read of the text. It reads the rest in the call that drafts."""

    cache: Cache
    added: Float[Array, "B S E"] | None = None  # PARD-2: what is added to the embedding at each position


@dataclasses.dataclass(frozen=True)
class Pard(TreeDrafter):
    """Draws all levels in one call of a draft model that was trained with mask tokens (PARD; `pard_token`).

    Attributes:
        network: the draft model.
        token: the mask token, a row of the draft model's embedding.
        vocab: V, the size of the target's vocabulary; the draft model may have more rows, which are padding.
        tree: the topology, or the sizes of a dynamic tree.
        states: the taps of the target that PARD-2 projects (`jaxspec.core.networks.TappedTarget`), in this order; None
            stands for the target's own feature. Empty for PARD.
        scale: the factor applied to the projection.

    Raises:
        InvalidConfig: the tree has only its root, or nodes with more children than the vocabulary has tokens.
    """

    network: LanguageModel
    token: int
    vocab: int
    tree: Topology | Dynamic = chain(8)
    states: tuple[int | None, ...] = ()
    scale: float = 1.0

    takes: ClassVar[frozenset[str]] = frozenset({"tree", "draft", "pard_token", "projection"})
    draws = True

    def __post_init__(self):
        check_tree(self.tree, self.vocab)

    @classmethod
    def build(cls, inputs: DrafterInputs) -> tuple[Self, Params]:
        draft, target = inputs.draft, inputs.target
        if draft is None:
            raise MissingDraft("the drafter 'pard' needs a draft model that was trained for it (draft=, --draft-model)")
        _check_vocab(draft, target)
        token = inputs.options.get("pard_token", draft.settings.get("pard_token"))
        if token is None:
            raise InvalidConfig(
                f"{draft.name} has no mask token: its config.json has no pard_token; use a model that was trained by "
                "PARD, or pass the option pard_token"
            )
        token = whole("pard_token", token, 0, _rows(draft) - 1)
        states, scale, params = (), 1.0, draft.params
        if source := inputs.options.get("projection"):  # empty for none
            states, scale, params = _project(draft, target, source)
        return cls(draft.lm, token, target.lm.vocab, inputs.tree or chain(8), states, scale), params

    @property
    def needs(self) -> Needs:
        return Needs(taps=tuple(state for state in self.states if state is not None), tree=self.tree)

    @property
    def calls(self) -> int:
        return 1

    def init(self, params: Params, batch: int, capacity: int) -> PardState:
        added = None
        if self.states:
            added = jnp.zeros((batch, capacity, params["projection"].shape[1]), jnp.float32)
        return PardState(self.network.init_cache(batch, capacity), added)

    def absorb(self, params: Params, state: PardState, advance: Advance) -> PardState:
        """Reads a chunk of a prompt, except for its last token, from which the next proposal starts."""
        if state.added is not None:
            state = state._replace(added=self._project(params, state.added, advance))
        if advance.nodes is not None:
            return state
        end = jnp.where(advance.count > 0, advance.start + advance.count - 1, 0)
        return self.read(params, state, advance.text, end, advance.tokens.shape[1])[0]

    def propose(self, params: Params, state: PardState, context: Context, draw: Draw) -> tuple[Proposal, PardState]:
        drafting, depth = draw.below(0), self.shape.depth
        length = jnp.where(drafting, context.length, 0)

        def unread(carry: tuple[PardState, Array]) -> Array:
            return jnp.any(length > carry[0].cache.length)

        def read(carry: tuple[PardState, Array]) -> tuple[PardState, Array]:
            before, kept = carry
            after, features = self.read(params, before, context.tokens, length, depth + 1, depth - 1)
            count = (after.cache.length - before.cache.length)[:, None]
            rows = (jnp.maximum(count - 1, 0) + jnp.arange(depth))[:, :, None]
            return after, jnp.where(count[:, :, None] > 0, jnp.take_along_axis(features, rows, axis=1), kept)

        feature = empty_feature(self.network, self._network_params(params), state.cache)
        features = jnp.zeros((feature.shape[0], depth, feature.shape[1]), feature.dtype)
        # One iteration, unless a schedule has left some text unread.
        state, features = lax.while_loop(unread, read, (state, features))
        logits = lax.cond(
            drafting.any(),
            lambda: self.head(params, features),
            lambda: jnp.zeros((*features.shape[:2], self.vocab), jnp.float32),
        )

        def of_level(level: Level, carry: tuple[()]) -> tuple[Float[Array, "B 1 V"], tuple[()]]:
            return logits[:, level.depth : level.depth + 1], carry

        root = context.root
        return grow(self.tree, root, draw, of_level, (), unroll=True).proposal, state

    def head(self, params: Params, features: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        """Returns the logits of the target's vocabulary."""
        return self.network.head(self._network_params(params), features)[..., : self.vocab]

    def read(
        self,
        params: Params,
        state: PardState,
        text: Int[Array, "B S"],
        length: Int[Array, "B"],
        size: int,
        masks: int = 0,
    ) -> tuple[PardState, Float[Array, "B T E"]]:
        """Reads the next tokens of the text, at most `size` and only those before `length`, and masks after them.

        Returns:
            The state with the text's entries, and the features of the T = `size` + `masks` tokens: each row's text,
            followed by masks.
        """
        cache, steps = state.cache, jnp.arange(size + masks)
        count = jnp.clip(length - cache.length, 0, size)
        positions = cache.length[:, None] + steps
        tokens = jnp.take_along_axis(text, jnp.minimum(positions, text.shape[1] - 1), axis=1)
        tokens = jnp.where(steps < count[:, None], tokens, self.token)
        causal = jnp.broadcast_to(steps[:, None] >= steps, (length.shape[0], steps.size, steps.size))
        added = None
        if state.added is not None:
            last = jnp.clip(length - 1, 0, state.added.shape[1] - 1)[:, None]
            added = jnp.take_along_axis(state.added, jnp.minimum(positions, last)[:, :, None], axis=1)
        network: Any = self.network  # a `TransformerLM` for PARD-2
        extra = {} if added is None else {"added": added}
        features, entries = network.apply(
            self._network_params(params), Window(tokens, positions, causal), cache, **extra
        )
        entries = jax.tree.map(lambda a: a[:, :, :, :size], entries)
        after = self.network.commit(cache, entries, None, count, features)
        return state._replace(cache=after), features

    def _network_params(self, params: Params) -> Params:
        return params["network"] if self.states else params

    def _project(self, params: Params, added: Float[Array, "B S E"], advance: Advance) -> Float[Array, "B S E"]:
        """Projects the target's state before each committed token, and writes it at the position of that token."""
        feature, *tapped = jnp.split(advance.features, 1 + len(self.needs.taps), axis=-1)
        parts = [feature if state is None else tapped.pop(0) for state in self.states]
        projected = (matmul(jnp.concatenate(parts, -1), params["projection"]) + params["bias"]) * self.scale
        steps = jnp.arange(advance.tokens.shape[1])
        positions = jnp.where(steps < advance.count[:, None], advance.start[:, None] + steps, added.shape[1])
        return added.at[jnp.arange(len(added))[:, None], positions].set(projected, mode="drop")


def _project(draft: Model, target: Model, source: Any) -> tuple[tuple[int | None, ...], float, Params]:
    """Returns `Pard.states`, `Pard.scale` and the parameters of a PARD-2 model with the projection in a file.

    Raises:
        InvalidConfig: the draft model is not a PARD-2 model, or its layers or the projection do not fit the models.
    """
    if not is_pard2(draft.settings) or not isinstance(draft.lm, TransformerLM):
        raise InvalidConfig(
            f"{draft.name} is not a PARD-2 model: its config.json has no pard2_target_layers; leave out the option "
            "projection"
        )
    states_read, lm = parse_pard2(draft.name, draft.settings), target.lm
    layers = states_read.layers
    depth = lm.depth if isinstance(lm, TappedTarget) else 0
    states = tuple(i if i >= 0 else i + depth + 1 for i in layers)
    if not all(0 < state <= depth for state in states):
        raise InvalidConfig(
            f"{draft.name} reads the states after layers {layers} of its target, but {target.name} "
            + (f"has layers 1 to {depth} (or -{depth} to -1)" if depth else "does not return such states")
        )
    weight, bias = read_projection(source)
    width = empty_feature(lm, target.params, lm.init_cache(1, 1)).shape[1]
    expected = len(layers) * width, draft.lm.config.hidden_size
    if weight.shape != expected:
        raise InvalidConfig(
            f"{source}: the projection has shape {list(weight.shape)}, expected {list(expected)}: from {len(layers)} "
            f"states of {target.name} to the embeddings of {draft.name}"
        )
    projection = jnp.asarray(weight, dtype_of(draft.lm))
    taps = tuple(None if state == depth else state for state in states)
    params = {"network": draft.params, "projection": projection, "bias": jnp.asarray(bias)}
    return taps, states_read.scale, params


def _rows(model: Model) -> int:
    """Returns the number of rows of a model's embedding, padding included."""
    return model.lm.config.vocab_size if isinstance(model.lm, TransformerLM) else model.lm.vocab


def _check_vocab(draft: Model, target: Model) -> None:
    """Refuses a draft model of another vocabulary; without a tokenizer, it needs as many rows as the target.

    Raises:
        VocabMismatch: the vocabularies differ.
    """
    if draft.tokenizer is None or target.tokenizer is None:
        same = draft.lm.vocab == target.lm.vocab or (draft.tokenizer is None and _rows(draft) == _rows(target))
    else:
        same = same_vocab(draft.tokenizer, target.tokenizer) and draft.lm.vocab == target.lm.vocab
    if not same:
        raise VocabMismatch(
            f"the drafter 'pard' needs a draft model with the target's vocabulary, but {draft.name} has "
            f"{draft.lm.vocab} tokens and {target.name} has {target.lm.vocab}, or some tokens differ; use the drafter "
            "'model' for another vocabulary"
        )
