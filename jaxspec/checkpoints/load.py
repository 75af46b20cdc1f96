"""Loading of models: reads the parameters of a checkpoint one at a time and places them on devices."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxspec.checkpoints.base import (
    FILE_DTYPE,
    FLOAT_DTYPES,
    WEIGHT_DTYPES,
    Checkpoint,
    activation_dtype,
    check_finite,
    check_names,
    check_native,
    check_shape,
    describe_left_out,
)
from jaxspec.checkpoints.defaults import default_processors
from jaxspec.checkpoints.presets import PRESETS
from jaxspec.checkpoints.source import open_source
from jaxspec.confined.process import CONFINED
from jaxspec.core.checks import check_arguments, flag, one_of
from jaxspec.core.mesh import MODEL, check_mesh
from jaxspec.core.processor import Processor
from jaxspec.errors import InvalidConfig, in_source
from jaxspec.kernels.library import describe_kernels, kernels_available, use_kernels
from jaxspec.models import sharding
from jaxspec.models.config import is_matrix, is_table
from jaxspec.models.exact import resolve_exact
from jaxspec.models.execution import ATTENTION_KINDS, Execution
from jaxspec.models.kernels import find_kernel_gap
from jaxspec.models.model import Model
from jaxspec.models.packed import pack_param
from jaxspec.models.quantized import Quantized
from jaxspec.models.transformer import TransformerLM
from jaxspec.text.tokenizer import Tokenizer


@check_arguments
def load(
    source: str | os.PathLike | Checkpoint,
    *,
    dtype: DTypeLike = "float32",
    context: int | None = None,
    revision: str | None = None,
    mesh: Mesh | None = None,
    kernels: bool | None = None,
    attention: str = "xla",
    exact: bool | None = None,
    generation_config: bool = True,
    report: Callable[[str], Any] | None = None,
    progress: Callable[[int, int, str], Any] | None = None,
) -> Model:
    """Loads a model from a preset, a GGUF file, a Hugging Face directory or repository, or a saved model.

    Args:
        source: name of a preset, path, or Hub repository `organization/name`; or an open `Checkpoint`.
        dtype: dtype of the matrices: "float32", "bfloat16" or "int8", or a type such as `jnp.bfloat16`. "int8"
            quantizes the weights and uses bfloat16 caches, which gives a different model of a quarter of the size; see
            `jaxspec.models.quantized`. "file" keeps the quantized blocks of a GGUF file for the CPU kernels; see
            `jaxspec.models.blocks`.
        context: length of the longest text to decode, in tokens; None for the model's own context length. It selects
            the rotary frequencies of models with LongRoPE; see `jaxspec.checkpoints.source.open_source`.
        revision: branch, tag or commit of a Hub repository.
        mesh: devices to place the model on, see `jaxspec.make_mesh`. Each parameter is placed as soon as it is read,
            and each device receives only its part. None for the default device.
        kernels: whether to use jaxspec's CPU kernels (docs/kernels.md). With None they are used if they were built and
            the model is placed on CPU devices that do not split layers.
        attention: "xla" for XLA's own operations, or "pallas" for kernels of our own on TPUs or GPUs that do not
            split layers. On an H200 the kernel was slower for one row and faster for 16 rows; see docs/gpu.md.
        exact: True to require that the bits of a text do not depend on the drafter, its tree or the batch, or to refuse
            the model. On a CPU this requires the CPU kernels. On a GPU or TPU, attention and products then run in
            Pallas; on a GPU, products run by XLA in one fixed order if a size of the network has no Pallas kernel. The
            model's `repr` says which. Devices of a mesh may share layers if products run in Pallas. No form has been
            measured on a GPU or TPU yet, see docs/gpu.md and docs/tpu.md. None to use the fastest form.
        generation_config: whether texts have the penalties and forbidden tokens that the model's
            generation_config.json sets (docs/processors.md); see `jaxspec.Model.processors`. Its temperature, top-k
            and top-p are never used.
        report: called with a line of text on each step of a download, if `exact` leaves products to XLA, if
            generation_config.json sets penalties, and if parts of the file are left out, such as encoders of images;
            None for a warning about such parts.
        progress: called with (parameters read, total parameters, name of the parameter).

    Returns:
        A `Model` with its tokenizer and chat template, if the checkpoint has them.

    Raises:
        UnknownName: the source is neither a preset nor a path nor a repository.
        FetchError: the download failed.
        CheckpointError: the checkpoint is malformed or not supported.
        InvalidConfig: an argument is invalid.
    """
    dtype = one_of("dtype", dtype, WEIGHT_DTYPES)
    if mesh is not None:
        check_mesh(mesh)
    one_of("attention", attention, ATTENTION_KINDS)
    sharding.check_attention(attention, mesh)
    whole_layers = sharding.suits_kernels(mesh)
    if dtype == FILE_DTYPE and not (whole_layers and kernels_available() and kernels is not False):
        raise InvalidConfig(
            "dtype 'file' needs the CPU kernels and a model on CPU devices that do not split layers "
            f"(kernels: {describe_kernels()}); choose another dtype, such as int8"
        )
    CONFINED.start()  # so that it imports its modules while the file is read
    checkpoint = source if isinstance(source, Checkpoint) else open_source(source, revision, report, context)
    packed = use_kernels(kernels, whole_layers) and not _lacks_kernels(checkpoint, kernels, dtype)
    execution = _execution(packed, attention, mesh)
    if attention == "pallas":
        from jaxspec.models import attention_pallas  # Pallas takes a third of a second to import

        attention_pallas.check_pallas(sharding.platform_of(mesh), activation_dtype(dtype), checkpoint.config.head_dim)
    execution = resolve_exact(execution, exact, dtype, checkpoint.config, sharding.platform_of(mesh), report)
    if (note := describe_left_out(checkpoint)) is not None:
        (report or _warn)(note)
    processors = _default_processors(checkpoint, flag("generation_config", generation_config), report)
    size = checkpoint.config.vocab_size
    with in_source(checkpoint.source):
        tokenizer = Tokenizer.from_source(checkpoint.tokenizer, size) if checkpoint.tokenizer else None
        template = checkpoint.open_template()
        stop_ids = checkpoint.end_ids(tokenizer, template)
    # Checkpoints pad the vocabulary; a padded id has no text and is never proposed or emitted.
    known = None if tokenizer is None else min(tokenizer.vocab_size, size)
    name = os.path.basename(os.path.normpath(checkpoint.source))

    if mesh is not None:
        sharding.check_divisible(checkpoint.config, mesh, name)

    def put(part: str, array: Any) -> Any:
        array = pack_param(part, array) if packed else array
        if mesh is None:
            return jax.tree.map(jnp.asarray, array)
        return sharding.place_param(part, array, checkpoint.config, mesh)

    params = read_params(checkpoint, dtype, progress, put)
    params["layers"] = dict(enumerate(params["layers"]))
    return Model(
        lm=TransformerLM(
            checkpoint.config,
            activation_dtype(dtype),
            known=known,
            execution=execution,
        ),
        params=params,
        tokenizer=tokenizer,
        chat_template=template,
        stop_ids=stop_ids,
        name=name,
        preset=checkpoint.source if checkpoint.source in PRESETS else None,
        settings=checkpoint.settings,
        processors=processors,
        heads_inside=(checkpoint.path or checkpoint.source) if checkpoint.has_drafting_layer else None,
    )


def _default_processors(
    checkpoint: Checkpoint, wanted: bool, report: Callable[[str], Any] | None
) -> tuple[Processor, ...]:
    """Returns the processors of generation_config.json if they are wanted, and reports them."""
    generation = checkpoint.generation if wanted else {}
    processors, asked = default_processors(checkpoint.source, generation, checkpoint.config.vocab_size)
    if asked is not None and report is not None:
        report(asked)
    return processors


def _lacks_kernels(checkpoint: Checkpoint, kernels: bool | None, dtype: str) -> bool:
    """Returns whether the CPU kernels cannot run a network; raises InvalidConfig if the user asked for them."""
    if (gap := find_kernel_gap(checkpoint.config)) is None:
        return False
    if kernels or dtype == FILE_DTYPE:
        chosen = "dtype 'file' needs the CPU kernels" if dtype == FILE_DTYPE else "kernels=True"
        raise InvalidConfig(f"{checkpoint.source}: {chosen}, but {gap}; leave it out")
    return True


def _execution(kernels: bool, attention: str, mesh: Mesh | None) -> Execution:
    """Returns how a network runs on a mesh, or on JAX's default device."""
    if mesh is None:
        return Execution(kernels, attention=attention)
    return Execution(kernels, mesh.shape[MODEL], attention, sharding.platform_of(mesh))


