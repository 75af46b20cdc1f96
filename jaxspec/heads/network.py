"""Draft heads with their parameters, their networks in Flax NNX, and whether they fit a target."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxspec.amounts import size
from jaxspec.core import cache as caches
from jaxspec.core.networks import ProjectedTarget, empty_feature, need_members
from jaxspec.core.records import Cache, Params
from jaxspec.core.topology import Topology
from jaxspec.errors import InvalidConfig, MissingDraft, ShapeMismatch, shown
from jaxspec.heads.kinds import head_kind, kind_of
from jaxspec.heads.sizes import HeadSizes, TappedSizes
from jaxspec.models.execution import Execution
from jaxspec.models.packed import Matrix
from jaxspec.registry import locate


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DraftHeads:
    """Loaded or trained heads, for the drafters "medusa", "eagle" and "dflash".

    Attributes:
        config: the sizes of the heads: a `HeadsConfig` for "medusa", an `EagleConfig` for "eagle", a `DFlashConfig` for
            "dflash", or another `jaxspec.heads.sizes.HeadSizes`.
        params: nested arrays; their paths are the names of `param_shapes` of the sizes.
        tree: the topology with which the heads draft best, if it is known.
        name: the name of the heads in tables.
        notes: what users should know about the heads, one sentence each.
    """

    config: Any
    params: Params
    tree: Topology | None = None
    name: str = "heads"
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Memory of the parameters, in bytes."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.params))

    def __repr__(self) -> str:
        nodes = "" if self.tree is None else f", a tree of {self.tree.shape.nodes} nodes"
        return f"DraftHeads({self.name!r}, {self.config.summary}, {size(self.bytes)}{nodes})"


class Frozen(nnx.Variable):
    """A variable that is not trained."""


class HeadNetwork(nnx.Module):
    """The base of the networks of all kinds of heads.

    A network is made by `Network(config, execution=execution, rngs=rngs)`. Its state, as a pure dict, holds the
    parameters of `HeadSizes.param_shapes`.

    Attributes:
        starts_from_target: True if the heads' own projections must start as copies of the target's projection.
    """

    starts_from_target: ClassVar[bool] = False


@functools.lru_cache
def _graph(config: HeadSizes, execution: Execution) -> nnx.GraphDef:
    network = locate(kind_of(config).network)
    return nnx.split(nnx.eval_shape(lambda: network(config, execution=execution, rngs=nnx.Rngs(0))))[0]


def make_network(config: HeadSizes, params: Params, execution: Execution = Execution()) -> Any:
    """Returns the network with these parameters, which are the pure dict of its state."""
    return nnx.merge(_graph(config, execution.resolve()), nnx.State(params))


def init_cache(config: TappedSizes, batch: int, capacity: int, dtype: DTypeLike, platform: str | None = None) -> Cache:
    """Returns an empty cache for the keys and values of the head's layers; each slot holds one row of the head."""
    c = config.decoder
    return caches.empty_cache(c.num_layers, batch, c.num_kv_heads, capacity, c.head_dim, dtype, platform=platform)


def init_params(
    config: HeadSizes,
    projection: Float[Array | np.ndarray, "V E"] | Matrix | None = None,
    tokens: Int[Array | np.ndarray, "R"] | None = None,
    *,
    key: Array | None = None,
) -> Params:
    """Returns parameters before training, a pure dict of float32 arrays.

    Medusa heads at first predict what the target predicts. In other heads, norms are 1, biases are 0, and matrices are
    drawn from a normal distribution.

    Args:
        config: the sizes of the heads.
        projection: the target's projection, with which the heads' own projections start. Required for Medusa heads with
            projections of their own. Without it, the projections of other heads are random.
        tokens: the ids of a reduced vocabulary, ascending; required if the vocabulary is reduced.
        key: the key of random matrices; None for `jax.random.key(0)`.

    Raises:
        InvalidConfig: the projection or the tokens are missing, or do not fit the sizes.
    """
    network = locate(kind_of(config).network)
    params = nnx.to_pure_dict(
        nnx.state(network(config, rngs=nnx.Rngs(params=jax.random.key(0) if key is None else key)))
    )
    if (ids := check_token_ids(config, tokens)) is not None:
        params["tokens"] = ids
    if config.projections and (projection is not None or network.starts_from_target):
        expected, got = (config.vocab_size, config.hidden_size), None if projection is None else projection.shape
        if projection is None or got != expected:
            raise InvalidConfig(f"projection must be the target's, of shape {list(expected)}; got {got}")
        rows = jnp.asarray((projection if ids is None else projection[ids]).astype(jnp.float32))
        params = unflatten(flatten(params) | dict.fromkeys(config.projections, rows))
    return jax.tree.map(jnp.asarray, params)


