"""A loaded model: network, parameters, tokenizer, and what it was told of chats and stops."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax

from jaxspec.core.networks import NETWORK, LanguageModel, need_members
from jaxspec.core.records import Params
from jaxspec.errors import InvalidConfig, MissingTokenizer, in_source
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
