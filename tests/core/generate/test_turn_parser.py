"""Sampled text back to messages: what a template writes is read again, and no text is lost.

The texts are those of the templates in `test_chat_templates`, and of templates that write calls as
the families of `call_formats` do.
"""

import json
import random
import re
from functools import cache

import pytest

from sabia.core.errors import BadData
from sabia.core.generate.call_formats import split_calls
from sabia.core.generate.chat import turn_text
from sabia.core.generate.turn_parser import parse_turn
from sabia.core.text.tokenize.tokenizer import Tokenizer
from sabia.core.text.tokenize.tokenizer_training import train_bpe
from tests.core.generate.test_chat_templates import published

HEAD = """\
{%- for m in messages %}{%- if m.role != 'assistant' %}{{- '<|user|>' + m.content + '<|end|>' }}
{%- else %}{{- '<|assistant|>' }}
{%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}{{- m.content }}
"""
TAIL = """\
{{- '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
EACH = "{%- for call in m.tool_calls or [] %}{%- set f = call.function %}"
CALLS = {
    "hermes": EACH + "{{- '\\n<tool_call>\\n' + (f | tojson) + '\\n</tool_call>' }}{%- endfor %}",
    "function tags": EACH + """\
{{- '\\n<tool_call>\\n<function=' + f.name + '>\\n' }}
{%- for k, v in f.arguments | items %}
{{- '<parameter=' + k + '>\\n' + (v if v is string else v | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}""",
    "key tags": EACH + """\
{{- '\\n<tool_call>' + f.name }}
{%- for k, v in f.arguments | items %}{{- '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' }}
{{- (v if v is string else v | tojson) + '</arg_value>' }}
{%- endfor %}{{- '\\n</tool_call>' }}{%- endfor %}""",
    "deepseek": "{%- if m.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}" + EACH + """\
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name + '\\n```json\\n' }}
{{- (f.arguments | tojson) + '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}
{{- '<｜tool▁calls▁end｜>' }}{%- endif %}""",
    "atem": "{%- if m.tool_calls %}{{- '<atem:function_calls>' }}" + EACH + """\
{{- '<atem:invoke name="' + f.name + '">' }}
{%- for k, v in f.arguments | items %}{{- '<atem:parameter name="' + k + '">' }}
{{- (v if v is string else v | tojson) + '</atem:parameter>' }}
{%- endfor %}{{- '</atem:invoke>' }}{%- endfor %}{{- '</atem:function_calls>' }}{%- endif %}""",
}  # fmt: skip
TYPES = {"n": "integer", "x": "number", "flag": "boolean", "s": "string", "list": "array",
         "o": "object"}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": name, "description": "It adds.", "parameters": {
    "type": "object", "required": ["n"],
    "properties": {k: {"type": v, "description": "one"} for k, v in TYPES.items()}}}}
    for name in ("add", "find_all")]  # fmt: skip
ASK = [{"role": "user", "content": "What is it?"}]


@cache
def with_template(template: str) -> Tokenizer:
    """A tokenizer whose special tokens are those of the template."""
    base = train_bpe(["What is it? It is 95. add 37 + 58 assistant user tool"] * 9, 400)
    definition = json.loads(base.definition)
    texts = re.findall(r"<[|｜][^<>{}'\" ]*?[|｜]>|<turn\|>|<end_of_turn>|</s>", template)
    texts += ["<end_of_utterance>"]
    added = [{"id": base.vocab_size + n, "content": text, "single_word": False, "lstrip": False,
              "rstrip": False, "normalized": False, "special": True}
             for n, text in enumerate(sorted(set(texts)))]  # fmt: skip
    definition["added_tokens"] = [*definition["added_tokens"], *added]
    return Tokenizer(json.dumps(definition), {**base.config, "bos_token": "<s>"}, template)


def generated(chosen: random.Random, calls: int, reasoning: bool, content: bool) -> dict:
    values = {"n": [7, -12, 0], "x": [1.5, -0.25], "flag": [True, False],
              "s": ["x y", "a (b), c", "\u00e7 \U0001f600", "37", "true"],
              "list": [[1, "a"], []], "o": [{"k": [1]}, {"s": "t"}]}  # fmt: skip
    message = {"role": "assistant", "content": ""}
    if content:
        message["content"] = chosen.choice(["It is 95.", "a\n\nb", "<b> {x}", "I see: [1]"])
    if reasoning:
        message["reasoning_content"] = chosen.choice(["Let me\nthink.", "Hm. <a> {}"])
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {
                "name": chosen.choice(("add", "find_all")),
                "arguments": {k: chosen.choice(values[k])
                              for k in sorted(chosen.sample(list(TYPES), chosen.randint(0, 4)))}}}
            for _ in range(calls)]  # fmt: skip
    return message


@pytest.mark.parametrize("name", CALLS)
def test_what_a_template_writes_is_read_again(name):
    tokenizer, chosen = with_template(HEAD + CALLS[name] + TAIL), random.Random(name)
    for number in range(240):
        message = generated(chosen, number % 3, number % 2 == 0, number % 5 > 0 or not number % 3)
        text = turn_text([*ASK, message], tokenizer, TOOLS)
        assert parse_turn(text, ASK, tokenizer, TOOLS) == message
        assert parse_turn(text, ASK, tokenizer, json.dumps(TOOLS)) == message


@pytest.mark.parametrize("name", published())
def test_published_templates_are_read_again(name):
    tokenizer, chosen = with_template(published()[name]), random.Random(0)
    read = 0
    for number in range(36):
        message = generated(chosen, number % 3, number % 2 == 0, number % 3 == 0)
        try:
            text = turn_text([*ASK, message], tokenizer, TOOLS)
        except BadData:
            continue  # the template has no calls, or one only
        new = parse_turn(text, ASK, tokenizer, TOOLS)
        again = turn_text([*ASK, new], tokenizer, TOOLS)
        assert "".join(again.split()) == "".join(text.split())
        assert new.get("tool_calls") == message.get("tool_calls")
        assert new["content"] == message["content"]
        if message.get("reasoning_content", "none")[:6] in text:
            assert new["reasoning_content"] == message["reasoning_content"]
        read += 1
    assert read >= 6


def test_types_follow_the_schema_and_otherwise_the_value():
    tokenizer = with_template(HEAD + CALLS["function tags"] + TAIL)
    text = ("<tool_call>\n<function=add>\n<parameter=s>\n37\n</parameter>\n<parameter=n>\n37\n"
            "</parameter>\n</function>\n</tool_call><|end|>")  # fmt: skip

    def arguments(tools):
        (call,) = parse_turn(text, ASK, tokenizer, tools)["tool_calls"]
        return call["function"]["arguments"]

    assert arguments(TOOLS) == {"s": "37", "n": 37}
    assert arguments(None) == {"s": 37, "n": 37}


def test_reasoning_that_the_prompt_opened_and_the_template_leaves_out():
    template = """\
{%- for m in messages %}{%- if m.role == 'user' %}{{- '<|user|>' + m.content }}
{%- else %}{{- '<|assistant|>' + m.content.split('</think>')[-1] + '<|end|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\\n' }}{%- endif %}
"""
    message = parse_turn("Let me.\n</think>\n\nIt is 95.<|end|>", ASK, with_template(template))
    assert message == {"role": "assistant", "content": "It is 95.", "reasoning_content": "Let me."}
    plain = HEAD.replace("<think>", "[").replace("</think>", "]") + TAIL
    text = "Let me.\n</think>\n\nIt is 95."
    assert parse_turn(text, ASK, with_template(plain))["content"] == text


def bare(text: str) -> str:
    """The text without white space and the special tokens at its end."""
    return "".join(re.sub(r"(<[|｜][^<>]*[|｜]>|\s)+\Z", "", text).split())


@pytest.mark.parametrize("name", CALLS)
def test_no_text_is_lost_and_none_is_made_up(name):
    """Texts that were cut, changed in one place, or joined from parts of others."""
    tokenizer, chosen = with_template(HEAD + CALLS[name] + TAIL), random.Random(name)
    for number in range(200):
        texts = [turn_text([*ASK, generated(chosen, n % 3, n % 2 == 0, True)], tokenizer, TOOLS)
                 for n in (number, number + 1)]  # fmt: skip
        cut = chosen.randrange(len(texts[0]))
        text = chosen.choice([
            texts[0][:cut], texts[0][:cut] + texts[1], texts[0][:cut] + "<" + texts[0][cut + 1 :],
        ])  # fmt: skip
        message = parse_turn(text, ASK, tokenizer, TOOLS)
        if message.keys() == {"role", "content"}:
            assert bare(message["content"]) == bare(text)
        else:
            assert bare(turn_text([*ASK, message], tokenizer, TOOLS)) == bare(text)


def test_hostile_texts_take_little_time():
    for text in (
        "<tool_call>" * 20_000,
        "<tool_call>{" + "[" * 100_000 + "</tool_call>",
        "<|tool_call_start|>[" + "(" * 50_000 + "]<|tool_call_end|>",
        '{"name": ' + "[" * 100_000,
        "<think>" * 20_000,
        "to=" * 30_000,
        "<tool_call><function=a>" + "<parameter=" * 9_000 + "</function></tool_call>",
    ):
        assert split_calls(text, {}) is None
        parsed = parse_turn(text, ASK, with_template(HEAD + TAIL))
        assert parsed == {"role": "assistant", "content": text}
