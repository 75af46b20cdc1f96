"""The drafter "pard": a draft model that guesses several tokens in one call, on any tree (PARD, arXiv:2504.18583).

The model was trained to continue a text in which mask tokens stand for the last tokens. A round's call reads the text
that it has not read yet and D - 1 masks; its last D rows are the distributions of the next D tokens. No row reads a
drafted token, so all nodes of a level have the same children, as in Medusa's Cartesian trees. Only the text's keys and
values are kept.
"""

import dataclasses
from typing import ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core import cache as caches
from jaxspec.core.checks import whole
from jaxspec.core.draw import Draw
from jaxspec.core.networks import LanguageModel, no_feature
from jaxspec.core.protocols import DrafterInputs
from jaxspec.core.records import KV, Advance, Cache, Context, Params, Proposal, Window
from jaxspec.core.tree import Dynamic, Topology, TreeShape, chain
from jaxspec.drafters._grow import grow
from jaxspec.drafters._level import Level
from jaxspec.drafters._window import check_tree
from jaxspec.errors import InvalidConfig, MissingDraft, VocabMismatch
from jaxspec.models.model import Model
from jaxspec.models.transformer import TransformerLM
from jaxspec.text.tokenizer import same_vocab


class PardState(NamedTuple):
    """What the draft model has read of the text. It reads the rest in the call that drafts."""

    cache: Cache


@dataclasses.dataclass(frozen=True)
class Pard:
    """Draws all levels in one call of a draft model that was trained with mask tokens (PARD; `pard_token`).

    Attributes:
        network: the draft model.
        token: the mask token, a row of the draft model's embedding.
        vocab: V, the target's vocabulary; the draft model may have more rows, which are padding.
        tree: the topology, or the sizes of a dynamic tree.

    Raises:
        InvalidConfig: the tree has only its root, or nodes with more children than the vocabulary has tokens.
    """

    network: LanguageModel
    token: int
    vocab: int
    tree: Topology | Dynamic = chain(8)

    takes: ClassVar[frozenset[str]] = frozenset({"tree", "draft", "pard_token"})
    draws = True

    def __post_init__(self):
        check_tree(self.tree, self.vocab)

    @classmethod
    def build(cls, inputs: DrafterInputs) -> tuple[Self, Params]:
        draft, target = inputs.draft, inputs.target
        if draft is None:
            raise MissingDraft("the drafter 'pard' needs a draft model that was trained for it (draft=, --draft-model)")
        _check_vocab(draft, target)
        token = inputs.options.get("pard_token", draft.pard_token)
        if token is None:
            raise InvalidConfig(
                f"{draft.name} does not say which token stands for a token to guess: its config.json has no "
                "pard_token, as models trained by PARD have; if it is one, pass the option pard_token"
            )
        token = whole("pard_token", token, 0, _rows(draft) - 1)
        return cls(draft.lm, token, target.lm.vocab, inputs.tree or chain(8)), draft.params

    @property
    def shape(self) -> TreeShape:
        return self.tree.shape

    @property
    def calls(self) -> int:
        return 1

    def init(self, params: Params, batch: int, capacity: int) -> PardState:
        return PardState(self.network.init_cache(batch, capacity))

    def absorb(self, params: Params, state: PardState, advance: Advance) -> PardState:
        """Reads a chunk of a prompt, but for its last token, which the next proposal starts from."""
        if advance.nodes is not None:
            return state
        end = jnp.where(advance.count > 0, advance.start + advance.count - 1, 0)
        return PardState(self.read(params, state.cache, advance.text, end, advance.tokens.shape[1])[0])

    def propose(self, params: Params, state: PardState, context: Context, draw: Draw) -> tuple[Proposal, PardState]:
        drafting, depth = draw.below(0), self.shape.depth
        length = jnp.where(drafting, context.length, 0)

        def behind(carry: tuple[Cache, Array]) -> Array:
            return jnp.any(length > carry[0].length)

        def read(carry: tuple[Cache, Array]) -> tuple[Cache, Array]:
            cache, kept = carry
            after, features = self.read(params, cache, context.tokens, length, depth + 1, depth - 1)
            count = (after.length - cache.length)[:, None]
            rows = (jnp.maximum(count - 1, 0) + jnp.arange(depth))[:, :, None]
            return after, jnp.where(count[:, :, None] > 0, jnp.take_along_axis(features, rows, axis=1), kept)

        feature = no_feature(self.network, params, state.cache)
        features = jnp.zeros((feature.shape[0], depth, feature.shape[1]), feature.dtype)
        # One turn, unless a schedule has left some text unread.
        cache, features = lax.while_loop(behind, read, (state.cache, features))
        logits = lax.cond(
            drafting.any(),
            lambda: self.network.head(params, features)[..., : self.vocab],
            lambda: jnp.zeros((*features.shape[:2], self.vocab), jnp.float32),
        )

        def of_level(level: Level, carry: tuple[()]) -> tuple[Float[Array, "B 1 V"], tuple[()]]:
            return logits[:, level.depth : level.depth + 1], carry

        root = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)[:, 0]
        return grow(self.tree, root, draw, of_level, (), unroll=True).proposal, PardState(cache)

    def read(
        self, params: Params, cache: Cache, text: Int[Array, "B S"], length: Int[Array, "B"], size: int, masks: int = 0
    ) -> tuple[Cache, Float[Array, "B T E"]]:
        """Reads the next tokens of the text, at most `size` and none from `length` on, and masks after them.

        Returns:
            The cache with the text's entries, and the features of the T = `size` + `masks` tokens: each row's text,
            then masks to the end.
        """
        steps = jnp.arange(size + masks)
        count = jnp.clip(length - cache.length, 0, size)
        places = cache.length[:, None] + steps
        tokens = jnp.take_along_axis(text, jnp.minimum(places, text.shape[1] - 1), axis=1)
        tokens = jnp.where(steps < count[:, None], tokens, self.token)
        causal = jnp.broadcast_to(steps[:, None] >= steps, (length.shape[0], steps.size, steps.size))
        features, entries = self.network.apply(params, Window(tokens, places, causal), cache)
        entries = KV(*(a[:, :, :, :size] for a in entries))
        return caches.commit(cache, entries, count, jnp.isnan(features[:, 0, 0]).astype(jnp.int32)), features


def _rows(model: Model) -> int:
    """Returns the number of rows of a model's embedding, padding included."""
    return model.lm.config.vocab_size if isinstance(model.lm, TransformerLM) else model.lm.vocab


def _check_vocab(draft: Model, target: Model) -> None:
    """Refuses a draft model of another vocabulary; one without a tokenizer needs as many rows as the target.

    Raises:
        VocabMismatch: the vocabularies differ.
    """
    if draft.tokenizer is None or target.tokenizer is None:
        same = draft.lm.vocab == target.lm.vocab or (draft.tokenizer is None and _rows(draft) == _rows(target))
    else:
        same = same_vocab(draft.tokenizer, target.tokenizer) and draft.lm.vocab == target.lm.vocab
    if not same:
        raise VocabMismatch(
            f"the drafter 'pard' needs a draft model of the target's vocabulary; {draft.name} has {draft.lm.vocab} "
            f"tokens and {target.name} {target.lm.vocab}, or some of them differ; use the drafter 'model' across "
            "vocabularies"
        )
