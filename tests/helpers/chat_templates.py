"""Compact chat templates with the formats of the families in use, and a tokenizer of bytes with their special tokens.

The templates are written for the tests, each with the format of its family and with what the family does to messages: a
system prompt of its own, trimming, reasoning that is dropped from earlier answers.
"""

import dataclasses
import functools
import json
from collections.abc import Iterable
from typing import Any

import tokenizers

from jaxspec.text import ChatTemplate, Tokenizer


@dataclasses.dataclass(frozen=True)
class Family:
    """A template, and the special tokens of its vocabulary.

    Attributes:
        source: the template.
        end: the token that ends the assistant's turn.
        more: other special tokens.
        eos: the EOS token of the tokenizer; the template's `eos_token`.
        system: whether a system message is read.
    """

    source: str
    end: str
    more: tuple[str, ...] = ()
    eos: str = "</s>"
    system: bool = True

    @property
    def special(self) -> tuple[str, ...]:
        """The names of all special tokens, without repetition."""
        return tuple(dict.fromkeys(("<s>", self.eos, self.end, *self.more)))

    @functools.cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.source, {"bos_token": "<s>", "eos_token": self.eos})


def _each(body: str, ask: str = "", begin: str = "") -> str:
    """A template that writes every message alike, and then the beginning of the reply."""
    reply = f"{{% if add_generation_prompt %}}{ask}{{% endif %}}"
    return f"{begin}{{% for m in messages %}}{body}{{% endfor %}}{reply}"


def _pairs(user: str, assistant: str, ask: str = "", begin: str = "", system: str = "{{ m.content }}") -> str:
    """A template that writes each role in its own way."""
    first, second = "{% if m.role == 'user' %}", "{% elif m.role == 'assistant' %}"
    return _each(f"{first}{user}{second}{assistant}{{% else %}}{system}{{% endif %}}", ask, begin)


_CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_ASK = "<|im_start|>assistant\n"
_IM = ("<|im_start|>", "<|endoftext|>")
_DEFAULT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
)
_HEADER = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>")
_ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
_NO_SYSTEM = "{{ raise_exception('no system role') }}"
_THOUGHT = (
    "{% set content = m.content %}{% if m.role == 'assistant' and '</think>' in content and not loop.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)

FAMILIES = {
    "chatml": Family(_each(_CHATML, _ASK), "<|im_end|>", _IM, "<|im_end|>"),
    "qwen-2.5": Family(_each(_CHATML, _ASK, _DEFAULT), "<|im_end|>", _IM, "<|im_end|>"),
    "smollm-2": Family(
        _each(_CHATML, _ASK, _DEFAULT.replace("assistant.", "model named SmolLM.")), "<|im_end|>", _IM, "<|im_end|>"
    ),
    "qwen-3": Family(_each(_THOUGHT + _CHATML.replace("m.content", "content"), _ASK), "<|im_end|>", _IM, "<|im_end|>"),
    "smollm-3": Family(
        _each(
            _THOUGHT + _CHATML.replace("m.content", "content"),
            _ASK,
            "<|im_start|>system\n## Metadata\n{{ '/think' if enable_thinking | default(true) else '/no_think' }}"
            "<|im_end|>\n",
        ),
        "<|im_end|>",
        _IM,
        "<|im_end|>",
    ),
    "internlm": Family(_each(_CHATML, _ASK, "{{ bos_token }}"), "<|im_end|>", _IM),
    "yi": Family(_each(_CHATML, _ASK), "<|im_end|>", _IM, "<|endoftext|>"),
    "hermes": Family(
        _each(
            "{% if m.role == 'tool' %}<|im_start|>tool\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
            "{% else %}" + _CHATML + "{% endif %}",
            _ASK,
            "{{ bos_token }}{% if tools %}<|im_start|>system\n<tools>{{ tools | tojson }}</tools><|im_end|>\n"
            "{% endif %}",
        ),
        "<|im_end|>",
        _IM,
        "<|im_end|>",
    ),
    "phi-4": Family(
        _each("<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
        "<|im_end|>",
        (*_IM, "<|im_sep|>"),
        "<|im_end|>",
    ),
    "llama-2": Family(
        "{% set system = messages[0].content if messages[0].role == 'system' else none %}"
        "{% for m in (messages[1:] if system else messages) %}" + _ALTERNATE + "{% if m.role == 'user' %}<s>[INST] "
        "{% if system and loop.first %}<<SYS>>\n{{ system }}\n<</SYS>>\n\n{% endif %}{{ m.content | trim }} [/INST]"
        "{% else %}{{ ' ' ~ (m.content | trim) ~ ' ' ~ eos_token }}{% endif %}{% endfor %}",
        "</s>",
    ),
    "mistral-v1": Family(
        _pairs("[INST] {{ m.content }} [/INST]", "{{ m.content }}</s> ", begin="{{ bos_token }}", system=_NO_SYSTEM),
        "</s>",
        system=False,
    ),
    "mistral-v3": Family(
        "{% set system = messages[0].content if messages[0].role == 'system' else none %}{{ bos_token }}"
        "{% for m in (messages[1:] if system else messages) %}{% if m.role == 'user' %}[INST] "
        "{% if system and loop.last %}{{ system ~ '\n\n' }}{% endif %}{{ m.content }}[/INST]"
        "{% else %}{{ ' ' ~ (m.content | trim) ~ eos_token }}{% endif %}{% endfor %}",
        "</s>",
        ("[INST]", "[/INST]"),
    ),
    "mistral-tekken": Family(
        _pairs(
            "[INST]{{ m.content }}[/INST]",
            "{{ m.content }}</s>",
            begin="{{ bos_token }}",
            system="[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]",
        ),
        "</s>",
        ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    ),
    "llama-3": Family(
        _each(_HEADER, "<|start_header_id|>assistant<|end_header_id|>\n\n", "{{ bos_token }}"),
        "<|eot_id|>",
        _HEADERS,
        "<|end_of_text|>",
    ),
    "llama-3.1": Family(
        _each(
            "{% if m.role != 'system' %}" + _HEADER + "{% endif %}",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nToday: 26 Jul 2024\n\n"
            "{{ messages[0].content if messages[0].role == 'system' }}<|eot_id|>",
        ),
        "<|eot_id|>",
        (*_HEADERS, "<|eom_id|>"),
        "<|eot_id|>",
    ),
    "gemma": Family(
        _each(
            "{% if m.role == 'system' %}" + _NO_SYSTEM + "{% endif %}<start_of_turn>"
            "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n",
            "<start_of_turn>model\n",
            "{{ bos_token }}",
        ),
        "<end_of_turn>",
        ("<start_of_turn>",),
        "<eos>",
        system=False,
    ),
    "phi-3": Family(
        _each("<|{{ m.role }}|>\n{{ m.content }}<|end|>\n", "<|assistant|>\n")
        + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
        "<|end|>",
        ("<|user|>", "<|assistant|>", "<|system|>"),
        "<|endoftext|>",
    ),
    "zephyr": Family(
        _each("<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n", "<|assistant|>\n"), "</s>", system=True
    ),
    "deepseek-v2": Family(
        _pairs(
            "User: {{ m.content }}\n\n",
            "Assistant: {{ m.content }}{{ eos_token }}",
            "Assistant:",
            "{{ bos_token }}",
            "{{ m.content }}\n\n",
        ),
        "<｜end▁of▁sentence｜>",
        (),
        "<｜end▁of▁sentence｜>",
    ),
    "deepseek-r1": Family(
        _each(
            "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}<｜Assistant｜>"
            "{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% else %}{{ m.content }}{% endif %}",
            "<｜Assistant｜><think>\n",
            "{{ bos_token }}",
        ),
        "<｜end▁of▁sentence｜>",
        ("<｜User｜>", "<｜Assistant｜>"),
        "<｜end▁of▁sentence｜>",
    ),
    "vicuna": Family(
        _pairs("USER: {{ m.content }}", " ASSISTANT: {{ m.content }}{{ eos_token }}", " ASSISTANT:", "A chat. "), "</s>"
    ),
    "alpaca": Family(
        _pairs(
            "### Instruction:\n{{ m.content }}\n\n",
            "### Response:\n{{ m.content }}\n\n",
            "### Response:\n",
            "Below is an instruction.\n\n",
            "{{ m.content }}\n\n",
        ),
        "",
    ),
    "falcon": Family(
        _each("{{ '\n' if not loop.first }}{{ m.role | capitalize }}: {{ m.content | trim }}", "{{ '\n' }}Assistant:"),
        "",
        (),
        "<|endoftext|>",
    ),
    "command-r": Family(
        _each(
            "<|START_OF_TURN_TOKEN|>"
            "<|{{ {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'}[m.role] }}_TOKEN|>"
            "{{ m.content | trim }}<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
            "{{ bos_token }}",
        ),
        "<|END_OF_TURN_TOKEN|>",
        ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
        "<|END_OF_TURN_TOKEN|>",
    ),
    "granite": Family(
        _each(
            "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
            "<|start_of_role|>assistant<|end_of_role|>",
            "{% if messages[0].role != 'system' %}<|start_of_role|>system<|end_of_role|>You are Granite."
            "<|end_of_text|>\n{% endif %}",
        ),
        "<|end_of_text|>",
        ("<|start_of_role|>", "<|end_of_role|>"),
        "<|end_of_text|>",
    ),
    "olmo": Family(
        _pairs(
            "<|user|>\n{{ m.content }}\n",
            "<|assistant|>\n{{ m.content }}{{ eos_token }}{{ '\n' if not loop.last }}",
            "<|assistant|>\n",
            "{{ bos_token }}",
            "<|system|>\n{{ m.content }}\n",
        ),
        "<|endoftext|>",
        (),
        "<|endoftext|>",
    ),
    "glm-4": Family(
        _each("<|{{ m.role }}|>\n{{ m.content }}", "<|assistant|>\n", "[gMASK]<sop>"),
        "<|user|>",
        ("<|assistant|>", "<|system|>", "[gMASK]", "<sop>"),
        "<|endoftext|>",
    ),
    "stablelm": Family(
        _each("<|{{ m.role }}|>\n{{ m.content }}<|endoftext|>{{ '\n' if not loop.last }}", "{{ '\n' }}<|assistant|>\n"),
        "<|endoftext|>",
        ("<|user|>", "<|assistant|>", "<|system|>"),
        "<|endoftext|>",
    ),
}


def byte_tokenizer(special: Iterable[str], added: Iterable[str] = ()) -> dict[str, Any]:
    """A tokenizer.json whose tokens are bytes, after its special tokens; `added` are not control tokens."""
    names = [*special, *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), *added]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({name: i for i, name in enumerate(names)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in special])
    inner.add_tokens([tokenizers.AddedToken(name, special=False, normalized=False) for name in added])
    return json.loads(inner.to_str())


@functools.cache
def shared_tokenizer() -> Tokenizer:
    """A tokenizer that has the special tokens of all families, so that their models have one shape."""
    special = dict.fromkeys(name for family in FAMILIES.values() for name in family.special if name)
    return Tokenizer(byte_tokenizer(special, ["<think>", "</think>"]))