def _warn(note: str) -> None:
    warnings.warn(note, stacklevel=4)


def read_params(
    checkpoint: Checkpoint,
    dtype: str = "float32",
    progress: Callable[[int, int, str], object] | None = None,
    put: Callable[[str, Any], Any] = lambda name, array: array,
) -> dict:
    """Reads all parameters, one at a time.

    Args:
        checkpoint: an open checkpoint.
        dtype: dtype of the matrices: "float32", "bfloat16", "int8" (see `jaxspec.models.quantized`) or "file" (see
            `jaxspec.models.blocks`). Norms and biases are always float32.
        progress: called as `progress(done, total, name)` after each parameter.
        put: called as `put(name, array)` on each parameter as soon as it is read, with the last part of its name. It
            places the parameter on a device, so that the host holds only one parameter at a time. With "int8" a matrix
            is a `Quantized`, with "file" a `Blocks`.

    Returns:
        A tree of the results of `put`, NumPy arrays by default: `{"embed": [V, E], "layers": [{"attn_norm": [E],
        "qkv": ..., ...}, ...], "norm": [E]}`, and `"head": [V, E]` unless it is tied; see `ModelConfig.param_shapes`.

    Raises:
        InvalidConfig: the dtype is not supported.
        CheckpointError: a parameter is missing, unexpected, of the wrong shape, or not finite.
    """
    dtype = one_of("dtype", dtype, WEIGHT_DTYPES)
    if dtype == FILE_DTYPE:
        check_native(checkpoint)
    shapes = checkpoint.config.param_shapes()
    check_names(checkpoint.source, shapes, checkpoint.tensors)
    tree: dict = {"layers": [{} for _ in range(checkpoint.config.num_layers)]}
    for done, (name, shape) in enumerate(shapes.items(), start=1):
        *layer, leaf = name.split(".")
        if dtype == FILE_DTYPE and is_matrix(leaf, len(shape)):
            array = checkpoint.native[name]()
        else:
            array = checkpoint.tensors[name]()
            check_shape(checkpoint.source, name, array.shape, shape)
            array = np.ascontiguousarray(
                array, FLOAT_DTYPES[dtype if is_matrix(leaf, len(shape)) and dtype in FLOAT_DTYPES else "float32"]
            )
            array = check_finite(checkpoint.source, name, array)
        if dtype == "int8" and is_matrix(leaf, len(shape)):
            array = Quantized.quantize(array, is_table(leaf))
        (tree["layers"][int(layer[1])] if layer else tree)[leaf] = put(leaf, array)
        if progress is not None:
            progress(done, len(shapes), name)
    return tree
