"""The drafter "dflash": a DFlash, DSpark or JetSpec head, which predicts a block of tokens in one call.

The head is a network of `jaxspec.heads.dflash`. Its cache holds only the keys and values of the target's states before
the root; the keys and values of a block's rows are dropped. The nodes of a level share a row of the block, whose law
the Markov head adapts to the node's token, or to the tokens of the node's path. So the law after a node does not depend
on anything below the node, under any rule. The same is true of the estimate of a confidence head, which a schedule may
read. Where rows attend to later rows, a block has all the rows it was trained with, however shallow the tree is,
because fewer masks would give other distributions.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core import cache as caches
from jaxspec.core.drafter import DrafterInputs, Needs
from jaxspec.core.draw import Draw, Judged
from jaxspec.core.networks import LanguageModel, TappedTarget
from jaxspec.core.records import Advance, Cache, Context, Params, Proposal
from jaxspec.core.topology import Dynamic, Topology, chain
from jaxspec.drafters._grow import grow
from jaxspec.drafters._level import Level, count_slots
from jaxspec.drafters._tapped import dtype_of, execution_of, pairs, prepare_head, with_options
from jaxspec.drafters._tree import TreeDrafter
from jaxspec.drafters._window import check_tree
from jaxspec.errors import InvalidConfig
from jaxspec.heads.dflash import DFlashHead
from jaxspec.heads.dflash_config import DFlashConfig
from jaxspec.heads.network import check_target, init_cache, make_network, require_heads
from jaxspec.models.layers import look_up


class DFlashState(NamedTuple):
    """What the head has read of the text; slot t of its cache is made from the target's state at position t."""

    cache: Cache


@dataclasses.dataclass(frozen=True)
class DFlash(TreeDrafter):
    """Draws from the distributions of a DFlash, DSpark or JetSpec head on states of the target.

    Attributes:
        config: the sizes of the head; the option `taps` replaces the taps in its file.
        target: the model whose states the head reads, and whose embedding and projection it may share.
        tree: the topology, or the sizes of a dynamic tree; at most `DFlashConfig.max_depth` deep.

    Raises:
        InvalidConfig: the tree is deeper than a block, has only its root, or has nodes with more children than the head
            has tokens.
    """

    config: DFlashConfig
    target: LanguageModel
    tree: Topology | Dynamic

    takes: ClassVar[frozenset[str]] = frozenset({"tree", "heads", "taps"})
    draws = True

    def __post_init__(self):
        check_tree(self.tree, self.config.rows)
        depth, most = self.tree.shape.depth, self.config.max_depth
        if depth > most:
            raise InvalidConfig(f"a block of this head predicts at most {most} tokens, got a tree of depth {depth}")

    @classmethod
    def build(cls, inputs: DrafterInputs) -> tuple[Self, Params]:
        heads = require_heads(inputs.heads, "dflash")
        config = with_options(heads.config, inputs.options)
        check_target(config, inputs.target)
        config, params = prepare_head(config, heads, inputs.target)
        return cls(config, inputs.target.lm, inputs.tree or heads.tree or chain(config.max_depth)), params

    @property
    def calls(self) -> int:
        """One call of the head in a round, for all levels."""
        return 1

    @property
    def needs(self) -> Needs:
        depth = self.target.depth if isinstance(self.target, TappedTarget) else 0
        return Needs(taps=self.config.taps_of(depth), tree=self.tree)

    def init(self, params: Params, batch: int, capacity: int) -> DFlashState:
        return DFlashState(
            init_cache(self.config, batch, capacity, dtype_of(self.target), execution_of(self.target).platform)
        )

    def absorb(self, params: Params, state: DFlashState, advance: Advance) -> DFlashState:
        """Reads the target's states before the committed tokens, which are the new states before the root."""
        head, cache = self._module(params), state.cache
        _, features, count = pairs(advance)
        context = head.fuse(features)
        positions = cache.length[:, None] + jnp.arange(context.shape[1])
        entries = head.remember(context, positions, caches.value_dtype(cache.stores.keys.dtype))
        return DFlashState(caches.append_to_cache(cache, entries, None, count, context))

    def propose(self, params: Params, state: DFlashState, context: Context, draw: Draw) -> tuple[Proposal, DFlashState]:
        root = context.root
        head, config, depth = self._module(params), self.config, self.shape.depth

        def block() -> tuple[Float[Array, "B D E"], Float[Array, "B D R"]]:
            states = self._read(head, params, context.params, root, state.cache)
            return states, self._logits(head, context, states)

        def nothing() -> tuple[Float[Array, "B D E"], Float[Array, "B D R"]]:
            width = config.rows if config.draft_vocab_size is not None else self.target.vocab
            states = jnp.zeros((root.size, depth, config.hidden_size), jnp.float32)
            return states, jnp.zeros((root.size, depth, width), jnp.float32)

        states, base = lax.cond(draw.below(0).any(), block, nothing)

        def read(level: Level, memory: Float[Array, "B S m"]) -> tuple[Float[Array, "B n R"] | Judged, Array]:
            state_row, logits = (lax.dynamic_slice_in_dim(a, level.depth, 1, axis=1) for a in (states, base))
            words = None
            if config.selector_rank:
                return head.select(level.tokens, state_row, logits), memory
            if config.markov is not None:
                words = head.words(level.tokens)
                state_row = jnp.broadcast_to(state_row, (*words.shape[:2], state_row.shape[2]))
                followed, new = head.follow(words, state_row, level.of_parents(memory))
                logits, memory = logits + head.correction(followed)[..., : base.shape[2]], level.put(memory, new)
            return Judged(
                logits, jax.nn.sigmoid(head.certainty(state_row, words))
            ) if config.confidence else logits, memory

        memory = jnp.zeros((root.size, count_slots(self.tree), config.memory), jnp.float32)
        return grow(self.tree, root, draw, read, memory, ids=params.get("tokens")).proposal, state

    def _read(
        self, head: DFlashHead, params: Params, target_params: Params, root: Int[Array, "B"], cache: Cache
    ) -> Float[Array, "B D E"]:
        """Returns the states of the rows that predict the tokens of each level."""
        target: Any = self.target
        table = params["embed"] if self.config.own_embedding else target.embedding(target_params)
        rows = jnp.arange(self.config.rows_for(self.shape.depth))
        tokens = jnp.where(rows == 0, root[:, None], self.config.mask_token)
        states = head(look_up(table, tokens), cache.length[:, None] + rows, cache)
        return states[:, self.config.skipped :][:, : self.shape.depth]

    def _logits(self, head: DFlashHead, context: Context, states: Float[Array, "B D E"]) -> Float[Array, "B D R"]:
        if head.head is None:
            return self.target.head(context.params, states)
        logits = head.logits(states)
        return logits if self.config.draft_vocab_size is not None else logits[..., : self.target.vocab]

    def _module(self, params: Params) -> DFlashHead:
        return make_network(self.config, params, execution_of(self.target))
