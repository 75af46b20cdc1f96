"""Tensor parallelism: each layer's matrices are split over the devices of the mesh axis "model".

The split follows Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): projections into heads and MLP units
by columns, projections out of them by rows, and embedding tables by tokens.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.backend.layout import default_platform
from jaxspec.core.mesh import DATA, MODEL, check_mesh, place, replicate
from jaxspec.core.networks import LanguageModel
from jaxspec.core.records import Params
from jaxspec.errors import InvalidConfig, shown
from jaxspec.kernels.library import use_kernels
from jaxspec.models.columns import file_order, group_by_shard
from jaxspec.models.config import ModelConfig
from jaxspec.models.exact import check_shared
from jaxspec.models.kernels import find_kernel_gap, with_kernels, without_kernels
from jaxspec.models.packed import is_packed
from jaxspec.models.placement import FUSED_PARAMS, param_spec, param_specs
from jaxspec.models.quantized import Quantized
from jaxspec.models.split_table import SplitTable
from jaxspec.models.transformer import TransformerLM

if TYPE_CHECKING:
    from jaxspec.models.model import Model

EMBEDDING, HEAD = "embed", "head"
"""Names of the tables of which the layers of a network read a few rows, or no rows."""


def shard(model: "Model", mesh: Mesh) -> "Model":
    """Places a model on a mesh: matrices are split over the axis "model", everything else is replicated.

    `generate` does this on every call with a mesh; call it once to generate repeatedly. The parameters of a network
    other than `TransformerLM` are replicated. The CPU kernels are used on CPU devices that share no layer.

    Raises:
        InvalidConfig: the number of devices does not divide the model's heads or MLP units, or its kernels are not
            split over devices.
    """
    return place_model(model, mesh)


def place_model(model: "Model", mesh: Mesh, spread: bool = False) -> "Model":
    """Computes `shard`.

    With `spread`, matrices are split over the axis "data" as well, and kernels are not used. Training keeps its target
    like this, and collects the matrices of a layer when the layer runs (`collect`).
    """
    check_mesh(mesh)
    if not isinstance(getattr(model, "lm", None), LanguageModel):
        raise InvalidConfig(f"model must be a Model, as from jaxspec.load; got {shown(model)}")
    if isinstance(model.lm, TransformerLM):
        check_attention(model.lm.execution.attention, mesh)
        check_shared(model.lm.execution, model.lm.config, platform_of(mesh), mesh.shape[MODEL])
        model = dataclasses.replace(model, lm=model.lm.with_execution(platform=platform_of(mesh)))
    if spread or not suits_kernels(mesh):
        model = without_kernels(model)
    lm, params, size = model.lm, model.params, mesh.shape[MODEL]
    if not isinstance(lm, TransformerLM) or lm.execution.kernels:
        return dataclasses.replace(model, params=replicate(params, mesh))
    check_divisible(lm.config, mesh, model.name)
    if lm.execution.shards not in (1, size):  # split over another number of devices
        lm, params = lm.with_execution(shards=1), file_order(lm, params)

    def put(path: tuple, leaf: Any) -> Any:
        return place_param(str(getattr(path[-1], "key", "")), leaf, lm.config, mesh, lm.execution.shards, spread)

    params = jax.tree_util.tree_map_with_path(put, params, is_leaf=_is_quantized)
    return dataclasses.replace(model, lm=lm.with_execution(shards=size), params=params)


def suits_kernels(mesh: Mesh | None) -> bool:
    """Returns True if each device of the mesh, or the default device, is a CPU that runs whole layers."""
    return platform_of(mesh) == "cpu" and (mesh is None or mesh.shape[MODEL] == 1)


def platform_of(mesh: Mesh | None) -> str:
    """Returns the platform of a mesh's devices, or of JAX's default device without a mesh."""
    return default_platform() if mesh is None else mesh.devices.flat[0].platform


def follow_platform(model: "Model", leader: "Model") -> "Model":
    """Returns a model that runs on the platform of another model, as a draft model runs on its target's platform."""
    if not isinstance(model.lm, TransformerLM) or not isinstance(leader.lm, TransformerLM):
        return model
    execution, platform = model.lm.execution, leader.lm.execution.platform
    if leader.lm.execution.shards > 1:  # a draft is replicated, and XLA does not even replicate Pallas kernels itself
        execution = execution.of_head()
    lm = dataclasses.replace(model.lm, execution=dataclasses.replace(execution, platform=platform))
    return dataclasses.replace(model, lm=lm)


