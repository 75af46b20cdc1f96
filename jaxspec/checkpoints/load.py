"""Loads a model: reads the parameters of a checkpoint one at a time, and puts them on a device."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.backend.cpu import has_avx512
from jaxspec.checkpoints.base import DTYPES, WEIGHTS, Checkpoint, beside, check_shape, finite, refuse_difference
from jaxspec.checkpoints.presets import PRESETS
from jaxspec.checkpoints.source import open_source
from jaxspec.core.checks import named, one_of
from jaxspec.core.mesh import MODEL, check
from jaxspec.errors import in_source
from jaxspec.models import sharding
from jaxspec.models.config import is_table
from jaxspec.models.model import Model
from jaxspec.models.out_major import ByOutput
from jaxspec.models.transformer import TransformerLM
from jaxspec.text.chat import ChatTemplate
from jaxspec.text.tokenizer import Tokenizer


@named()
def load(
    source: str | os.PathLike | Checkpoint,
    *,
    dtype: Any = "float32",
    context: int | None = None,
    revision: str | None = None,
    mesh: Mesh | None = None,
    by_output: bool | None = None,
    report: Callable[[str], Any] | None = None,
    progress: Callable[[int, int, str], Any] | None = None,
) -> Model:
    """A model from a preset name, a `.gguf` file, a Hugging Face directory or repository.

    Args:
        source: which.
        dtype: of the matrices, "float32", "bfloat16" or "int8", or a type such as `jnp.bfloat16`. With "int8" the
            weights are rounded to a byte each, and all else is float32: another model, a quarter the size; see
            `jaxspec.models.out_major`.
        context: the longest text that will be decoded, in tokens; None for what the model was made for. See
            `jaxspec.checkpoints.source.open_source` on models with LongRoPE.
        revision: of a Hub repository.
        mesh: devices to lay it on, see `jaxspec.make_mesh`; each parameter goes there as it is read, to a device the
            part that it needs. None for the default device.
        by_output: whether float matrices stand an output a row; None for what is fastest: so on a CPU, in float32 with
            AVX-512 alone (others were not measured); else not.
        report: called with a line of text now and then while something is fetched.
        progress: called with (parameters read, parameters in all, name).

    Raises:
        UnknownName, FetchError, CheckpointError, InvalidConfig: what is wrong, and where.
    """
    dtype = one_of("dtype", dtype, WEIGHTS)
    checkpoint = source if isinstance(source, Checkpoint) else open_source(source, revision, report, context)
    size = checkpoint.config.vocab_size
    written = checkpoint.chat_template
    with in_source(checkpoint.source):
        tokenizer = Tokenizer.from_source(checkpoint.tokenizer, size) if checkpoint.tokenizer else None
        template = ChatTemplate(written, checkpoint.special_tokens) if written else None
    # Checkpoints pad the vocabulary; a padded id has no text, and is never proposed or emitted.
    known = None if tokenizer is None else min(tokenizer.vocab_size, size)
    name = os.path.basename(os.path.normpath(checkpoint.source))

    if by_output is None:
        platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
        by_output = platform == "cpu" and (dtype == "bfloat16" or has_avx512() is True)

    def put(part: str, array: Any) -> Any:
        if by_output and isinstance(array, np.ndarray) and array.ndim > 1 and not is_table(part):
            array = ByOutput(np.ascontiguousarray(array.T))
        if mesh is None:
            return jax.tree.map(jnp.asarray, array)
        return sharding.place(part, array, checkpoint.config, mesh)

    if mesh is not None:
        check(mesh)
        sharding.check_shares(checkpoint.config, mesh, name)
    params = read_params(checkpoint, dtype, progress, put)
    params["layers"] = dict(enumerate(params["layers"]))
    return Model(
        lm=TransformerLM(
            checkpoint.config, beside(dtype), known=known, shards=1 if mesh is None else mesh.shape[MODEL]
        ),
        params=params,
        tokenizer=tokenizer,
        chat_template=template,
        stop_ids=checkpoint.stop_ids,
        name=name,
        preset=source if isinstance(source, str) and source in PRESETS else None,
    )


def read_params(
    checkpoint: Checkpoint,
    dtype: str = "float32",
    progress: Callable[[int, int, str], object] | None = None,
    put: Callable[[str, Any], Any] = lambda name, array: array,
) -> dict:
    """Reads all weights, one parameter at a time.

    Args:
        checkpoint: what `open_checkpoint` gave.
        dtype: "float32", "bfloat16" or "int8" (see `jaxspec.models.out_major`), of the matrices; norms and biases are
            float32 always.
        progress: called as `progress(done, total, name)` after each parameter.
        put: gets the last part of each parameter's name and the array (or the `ByOutput`) as soon as it is read, and
            takes it to a device: so the host holds no more than one.

    Returns:
        A tree of what `put` gave, numpy arrays by default: `{"embed": [V, E], "layers": [{"attn_norm": [E],
        "qkv": ..., ...}, ...], "norm": [E]}`, and `"head": [V, E]` unless the config ties it; see
        `ModelConfig.param_shapes`.

    Raises:
        InvalidConfig: the dtype is none of these.
        CheckpointError: a parameter is missing, unknown, of the wrong shape, or not finite.
    """
    dtype = one_of("dtype", dtype, WEIGHTS)
    shapes = checkpoint.config.param_shapes()
    refuse_difference(checkpoint.source, shapes, checkpoint.tensors)
    tree: dict = {"layers": [{} for _ in range(checkpoint.config.num_layers)]}
    for done, (name, shape) in enumerate(shapes.items(), start=1):
        array = checkpoint.tensors[name]()
        check_shape(checkpoint.source, name, array.shape, shape)
        array = np.ascontiguousarray(array, DTYPES[dtype if len(shape) > 1 and dtype != "int8" else "float32"])
        *layer, leaf = name.split(".")
        array = finite(checkpoint.source, name, array)
        if dtype == "int8" and len(shape) > 1:
            array = ByOutput.rounded(array, is_table(leaf))
        (tree["layers"][int(layer[1])] if layer else tree)[leaf] = put(leaf, array)
        if progress is not None:
            progress(done, len(shapes), name)
    return tree