def check_token_ids(config: HeadSizes, tokens: Int[Array | np.ndarray, "R"] | None) -> Int[Array, "R"] | None:
    """Returns the ids of a reduced vocabulary as the array among the parameters; None if the vocabulary is not reduced.

    Raises:
        InvalidConfig: the ids are missing, or do not fit the sizes.
    """
    if (tokens is None) != (config.draft_vocab_size is None):
        raise InvalidConfig("tokens must be given if draft_vocab_size is set, and must not be given otherwise")
    if tokens is None:
        return None
    ids = np.asarray(tokens).astype(np.int32)  # NumPy, because shapes are computed in a trace (`jax.eval_shape`)
    if ids.shape != (config.rows,) or (np.diff(ids) <= 0).any():
        raise InvalidConfig(f"tokens must be {config.rows} ascending token ids, got an array of shape {ids.shape}")
    if ids[0] < 0 or ids[-1] >= config.vocab_size:
        raise InvalidConfig(f"tokens must be ids from 0 to {config.vocab_size - 1}")
    return jnp.asarray(ids)


def check_heads(heads: Any) -> None:
    """Refuses anything but `DraftHeads`.

    Raises:
        InvalidConfig: `heads` is something else; the message says how to load heads.
    """
    if not isinstance(heads, DraftHeads):
        raise InvalidConfig(f"heads must be DraftHeads, as jaxspec.load_heads returns them; got {shown(heads)}")


def check_kind(heads: DraftHeads, drafter: str) -> None:
    """Refuses heads that are for another drafter.

    Raises:
        InvalidConfig: the heads are of another kind.
    """
    if heads.config.drafter != drafter:
        raise InvalidConfig(
            f"the drafter {drafter!r} cannot use {heads.name!r} ({heads.config.summary}), which is for the drafter "
            f"{heads.config.drafter!r}"
        )


def require_heads(heads: Any, drafter: str) -> DraftHeads:
    """Returns the heads of a drafter.

    Raises:
        MissingDraft: there are no heads.
        InvalidConfig: the heads are of another kind.
    """
    if heads is None:
        raise MissingDraft(f"the drafter {drafter!r} needs {head_kind(drafter).title} (heads=..., or --heads)")
    check_kind(heads, drafter)
    return heads


def check_target(config: HeadSizes, target: Any) -> None:
    """Refuses a target (`jaxspec.models.model.Model`) that heads of these sizes cannot draft for.

    Raises:
        ShapeMismatch: the target's features or its vocabulary have another size.
        InvalidConfig: the target lacks an embedding or a projection that the heads read.
    """
    lm = target.lm
    need_members(lm, config.tables, "these heads read the target's")
    width = empty_feature(lm, target.params, lm.init_cache(1, 1)).shape[-1]
    sizes = (("features", config.feature_size, width), ("a vocabulary", config.vocab_size, vocab_size_of(target)))
    for name, own, other in sizes:
        if own != other:
            raise ShapeMismatch(
                f"the heads are for {name} of {own}, but {target.name} has {other}; use heads for this target"
            )


def vocab_size_of(target: Any) -> int:
    """Returns V for heads of this target: the number of rows of its projection, including padding."""
    lm = target.lm
    return lm.unembedding(target.params).shape[0] if isinstance(lm, ProjectedTarget) else lm.vocab


def flatten(params: Params) -> dict[str, Any]:
    """Returns the parameters by the names of `HeadSizes.param_shapes`."""
    return {".".join(map(str, path)): leaf for path, leaf in nnx.traversals.flatten_mapping(params).items()}


def unflatten(named: dict[str, Any]) -> Params:
    """Returns nested parameters from `flatten`'s dict."""
    paths = {tuple(int(part) if part.isdigit() else part for part in name.split(".")): a for name, a in named.items()}
    return dict(nnx.traversals.unflatten_mapping(paths))
