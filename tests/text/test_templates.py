# ruff: noqa: E501  (templates are read more easily in lines of their own)
"""Chat templates: those of the families in use render as jinja2 renders them, and hostile ones end in time.

The templates are this file's own. Each uses the constructs of its family's published one, and gives its format.
"""

import datetime
import json
import random
import subprocess
import sys
import threading

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.tests
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.text import ChatTemplate
from jaxspec.text import chat as module

pytestmark = pytest.mark.quick

SYSTEM = {"role": "system", "content": " be <kind> "}
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<think>\nwell\n</think>\n\nhello "},
    {"role": "user", "content": " 'more'?\n"},
]
CALL = {"name": "add", "arguments": {"a": 1, "b": [2, None, "é\n<x>"], "c": {"d": True}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds <two>",
            "parameters": {
                "type": "object",
                "properties": {"b": {"type": "array", "items": {"type": "number"}}, "a": {"type": "number"}},
                "required": ["a"],
            },
        },
    }
]
USED = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "call00001", "type": "function", "function": CALL}]},
    {"role": "tool", "content": '{"sum": 3}', "name": "add", "tool_call_id": "call00001"},
]
CONVERSATIONS = [TALK[:1], TALK, [SYSTEM, *TALK], [SYSTEM, *USED], [*USED, {"role": "assistant", "content": "3"}]]
VARIABLES = [
    {},
    {"tools": TOOLS},
    {"tools": TOOLS, "enable_thinking": False, "documents": [{"title": "t", "text": "x"}]},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# Every template with what it makes of "hi".
FAMILIES = {
    "chatml": (
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nhelp<|im_end|>\\n' }}{% endif %}"
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>'"
        " + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        "<|im_start|>system\nhelp<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama-2": (
        "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
        "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}"
        "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if loop.index0 == 0 and system != false %}{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + "
        "m['content'] %}{% else %}{% set content = m['content'] %}{% endif %}"
        "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
        "{% elif m['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
        "<s>[INST] hi [/INST]",
    ),
    "llama-3": (
        "{% set rest = messages %}{% for m in rest %}{% set content = '<|start_header_id|>' + m['role'] + "
        "'<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
        "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
        "<s><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "llama-3.1": (
        "{{- bos_token }}\n{%- if not date_string is defined %}\n    {%- set date_string = '26 Jul 2024' %}\n{%- endif %}\n"
        "{%- if messages[0]['role'] == 'system' %}\n    {%- set system = messages[0]['content'] | trim %}\n"
        "    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set system = '' %}\n{%- endif %}\n"
        "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date_string + '\\n\\n' }}\n"
        "{%- if tools is not none %}\n    {%- for t in tools %}\n        {{- t | tojson(indent=4) }}\n"
        "        {{- '\\n\\n' }}\n    {%- endfor %}\n{%- endif %}\n{{- system ~ '<|eot_id|>' }}\n"
        "{%- for m in messages %}\n    {%- if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}\n"
        "        {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n'+ m['content'] | trim + '<|eot_id|>' }}\n"
        "    {%- elif 'tool_calls' in m %}\n        {%- if not m.tool_calls | length == 1 %}\n"
        "            {{- raise_exception('one tool at a time') }}\n        {%- endif %}\n"
        "        {%- set call = m.tool_calls[0].function %}\n"
        '        {{- \'{"name": "\' + call.name + \'", "parameters": \' }}\n        {{- call.arguments | tojson }}\n'
        "        {{- '}<|eot_id|>' }}\n    {%- elif m.role == 'tool' or m.role == 'ipython' %}\n"
        "        {%- if m.content is mapping or m.content is iterable %}\n            {{- m.content | tojson }}\n"
        "        {%- else %}\n            {{- m.content }}\n        {%- endif %}\n    {%- endif %}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n",
        "<s><|start_header_id|>system<|end_header_id|>\n\nToday: 26 Jul 2024\n\n<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": (
        "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
        "{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}"
        "{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}"
        "{%- set ns = namespace(index=0) %}{%- for m in rest %}"
        "{%- if not (m.role == 'tool' or m.tool_calls is defined and m.tool_calls is not none) %}"
        "{%- if (m['role'] == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('alternate') }}{%- endif %}"
        "{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}{{- bos_token }}"
        "{%- for m in rest %}{%- if m['role'] == 'user' %}{%- if tools is not none and (m == users[-1]) %}"
        "{{- '[AVAILABLE_TOOLS] [' }}{%- for t in tools %}{%- set t = t.function %}{{- '{\"type\": \"function\", ' }}"
        "{%- for key, val in t.items() if key != 'return' %}{%- if val is string %}"
        "{{- '\"' + key + '\": \"' + val + '\"' }}{%- else %}{{- '\"' + key + '\": ' + val | tojson }}{%- endif %}"
        "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- '}' }}{%- endfor %}{{- '][/AVAILABLE_TOOLS]' }}"
        "{%- endif %}{%- if loop.last and system is defined %}{{- '[INST] ' + system + '\\n\\n' + m['content'] + '[/INST]' }}"
        "{%- else %}{{- '[INST] ' + m['content'] + '[/INST]' }}{%- endif %}"
        "{%- elif m.tool_calls is defined and m.tool_calls is not none %}{{- '[TOOL_CALLS] [' }}"
        "{%- for c in m.tool_calls %}{%- set out = c.function | tojson %}{{- out[:-1] }}"
        "{%- if not c.id is defined or c.id | length != 9 %}{{- raise_exception('ids have 9 letters') }}{%- endif %}"
        "{{- ', \"id\": \"' + c.id + '\"}' }}{{- ', ' if not loop.last else ']' + eos_token }}{%- endfor %}"
        "{%- elif m['role'] == 'assistant' %}{{- ' ' + m['content'] | trim + eos_token }}"
        "{%- elif m['role'] in ['tool', 'tool_results'] %}{{- '[TOOL_RESULTS] ' + m.content | string + '[/TOOL_RESULTS]' }}"
        "{%- endif %}{%- endfor %}",
        "<s>[INST] hi[/INST]",
    ),
    "qwen-2.5": (
        "{%- if tools %}\n    {{- '<|im_start|>system\\n' }}\n    {%- if messages[0]['role'] == 'system' %}\n"
        "        {{- messages[0]['content'] }}\n    {%- endif %}\n    {{- '\\n\\n# Tools\\n<tools>' }}\n"
        '    {%- for tool in tools %}\n        {{- "\\n" }}\n        {{- tool | tojson }}\n    {%- endfor %}\n'
        "    {{- '\\n</tools><|im_end|>\\n' }}\n{%- endif %}\n{%- for message in messages %}\n"
        '    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or '
        '(message.role == "assistant" and not message.tool_calls) %}\n'
        "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
        '    {%- elif message.role == "assistant" %}\n        {{- "<|im_start|>" + message.role }}\n'
        "        {%- for tool_call in message.tool_calls %}\n            {%- if tool_call.function is defined %}\n"
        "                {%- set tool_call = tool_call.function %}\n            {%- endif %}\n"
        '            {{- \'\\n<tool_call>\\n{"name": "\' }}\n            {{- tool_call.name }}\n'
        '            {{- \'", "arguments": \' }}\n            {{- tool_call.arguments | tojson }}\n'
        "            {{- '}\\n</tool_call>' }}\n        {%- endfor %}\n        {{- '<|im_end|>\\n' }}\n"
        '    {%- elif message.role == "tool" %}\n        {%- if (loop.index0 == 0) or '
        "(messages[loop.index0 - 1].role != \"tool\") %}\n            {{- '<|im_start|>user' }}\n        {%- endif %}\n"
        "        {{- '\\n<tool_response>\\n' }}\n        {{- message.content }}\n        {{- '\\n</tool_response>' }}\n"
        "        {%- if loop.last or (messages[loop.index0 + 1].role != \"tool\") %}\n            {{- '<|im_end|>\\n' }}\n"
        "        {%- endif %}\n    {%- endif %}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen-3": (
        "{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}\n{%- for message in messages[::-1] %}\n"
        "    {%- set index = (messages|length - 1) - loop.index0 %}\n"
        '    {%- if ns.multi_step and message.role == "user" and message.content is string and not('
        "message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}\n"
        "        {%- set ns.multi_step = false %}\n        {%- set ns.last = index %}\n    {%- endif %}\n{%- endfor %}\n"
        "{%- for message in messages %}\n    {%- set content = message.content if message.content is string else '' %}\n"
        "    {%- if message.role == \"assistant\" %}\n        {%- set reasoning = '' %}\n"
        "        {%- if '</think>' in content %}\n"
        "            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}\n"
        "            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}\n        {%- endif %}\n"
        "        {%- if loop.index0 > ns.last %}\n            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>' }}\n"
        "        {%- endif %}\n    {%- endif %}\n"
        "    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n"
        "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
        "        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n{%- endif %}",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
        "{% else %}{% set role = message['role'] %}{% endif %}"
        "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
        "<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    ),
    "gemma-3": (
        "{{ bos_token }}\n{%- if messages[0]['role'] == 'system' -%}\n    {%- if messages[0]['content'] is string -%}\n"
        "        {%- set first = messages[0]['content'] + '\\n\\n' -%}\n    {%- else -%}\n"
        "        {%- set first = messages[0]['content'][0]['text'] + '\\n\\n' -%}\n    {%- endif -%}\n"
        "    {%- set loop_messages = messages[1:] -%}\n{%- else -%}\n    {%- set first = '' -%}\n"
        "    {%- set loop_messages = messages -%}\n{%- endif -%}\n{%- for message in loop_messages -%}\n"
        "    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}\n"
        "    {{ '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}\n"
        "    {%- if message['content'] is string -%}\n        {{ message['content'] | trim }}\n"
        "    {%- elif message['content'] is iterable -%}\n        {%- for item in message['content'] -%}\n"
        "            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}\n        {%- endfor -%}\n"
        "    {%- else -%}\n        {{ raise_exception('Invalid content type') }}\n    {%- endif -%}\n"
        "    {{ '<end_of_turn>\\n' }}\n{%- endfor -%}\n{%- if add_generation_prompt -%}\n"
        "    {{ '<start_of_turn>model\\n' }}\n{%- endif -%}\n",
        "<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    ),
    "phi-3": (
        "{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}"
        "{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'user' %}"
        "{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'assistant' %}"
        "{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}",
        "<|user|>\nhi<|end|>\n<|assistant|>\n",
    ),
    "phi-4-mini": (
        "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and "
        "message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + "
        "message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + "
        "'<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        "<|user|>hi<|end|><|assistant|>",
    ),
    "zephyr": (
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\\n' + message['content'] + "
        "eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\\n'  + message['content'] + eos_token }}\n"
        "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
        "<|user|>\nhi</s>\n<|assistant|>\n",
    ),
    "vicuna": (
        "{% set sep = ' ' %}{% set ns = namespace(out='A chat.') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.out = m.content | trim %}{% else %}{% set ns.out = ns.out ~ sep ~ (m.role | upper) ~ ': ' ~ m.content %}"
        "{% if m.role == 'assistant' %}{% set ns.out = ns.out + eos_token %}{% endif %}{% endif %}{% endfor %}{{ ns.out }}"
        "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}",
        "A chat. USER: hi ASSISTANT:",
    ),
    "falcon": (
        "{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}{{ message['role'].capitalize() + ': ' + "
        "message['content'].strip().replace('\\r\\n', '\\n').replace('\\n\\n', '\\n') }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\\nAssistant:' }}{% endif %}",
        "User: hi\nAssistant:",
    ),
    "deepseek-v2": (
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}"
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\\n\\n' }}"
        "{% elif m['role'] == 'assistant' %}{{ 'Assistant: ' + m['content'] + eos_token }}"
        "{% elif m['role'] == 'system' %}{{ m['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
        "<s>User: hi\n\nAssistant:",
    ),
    "deepseek-r1": (
        "{% set ns = namespace(is_first=false, is_tool=false, system='') %}{%- for message in messages %}"
        "{%- if message['role'] == 'system' %}{% set ns.system = message['content'] %}{%- endif %}{%- endfor %}"
        "{{ bos_token }}{{ ns.system }}{%- for message in messages %}{%- if message['role'] == 'user' %}"
        "{%- set ns.is_tool = false -%}{{'<｜User｜>' + message['content']}}{%- endif %}"
        "{%- if message['role'] == 'assistant' and message['tool_calls'] is defined %}"
        "{%- for tool in message['tool_calls'] %}{%- if not ns.is_first %}{{ '<｜Assistant｜>' }}"
        "{%- set ns.is_first = true -%}{%- endif %}{{ tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' "
        "+ tool['function']['arguments'] | tojson }}{%- endfor %}{%- elif message['role'] == 'assistant' %}"
        "{% set content = message['content'] %}{% if '</think>' in content %}"
        "{% set content = content.split('</think>')[-1] %}{% endif %}{{'<｜Assistant｜>' + content + '<｜end｜>'}}"
        "{%- endif %}{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}"
        "{{'<｜tool▁output｜>' + message['content']}}{%- endif %}{%- endfor -%}"
        "{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\\n'}}{% endif %}",
        "<s><｜User｜>hi<｜Assistant｜><think>\n",
    ),
    "command-r": (
        "{{ bos_token }}{% set roles = {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM', 'tool': 'SYSTEM'} %}"
        "{%- macro kind(spec) %}{%- set names = {'string': 'str', 'number': 'float', 'integer': 'int'} %}"
        "{%- if names[spec.type] is defined %}{{- names[spec.type] }}{%- elif spec.type == 'array' %}"
        "{{- 'List[' + kind(spec['items']) + ']' }}{%- elif spec.type is iterable and spec.type is not string %}"
        "{{- 'Union[' }}{%- for t in spec.type %}{{- kind({'type': t}) }}{%- if not loop.last %},{%- endif %}{%- endfor %}"
        "{{- ']' }}{%- else %}{{- 'Dict' }}{%- endif %}{%- endmacro %}"
        "{%- if tools %}{% for tool in tools %}{%- set f = tool.function %}{{ 'def ' + f.name + '(' }}"
        "{%- for name, fields in f.parameters.properties.items() %}{%- if loop.index != 1 %}{{ ', ' }}{%- endif %}"
        "{{ name + ': ' }}{% if name in f.parameters.required %}{{ kind(fields) }}{% else %}"
        "{{ 'Optional[' + kind(fields) + ']' }}{% endif %}{%- endfor %}{{ ') # ' ~ f.description | e }}{% endfor %}{% endif %}"
        "{% if documents %}{% for d in documents %}{{ '\\nDocument: ' ~ loop.index0 }}\n{% for k, v in d.items() %}"
        "{{ k | title }}: {{ v }}\n{% endfor %}{% endfor %}{% endif %}{% for m in messages %}"
        "{{ '<|START_OF_TURN_TOKEN|><|' + roles[m.role] + '_TOKEN|>' + m.content.strip() + '<|END_OF_TURN_TOKEN|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}",
        "<s><|START_OF_TURN_TOKEN|><|USER_TOKEN|>hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    "smollm-3": (
        "{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}"
        "{%- set mode = '/think' if enable_thinking else '/no_think' -%}{%- set custom = '' -%}"
        "{%- if messages[0].role == 'system' -%}{%- set system = messages[0].content -%}"
        "{%- if '/no_think' in system -%}{%- set mode = '/no_think' -%}{%- endif -%}"
        "{%- set custom = system.replace('/no_think', '').replace('/think', '').rstrip() -%}{%- endif -%}"
        "{{- '<|im_start|>system\\nToday: ' -}}{{- strftime_now('%Y') | length -}}{{- '\\n' + mode + '\\n' + custom -}}"
        "{%- if tools -%}{%- set ns = namespace(text='') -%}{%- for t in tools[:] -%}"
        "{%- set ns.text = ns.text ~ (t | string) ~ '\\n' -%}{%- endfor -%}{{- ns.text -}}{%- endif -%}"
        "{{- '<|im_end|>\\n' -}}{%- for m in messages -%}{%- if m.role == 'user' -%}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- elif m.role == 'assistant' -%}"
        "{% generation %}{{ '<|im_start|>assistant\\n' + m.content.lstrip('\\n') + '<|im_end|>\\n' }}{% endgeneration %}"
        "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}",
        "<|im_start|>system\nToday: 4\n/think\n<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    ),
    "olmo": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] in ('system', 'user') %}"
        "{{ '<|' ~ m['role'] ~ '|>\\n' ~ m['content'] ~ '\\n' }}{% elif m['role'] == 'assistant' %}{% if not loop.last %}"
        "{{ '<|assistant|>\\n' + m['content'] + eos_token + '\\n' }}{% else %}{{ '<|assistant|>\\n' + m['content'] + "
        "eos_token }}{% endif %}{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
        "{% endfor %}",
        "<s><|user|>\nhi\n<|assistant|>\n",
    ),
    "granite": (
        "{%- if tools %}{{- '<|start_of_role|>available_tools<|end_of_role|>\\n' }}{%- for tool in tools %}"
        "{{- tool | tojson(indent=4) }}{%- if not loop.last %}{{- '\\n\\n' }}{%- endif %}{%- endfor %}"
        "{{- '<|end_of_text|>\\n' }}{%- endif %}{%- for message in messages %}{%- if message['role'] == 'tool' %}"
        "{%- set role = 'tool_response' %}{%- else %}{%- set role = message.role | default('user', true) %}{%- endif %}"
        "{{- '<|start_of_role|>' + role + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}"
        "{%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant' }}"
        "{%- if controls and controls | length > 0 %}{{- ' ' + controls | tojson }}{%- endif %}"
        "{{- '<|end_of_role|>' }}{%- endif %}{%- endfor %}",
        "<|start_of_role|>user<|end_of_role|>hi<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    ),
    "internlm": (
        "{{ bos_token }}{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + "
        "'<|im_end|>' + '\\n'}}{% endfor %}{{ '<|im_start|>assistant\\n' if add_generation_prompt }}",
        "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    ),
    "stablelm": (
        "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}{% continue %}{% endif %}"
        "<|{{ m.role }}|>\n{{ m.content }}<|endoftext|>{{ '\\n' if not loop.last }}{% if loop.index >= 64 %}{% break %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '\\n<|assistant|>\\n' }}{% endif %}",
        "<|user|>\nhi<|endoftext|>\n<|assistant|>\n",
    ),
    "gpt-oss": (
        "{%- macro render_type(spec, required=[], nullable=false) -%}{%- if spec.type == 'array' -%}"
        "{%- if spec['items'] -%}{{- render_type(spec['items'], required) + '[]' -}}{%- else -%}any[]{%- endif -%}"
        "{%- if nullable -%}{{- ' | null' -}}{%- endif -%}{%- elif spec.type == 'object' -%}{{- '{\\n' -}}"
        "{%- for name, prop in (spec.properties or {}).items() -%}{{- name -}}"
        "{%- if name not in (spec.required or []) -%}{{- '?' -}}{%- endif -%}{{- ': ' -}}{{- render_type(prop) -}}"
        "{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}{%- endfor -%}{{- '}' -}}"
        "{%- elif spec.enum is defined and spec.enum -%}{{- '\"' + spec.enum | join('\" | \"') + '\"' -}}"
        "{%- else -%}{{- spec.type | default('any') -}}{%- endif -%}{%- endmacro -%}"
        "{{- '<|start|>system<|message|>Knowledge cutoff: 2024-06\\nReasoning: ' + (reasoning_effort | default('medium')) "
        "+ '<|end|>' -}}{%- if tools -%}{{- 'namespace functions {\\n' -}}{%- for tool in tools -%}"
        "{%- set tool = tool.function -%}{{- '// ' + tool.description + '\\ntype ' + tool.name + ' = (_: ' -}}"
        "{{- render_type(tool.parameters, tool.parameters.required or []) -}}{{- ') => any;\\n' -}}{%- endfor -%}"
        "{{- '}' -}}{%- endif -%}{%- set last_call = namespace(name=none) -%}{%- for message in messages -%}"
        "{%- if message.role == 'assistant' -%}{%- if 'tool_calls' in message -%}"
        "{%- set call = message.tool_calls[0].function -%}{%- set last_call.name = call.name -%}"
        "{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary<|message|>' -}}"
        "{{- call.arguments | tojson -}}{{- '<|call|>' -}}{%- elif loop.last and not add_generation_prompt -%}"
        "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' -}}{%- else -%}"
        "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' -}}{%- endif -%}"
        "{%- elif message.role == 'tool' -%}{%- if last_call.name is none -%}{{- raise_exception('no call') -}}"
        "{%- endif -%}{{- '<|start|>functions.' + last_call.name + '<|message|>' + message.content | tojson -}}"
        "{{- '<|end|>' -}}{%- else -%}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' -}}"
        "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}",
        "<|start|>system<|message|>Knowledge cutoff: 2024-06\nReasoning: medium<|end|><|start|>user<|message|>hi<|end|>"
        "<|start|>assistant",
    ),
    "glm-4": (
        "[gMASK]<sop>{%- macro visible(content) -%}{%- if content is string -%}{{- content }}"
        "{%- elif content is iterable and content is not mapping -%}{%- for item in content -%}"
        "{%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- elif item is string -%}{{- item }}"
        "{%- endif -%}{%- endfor -%}{%- else -%}{{- content }}{%- endif -%}{%- endmacro -%}"
        "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
        "{% set ns.last = loop.index0 -%}{%- endif %}{%- endfor %}{% for m in messages %}{%- if m.role == 'user' -%}"
        "<|user|>\n{{ visible(m.content) }}{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not "
        "visible(m.content).endswith('/nothink')) else '' -}}{%- elif m.role == 'assistant' -%}<|assistant|>"
        "{%- set content = visible(m.content) %}{%- if content.strip() -%}{{ '\\n' + content.strip() }}{%- endif -%}"
        "{% if m.tool_calls %}{% for tc in m.tool_calls %}{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}"
        "{{ '\\n<tool_call>' + tc.name }}{% set args = tc.arguments %}{% for k, v in args.items() %}\n<arg_key>{{ k }}"
        "</arg_key>\n<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>{% endfor %}\n"
        "</tool_call>{% endfor %}{% endif %}{%- elif m.role == 'tool' -%}"
        "{%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{- '<|observation|>' }}{%- endif %}"
        "{{- '\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' }}{%- elif m.role == 'system' -%}<|system|>\n"
        "{{ visible(m.content) }}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}",
        "[gMASK]<sop><|user|>\nhi<|assistant|>",
    ),
    "hermes": (
        "{%- macro wrap(tag) %}{{ '<' ~ tag ~ '>\\n' }}{{ caller() }}{{ '\\n</' ~ tag ~ '>' }}{%- endmacro %}"
        "{{- bos_token }}{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools if tool.type == 'function' %}"
        "{%- call wrap('tools') %}{%- filter trim %} {{ tool | tojson }} {% endfilter %}{%- endcall %}{%- endfor %}"
        "{{- '<|im_end|>\\n' }}{%- endif %}{%- for m in messages %}{%- if m.tool_calls %}"
        "{{- '<|im_start|>assistant' }}{%- for c in m.tool_calls | map(attribute='function') %}"
        "{% set body %}{{ '{' }}{% for k, v in c.arguments | dictsort %}{{ k }}={{ v | tojson | safe }};{% endfor %}{{ '}' }}"
        "{% endset %}{{- '\\n<tool_call>' ~ c.name ~ body | replace(';}', '}') ~ '</tool_call>' }}{%- endfor %}"
        "{{- '<|im_end|>\\n' }}{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
        "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    ),
}

# What templates are written with, one by one: expressions that jinja2 computes alike.
EXPRESSIONS = """
messages | map(attribute='role') | join(', ')
messages | map(attribute='role') | map('upper') | list
messages | rejectattr('role', 'equalto', 'user') | list | length
messages | selectattr('tool_calls', 'undefined') | list | last
(messages | selectattr('role', 'in', ['user', 'tool']) | first).content
'yes' if messages | selectattr('role', 'equalto', 'nobody') else 'no'
none | selectattr('x') | list
'yes' if tools else 'no'
messages[-1].content[:3] ~ messages[-1]['content'][::-1]
messages[::-1][0].role
messages | length > 1 and messages[0] != messages[-1]
0 < messages | length <= 99
range(3, 0, -1) | list
range(5)[1:] | sum
[3, 1, 2] | sort | reverse | list
['b', 'A', 'b'] | unique | list
[1, 2.5] | max + 'a,b'.split(',') | length
{'b': 1, 'a': [2]} | dictsort
{'b': 1, 'a': [2]} | items | list
{1: {'x': (1, 2)}, 'k': none}
{'a': 1}.get('b', 'none') ~ {'a': 1}.keys() | list ~ {'a': 1}.values() | list
('<' | safe) + '<' + '&'
'<a>' | e
'%d' | length + 7 // 2 + 7 % 4 + 2 ** 3 - 6 / 4
'x' * 3 + ([0] * 2) | string
'a b  c'.split() + 'a-b'.rsplit('-', 1) + 'a\\nb'.splitlines()
'abcabc'.find('c') ~ 'abcabc'.rfind('c') ~ 'abc'.index('b') ~ 'aXa'.count('a')
' x '.strip() ~ 'xxa'.lstrip('x') ~ 'axx'.rstrip('x') ~ 'a'.join(['1', '2'])
'ab'.partition('b') | string ~ 'Ab'.swapcase() ~ 'a b'.title() ~ 'prefix'.removeprefix('pre')
'12'.isdigit() and 'ab'.isalpha() and not ' '.isalnum()
'12' | int + '1.5' | float + 'x' | int(7) + 3.14159 | round(2) + -4 | abs
'a\\nb' | indent(2) ~ 'a\\nb' | indent(2, true) ~ 'ab' | capitalize ~ 'A b' | title ~ 'AB' | lower
'aaa' | replace('a', 'b', 2) ~ 1 | replace(1, 2)
missing | default('d') ~ '' | d('e', true) ~ missing
[missing is undefined, none is none, 1 is odd, 4 is divisibleby 2, 'a' is string, 1 is number, true is boolean]
[messages is sequence, messages[0] is mapping, 'a' is iterable, 1.5 is float, 1 is integer, 1 is eq 1, 2 is gt(1)]
[[1, (2, 'a')] == [1, (2, 'a')], {'a': 1} == {'a': 1.0}, [1] == (1,), 'a' < 'b', [1, 2] < [1, 3], 2 in [1, 2]]
dict(a=1, **{'b': 2}) | tojson(sort_keys=true, separators=(',', ':'))
[1, 'é', none, true] | tojson(ensure_ascii=true, indent=2)
namespace(a=1).a ~ strftime_now('%Y-%m-%d')
messages[9] is defined
""".strip().splitlines()


def _raise(message):
    raise jinja2.TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(jinja2.ext.Extension):
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


PLAIN = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
)
PLAIN.filters["tojson"] = _to_json
PLAIN.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.datetime.now().strftime(form)}


def plainly(source: str, messages: list, add: bool, variables: dict) -> str | None:
    """What jinja2 makes of a template as transformers uses it; None if it raises."""
    given = {"tools": None, "documents": None, **TOKENS, **variables}
    try:
        return PLAIN.from_string(source).render(messages=messages, add_generation_prompt=add, **given)
    except jinja2.TemplateError:
        return None


# --- what templates do --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_families_render_as_jinja2_renders_them(name, monkeypatch):
    source, greeting = FAMILIES[name]
    template = ChatTemplate(source, TOKENS)
    assert template.render(TALK[:1]) == greeting
    monkeypatch.setattr(module, "BUDGET", 0)  # what a conversation pays for itself is more than enough
    for messages in CONVERSATIONS:
        for variables in VARIABLES:
            for add in (True, False):
                expected = plainly(source, messages, add, variables)
                if expected is None:
                    with pytest.raises(InvalidConfig, match="the chat template rejects these messages"):
                        template.render(messages, add, **variables)
                else:
                    assert template.render(messages, add, **variables) == expected


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_give_what_jinja2_gives(expression):
    source = "{{ " + expression + " }}"
    expected = plainly(source, USED, True, {})
    assert expected is not None
    assert ChatTemplate(source, TOKENS).render(USED) == expected


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("'a'.translate({})", "access to attribute 'translate' of 'str' object is unsafe"),
        ("messages | pprint", "line 1: No filter named 'pprint'"),
        ("1 is lower", "line 1: No test named 'lower'"),
        ("cycler('a')", "'cycler' is undefined"),
        ("loop", None),
        ("namespace(a=1)", "'Namespace' object cannot be looped over, compared or printed"),
        ("18446744073709551617", "line 1: an integer above"),
        ("1" + " + 1" * 99, "line 1: expressions nested more than 80"),
        ("[" + "1," * 20_000 + "]", "line 1: more than 5000 statements and expressions"),
    ],
)
def test_what_is_outside_the_language_is_named(expression, message):
    source = "{% for m in messages %}{{ " + expression + " }}{% endfor %}"
    with pytest.raises(CheckpointError, match=message or "LoopContext"):
        ChatTemplate(source).render(TALK)


@pytest.mark.parametrize("value", [print, object(), {1, 2}, [b"x"], {"a": [lambda: 0]}])
def test_variables_are_data(value):
    with pytest.raises(InvalidConfig, match=r"tools may contain only strings, numbers, lists and dicts, got '\w+'"):
        ChatTemplate("{{ tools }}").render(TALK, tools=value)


def test_variables_that_contain_themselves():
    tools = []
    tools.append(tools)
    with pytest.raises(InvalidConfig, match="tools: lists and dicts nested more than 90"):
        ChatTemplate("{{ tools }}").render(TALK, tools=tools)


def test_threads_spend_budgets_of_their_own():
    """In threads whose stack is small, too, where a timer's signal would never come."""
    endless = ChatTemplate("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}")
    template, results = ChatTemplate(FAMILIES["qwen-3"][0], TOKENS), []

    def refused():
        with pytest.raises(CheckpointError, match="exceeds the time or memory limit"):
            endless.render(TALK)

    def rendered():
        results.extend(template.render(TALK) for _ in range(20))

    before = threading.stack_size(256 << 10)
    try:
        threads = [threading.Thread(target=work) for work in (refused, rendered, refused, rendered)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.stack_size(before)
    assert results == [plainly(FAMILIES["qwen-3"][0], TALK, True, {})] * 40


# --- what hostile ones do -----------------------------------------------------------------------------------

BEGIN = "{% set ns = namespace(a=[1], b=[1], s='ab', t=(1,), d={'k': 1}, u=none) %}"
SHARED = (
    "{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% set ns.t = (ns.t, ns.t) %}"
    "{% set ns.d = {'k': ns.d, 'l': ns.d} %}{% endfor %}"
)
LONG = "{% for i in range(21) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
CHAIN = "{% for i in range(60000) %}{% set ns.u = BODY %}{% endfor %}"

BOMBS = [
    *(
        BEGIN + SHARED + "{{ " + use + " }}"
        for use in """ns.a == ns.b;ns.a < ns.b;ns.a in [ns.b];ns.a;ns.d | string;ns.a | tojson;ns.a | pprint;{ns.t: 1}
        ns.d.get(ns.t);messages[ns.t];dict([(ns.t, 1)]);[ns.t] | unique | list;[ns.a, ns.b] | sort;ns.a | join;ns.a ~ ''
        ns.a | upper;'1' | replace('1', ns.a);[ns.a] | select('equalto', ns.b) | list;ns.d.items() == ns.d.items()
        ns.a | map('string') | list;raise_exception(ns.a);'%s' % ns.a;ns.a.index(ns.b);ns.a | sum(start=[])""".replace(
            "\n", ";"
        ).split(";")
    ),
    *(
        BEGIN + LONG + "{{ " + use + " }}"
        for use in """ns.s.translate({});ns.s.expandtabs(10 ** 9);ns.s.split() | length;ns.s | list | length
        ns.s.rfind('b' + ns.s[2:]);ns.s.strip(ns.s[::-1]);ns.s.replace('a', ns.s);ns.s.join(ns.s);[ns.s] | string
        ns.s | indent(16);(ns.s | safe) + ns.s;messages | map(attribute=ns.s) | list;strftime_now(ns.s)""".replace(
            "\n", ";"
        ).split(";")
    ),
    *(
        BEGIN + CHAIN.replace("BODY", body) + "{{ ns.u | length if ns.u is sequence }}"
        for body in """[ns.u];(ns.u,);{'k': ns.u};{'k': ns.u}.values();{'k': ns.u}.get;namespace(u=ns.u);[ns.u] | map('list')
        {'k': ns.u}.missing;[ns.u] | reverse""".replace("\n", ";").split(";")
    ),
    BEGIN + CHAIN.replace("BODY", "[ns.u]") + "{{ ns.u == [ns.u] }}",
    BEGIN + "{% set ns.u = ns %}{{ ns.u == [ns] }}{{ [ns] }}",
    BEGIN
    + "{% for i in range(9999) %}{% set p = ns.u %}{% macro m() %}{{ p() }}{% endmacro %}{% set ns.u = m %}{% endfor %}",
    BEGIN + "{% for i in range(9999) %}{% for x in [ns.u] %}{% set ns.u = [loop] %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10 ** 9 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ '%999999999d' is odd }}",
    "{{ strftime_now('%999999999d') }}",
    "{% for i in range(99999) %}{% set x = [" + "[]," * 3000 + "] %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% set x %}{% for i in range(99999) %}" + "x" * 60_000 + "{% endfor %}{% endset %}{{ x | length }}",
    "{% macro m() %}" + "x" * 9999 + "{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for i in range(99999) %}{{ ('a' * 2500).rfind('b' + 'a' * 1250) }}{% endfor %}",
    "{% for i in range(99999) %}{{ [0 - 10 ** 15] | map('_step') | list }}{{ 'a' * 60000 }}{% endfor %}",
    "{{ " + "(" * 30_000 + ")" * 30_000 + " }}",
    "{{ " + "not " * 15_000 + "1 }}",
    "{{ a" + ".b" * 30_000 + " }}",
    "{{ " + "+".join("1" * 30_000) + " }}",
    "{{ a" + "|trim" * 10_000 + " }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "{% for i in x %}" * 1500 + "{% endfor %}" * 1500,
    "{% macro m() %}" * 1500 + "{% endmacro %}" * 1500,
    "{% if 1 %}" + "{% elif 1 %}" * 5000 + "{% endif %}",
    "".join(f"{{%if a%}}{{%set x{i}=1%}}{{%endif%}}" for i in range(1800)),
    "{{ " + "0x" + "f" * 60_000 + " }}",
    "{%" + " " * 65_000,
    "{{" * 32_000,
    "{% raw %}" + "{% endra" * 8000,
]


def generated(rng: random.Random) -> str:
    """A template that makes large values in one of many ways, and does one of many things with them."""
    names = ["a", "b", "s", "t", "d", "u"]
    one, other = (f"ns.{rng.choice(names)}" for _ in range(2))
    grow = [
        f"[{one}, {other}]",
        f"({one}, {other})",
        f"{{'k': {one}, 'l': {other}}}",
        f"{one} ~ {other}",
        f"{one} + {other}",
        f"{one} * {rng.choice([2, 3, 999, 10**9])}",
        f"[{one}] * 99",
        f"{one} | map('{rng.choice(['string', 'list', 'upper', 'tojson'])}')",
        f"{one} | {rng.choice(['string', 'tojson', 'list', 'upper', 'escape', 'safe', 'indent(9)', 'join(ns.s)'])}",
        f"{one}.replace('a', {other})",
        f"{one}.{rng.choice(['split', 'join', 'strip', 'items', 'values', 'get'])}({rng.choice(['', other])})",
        f"{one}[::-1]",
        f"f({other})",
    ]
    filters, tests = sorted(jinja2.filters.FILTERS), sorted(jinja2.tests.TESTS)
    methods = sorted({name for kind in (str, list, dict, tuple) for name in dir(kind)})
    number = rng.choice(["2", "99", "10 ** 9", "'a'", one, "", "2.5, 'ceil'", "indent=9"])
    use = [
        f"{one} | {rng.choice(filters)}",
        f"{one} | {rng.choice(filters)}({number})",
        f"{one} | {rng.choice(filters)} | {rng.choice(filters)}",
        f"{one} | map('{rng.choice(filters)}') | list",
        f"[{one}, {other}] | {rng.choice(['select', 'reject'])}('{rng.choice(tests)}', {other}) | list",
        f"{one} is {rng.choice(tests)}({other})",
        f"{one}.{rng.choice(methods)}({number})",
        f"{one} {rng.choice(['==', '!=', '<', '>=', 'in', '+', '-', '*', '/', '//', '%', '**', '~'])} {other}",
        f"{{{one}: {other}}}",
        f"messages[{one}]",
        f"{one}[{other}]",
    ]
    turns = rng.choice([3, 20, 45, 3000])
    loops = "".join(f"{{% set ns.{rng.choice(names)} = {rng.choice(grow)} %}}" for _ in range(rng.randint(1, 3)))
    uses = "".join(f"{{{{ {rng.choice(use)} }}}}" for _ in range(rng.randint(1, 2)))
    macro = "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}"
    return f"{BEGIN}{macro}{{% for i in range({turns}) %}}{loops}{{% endfor %}}{uses}"


SECONDS, MEMORY = 2.0, 1 << 29  # of processor time, and bytes

CHILD = """
import json, signal, sys, time
from jaxspec.errors import JaxspecError
from jaxspec.text import ChatTemplate, chat

sources, memory, budget, interrupt = json.load(sys.stdin)
chat.BUDGET = budget or chat.BUDGET
try:
    import resource
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory,) * 2)
except (ImportError, OSError):
    pass  # where there is no such limit
signal.signal(signal.SIGALRM, signal.default_int_handler)
for source in sources:
    start = time.process_time()
    try:
        if interrupt:
            signal.setitimer(signal.ITIMER_REAL, interrupt)
        template = ChatTemplate(source)
        text = template.render([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}])
        result = "text"
    except JaxspecError as error:
        result = f"{type(error).__name__}: {error}"
    except BaseException as error:
        result = f"raw {error!r:.200}"
    print(json.dumps([time.process_time() - start, result]), flush=True)
"""


def run(sources: list[str], budget: int = 0, interrupt: float = 0) -> list[tuple[float, str]]:
    """Renders every template in a process of its own with little memory; gives the seconds and what came of each."""
    given = json.dumps([sources, MEMORY, budget, interrupt])
    done = subprocess.run([sys.executable, "-c", CHILD], input=given, capture_output=True, text=True, timeout=900)
    results = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    failed = f"{sources[len(results)]:.300}\n{done.stderr[-2000:]}" if len(results) < len(sources) else ""
    assert not failed, f"the process ended ({done.returncode}) at {failed}"
    return results


def ended_well(sources: list[str]) -> None:
    for source, (seconds, result) in zip(sources, run(sources)):
        assert seconds < SECONDS, (source[:300], result)
        assert result == "text" or result.startswith(("CheckpointError: chat template", "InvalidConfig: the chat")), (
            source[:300],
            result,
        )
        assert "\n" not in result


def test_bombs_end_in_time_and_memory():
    ended_well(BOMBS)


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_generated_templates_end_in_time_and_memory(count, seed):
    rng = random.Random(seed)
    ended_well([generated(rng) for _ in range(count)])


def test_an_interrupt_ends_a_rendering():
    """With a budget of minutes, so that nothing else ends it."""
    sources = [
        BEGIN + SHARED + "{{ ns.a == ns.b }}",
        BEGIN + SHARED + "{{ ns.a }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
        "{% for i in range(99999) %}{% if range(99999) | map('string') | join | length %}{% endif %}{% endfor %}",
    ]
    for seconds, result in run(sources, budget=1 << 40, interrupt=0.3):
        assert result.startswith("raw KeyboardInterrupt")
        assert seconds < SECONDS
