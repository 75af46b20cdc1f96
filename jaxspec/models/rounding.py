"""Rounds a model in memory to int8, as a draft model for the model itself."""

import dataclasses
from typing import Any

import jax

from jaxspec.errors import InvalidConfig
from jaxspec.models.columns import gather
from jaxspec.models.config import is_matrix, is_table
from jaxspec.models.model import Model
from jaxspec.models.packed import is_packed, is_quantized, pack_param, unpack_param
from jaxspec.models.quantized import Quantized
from jaxspec.models.transformer import TransformerLM

ACTIVATIONS = "bfloat16"
"""The type of the cache and the activations of int8 models; see `jaxspec.load`."""


def round_to_int8(model: Model) -> Model:
    """Returns a copy of a model whose matrices are int8, as `load` makes it with dtype "int8".

    All other parameters are shared with the model. The copy runs on the CPU kernels if the model does. Matrices are
    rounded one at a time.

    Args:
        model: a model of a `TransformerLM` with floats as weights. A model that is split over devices is gathered on
            the default device.

    Raises:
        InvalidConfig: the network is not a `TransformerLM`, or its weights are quantized already.
    """
    if not isinstance(model.lm, TransformerLM):
        raise InvalidConfig(f"only the weights of a TransformerLM can be rounded to int8, not of {model!r}")
    if is_quantized(model.params):
        raise InvalidConfig(f"{model.name} is quantized already, so a copy of it in int8 would not be faster")
    lm, params = gather(model.lm, model.params)
    kernels = model.lm.execution.kernels

    def convert(path: tuple, leaf: Any) -> Any:
        name = path[-1].key
        values = unpack_param(name, leaf)
        if not is_matrix(name, values.ndim):
            return leaf
        rounded = Quantized.quantize(values, is_table(name))
        return pack_param(name, rounded) if kernels else rounded

    params = jax.tree_util.tree_map_with_path(convert, params, is_leaf=is_packed)
    return dataclasses.replace(model, lm=dataclasses.replace(lm, dtype=ACTIVATIONS, taps=()), params=params)
