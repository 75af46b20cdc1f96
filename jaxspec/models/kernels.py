"""Turns the CPU kernels on and off for a model in memory."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax

from jaxspec.core.networks import LanguageModel
from jaxspec.errors import InvalidConfig, shown
from jaxspec.kernels.library import use_kernels
from jaxspec.models.columns import gather
from jaxspec.models.config import ModelConfig
from jaxspec.models.packed import has_blocks, is_packed, pack_params, unpack_params
from jaxspec.models.transformer import TransformerLM

if TYPE_CHECKING:
    from jaxspec.models.model import Model


def find_kernel_gap(config: ModelConfig) -> str | None:
    """Returns why the CPU kernels cannot run a network, in one line; None if they can."""
    if config.sinks:
        return "there are no CPU kernels for attention sinks"
    if config.activation == "clamped_silu" or (config.experts is not None and config.experts.biases):
        return "there are no CPU kernels for experts with biases or clamped gates"
    return None


def with_kernels(model: "Model") -> "Model":
    """Returns the model with packed matrices, which runs on jaxspec's CPU kernels.

    `jaxspec.load` does this by default. The model is the same except for the rounding of sums. With int8 weights,
    activations are also rounded to int8.

    Args:
        model: a model of a `TransformerLM`. A model that is split over devices is gathered on the default device.

    Raises:
        InvalidConfig: the kernels are not available, the network is not a `TransformerLM`, or there are no kernels for
            one of its layers.
    """
    lm: Any = getattr(model, "lm", None)
    if not isinstance(lm, TransformerLM):
        raise InvalidConfig(f"only a model of a TransformerLM can use the kernels, got {shown(model)}")
    use_kernels(True)
    if (gap := find_kernel_gap(lm.config)) is not None:
        raise InvalidConfig(f"{model.name}: {gap}; run it without kernels")
    if lm.execution.kernels:
        return model
    lm, params = gather(lm, model.params)
    params = jax.tree.map(jax.numpy.asarray, pack_params(params))
    return dataclasses.replace(model, lm=lm.with_execution(kernels=True), params=params)


def without_kernels(model: "Model") -> "Model":
    """Returns the model with matrices as arrays, to run on XLA's own operations; the model itself if it already does.

    Raises:
        InvalidConfig: `model` is not a `Model`, or its weights are in the blocks of a GGUF file, which only the kernels
            multiply.
    """
    if not isinstance(lm := getattr(model, "lm", None), LanguageModel):
        raise InvalidConfig(f"model must be a Model, as from jaxspec.load; got {shown(model)}")
    if has_blocks(model.params):
        raise InvalidConfig(
            f"{model.name} was loaded with dtype 'file', which needs the CPU kernels; load it with another dtype"
        )
    packed = any(map(is_packed, jax.tree.leaves(model.params, is_leaf=is_packed)))
    if not packed and not (isinstance(lm, TransformerLM) and lm.execution.kernels):
        return model
    lm = lm.with_execution(kernels=False) if isinstance(lm, TransformerLM) else lm
    return dataclasses.replace(model, lm=lm, params=unpack_params(model.params))
