"""What a manifest records of the target, and of the model or heads that training starts from.

Weights alone do not decide what a network computes: a checkpoint may be edited so that the same weights run with
another base of the rotary frequencies. A manifest therefore also holds every field of the network. The CPU kernels,
the form of attention and the devices that share a layer are not recorded: they only change the rounding of sums.
"""

import hashlib
from typing import Any, NamedTuple, Self

from jaxspec.generation.fingerprint import describe_static
from jaxspec.heads.network import DraftHeads
from jaxspec.models.columns import file_order
from jaxspec.models.model import Model
from jaxspec.text.chat import ChatTemplate
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.train.files import digest_of, fingerprint


class TargetIdentity(NamedTuple):
    """What features and answers depend on, other than prompts and settings, as JSON values.

    Attributes:
        weights: sha256 of the parameters.
        network: the fields of the network, by name.
        stop_ids: the tokens that end an answer.
        tokenizer: sha256 of the tokenizer; None without one.
        chat_template: sha256 of the chat template and its variables; None without one.
    """

    weights: str
    network: Any
    stop_ids: list[int]
    tokenizer: str | None
    chat_template: str | None

    @classmethod
    def of(cls, target: Model) -> Self:
        """Describes a target."""
        tokenizer, template = _hash_tokenizer(target.tokenizer), _hash_template(target.chat_template)
        weights = fingerprint(file_order(target.lm, target.params))
        return cls(weights, describe_static(target.lm), list(target.stop_ids), tokenizer, template)

    @property
    def feature_values(self) -> dict[str, Any]:
        """The values of a manifest that features of given token ids depend on."""
        return {"target": self.weights, "target_network": self.network}

    @property
    def answer_values(self) -> dict[str, Any]:
        """The values of a manifest that answers to given token ids depend on."""
        return self.feature_values | {"stop_ids": self.stop_ids}

    @property
    def encoding_values(self) -> dict[str, Any]:
        """The values that explain why a text has other token ids. The ids themselves are compared."""
        return {"tokenizer": self.tokenizer, "chat_template": self.chat_template}


def describe_start(start: DraftHeads | Model | None) -> dict[str, Any]:
    """Returns the values of a manifest that describe what training starts from; None for new heads."""
    if start is None:
        return {"start": None, "start_network": None}
    network = start.config if isinstance(start, DraftHeads) else start.lm
    return {"start": fingerprint(start.params), "start_network": describe_static(network)}


def _hash_tokenizer(tokenizer: Tokenizer | None) -> str | None:
    if tokenizer is None:
        return None
    ids = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos]
    return hashlib.sha256(f"{ids} {tokenizer.text}".encode()).hexdigest()


def _hash_template(template: ChatTemplate | None) -> str | None:
    if template is None:
        return None
    return digest_of([template.source, template.special_tokens, *([template.named] if template.named else [])])
