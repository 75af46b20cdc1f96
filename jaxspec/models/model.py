"""A loaded model: network, parameters, tokenizer, chat template and stop tokens."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxspec.core.networks import NETWORK_MEMBERS, LanguageModel, need_members
from jaxspec.core.processor import Processor, check_processors
from jaxspec.core.records import Params
from jaxspec.errors import InvalidConfig, MissingTokenizer, in_source, shown
from jaxspec.models.exact import describe_exact
from jaxspec.models.execution import Execution
from jaxspec.models.packed import is_packed, stored_types
from jaxspec.text.chat import ChatTemplate
from jaxspec.text.messages import check_tools, check_variables
from jaxspec.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A target or draft model for `generate`. For your own network: `Model(lm, params)`, see docs/own-model.md.

    Attributes:
        lm: the network: any hashable object with the methods of `LanguageModel`.
        params: the parameters of the network, a pytree of arrays.
        tokenizer: the tokenizer; None for a model that only maps token ids.
        chat_template: the chat template; None if the model has no chat template.
        stop_ids: the token ids that end a text.
        name: the name of the model in tables and messages.
        preset: the name of the preset that the model was loaded from, whose draft model and heads are then the default;
            None for other models.
        settings: facts that the model's file states, by the file's own names, such as the entries of config.json. A
            drafter reads what it needs, such as the mask token of a PARD model (`pard_token`).
        heads_inside: the path of the model's files if they hold draft heads, too, such as the layer for multi-token
            prediction of Qwen3.5; these heads are then the default of the drafter "eagle". None for other models.

        processors: the processors of every text of `generate`, as generation_config.json asks for them. A processor of
            the same class in the sampling settings replaces one of these.

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
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    heads_inside: str | None = None
    processors: tuple[Processor, ...] = ()

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.params, is_leaf=is_packed)
        size = sum(math.prod(leaf.shape) for leaf in leaves)
        kinds = sorted({kind for leaf in leaves for kind in stored_types(leaf)})
        parts = [type(self.lm).__name__, f"{size / 1e6:.1f} M parameters", ", ".join(kinds)]
        execution = getattr(self.lm, "execution", None)
        parts += [describe_exact(execution)] if isinstance(execution, Execution) else []
        parts += ["tokenizer"] * (self.tokenizer is not None) + ["chat template"] * (self.chat_template is not None)
        parts += [type(one).__name__ for one in self.processors]
        return f"Model({self.name!r}, {', '.join(filter(None, parts))})"

    def __post_init__(self):
        object.__setattr__(self, "processors", check_processors(self.processors))
        if not isinstance(self.settings, Mapping):
            raise InvalidConfig(f"settings must be a mapping from names to values, got {shown(self.settings)}")
        need_members(self.lm, NETWORK_MEMBERS, "a model's network needs")
        try:
            hash(self.lm)
        except TypeError as error:
            raise InvalidConfig(
                f"a model's network must be hashable, because it is a static argument; {type(self.lm).__name__} is not "
                f"({error}); make it a frozen dataclass without arrays, and pass the arrays as params"
            ) from None

    @property
    def bytes(self) -> int:
        """Memory of the parameters, in bytes."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.params))

    def encode(self, text: str, begins: bool = True) -> list[int]:
        """Returns the token ids of a text.

        Args:
            text: the text.
            begins: True if this is the beginning of a text, False if it continues another text; see `Tokenizer.encode`.

        Raises:
            MissingTokenizer: the model has no tokenizer.
        """
        return self._need_tokenizer().encode(text, begins=begins)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids.

        Raises:
            MissingTokenizer: the model has no tokenizer.
        """
        return self._need_tokenizer().decode(tokens)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Returns the token ids of a conversation, up to the start of the assistant's reply.

        Args:
            messages: the messages, see `ChatTemplate.render`.
            tools: JSON schemas of the functions that the model may call; None for no tools.
            template_variables: further variables of the chat template, such as `{"enable_thinking": False}`.

        Raises:
            MissingTokenizer: the model has no tokenizer or no chat template.
            InvalidConfig: an argument is malformed, or the template rejects the messages.
        """
        text = self.render_chat(messages, tools, template_variables)
        with in_source(self.name):
            return self._need_tokenizer().encode(text)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the text of a conversation that `encode_chat` encodes."""
        return self.render_chats([messages], tools, template_variables)[0]

    def render_chats(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Returns the texts of several conversations, faster than one at a time; see `encode_chat`."""
        self._need_tokenizer()
        if self.chat_template is None:
            raise MissingTokenizer(f"{self.name} has no chat template; pass plain text (chat=False, --no-chat) instead")
        variables: dict[str, Any] = check_variables(template_variables) | {"tools": check_tools(tools) or None}
        with in_source(self.name):
            return self.chat_template.render_all(conversations, **variables)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise MissingTokenizer(f"{self.name} has no tokenizer; pass token ids instead of text")
        return self.tokenizer
