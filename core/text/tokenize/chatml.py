"""The ChatML chat template that sabia's own tokenizers carry.

One message is `<|im_start|>ROLE\\nCONTENT<|im_end|>\\n`. Tools are announced in the system message
and called in the form that Qwen and Hermes models use (`<tool_call>{json}</tool_call>`; results
come back in a user turn as `<tool_response>`), so that servers parse the calls without a setting.
No turn of the assistant looks ahead, so masks by prefix difference work.
"""

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
TURN_START = "<|im_start|>"

CHATML_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages and messages[0].role == 'system' and messages[0].content %}
{{- messages[0].content + '\\n\\n' }}
{%- endif %}
{{- '# Tools\\n\\nYou may call functions. Their signatures, one JSON object a line:\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n' + (tool | tojson) }}
{%- endfor %}
{{- '\\n</tools>\\n\\nFor each call write a JSON object with the name and the arguments:\\n' }}
{{- '<tool_call>\\n{"name": <name>, "arguments": <arguments>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first and tools %}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + (message.content or '') + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function if call.function is defined else call %}
{%- if message.content or not loop.first %}
{{- '\\n' }}
{%- endif %}
{{- '<tool_call>\\n{"name": ' + (function.name | tojson) + ', "arguments": ' }}
{%- if function.arguments is string %}
{{- function.arguments }}
{%- else %}
{{- function.arguments | tojson }}
{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
