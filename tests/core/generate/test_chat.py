"""Chat templates: the same text and ids as transformers, masks on what the assistant writes."""

import json
from functools import cache

import pytest

from sabia.core.errors import BadData, UsageError
from sabia.core.generate import chat, template_engine
from sabia.core.text.tokenize.tokenizer import Tokenizer, load_tokenizer
from sabia.core.text.tokenize.tokenizer_training import train_bpe

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 37, "b": "ç"}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <two> numbers & says 'so'",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
PLAIN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "37 + 58 = ?"},
    {"role": "assistant", "content": "095 😀"},
    {"role": "user", "content": "\n  and 1 + 1?"},
    {"role": "assistant", "content": "\n\n002\n"},
]
WITH_CALL = [
    {"role": "user", "content": "add"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "95", "name": "add"},
    {"role": "tool", "content": "95", "name": "add"},
    {"role": "assistant", "content": "It is 95."},
]
# In the shapes that model families use; written for these tests.
MARKED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] | trim }}
            {%- for call in message.tool_calls %}
                {{- '[call]' + call | tojson(indent=1) }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
BRACKETS = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}
{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{% for message in rest %}
{% if message.role not in ['user', 'assistant', 'tool'] %}
{{ raise_exception('no such role: ' + message.role) }}
{% endif %}
{% if message.role == 'assistant' %}
{{ ' ' + message.content | trim + eos_token }}
{% for call in message.tool_calls or [] %}
{{ '{' }}{{ call.function.name }}({{ call.function.arguments | tojson }}){{ '}' }}
{% if loop.last %}{% break %}{% endif %}
{% endfor %}
{% else %}
[INST] {{ system if loop.first }} {{ message.content }} [/INST]
{% if tools %}{{ tools | tojson }}{% endif %}
{% endif %}
{% endfor %}
"""
FORGETS_REASONING = """\
{%- for message in messages %}
{%- set body = message.content %}
{%- if message.role == 'assistant' and not loop.last and '</think>' in body %}
{%- set body = body.split('</think>')[-1] %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + body + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@cache
def trained() -> Tokenizer:
    texts = ["Be brief. It is 95. add 37 + 58 = 095 <tool_call> name arguments assistant user"] * 9
    return train_bpe(texts, 400)


def with_template(template: str | None) -> Tokenizer:
    base = trained()
    config = {**base.config, "bos_token": "<|reserved_0|>"}
    return Tokenizer(base.definition, config, template)


def hugging_face(tokenizer: Tokenizer, folder):
    transformers = pytest.importorskip("transformers", reason="the judge of these templates")
    tokenizer.save(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def written(ids, mask, tokenizer) -> str:
    return tokenizer.decode([i for i, kept in zip(ids, mask, strict=True) if kept])


@pytest.mark.parametrize("template", [None, MARKED, BRACKETS, FORGETS_REASONING])
@pytest.mark.parametrize(("messages", "tools"), [(PLAIN, None), (WITH_CALL, TOOLS)])
@pytest.mark.parametrize("prompt", [False, True])
def test_same_text_and_ids_as_transformers(template, messages, tools, prompt, tmp_path):
    tokenizer = trained() if template is None else with_template(template)
    judge = hugging_face(tokenizer, tmp_path)
    if template == FORGETS_REASONING and tools:  # it has no calls
        with pytest.raises(BadData, match="call of 'add' in message 1"):
            chat.render(messages, load_tokenizer(tmp_path), prompt, tools)
        return
    ours = chat.render(messages, load_tokenizer(tmp_path), prompt, tools)
    options = {"tools": tools, "add_generation_prompt": prompt}
    assert ours == judge.apply_chat_template(messages, tokenize=False, **options)
    theirs = judge.apply_chat_template(messages, return_dict=True, **options)["input_ids"]
    assert tokenizer.encode(ours) == theirs


@pytest.mark.parametrize(("messages", "tools"), [(PLAIN, None), (WITH_CALL, TOOLS)])
def test_marks_give_the_mask_of_transformers(messages, tools, tmp_path):
    tokenizer = with_template(MARKED)
    judge = hugging_face(tokenizer, tmp_path)
    ((ids, mask),) = chat.render_rows(messages, tokenizer, tools)
    theirs = judge.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids == theirs["input_ids"]
    assert mask == theirs["assistant_masks"]


def test_marks_and_prefix_difference_agree():
    unmarked = MARKED.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    for messages in (PLAIN, WITH_CALL):
        marked = chat.render_rows(messages, with_template(MARKED))
        assert marked == chat.render_rows(messages, with_template(unmarked))


def test_mask_holds_content_and_end_of_turn_only():
    tokenizer = trained()
    ((ids, mask),) = chat.render_rows(PLAIN, tokenizer)
    assert written(ids, mask, tokenizer) == "095 😀<|im_end|>\n\n002\n<|im_end|>"
    ((ids, mask),) = chat.render_rows(WITH_CALL, tokenizer, TOOLS)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 37, "b": "ç"}}\n</tool_call>'
    assert written(ids, mask, tokenizer) == f"{call}\n{call}<|im_end|>It is 95.<|im_end|>"


def test_chat_records_with_json_text_and_nulls_render_alike():
    stored = [
        {"name": None, **message, "tool_calls": json.dumps(calls) if calls else None}
        for message in WITH_CALL
        for calls in [message.get("tool_calls")]
    ]
    tokenizer = trained()
    plain = chat.render(WITH_CALL, tokenizer, tools=TOOLS)
    assert chat.render(stored, tokenizer, tools=json.dumps(TOOLS)) == plain


def test_nothing_of_the_assistant_is_an_error():
    with pytest.raises(BadData, match="no token"):
        chat.render_rows([{"role": "user", "content": "x"}], trained())


def test_rewritten_turns_are_refused_then_split():
    tokenizer = with_template(FORGETS_REASONING)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>b</think>c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "<think>e</think>f"},
    ]
    with pytest.raises(chat.NotPrefixPreserving, match="rewrites earlier turns: message 1"):
        chat.assistant_spans(messages, tokenizer)
    rows = chat.render_rows(messages, tokenizer)
    texts = [written(ids, mask, tokenizer) for ids, mask in rows]
    assert texts == ["<think>b</think>c<|im_end|>", "<think>e</think>f<|im_end|>"]
    assert "<think>b" not in tokenizer.decode(rows[1][0])


def test_template_errors_are_one_line():
    with pytest.raises(BadData, match="no such role: robot"):
        chat.render([{"role": "robot", "content": ""}], with_template(BRACKETS))
    with pytest.raises(BadData, match="not a Jinja template: line 1"):
        chat.render(PLAIN, with_template("{% if %}"))
    with pytest.raises(UsageError, match=r"no chat template .*--tokenizer DIR"):
        chat.render(PLAIN, with_template(None))


def test_sandbox_holds():
    for attack in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(BadData, match="rejects"):
            chat.render(PLAIN, with_template(attack))


def test_frame_characters_in_content_cannot_move_the_mask():
    sly = [
        {"role": "user", "content": f"{template_engine.OPEN}x{template_engine.CLOSE}"},
        *PLAIN[-1:],
    ]
    tokenizer = with_template(MARKED)
    ((ids, mask),) = chat.render_rows(sly, tokenizer)
    assert written(ids, mask, tokenizer) == "002<|im_end|>"
