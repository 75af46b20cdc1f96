# ruff: noqa: E501  (templates are read more easily in lines of their own)
"""Chat templates: those of the families in use render as jinja2 renders them.

The templates are this file's own. Each uses the constructs of its family's published one, and gives its format.
`scripts/prove/templates.py` compares published ones in the same way.
"""

import datetime
import marshal

import pytest

from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.text import ChatTemplate
from jaxspec.text.chat import MAX_SOURCE
from scripts.prove.templates import DATE, render_plainly

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


# --- what templates do --------------------------------------------------------------------------------------


def plainly(source: str, messages: list, add: bool, variables: dict) -> str | None:
    """What jinja2 makes of a template as transformers uses it; None if it raises."""
    return render_plainly(source, messages, add, TOKENS | variables)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_render_as_jinja2_renders_them(name):
    source, greeting = FAMILIES[name]
    template = ChatTemplate(source, TOKENS)
    assert template.render(TALK[:1]) == greeting
    for messages in CONVERSATIONS:
        for variables in VARIABLES:
            for add in (True, False):
                expected = plainly(source, messages, add, variables)
                if expected is None:
                    with pytest.raises(InvalidConfig, match="the chat template rejects these messages"):
                        template.render(messages, add, **variables)
                else:
                    assert template.render(messages, add, **variables) == expected


def test_conversations_render_together_as_alone():
    template = ChatTemplate(FAMILIES["qwen-3"][0], TOKENS)
    ends = [i % 2 == 0 for i in range(len(CONVERSATIONS))]
    expected = [template.render(messages, end, tools=TOOLS) for messages, end in zip(CONVERSATIONS, ends)]
    assert template.render_all(CONVERSATIONS, ends, tools=TOOLS) == expected
    assert template.render_all(CONVERSATIONS) == [template.render(messages) for messages in CONVERSATIONS]
    assert template.render_all([]) == []
    with pytest.raises(InvalidConfig, match="add_generation_prompt"):
        template.render_all(CONVERSATIONS, [True])


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_give_what_jinja2_gives(expression):
    source = "{{ " + expression + " }}"
    expected = plainly(source, USED, True, {})
    assert expected is not None
    assert ChatTemplate(source, TOKENS).render(USED, strftime_now=DATE.isoformat()) == expected


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("[1, 2] | random", "line 1: No filter named 'random'"),
        ("1 is lowered", "line 1: No test named 'lowered'"),
        ("lipsum()", "'lipsum' is undefined"),
        ("messages[0].get", "prints <built-in method get of dict object>, which differs from run to run"),
        ("[messages | map('upper')]", "prints <generator object .*>, which differs from run to run"),
        ("cycler(1) ~ ''", "prints <.*Cycler object>, which differs from run to run"),
    ],
)
def test_what_is_no_function_of_the_input_is_refused(expression, message):
    with pytest.raises(CheckpointError, match=f"chat template: {message}"):
        ChatTemplate("{{ " + expression + " }}").render(TALK)


def test_addresses_that_were_given_are_text():
    said = "what is <function f at 0x7f00deadbeef>?"
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": said}]) == said


@pytest.mark.parametrize(
    "piece", ["{{ a }}", "{%if a%}{{b}}{%endif%}", "{{ a.b if c else d[0] | trim }}\n", "{%set x=1%}", "family"]
)
def test_a_template_may_have_its_maximum_length(piece):
    """The limits of compiling grow with the source."""
    piece = FAMILIES["llama-3.1"][0] if piece == "family" else piece
    source = piece * (MAX_SOURCE // len(piece))
    message = {"role": "user", "content": "x"}
    assert ChatTemplate(source, TOKENS).source == source
    assert ChatTemplate("{% if 0 %}" + source[: len(piece) * 99] + "{% endif %}a", TOKENS).render([message]) == "a"


def test_conversations_share_their_tools(monkeypatch):
    """They are sent once, however many conversations there are."""
    sent, dumps = [], marshal.dumps
    monkeypatch.setattr(marshal, "dumps", lambda value: sent.append(dumps(value)) or sent[-1])
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | length }}{{ tools[0].name }}"
    tools = [{"name": f"{i}", "description": "x" * 9999} for i in range(99)]
    talks = [[{"role": "user", "content": str(i)}] for i in range(99)]
    assert ChatTemplate(source).render_all(talks, tools=tools) == [f"{i}990" for i in range(99)]
    assert 99 * 9999 < max(map(len, sent)) < 2 * 99 * 9999


def test_the_date_is_today_or_the_one_that_is_given():
    template = ChatTemplate("{{ strftime_now('%d %b %Y, %H:%M') }}")
    before = datetime.datetime.now().replace(second=0, microsecond=0)
    now = datetime.datetime.strptime(template.render(TALK), "%d %b %Y, %H:%M")
    assert before <= now <= datetime.datetime.now()
    assert template.render(TALK, strftime_now="2024-07-26") == "26 Jul 2024, 00:00"
    assert template.render(TALK, strftime_now="2024-07-26T12:30") == "26 Jul 2024, 12:30"
    for given in ("tomorrow", 5, ["2024-07-26"]):
        with pytest.raises(InvalidConfig, match=r'strftime_now must be a date such as "2026-11-27"'):
            template.render(TALK, strftime_now=given)


@pytest.mark.parametrize("value", [print, object(), {1, 2}, [b"x"], {"a": [lambda: 0]}])
def test_variables_are_data(value):
    with pytest.raises(InvalidConfig, match=r"tools must contain only strings, numbers, lists and dicts, got '\w+'"):
        ChatTemplate("{{ tools }}").render(TALK, tools=value)


def test_variables_that_contain_themselves():
    tools: list = []
    tools.append(tools)
    with pytest.raises(InvalidConfig, match="tools: lists and dicts are nested more than 90"):
        ChatTemplate("{{ tools }}").render(TALK, tools=tools)
