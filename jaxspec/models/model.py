"""A loaded model: network, parameters, tokenizer, and what it was told of chats and stops."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.core.checks import named, one_of
from jaxspec.core.cpu import has_avx512
from jaxspec.core.mesh import MODEL, check
from jaxspec.core.protocols import NETWORK, LanguageModel, need_members
from jaxspec.core.records import Params
from jaxspec.errors import InvalidConfig, MissingTokenizer
from jaxspec.models.checkpoint import WEIGHTS, Checkpoint, beside, open_source, read_params
from jaxspec.models.checkpoint import named as in_source
from jaxspec.models.config import is_table
from jaxspec.models.presets import PRESETS
from jaxspec.text.chat import ChatTemplate
from jaxspec.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Model:
    """What `generate` takes as target or draft. Your own network: `Model(lm, params)`, see docs/own-model.md.

    Attributes:
        lm: the network: any hashable object with the methods of `LanguageModel`.
        params: its parameters, a pytree of arrays.
        tokenizer: None for a model of token ids alone.
        chat_template: None if the model has none.
        stop_ids: ids that end a text.
        name: for tables.
        preset: the preset it was loaded from, by name, whose draft model and heads then draft for it; None for others.

    Raises:
        InvalidConfig: the network lacks a method of `LanguageModel`, or cannot be hashed.
    """

    lm: LanguageModel
    params: Params
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None
    stop_ids: tuple[int, ...] = ()
    name: str = "model"
    preset: str | None = None

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.params)
        kinds = ", ".join(sorted({str(leaf.dtype) for leaf in leaves}))
        parts = [type(self.lm).__name__, f"{sum(leaf.size for leaf in leaves) / 1e6:.1f} M parameters", kinds]
        parts += ["tokenizer"] * (self.tokenizer is not None) + ["chat template"] * (self.chat_template is not None)
        return f"Model({self.name!r}, {', '.join(filter(None, parts))})"

    def __post_init__(self):
        need_members(self.lm, NETWORK, "a model's network needs")
        try:
            hash(self.lm)
        except TypeError as error:
            raise InvalidConfig(
                f"a model's network is a static argument and must be hashable, {type(self.lm).__name__} is not "
                f"({error}); make it a frozen dataclass without arrays, and give the arrays as params"
            ) from None

    @property
    def bytes(self) -> int:
        """Memory of the parameters."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.params))

    def encode(self, text: str) -> list[int]:
        return self._need_tokenizer().encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._need_tokenizer().decode(tokens)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation, up to where the assistant begins to write.

        Raises:
            MissingTokenizer: no tokenizer, or no chat template.
        """
        tokenizer = self._need_tokenizer()
        if self.chat_template is None:
            raise MissingTokenizer(f"{self.name} has no chat template; give plain text (chat=False, --no-chat) instead")
        with in_source(self.name):
            return tokenizer.encode(self.chat_template.render(messages))

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise MissingTokenizer(f"{self.name} has no tokenizer; give token ids instead of text")
        return self.tokenizer


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
            `jaxspec.models.by_output`.
        context: the longest text that will be decoded, in tokens; None for what the model was made for. See
            `jaxspec.models.checkpoint.open_source` on models with LongRoPE.
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
    from jaxspec.models import sharding
    from jaxspec.models.by_output import ByOutput
    from jaxspec.models.transformer import TransformerLM

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
