"""The drafter "eagle": an EAGLE head on any tree, with a cache of its own (`jaxspec.heads.eagle`).

The cache holds only rows that start from true states of the target. Drafted tokens are read again with the target's
states once they are committed, in one call for all tokens of a round.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.core.cache import append_to_cache, value_dtype
from jaxspec.core.drafter import DrafterInputs, Needs
from jaxspec.core.draw import Draw
from jaxspec.core.networks import LanguageModel, ProjectedTarget, TappedTarget
from jaxspec.core.records import KV, Advance, Cache, Context, Params, Proposal, Window
from jaxspec.core.topology import Dynamic, Topology, chain
from jaxspec.drafters._grow import grow
from jaxspec.drafters._level import Level, count_slots
from jaxspec.drafters._tapped import dtype_of, execution_of, pairs, prepare_head, with_options
from jaxspec.drafters._tree import TreeDrafter
from jaxspec.drafters._window import as_window, check_tree, put_entries
from jaxspec.heads.eagle import EagleHead
from jaxspec.heads.eagle_config import EagleConfig
from jaxspec.heads.network import check_target, init_cache, make_network, require_heads
from jaxspec.models.experts import count_bytes
from jaxspec.models.layers import look_up, matmul
from jaxspec.models.model import Model

MTP_ACCEPTANCE = 0.7
"""The assumed share of an MTP layer's tokens that are accepted, from which the default length of its chain follows.
Published shares of Qwen3.5 are between 0.6 and 0.9 for the first token, and lower for later tokens."""
MTP_LENGTH = 4
"""The longest chain by default."""


class EagleState(NamedTuple):
    """What the head has read of the text; row t of its cache comes from the target's state at t and the token t + 1."""

    cache: Cache
    hidden: Float[Array, "B E"]  # the state of the last row, which predicts the token after the root


@dataclasses.dataclass(frozen=True)
class Eagle(TreeDrafter):
    """Draws from the distribution of an EAGLE head on states of the target; with a dynamic tree EAGLE-1 is EAGLE-2.

    Attributes:
        config: the sizes of the head; the options `rope_theta` and `taps` replace the values in its file.
        target: the model whose states the head reads, and whose embedding and projection it may share.
        tree: the topology, or the sizes of a dynamic tree.

    Raises:
        InvalidConfig: the tree has only its root, or nodes with more children than the head has tokens.
    """

    config: EagleConfig
    target: LanguageModel
    tree: Topology | Dynamic = chain(4)

    takes: ClassVar[frozenset[str]] = frozenset({"tree", "heads", "rope_theta", "taps"})
    draws = True

    def __post_init__(self):
        check_tree(self.tree, self.config.rows)

    @classmethod
    def build(cls, inputs: DrafterInputs) -> tuple[Self, Params]:
        heads = require_heads(inputs.heads, "eagle")
        config = with_options(heads.config, inputs.options)
        check_target(config, inputs.target)
        config, params = prepare_head(config, heads, inputs.target)
        default = heads.tree or (mtp_tree(config, params, inputs.target) if config.pair_norms else chain(4))
        return cls(config, inputs.target.lm, inputs.tree or default), params

    @property
    def calls(self) -> int:
        """Calls of the head in a round. The call that reads the committed tokens also drafts the first level."""
        return self.tree.shape.depth

    @property
    def needs(self) -> Needs:
        depth = self.target.depth if isinstance(self.target, TappedTarget) else 0
        return Needs(taps=self.config.taps_of(depth), tree=self.tree)

    def init(self, params: Params, batch: int, capacity: int) -> EagleState:
        cache = init_cache(self.config, batch, capacity, dtype_of(self.target), execution_of(self.target).platform)
        return EagleState(cache, jnp.zeros((batch, self.config.hidden_size), jnp.float32))

    def absorb(self, params: Params, state: EagleState, advance: Advance) -> EagleState:
        """Reads committed tokens, each with the target's state before it; the text's first token has no such state."""
        cache, (batch, size) = state.cache, advance.tokens.shape
        tokens, features, count = pairs(advance)
        steps = jnp.arange(size)
        causal = jnp.broadcast_to(steps[:, None] >= steps, (batch, size, size))
        window, head = Window(tokens, cache.length[:, None] + steps, causal), self._module(params)
        states = head.fuse(features)
        states, entries = self._read(head, params, advance.params, states, window, cache)
        cache = append_to_cache(cache, entries, None, count, states)
        last = jnp.take_along_axis(states, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
        return EagleState(cache, jnp.where((count > 0)[:, None], last, state.hidden))

    def propose(self, params: Params, state: EagleState, context: Context, draw: Draw) -> tuple[Proposal, EagleState]:
        root = context.root
        head, cache = self._module(params), state.cache

        def read(level: Level, carry: tuple[Array, KV]) -> tuple[Array, tuple[Array, KV]]:
            states, entries = carry
            window = as_window(level, cache.length - 1)
            level_states = level.of_parents(states)
            level_states, new = self._read(head, params, context.params, level_states, window, cache, entries)
            return self._logits(head, context, level_states), (
                level.put(states, level_states),
                put_entries(entries, level, new),
            )

        slots = count_slots(self.tree)
        states = jnp.broadcast_to(state.hidden[:, None], (root.size, slots, state.hidden.shape[1]))
        entries = (jnp.zeros((*a.shape[:3], slots, a.shape[4]), value_dtype(a.dtype)) for a in cache.stores)
        carry = states, KV(*entries)

        def after_root() -> Float[Array, "B 1 R"]:
            return self._logits(head, context, state.hidden[:, None])

        grown = grow(self.tree, root, draw, read, carry, root_logits=after_root, ids=params.get("tokens"))
        return grown.proposal, state

    def _read(
        self,
        head: EagleHead,
        params: Params,
        target_params: Params,
        states: Float[Array, "B T E"],
        window: Window,
        cache: Cache,
        past: KV | None = None,
    ) -> tuple[Float[Array, "B T E"], KV]:
        target: Any = self.target
        table = params["embed"] if self.config.own_embedding else target.embedding(target_params)
        return head(states, look_up(table, window.tokens), window, cache, past)

    def _logits(self, head: EagleHead, context: Context, states: Float[Array, "B n E"]) -> Float[Array, "B n R"]:
        features = head.projected(states)
        if head.head is None:
            return self.target.head(context.params, features)
        logits = matmul(features, head.head[...], transposed=True)
        return logits if self.config.draft_vocab_size is not None else logits[..., : self.target.vocab]

    def _module(self, params: Params) -> EagleHead:
        return make_network(self.config, params, execution_of(self.target))


def mtp_tree(config: EagleConfig, params: Params, target: Model) -> Topology:
    """Returns the chain that an MTP layer drafts by default: the fastest one if time goes by the bytes that are read.

    A call of the layer reads the layer and the target's projection, which is large beside a small target. Layers with
    mixtures of experts read the experts of all tokens of a call. The first call of a round has as many tokens as the
    target's call.
    """
    lm: Any = target.lm
    table = lm.embedding(target.params)
    projection = lm.unembedding(target.params) if isinstance(lm, ProjectedTarget) else table
    rows = 0 if projection is table else count_bytes(table)
    experts, shared = config.decoder.experts, count_bytes(projection)

    def speed(length: int) -> float:
        first, other = (count_bytes(params, experts, tokens) + shared for tokens in (length + 1, 1))
        read = count_bytes(target.params, experts, length + 1) - rows + first + (length - 1) * other
        return sum(MTP_ACCEPTANCE**depth for depth in range(length + 1)) / read

    return chain(max(range(1, MTP_LENGTH + 1), key=speed))