def use_default_kernels(model: "Model") -> "Model":
    """Returns a model on the kernels that `load` uses by default: on a CPU, jaxspec's kernels if they are available."""
    lm = model.lm
    if not isinstance(lm, TransformerLM) or lm.execution.attention != "xla":
        return model
    if lm.execution.shards > 1 or mesh_of(model.params) is not None:
        return model
    whole = suits_kernels(None) and find_kernel_gap(lm.config) is None
    return with_kernels(model) if use_kernels(None, whole) else model


def mesh_of(params: Params) -> Mesh | None:
    """Returns the mesh of `make_mesh` that parameters were placed on; None if there is none, or it has one device."""
    for leaf in jax.tree.leaves(params):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, Mesh) and mesh.size > 1 and set(mesh.axis_names) == {DATA, MODEL}:
            return mesh
    return None


def check_attention(attention: str, mesh: Mesh | None) -> None:
    """Raises InvalidConfig if several devices would share a layer whose kernel is not split over them."""
    if attention == "pallas" and mesh is not None and (size := mesh.shape[MODEL]) > 1:
        raise InvalidConfig(f"attention='pallas' is for layers on one device, got layers split over {size}; use 'xla'")


def check_divisible(config: ModelConfig, mesh: Mesh, name: str) -> None:
    """Raises InvalidConfig unless the axis "model" divides the heads and MLP units of each layer."""
    size = mesh.shape[MODEL]
    sizes = {"heads": config.num_heads, "key heads": config.num_kv_heads}
    if not all(map(config.is_sparse, range(config.num_layers))):
        sizes["units"] = config.intermediate_size
    if (experts := config.experts) is not None:
        sizes["units of an expert"] = experts.width
        sizes["units of the shared expert"] = experts.shared_width or 0
    if (delta := config.delta) is not None:
        # The value heads of a device must read its own key heads.
        sizes["recurrent key heads"] = 1 if delta.tiled and delta.value_heads > delta.key_heads else delta.key_heads
    for what, count in sizes.items():
        if count % size:
            raise InvalidConfig(
                f"{name} has {count} {what} in a layer, which {size} devices cannot share evenly; use another mesh"
            )


def place_param(name: str, leaf: Any, config: ModelConfig, mesh: Mesh, shards: int = 1, spread: bool = False) -> Any:
    """Places one parameter on the mesh. Each device receives only its part of a NumPy array.

    Args:
        name: the last part of the parameter's name, which decides the split.
        leaf: an array or a `Matrix`.
        config: the model's configuration.
        mesh: the devices.
        shards: the number of parts in which the columns of a fused matrix are grouped already: 1, or the number of
            devices on the axis "model" of the mesh.
        spread: whether matrices are split over the axis "data" as well; see `place_model`.
    """
    size = mesh.shape[MODEL]
    if is_packed(leaf):
        return replicate(leaf, mesh)
    if name in FUSED_PARAMS and shards != size:
        leaf = group_by_shard(name, leaf, config, size)
    return jax.tree.map(place, leaf, _shardings(name, leaf, mesh, spread))


def _shardings(name: str, leaf: Any, mesh: Mesh, spread: bool = False) -> Any:
    """Returns the sharding of each of a parameter's arrays."""
    return _on(mesh, param_spec(name, leaf, mesh.shape[MODEL], mesh.shape[DATA] if spread else 1))


def param_shardings(params: Params, mesh: Mesh, spread: bool = False) -> Params:
    """Returns the shardings of a transformer's parameters; tables whose rows "model" does not divide are replicated.

    Args:
        params: the parameters, or their shapes.
        mesh: the devices.
        spread: whether matrices are split over the axis "data" as well.
    """
    return _on(mesh, param_specs(params, mesh.shape[MODEL], mesh.shape[DATA] if spread else 1))


def _on(mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda spec: isinstance(spec, P))


def collect(params: Params, mesh: Mesh) -> Params:
    """Returns the parameters of a transformer inside a program as its layers read them: not split over "data".

    For matrices that are split over "data", as rows are, XLA would multiply the parts, and add up activations over all
    devices. Each matrix is smaller than the activations of the rows that a device reads. The constraint makes XLA
    collect the matrix instead, when its layer runs. The embedding stays split, because few of its rows are read; see
    `SplitTable`.
    """

    def whole(path: tuple, leaf: Any) -> Any:
        name = str(getattr(path[-1], "key", ""))
        if name == HEAD:
            return leaf
        if name == EMBEDDING:
            return SplitTable(leaf, mesh)
        return jax.tree.map(jax.lax.with_sharding_constraint, leaf, _shardings(name, leaf, mesh))

    return jax.tree_util.tree_map_with_path(whole, params, is_leaf=_is_quantized)


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, Quantized)
