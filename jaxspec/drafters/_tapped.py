"""Functions shared by drafters whose heads have layers of their own and read taps of the target."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core.networks import LanguageModel, TypedTarget
from jaxspec.core.records import Advance, Params
from jaxspec.errors import InvalidConfig, shown
from jaxspec.heads.network import DraftHeads
from jaxspec.models.config import is_matrix
from jaxspec.models.execution import Execution
from jaxspec.models.model import Model
from jaxspec.models.packed import pack_params, take_rows
from jaxspec.models.transformer import TransformerLM


def with_options(config: Any, options: Mapping[str, Any]) -> Any:
    """Returns the sizes of a head, with the rotary base and the taps that the options state."""
    if (theta := options.get("rope_theta")) is not None:
        rope = dataclasses.replace(config.decoder.rope, theta=theta)
        config = dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, rope=rope))
    if (taps := options.get("taps")) is not None:
        parts = taps.split(",") if isinstance(taps, str) else taps if isinstance(taps, (list, tuple)) else ()
        numbers = tuple(int(part) if isinstance(part, str) and part.isdecimal() else part for part in parts)
        if len(numbers) != config.num_taps:
            raise InvalidConfig(
                f"taps must be {config.num_taps} numbers of target layers, because the head reads as many states, such "
                f"as (2, 15, 27) or '2,15,27'; got {shown(taps)}"
            )
        config = dataclasses.replace(config, taps=numbers)
    return config


def prepare_head(config: Any, heads: DraftHeads, target: Model) -> tuple[Any, Params]:
    """Returns the sizes and the parameters with which a head drafts for the target.

    The matrices have the dtype of the target's matrix products, and are packed for the CPU kernels if the target runs
    on them. A head with a reduced vocabulary gets a copy of its rows of the target's projection, so that a round reads
    far fewer bytes than from the whole matrix.
    """
    dtype = dtype_of(target.lm)
    params = jax.tree_util.tree_map_with_path(
        lambda path, a: a.astype(dtype) if is_matrix(path[-1].key, a.ndim) else a, heads.params
    )
    if config.draft_vocab_size is not None and not config.own_projection:
        config = dataclasses.replace(config, own_projection=True)
        lm: Any = target.lm
        params["head"] = take_rows(lm.unembedding(target.params), params["tokens"])
    return config, pack_params(params) if execution_of(target.lm).kernels else params


def dtype_of(target: LanguageModel) -> str:
    """Returns the dtype of the head's matrix products and of its cache."""
    return target.dtype if isinstance(target, TypedTarget) else "float32"


def execution_of(target: LanguageModel) -> Execution:
    """Returns how the head runs: on the same platform and with the same kernels as its target."""
    return target.execution.of_head() if isinstance(target, TransformerLM) else Execution()


def pairs(advance: Advance) -> tuple[Int[Array, "B M"], Float[Array, "B M F"], Int[Array, "B"]]:
    """Returns the committed tokens, the target's feature before each of them, and the number of tokens.

    The text's first token has no feature before it, and is left out.
    """
    size = advance.tokens.shape[1]
    first = ((advance.start == 0) & (advance.count > 0)).astype(jnp.int32)
    at = jnp.minimum(first[:, None] + jnp.arange(size), size - 1)
    tokens = jnp.take_along_axis(advance.tokens, at, axis=1)
    return tokens, jnp.take_along_axis(advance.features, at[:, :, None], axis=1), advance.count - first
